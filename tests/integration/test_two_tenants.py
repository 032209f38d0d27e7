"""Attempts of one tenant to reach the things of another. Each is answered as if the thing did not exist.

An attempt is made twice: for a thing of the other tenant, and for one that nobody has. Both answers must be equal in
status, headers and body, but for dates and for the name that the caller itself has sent.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from house.waiting import PATIENCE_S
from reshard.errors import JobError
from reshard.models.jobs import ConvertResult
from reshard_jobs.database import Database
from reshard_jobs.queue.leases import Leases
from reshard_jobs.queue.store import JobFilter
from servers.postgres import PostgresServer
from servers.stack import Stack

OPERATOR = "the token of the operator"
ALL = ["submit", "read", "cancel", "admin"]
ABSENT_TOKEN = "a" * 16
_TIMES = re.compile(r"\d{4}-\d\d-\d\dT[0-9:.]+Z|\d{4}-\d\d-\d\dT[0-9:.]+\+00:00")
_NEW_ID = re.compile(r"job_[a-z2-7]{24}")
_ID_LENGTH = len("job_") + 24


@dataclass
class Service:
    """A service with two tenants; `anna` has things, and `bert` tries to reach them."""

    url: str
    root: Path
    anna: str
    bert: str
    things: dict[str, str] = field(default_factory=dict[str, str])
    """The names of anna's things."""
    absent: dict[str, str] = field(default_factory=dict[str, str])
    """Names of the same form that nobody has."""

    def ask(self, method: str, path: str, *, token: str | None = None, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.bert if token is None else token}", **more.pop("headers", {})}
        headers = {name: value for name, value in headers.items() if value}
        return httpx.request(method, f"{self.url}{path}", headers=headers, timeout=PATIENCE_S, **more)

    def body(self, place: str = "bert", name: str = "out") -> dict[str, Any]:
        return {
            "source": {"url": f"{self.root}/{place}/scripted"},
            "target": f"{self.root}/{place}/{name}",
            "to": "universal",
        }


@dataclass(frozen=True)
class Attempt:
    """One attempt: the expected status, and a request about things, which are anna's or nobody's."""

    status: int
    ask: Callable[[Service, dict[str, str]], httpx.Response]


def _job(method: str, path: str, thing: str, status: int = 404, **more: Any) -> Attempt:
    return Attempt(status, lambda s, names: s.ask(method, path.replace("ID", names[thing]), **more))


def _put(change: str) -> Attempt:
    def ask(service: Service, names: dict[str, str]) -> httpx.Response:
        body = service.body(name="fixed")
        return service.ask("PUT", f"/v1/jobs/{names[change]}", json=body)

    return Attempt(202, ask)


def _keyed(thing: str, place: str = "bert") -> Attempt:
    def ask(service: Service, names: dict[str, str]) -> httpx.Response:
        headers = {"Idempotency-Key": names[thing]}
        return service.ask("POST", "/v1/jobs", json=service.body(place, "keyed"), headers=headers)

    return Attempt(202 if place == "bert" else 403, ask)


def _submit(part: str, thing: str, status: int, path: str = "/v1/jobs") -> Attempt:
    def ask(service: Service, names: dict[str, str]) -> httpx.Response:
        body = service.body()
        if part in ("source", "url"):
            body["source"]["url"] = names[thing]
        elif part == "profile":
            body["source"]["profile"] = names[thing]
        elif part == "base":
            body["options"] = {"peft": {"base": names[thing]}}
        else:
            body[part] = names[thing]
        return service.ask("POST", path, json=body["source"] if path == "/v1/inspections" else body)

    return Attempt(status, ask)


def _page(make: Callable[[dict[str, str]], str], query: str = "") -> Attempt:
    return Attempt(422, lambda s, names: s.ask("GET", f"/v1/jobs?page_token={make(names)}{query}"))


