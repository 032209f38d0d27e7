"""Webhooks from the change of a job to a receiver that fails, hangs, redirects and cuts: never zero times."""

from __future__ import annotations

import datetime as dt
import ipaddress
import json
import secrets
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
from cryptography import x509
from cryptography.fernet import Fernet
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from fastapi.testclient import TestClient
from sqlalchemy import text
from standardwebhooks import Webhook as Verifier, WebhookVerificationError

from house.expected import raised, some
from house.waiting import PATIENCE_S, at_once, wait_until
from reshard.choices import JobKind, JobState, TargetFormat
from reshard.errors import RequestError, SourceError
from reshard.models.access import DeliveryState
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec
from reshard_jobs.database import Database
from reshard_jobs.queue.leases import Leases
from reshard_jobs.queue.reaper import Reaper
from reshard_jobs.queue.states import move
from reshard_jobs.queue.store import JobStore
from reshard_jobs.settings import JobSettings
from reshard_jobs.statistics import JobStatistics
from reshard_jobs.webhooks import MOST_WEBHOOKS, PAUSES_S, Deliveries, DeliveryClaim, Outcome, Webhooks
from reshard_service.app import create_app
from reshard_service.settings import ServiceSettings
from reshard_service.webhooks import sender as webhook_sender
from reshard_service.webhooks.secrets import Sealer, new_secret, sealer_for
from reshard_service.webhooks.sender import WebhookDeliverer, WebhookSender
from servers.process import ServerProcess
from servers.scripted import scripted
from servers.stack import Stack, client_of

LOCAL = {"RESHARD_WEBHOOK_NETWORKS": "127.0.0.0/8", "RESHARD_WEBHOOK_HTTP": "true"}
ALLOWED = ServiceSettings(webhook_networks=(ipaddress.ip_network("127.0.0.0/8"),), webhook_http=True)
LONG = 60.0


class Receiver:
    """The receiver's process and what it has got."""

    def __init__(self, directory: Path, *certificate: str) -> None:
        self._log = directory / "received.jsonl"
        out = directory / "receiver.log"
        script = Path(__file__).parent.parent / "servers" / "receiver.py"
        argv = [sys.executable, str(script), str(self._log), *certificate]
        self.process = ServerProcess(argv, env={}, log=out)
        self.process.wait_until(lambda: out.read_text().strip().isdigit())
        self.port = int(out.read_text())

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/{name}"

    def got(self, name: str | None = None) -> list[dict[str, Any]]:
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        found = [json.loads(line) for line in lines]
        return [one for one in found if name is None or one["path"] == f"/{name}"]


@pytest.fixture
def receiver(tmp_path: Path) -> Generator[Receiver]:
    found = Receiver(tmp_path)
    yield found
    found.process.kill()


class Hooked:
    """A job database with endpoints."""

    def __init__(self, url: str) -> None:
        self.database = Database(url)
        self.store = JobStore(self.database)
        self.leases = Leases(self.database, lease_s=LONG)
        self.hooks = Webhooks(self.database)
        self.outbox = Deliveries(self.database)
        self.secrets: dict[str, str] = {}

    def hook(self, url: str = "https://hooks.example.org/", *events: str) -> str:
        secret = new_secret()
        events = events or ("job.succeeded", "job.failed", "job.cancelled")
        made = self.hooks.create(url, events=events, description="", secret=Sealer(()).seal(secret))
        self.secrets[made.id] = secret
        return made.id

    def job(self, name: str = "out", **more: Any) -> str:
        request = ConvertRequest(source=SourceSpec(url="/in"), target=f"/{name}", to=TargetFormat.UNIVERSAL)
        return self.store.create(request, **more).id

    def failed_job(self) -> str:
        claim = some(self.leases.claim(self.job(f"out{time.monotonic_ns()}"), worker="w"))
        assert self.leases.fail(claim, SourceError("checkpoint.incomplete", "rank 1 of /secret is missing"))
        return claim.job_id

    def events(self, hook: str) -> list[tuple[str, str]]:
        return [(found.job_id, found.event) for found in reversed(self.outbox.list(hook))]

    def claim(self) -> DeliveryClaim:
        return some(self.outbox.claim_next())

    def run(self, *statements: str) -> None:
        with self.database.write() as session:
            for statement in statements:
                session.execute(text(statement))

    def make_due(self) -> None:
        self.run("UPDATE webhook_deliveries SET next_at = 0")