def _forged(names: dict[str, str]) -> str:
    """A token for bert's own listing that points at a job."""
    text = json.dumps([JobFilter().digest("bert"), 9e9, names["queued"]])
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _bearer(make: Callable[[dict[str, str]], str], **headers: Any) -> Attempt:
    return Attempt(401, lambda s, names: s.ask("GET", "/v1/jobs", token=make(names), headers=headers))


def _cookie(names: dict[str, str]) -> dict[str, str]:
    return {"Cookie": f"reshard_session={names['token']}.{'0' * 64}", "Authorization": ""}


ATTEMPTS: dict[str, Attempt] = {
    # By the id of a job.
    **{
        f"{name} of the {thing} job": _job(method, path, thing, **more)
        for thing in ("queued", "own", "done", "failed")
        for name, method, path, more in (
            ("job", "GET", "/v1/jobs/ID", {}),
            ("events as a page", "GET", "/v1/jobs/ID/events", {"headers": {"Accept": "application/json"}}),
            ("result", "GET", "/v1/jobs/ID/result", {}),
            ("cancel", "POST", "/v1/jobs/ID/cancel", {}),
            ("retry", "POST", "/v1/jobs/ID/retry", {}),
        )
    },
    "long poll": _job("GET", "/v1/jobs/ID?wait=2", "queued"),
    "long poll of an own id": _job("GET", "/v1/jobs/ID?wait=2", "own"),
    "etag": _job("GET", "/v1/jobs/ID", "queued", headers={"If-None-Match": '"1"'}),
    "etag of an own id": _job("GET", "/v1/jobs/ID", "own", headers={"If-None-Match": '"1"'}),
    "event stream": _job("GET", "/v1/jobs/ID/events", "queued", headers={"Accept": "text/event-stream"}),
    "event stream of an ended job": _job("GET", "/v1/jobs/ID/events", "done"),
    "events after": _job("GET", "/v1/jobs/ID/events?after_seq=1", "own", headers={"Accept": "application/json"}),
    "last event id": _job("GET", "/v1/jobs/ID/events", "own", headers={"Last-Event-ID": "1"}),
    "head of a job": _job("HEAD", "/v1/jobs/ID", "queued", 405),
    "delete of a job": _job("DELETE", "/v1/jobs/ID", "queued", 405),
    # By an id of one's own, and by idempotency key.
    "put an id that the other uses": _put("own"),
    "put an id that the other used for a job that ended": _put("own done"),
    "key of the other": _keyed("key"),
    "key of the other for its own request": _keyed("second key", "anna"),
    "key that is an id of the other": _keyed("own"),
    "key that is a generated id of the other": _keyed("queued"),
    "put a generated id of the other": Attempt(
        422, lambda s, names: s.ask("PUT", f"/v1/jobs/{names['queued']}", json=s.body())
    ),
    # By filter and by page token.
    "label of the other": Attempt(200, lambda s, names: s.ask("GET", f"/v1/jobs?label=team={names['label']}")),
    "label and state": Attempt(
        200, lambda s, names: s.ask("GET", f"/v1/jobs?label=team={names['label']}&state=QUEUED&page_size=200")
    ),
    "page token of the other": _page(lambda names: names["page"]),
    "page token of the other with its filter": _page(lambda names: names["label page"], "&label=team=red"),
    "forged page token": Attempt(
        200, lambda s, names: s.ask("GET", f"/v1/jobs?page_size=1&page_token={_forged(names)}")
    ),
    # Roots and profiles.
    "read a file of the other": _submit("source", "file", 403),
    "read the root of the other": _submit("source", "root", 403),
    "write below the root of the other": _submit("target", "target", 403),
    "write a target that the other writes": _submit("target", "busy", 403),
    "model files of the other": _submit("model_files", "file", 403),
    "base model of the other": _submit("base", "file", 403),
    "plan from a file of the other": _submit("source", "file", 403, "/v1/plans"),
    "plan a target of the other": _submit("target", "busy", 403, "/v1/plans"),
    "inspect a file of the other": _submit("url", "file", 403, "/v1/inspections"),
    "dots that lead to the other": _submit("source", "dots", 403),
    "link that leads to the other": _submit("source", "link", 403),
    "profile of the other": _submit("profile", "profile", 422),
    "target profile of the other": _submit("target_profile", "profile", 422),
    "plan with a profile of the other": _submit("profile", "profile", 422, "/v1/plans"),
    "inspect with a profile of the other": _submit("profile", "profile", 422, "/v1/inspections"),
    # Webhooks.
    **{
        f"{name} of a webhook": _job(method, path, "webhook", **more)
        for name, method, path, more in (
            ("url", "GET", "/v1/webhooks/ID", {}),
            ("removal", "DELETE", "/v1/webhooks/ID", {}),
            ("new secret", "POST", "/v1/webhooks/ID/rotate", {"json": {}}),
            ("reactivation", "POST", "/v1/webhooks/ID/enable", {}),
            ("deliveries", "GET", "/v1/webhooks/ID/deliveries", {}),
            ("repetition", "POST", "/v1/webhooks/ID/redeliver", {"json": {}}),
        )
    },
    # Tokens and tenants.
    "revoke a token of the other": Attempt(404, lambda s, names: s.ask("DELETE", f"/v1/tokens/{names['token']}")),
    "list tokens of the other": Attempt(403, lambda s, names: s.ask("GET", f"/v1/tokens?tenant={names['tenant']}")),
    "make a token of the other": Attempt(
        403,
        lambda s, names: s.ask("POST", "/v1/tokens", json={"name": "x", "scopes": ["read"], "tenant": names["tenant"]}),
    ),
    "change the other tenant": Attempt(403, lambda s, names: s.ask("PUT", f"/v1/tenants/{names['tenant']}", json={})),
    "remove the other tenant": Attempt(403, lambda s, names: s.ask("DELETE", f"/v1/tenants/{names['tenant']}")),
    "make the other tenant": Attempt(
        403, lambda s, names: s.ask("POST", "/v1/tenants", json={"name": names["tenant"]})
    ),
    "id of the other's token with a wrong secret": _bearer(lambda names: f"reshard_{names['token']}_{'a' * 52}"),
    "hash of the other's token as the secret": _bearer(lambda names: names["hash"]),
    "revoked token of the other": _bearer(lambda names: names["revoked"]),
    "expired token of the other": _bearer(lambda names: names["expired"]),
    "session of the other with a wrong digest": Attempt(
        401, lambda s, names: s.ask("GET", "/v1/jobs", headers=_cookie(names))
    ),
}


def make_service(url: str, database_url: str, root: Path) -> Service:
    """Two tenants, and things of one of them."""
    service = Service(url, root, "", "")

    def admin(method: str, path: str, body: Any) -> Any:
        answer = service.ask(method, path, token=OPERATOR, json=body)
        assert answer.status_code in (200, 201), answer.text
        return answer.json()

    def token(tenant: str, **more: Any) -> tuple[str, str]:
        made = admin("POST", "/v1/tokens", {"name": "test", "scopes": ALL, "tenant": tenant, **more})
        return made["token"]["id"], made["secret"]

    for name in ("anna", "bert"):
        (root / name / "scripted").mkdir(parents=True)
        own = [str(root / name)]
        admin("POST", "/v1/tenants", {"name": name, "read_roots": own, "write_roots": own, "profiles": [f"p-{name}"]})
    (root / "anna" / "secret").mkdir()
    (root / "bert" / "link").symlink_to(root / "anna" / "secret")
    (root / "bert" / "dead").symlink_to(root / "anna" / "nothing")
    _, service.bert = token("bert")
    anna_id, service.anna = token("anna")
    revoked_id, revoked = token("anna")
    _, expired = token("anna", expires_in_s=1)
    admin("DELETE", f"/v1/tokens/{revoked_id}", None)

    def job(method: str = "POST", path: str = "/v1/jobs", name: str = "out", **headers: str) -> str:
        body = {**service.body("anna", name), "labels": {"team": "red"}}
        answer = service.ask(method, path, token=service.anna, json=body, headers=headers)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    done, failed = job(name="done"), job(name="failed")
    own_done = job("PUT", "/v1/jobs/nightly-3", name="own-done")
    end_jobs(database_url, done, failed)
    job("PUT", "/v1/jobs/nightly-1")
    job(**{"Idempotency-Key": "the second key of anna"})
    queued = job(**{"Idempotency-Key": "the key of anna"})
    service.ask("POST", f"/v1/jobs/{own_done}/cancel", token=service.anna)
    page = service.ask("GET", "/v1/jobs?page_size=1", token=service.anna).json()["next_page_token"]
    label_page = service.ask("GET", "/v1/jobs?page_size=1&label=team=red", token=service.anna).json()["next_page_token"]
    assert page
    assert label_page
    digest = base64.b32encode(hashlib.sha256(service.anna.encode()).digest()).decode().lower()
    hook = {"url": "https://receiver.example/hook", "events": ["job.failed"]}
    webhook = service.ask("POST", "/v1/webhooks", token=service.anna, json=hook)
    assert webhook.status_code == 201, webhook.text
    service.things = {
        "queued": queued,
        "own": "nightly-1",
        "own done": own_done,
        "done": done,
        "failed": failed,
        "key": "the key of anna",
        "second key": "the second key of anna",
        "label": "red",
        "page": page,
        "label page": label_page,
        "file": str(root / "anna" / "secret"),
        "root": str(root / "anna"),
        "target": str(root / "anna" / "new"),
        "busy": str(root / "anna" / "out"),
        "dots": f"{root}/bert/../anna/secret",
        "link": str(root / "bert" / "link"),
        "profile": "p-anna",
        "token": anna_id,
        "tenant": "anna",
        "webhook": webhook.json()["id"],
        "hash": f"reshard_{anna_id}_{digest[:52]}",
        "revoked": revoked,
        "expired": expired,
    }
    service.absent = {
        "queued": "job_" + "z" * 24,
        "own": "nightly-2",
        "own done": "nightly-4",
        "done": "job_" + "y" * 24,
        "failed": "job_" + "x" * 24,
        "key": "the key of nobody",
        "second key": "the second key of nobody",
        "label": "new",
        "page": "A" * len(page),
        "label page": "A" * len(label_page),
        "file": str(root / "anna" / "nobody"),
        "root": str(root / "carl"),
        "target": str(root / "carl" / "new"),
        "busy": str(root / "anna" / "xxx"),
        "dots": f"{root}/bert/../anna/nobody",
        "link": str(root / "bert" / "dead"),
        "profile": "p-nobo",
        "token": ABSENT_TOKEN,
        "tenant": "carl",
        "webhook": "wh_" + "w" * 24,
        "hash": f"reshard_{ABSENT_TOKEN}_{'b' * 52}",
        "revoked": f"reshard_{ABSENT_TOKEN}_{'c' * 52}",
        "expired": f"reshard_{ABSENT_TOKEN}_{'d' * 52}",
    }
    return service