@pytest.fixture
def hooked(database_url: str) -> Generator[Hooked]:
    found = Hooked(database_url)
    yield found
    found.database.close()


@pytest.fixture
def local(sqlite_url: str) -> Generator[Hooked]:
    found = Hooked(sqlite_url)
    yield found
    found.database.close()


def test_each_end_of_a_job_is_told_to_who_wants_it(hooked: Hooked) -> None:
    every = hooked.hook("https://a.example/", "job.started", "job.succeeded", "job.failed", "job.cancelled")
    failures = hooked.hook("https://b.example/", "job.failed")
    failed = hooked.failed_job()
    cancelled = hooked.job("cancelled")
    hooked.store.cancel(cancelled)
    hooked.store.retry(failed)
    claim = some(hooked.leases.claim(failed, worker="w"))
    assert hooked.leases.succeed(claim, claim.request, plan_digest="d")
    # The reaper ends jobs, too.
    lost = some(hooked.leases.claim(hooked.job("lost", max_attempts=1), worker="w"))
    hooked.run(f"UPDATE jobs SET lease_until = 1 WHERE id = '{lost.job_id}'")
    Reaper(hooked.database, lease_s=LONG).sweep()
    Reaper(hooked.database, lease_s=LONG).sweep()
    hooked.run(f"UPDATE jobs SET lease_until = 1 WHERE id = '{lost.job_id}' AND state <> 'FAILED'")
    Reaper(hooked.database, lease_s=LONG).sweep()
    assert hooked.events(every) == [
        (failed, "job.started"), (failed, "job.failed"), (cancelled, "job.cancelled"), (failed, "job.succeeded"),
        (lost.job_id, "job.started"), (lost.job_id, "job.failed"),
    ]  # fmt: skip
    assert hooked.events(failures) == [(failed, "job.failed"), (lost.job_id, "job.failed")]


def test_a_job_is_named_by_the_id_that_its_tenant_gave(hooked: Hooked) -> None:
    hook = hooked.hook()
    assert hooked.job(job_id="run-7") == "run-7"
    hooked.store.cancel("run-7")
    (delivery,) = hooked.outbox.list(hook)
    assert delivery.job_id == "run-7"
    assert json.loads(hooked.claim().payload)["data"]["id"] == "run-7"


def test_the_payload_is_small_and_says_no_texts(hooked: Hooked) -> None:
    hooked.hook()
    job_id = hooked.failed_job()
    payload = json.loads(hooked.claim().payload)
    assert payload["type"] == "job.failed"
    assert payload["data"]["error"] == "checkpoint.incomplete"
    assert payload["data"]["finished_at"] is not None
    assert {"id": job_id, "state": "FAILED", "attempt": 1, "kind": "convert"}.items() <= payload["data"].items()
    assert "secret" not in json.dumps(payload)


def test_an_event_is_written_with_the_change_or_not_at_all(hooked: Hooked) -> None:
    hook = hooked.hook()
    claim = some(hooked.leases.claim(hooked.job(), worker="w"))
    lost = type(claim)(**{n: getattr(claim, n) for n in claim.__slots__} | {"owner": "another"})
    assert not hooked.leases.succeed(lost, claim.request, plan_digest="d")
    assert hooked.events(hook) == []
    with suppress(ZeroDivisionError), hooked.database.write() as session:
        assert move(session, claim.job_id, JobState.FAILED) is not None
        raise ZeroDivisionError
    assert hooked.events(hook) == []
    assert hooked.store.get(claim.job_id).state is JobState.PLANNING


def test_a_service_without_endpoints_writes_nothing(hooked: Hooked) -> None:
    hooked.failed_job()
    hooked.hook()
    assert hooked.outbox.claim_next() is None
    plan = hooked.store.create(hooked.store.get(hooked.job()).request, kind=JobKind.PLAN)
    hooked.store.cancel(plan.id)
    assert json.loads(hooked.claim().payload)["data"]["kind"] == "plan"