def end_jobs(url: str, done: str, failed: str) -> None:
    """End two jobs as a worker does."""
    database = Database(url)
    try:
        leases = Leases(database, lease_s=60)
        for job_id in (done, failed):
            claim = leases.claim(job_id, worker="w")
            assert claim is not None
            if job_id == failed:
                assert leases.fail(claim, JobError("internal.error", "planted"))
                continue
            target = claim.request.target
            counts: dict[str, Any] = {"read_bytes": 0, "write_bytes": 0, "seconds": {}, "plan_digest": "d"}
            result = ConvertResult(target=target, to="universal", files=(), **counts)
            assert leases.succeed(claim, result, plan_digest="d")
    finally:
        database.close()


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Service]:
    directory = tmp_path_factory.mktemp("tenants")
    url = f"sqlite:///{directory}/jobs.db"
    if request.param == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres")
        url = server.new_database()
    root = directory / "data"
    stack = Stack(directory / "logs", url, extra={"RESHARD_TOKEN": OPERATOR, "RESHARD_ROOTS": str(root)})
    with stack.api() as where:
        yield make_service(where, url, root)


def same_but_for_names(answer: httpx.Response, service: Service) -> tuple[int, dict[str, str], str]:
    """An answer without dates, and without the names that the caller has sent."""

    names = {*service.things.values(), *service.absent.values()}

    def plain(text: str) -> str:
        for name in sorted(names, key=len, reverse=True):
            if len(name) < _ID_LENGTH:  # such a name may stand in a new id by chance
                text = _NEW_ID.sub("NEW", text)
            text = text.replace(name, "NAME")
        return _NEW_ID.sub("NEW", _TIMES.sub("TIME", text))

    headers = {name: plain(value) for name, value in answer.headers.items() if name != "date"}
    body = plain(answer.text)
    if "content-length" in headers:
        headers["content-length"] = str(len(body)) if body else headers["content-length"]
    return answer.status_code, headers, body