def test_no_two_processes_send_one_delivery(hooked: Hooked) -> None:
    for number in range(4):
        hooked.hook(f"https://h{number}.example/")
    hooked.failed_job()
    found: list[DeliveryClaim] = []
    lock = threading.Lock()

    def send() -> None:
        while (claim := hooked.outbox.claim_next()) is not None:
            with lock:
                found.append(claim)

    at_once([send] * 6)
    assert len({claim.id for claim in found}) == len(found) == 4
    # The sender was killed: its lease ends, and another one sends the same.
    hooked.run("UPDATE webhook_deliveries SET lease_until = 1")
    again = hooked.claim()
    assert again.id in {claim.id for claim in found}
    (before,) = (claim for claim in found if claim.id == again.id)
    assert not hooked.outbox.record(before, Outcome(204))
    assert hooked.outbox.record(again, Outcome(204))


def test_an_endpoint_gets_one_delivery_at_a_time(hooked: Hooked) -> None:
    hook = hooked.hook()
    for _ in range(3):
        hooked.failed_job()
    first = hooked.claim()
    assert hooked.outbox.claim_next() is None
    assert hooked.outbox.record(first, Outcome(204))
    assert hooked.claim().id != first.id
    states = [found.state for found in hooked.outbox.list(hook)]
    assert sorted(states) == sorted([DeliveryState.DELIVERED, DeliveryState.PENDING, DeliveryState.PENDING])


def _of_tenant(hooked: Hooked, tenant: str, endpoints: int) -> None:
    """A tenant with so many endpoints and a delivery for each of them."""
    hooks = Webhooks(hooked.database, tenant)
    for number in range(endpoints):
        hooks.create(
            f"https://{tenant}{number}.example/",
            events=("job.cancelled",),
            description="",
            secret=Sealer(()).seal(new_secret()),
        )
    store = JobStore(hooked.database, tenant)
    request = ConvertRequest(source=SourceSpec(url="/in"), target=f"/{tenant}", to=TargetFormat.UNIVERSAL)
    store.cancel(store.create(request).id)


def test_the_tenant_with_the_fewest_deliveries_on_their_way_is_next(hooked: Hooked) -> None:
    _of_tenant(hooked, "slow", 20)
    assert {hooked.claim().tenant for _ in range(3)} == {"slow"}
    _of_tenant(hooked, "quick", 2)
    claims = [hooked.claim() for _ in range(4)]
    assert [claim.tenant for claim in claims] == ["quick", "quick", "slow", "slow"]
    # As soon as one has arrived, the next one of its tenant is before the older ones of the other.
    assert hooked.outbox.record(claims[0], Outcome(204))
    _of_tenant(hooked, "third", 1)
    assert hooked.claim().tenant == "third"
    assert hooked.outbox.claim_next(without=["slow"]) is None


class Dripping:
    """Sends the deliveries of one tenant as long as the test wants, and others at once."""

    def __init__(self) -> None:
        self.waiting = threading.Semaphore(0)
        self.ended = threading.Event()

    def send(self, claim: DeliveryClaim) -> Outcome:
        if claim.tenant.startswith("slow"):
            self.waiting.release()
            assert self.ended.wait(PATIENCE_S)
        return Outcome(204)


@contextmanager
def dripping(hooked: Hooked, *tenants: str) -> Generator[Dripping]:
    """Deliver what 20 slow endpoints of each tenant wait for, and what comes later."""
    for tenant in tenants:
        _of_tenant(hooked, tenant, 20)
    sender = Dripping()
    deliverer = WebhookDeliverer(hooked.outbox, cast("WebhookSender", sender), keep_s=LONG)
    deliverer.start()
    try:
        yield sender
        assert not sender.ended.is_set()
    finally:
        sender.ended.set()
        deliverer.stop()


def _is_served(hooked: Hooked, tenant: str) -> None:
    _of_tenant(hooked, tenant, 1)
    (hook,) = Webhooks(hooked.database, tenant).list()
    wait_until(lambda: [one.state for one in hooked.outbox.list(hook.id)] == [DeliveryState.DELIVERED])


def test_endpoints_of_a_tenant_that_drip_do_not_delay_those_of_another(hooked: Hooked) -> None:
    with dripping(hooked, "slow") as sender:
        # The slow tenant has as many senders as it gets.
        for _ in range(8):
            assert sender.waiting.acquire(timeout=PATIENCE_S)
        _is_served(hooked, "quick")


def test_endpoints_of_two_tenants_that_drip_do_not_delay_those_of_a_third(hooked: Hooked) -> None:
    with dripping(hooked, "slow", "slow-too") as sender:
        # Three quarters of the senders; the others are for tenants without a delivery on its way.
        for _ in range(12):
            assert sender.waiting.acquire(timeout=PATIENCE_S)
        for tenant in ("third", "fourth"):
            _is_served(hooked, tenant)
        assert not sender.waiting.acquire(blocking=False)


def test_a_delivery_is_tried_for_about_a_day_and_then_dead(hooked: Hooked) -> None:
    assert 20 * 3600 < sum(PAUSES_S) < 25 * 3600
    hook = hooked.hook()
    hooked.failed_job()
    ids = set()
    for pause_s in PAUSES_S:
        claim = hooked.claim()
        ids.add(claim.id)
        now = time.time()
        assert hooked.outbox.record(claim, Outcome(500, "the endpoint answered 500"))
        (found,) = hooked.outbox.list(hook)
        assert found.next_at is not None
        assert 0.79 * pause_s - 5 < found.next_at.timestamp() - now < 1.21 * pause_s + 5
        assert hooked.outbox.claim_next() is None
        hooked.make_due()
    assert hooked.outbox.record(hooked.claim(), Outcome(None, "no answer within 15 s"))
    statistics = JobStatistics(hooked.database)
    assert (statistics.dead_lately(), statistics.delivery_age_s()) == (1, 0)
    (dead,) = hooked.outbox.list(hook, state=DeliveryState.DEAD)
    assert (dead.tries, dead.last_status, dead.last_error) == (len(PAUSES_S) + 1, None, "no answer within 15 s")
    assert hooked.outbox.claim_next() is None
    assert hooked.outbox.redeliver(hook) == 1
    again = hooked.claim()
    assert {again.id} == ids
    assert again.tries == 0
    assert hooked.outbox.record(again, Outcome(200))
    assert hooked.outbox.redeliver(hook) == 0
    assert hooked.outbox.redeliver(hook, again.id) == 1
    with pytest.raises(RequestError, match="no delivery"):
        hooked.outbox.redeliver(hooked.hook(), again.id)


def test_an_endpoint_that_is_gone_gets_nothing_more(hooked: Hooked) -> None:
    hook = hooked.hook()
    hooked.failed_job()
    hooked.failed_job()
    assert hooked.outbox.record(hooked.claim(), Outcome(410, "gone", gone=True))
    assert hooked.hooks.get(hook).disabled_at is not None
    assert hooked.outbox.claim_next() is None
    hooked.failed_job()
    assert len(hooked.events(hook)) == 2
    hooked.hooks.enable(hook)
    assert hooked.claim().webhook_id == hook


def test_ended_deliveries_are_forgotten(hooked: Hooked) -> None:
    hook, removed = hooked.hook(), hooked.hook()
    hooked.failed_job()
    for _ in range(2):
        hooked.outbox.record(hooked.claim(), Outcome(204))
    hooked.failed_job()
    hooked.outbox.forget(keep_s=3600)
    assert len(hooked.outbox.list(hook)) == 2
    # The endpoint went away while a job ended.
    hooked.run(
        f"DELETE FROM webhooks WHERE id = '{removed}'", "UPDATE webhook_deliveries SET ended_at = ended_at - 7200"
    )
    hooked.outbox.forget(keep_s=3600)
    assert [found.state for found in hooked.outbox.list(hook)] == [DeliveryState.PENDING]
    assert hooked.outbox.list(removed) == []
    hooked.hooks.remove(hook)
    assert hooked.outbox.list(hook) == []


def test_endpoints_are_limited(hooked: Hooked) -> None:
    for _ in range(MOST_WEBHOOKS):
        hooked.hook()
    assert raised(RequestError, hooked.hook).code == "request.above_maximum"