def test_there_are_at_least_forty_attempts() -> None:
    assert len(ATTEMPTS) >= 40


@pytest.mark.parametrize("name", ATTEMPTS)
def test_the_other_tenants_things_look_like_nothing(service: Service, name: str) -> None:
    attempt = ATTEMPTS[name]
    theirs = attempt.ask(service, service.things)
    nobodys = attempt.ask(service, service.absent)
    assert theirs.status_code == attempt.status, theirs.text
    assert same_but_for_names(theirs, service) == same_but_for_names(nobodys, service)


def test_listings_show_nothing_of_the_other_tenant(service: Service) -> None:
    pages = [service.ask("GET", path, headers={"Accept": "*/*"}) for path in ("/v1/jobs?page_size=200", "/")]
    pages += [service.ask("GET", path) for path in ("/v1/workers", "/v1/tokens", "/v1/webhooks")]
    secret = [service.things[name] for name in ("queued", "done", "failed", "token", "file", "webhook")]
    for page in pages:
        assert page.status_code == 200
        assert not [text for text in secret if text in page.text], page.url
    assert len(service.ask("GET", "/v1/tokens").json()["tokens"]) == 1
    for path in ("/metrics", "/v1/tenants"):
        assert service.ask("GET", path).status_code == 403
    # The operator's tenant is a tenant: it manages others, and does not read their jobs.
    assert service.ask("GET", "/v1/jobs", token=OPERATOR).json()["jobs"] == []
    assert service.ask("GET", f"/v1/jobs/{service.things['queued']}", token=OPERATOR).status_code == 404


def test_no_attempt_changed_anything(service: Service) -> None:
    for name in ("queued", "own"):
        job = service.ask("GET", f"/v1/jobs/{service.things[name]}", token=service.anna).json()
        assert job["state"] == "QUEUED"
    assert service.ask("GET", "/v1/jobs/nightly-3", token=service.anna).json()["state"] == "CANCELLED"
    failed = service.ask("GET", f"/v1/jobs/{service.things['failed']}", token=service.anna).json()
    assert (failed["state"], failed["retries"]) == ("FAILED", 0)


def test_both_tenants_may_use_one_id(service: Service) -> None:
    path = "/v1/jobs/shared-id"
    for token, place in ((service.anna, "anna"), (service.bert, "bert")):
        made = service.ask("PUT", path, token=token, json=service.body(place))
        assert (made.status_code, made.json()["id"]) == (202, "shared-id")
        assert service.ask("PUT", path, token=token, json=service.body(place)).status_code == 202
        other = service.ask("PUT", path, token=token, json=service.body(place, "b"))
        assert other.json()["code"] == "request.job_exists"
        found = service.ask("GET", path, token=token).json()
        assert found["request"]["target"].endswith(f"{place}/out")
        assert found["links"]["self"] == path
        page = service.ask("GET", f"{path}/events", token=token, headers={"Accept": "application/json"}).json()
        assert [event["job_id"] for event in page["events"]] == ["shared-id"]
    assert service.ask("POST", f"{path}/cancel", token=service.bert).json()["state"] == "CANCELLED"
    assert service.ask("GET", path, token=service.anna).json()["state"] == "QUEUED"