OUTCOMES = {
    "ok": (204, None),
    "fail": (500, "the endpoint answered 500"),
    "moved": (302, "the endpoint answered 302"),
    "gone": (410, "the endpoint is gone (410): it is disabled"),
    "busy": (429, "the endpoint answered 429"),
    "flood": (200, None),
    "hang": (None, "no answer within 1 s"),
    "drip": (None, "no answer within 1 s"),
    "cut": (None, "RemoteProtocolError"),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_the_answer_is_judged(name: str, local: Hooked, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_sender, "LIMIT_S", 1.0)
    # A proxy would connect to addresses that nobody has judged.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    local.hook(receiver.url(name))
    local.failed_job()
    began = time.monotonic()
    outcome = WebhookSender(ALLOWED, Sealer(())).send(local.claim())
    # The limit is one second; endpoints that hang do it for ever.
    assert time.monotonic() - began < 100
    status, error = OUTCOMES[name]
    assert outcome.status == status
    assert outcome.error == error or (error is not None and (outcome.error or "").startswith(error))
    assert outcome.gone == (name == "gone")
    assert outcome.retry_after_s == (77 if name == "busy" else 0)
    # No redirect was followed.
    assert [one["path"] for one in receiver.got()] == [f"/{name}"]


def test_nothing_is_sent_where_the_operator_does_not_allow_it(local: Hooked, receiver: Receiver) -> None:
    hook = local.hook(receiver.url("ok"))
    local.hook(f"http://localhost:{receiver.port}/ok")
    local.failed_job()
    claims = [local.claim(), local.claim()]
    for settings in (ServiceSettings(webhook_http=True), ServiceSettings(webhook_networks=ALLOWED.webhook_networks)):
        outcomes = [WebhookSender(settings, Sealer(())).send(claim) for claim in claims]
        assert all(outcome.error is not None and outcome.status is None for outcome in outcomes)
        assert all(outcome.forbidden for outcome in outcomes)
    assert receiver.got() == []
    # It ends at once, and the operator may send it again after a change of the settings.
    assert all(local.outbox.record(claim, outcome) for claim, outcome in zip(claims, outcomes, strict=True))
    assert [found.state for found in local.outbox.list(hook)] == [DeliveryState.DEAD]
    assert local.outbox.redeliver(hook) == 1
    # An endpoint that refuses connections, and a name that does not exist.
    for url in ("http://127.0.0.1:1/", "http://nowhere.invalid/"):
        sent = WebhookSender(ALLOWED, Sealer(())).send(
            DeliveryClaim("msg_1", "o", hook, url, "{}", claims[0].secrets, 0, "default")
        )
        assert (sent.error or "").startswith("ConnectError")


def test_a_rotation_signs_with_both_secrets(local: Hooked, receiver: Receiver) -> None:
    hook = local.hook(receiver.url("ok"))
    before, after = local.secrets[hook], [new_secret(), new_secret()]
    for secret in after:
        local.hooks.rotate(hook, Sealer(()).seal(secret), keep_s=3600)
    sender = WebhookSender(ALLOWED, Sealer(()))

    def verified() -> list[bool]:
        local.failed_job()
        claim = local.claim()
        assert local.outbox.record(claim, sender.send(claim))
        sent = receiver.got()[-1]
        return [verifies(secret, sent) for secret in (before, *after)]

    assert verified() == [True, True, True]
    local.run("UPDATE webhooks SET previous_until = 1")
    assert verified() == [False, False, True]


def test_no_secret_is_in_the_clear_in_a_sqlite_file(tmp_path: Path, receiver: Receiver) -> None:
    """Neither new ones nor those of a release that sealed nothing, and calls are signed as before."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    settings = ALLOWED.model_copy(update={"jobs": JobSettings(database_url=url), "token": secrets.token_hex(16)})
    hooked = Hooked(url)
    with closing(hooked.database) as database:
        old = hooked.hook(receiver.url("ok"))
        hooked.hooks.rotate(old, Sealer(()).seal(new_secret()), keep_s=3600)
        for _ in range(2):
            with TestClient(create_app(settings), headers={"Authorization": f"Bearer {settings.token}"}) as client:
                made = client.post("/v1/webhooks", json={"url": receiver.url("ok"), "events": ["job.cancelled"]}).json()
                client.post(f"/v1/webhooks/{made['id']}/rotate", json={"keep_s": 3600})
                with database.read() as session:
                    kept = session.execute(text("SELECT secret || ' ' || previous_secret FROM webhooks")).scalars()
                    assert all(one.startswith("fernet:") for texts in kept for one in texts.split())
                hooked.failed_job()
                wait_until(lambda: bool(receiver.got("ok")))
                assert verifies(hooked.secrets[old], receiver.got("ok")[0])
        key_file = tmp_path / "jobs.db-webhook-key"
        assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
        assert b"whsec_" not in b"".join(path.read_bytes() for path in tmp_path.glob("jobs.db*"))
        # Who takes the keys into his own hands goes on reading what the file's key has sealed.
        chosen = Fernet.generate_key().decode()
        sealer = sealer_for(database, (chosen,))
        with database.read() as session:
            for sealed in session.execute(text("SELECT secret FROM webhooks")).scalars():
                assert sealer.open(sealed).startswith("whsec_")
        assert Sealer([chosen]).open(sealer.seal("whsec_x")) == "whsec_x"


def test_a_key_file_that_holds_no_key_ends_the_start(tmp_path: Path) -> None:
    with closing(Database(f"sqlite:///{tmp_path}/jobs.db")) as database:
        (tmp_path / "jobs.db-webhook-key").write_text("")
        with pytest.raises(RequestError, match="holds no key"):
            sealer_for(database, ())


def verifies(secret: str, sent: dict[str, Any]) -> bool:
    try:
        Verifier(secret).verify(sent["body"], sent["headers"])
    except WebhookVerificationError:
        return False
    return True


def certificate(directory: Path, name: str) -> tuple[str, str]:
    """A certificate for a name, signed by itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
        .serial_number(1).not_valid_before(now).not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    paths = directory / f"{name}.pem", directory / f"{name}.key"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.TraditionalOpenSSL
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return str(paths[0]), str(paths[1])


def test_a_certificate_is_checked_against_the_name(
    local: Hooked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pem, key = certificate(tmp_path, "hooks.example.org")
    monkeypatch.setenv("SSL_CERT_FILE", pem)
    resolved = socket.getaddrinfo

    def names(host: Any, *args: Any, **more: Any) -> Any:
        return resolved("127.0.0.1" if str(host).endswith("example.org") else host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", names)
    found = Receiver(tmp_path, pem, key)
    try:
        sender = WebhookSender(ALLOWED, Sealer(()))
        for name in ("hooks.example.org", "other.example.org"):
            local.hook(f"https://{name}:{found.port}/ok")
        local.failed_job()
        # Both were written at the same moment, so either may be the first.
        sent = {claim.url.split(":")[1]: sender.send(claim) for claim in (local.claim(), local.claim())}
    finally:
        found.process.kill()
    assert sent["//hooks.example.org"] == Outcome(204)
    assert "certificate verify failed" in (sent["//other.example.org"].error or "")
    assert [one["headers"]["host"] for one in found.got()] == [f"hooks.example.org:{found.port}"]


def test_an_endpoint_that_hangs_delays_no_other(local: Hooked, receiver: Receiver) -> None:
    for _ in range(3):
        local.hook(receiver.url("hang"))
    good = local.hook(receiver.url("ok"))
    flaky = local.hook(receiver.url("flaky-1"))
    jobs = [local.failed_job() for _ in range(5)]
    deliverer = WebhookDeliverer(local.outbox, WebhookSender(ALLOWED, Sealer(())), keep_s=3600)
    deliverer.start()
    try:
        wait_until(lambda: len(receiver.got("ok")) == 5, timeout_s=PATIENCE_S)
        wait_until(lambda: len(local.outbox.list(flaky, state=DeliveryState.DELIVERED)) == 4, timeout_s=PATIENCE_S)
        local.make_due()
        wait_until(lambda: len(local.outbox.list(flaky, state=DeliveryState.DELIVERED)) == 5, timeout_s=PATIENCE_S)
        wait_until(lambda: len(local.outbox.list(good, state=DeliveryState.DELIVERED)) == 5, timeout_s=PATIENCE_S)
    finally:
        began = time.monotonic()
        deliverer.stop()
        assert time.monotonic() - began < 100
    told = [json.loads(one["body"])["data"]["id"] for one in receiver.got("ok")]
    assert told == jobs
    assert all(verifies(local.secrets[good], one) for one in receiver.got("ok"))


def test_a_service_tells_the_end_of_jobs(stack: Stack, receiver: Receiver, tmp_path: Path) -> None:
    stack.extra |= {**LOCAL, "RESHARD_TOKEN": "operator"}
    with stack.api() as url, client_of(url, "operator") as client, stack.worker():
        for wrong in ("http://127.0.0.1:1/#x", "https://10.0.0.1/", "ftp://127.0.0.1/"):
            with pytest.raises(RequestError):
                client.webhooks.create(wrong)
        with pytest.raises(RequestError, match="none of"):
            client.webhooks.create(receiver.url("ok"), events=("job.lost",))
        hook = client.webhooks.create(receiver.url("ok"), events=("job.started", "job.succeeded"), description="mine")
        assert hook.secret is not None
        (listed,) = client.webhooks.list()
        assert listed == hook.model_copy(update={"secret": None}) == client.webhooks.get(hook.id)
        job = client.submit(scripted(units=2), str(tmp_path / "out"), to="universal")
        assert client.wait(job.id, timeout_s=PATIENCE_S).state is JobState.SUCCEEDED
        wait_until(lambda: len(receiver.got("ok")) == 2)
        sent = receiver.got("ok")
        assert [json.loads(one["body"])["type"] for one in sent] == ["job.started", "job.succeeded"]
        assert all(verifies(hook.secret, one) for one in sent)
        assert json.loads(sent[1]["body"])["data"]["id"] == job.id
        wait_until(lambda: all(d.state is DeliveryState.DELIVERED for d in client.webhooks.deliveries(hook.id)))
        (newest, _) = client.webhooks.deliveries(hook.id)
        assert newest.id == sent[1]["headers"]["webhook-id"]
        assert client.webhooks.redeliver(hook.id, newest.id) == 1
        wait_until(lambda: len(receiver.got("ok")) == 3)
        assert receiver.got("ok")[2]["headers"]["webhook-id"] == newest.id
        rotated = client.webhooks.rotate(hook.id)
        assert rotated.secret not in (None, hook.secret)
        assert rotated.previous_secret_until is not None
        client.webhooks.remove(hook.id)
        for call in (client.webhooks.remove, client.webhooks.get, client.webhooks.deliveries, client.webhooks.enable):
            with pytest.raises(RequestError, match=r"request\.not_found"):
                call(hook.id)


def test_a_deliverer_that_is_killed_loses_nothing(stack: Stack, receiver: Receiver, tmp_path: Path) -> None:
    stack.extra |= {**LOCAL, "RESHARD_TOKEN": "operator"}
    with stack.api_process() as (url, process), client_of(url, "operator") as client:
        hook = client.webhooks.create(receiver.url("slow-once"))
        job = client.submit(scripted(units=2), str(tmp_path / "out"), to="universal")
        client.cancel(job.id)
        # It is sent, and its end is not recorded.
        wait_until(lambda: len(receiver.got("slow-once")) == 1)
        process.stop(signal.SIGKILL)
    database = Database(stack.database_url)
    (left,) = Deliveries(database).list(hook.id)
    assert left.state is DeliveryState.PENDING
    with database.write() as session:
        session.execute(text("UPDATE webhook_deliveries SET lease_until = 1"))
    database.close()
    with stack.api() as url, client_of(url, "operator") as client:
        wait_until(lambda: client.webhooks.deliveries(hook.id)[0].state is DeliveryState.DELIVERED)
    sent = receiver.got("slow-once")
    assert len(sent) == 2
    assert {one["headers"]["webhook-id"] for one in sent} == {left.id}
    assert hook.secret is not None
    assert all(verifies(hook.secret, one) for one in sent)
