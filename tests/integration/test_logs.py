"""The logs of real processes: JSON lines that say to which job they belong, and never a secret."""

from __future__ import annotations

import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import dataclass
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from checkpoints import gpt_parameters, write_zero_checkpoint

from house.waiting import PATIENCE_S
from reshard.choices import JobState
from reshard.cli.main import run
from reshard.errors import secrets_of
from reshard_jobs.logs import JsonLines, configure_logs, log_as, log_context
from servers.answering import Handler, answering
from servers.process import free_port
from servers.s3 import ACCESS_KEY, SECRET_KEY, S3Server
from servers.stack import Stack, client_of

BUCKET = "logs"
TOKEN = "planted-token-of-the-operator"
PASSWORD = "planted-password-of-the-database"
WRONG = "planted-token-of-a-stranger"
DENIED = "planted-secret-key-that-is-wrong"
SIGNATURE = "planted0signature0of0a0url"
SECRETS = (TOKEN, PASSWORD, WRONG, DENIED, SIGNATURE, SECRET_KEY)
PROFILES = f"""
[profiles.good]
access_key_id = "{ACCESS_KEY}"
secret_access_key = "{SECRET_KEY}"
endpoint_url = "ENDPOINT"
region = "us-east-1"
[profiles.bad]
access_key_id = "{ACCESS_KEY}"
secret_access_key = "{DENIED}"
endpoint_url = "ENDPOINT"
region = "us-east-1"
"""


@dataclass(frozen=True)
class Logged:
    """What a run of the topology logged: lines by process, and the jobs that it ran."""

    text: str
    lines: list[dict[str, Any]]
    shared: str
    failed: str


@pytest.fixture
def logged(make_stack: Callable[[str], Stack], s3: S3Server, tmp_path: Path) -> Logged:
    write_zero_checkpoint(tmp_path / "run", gpt_parameters(64, 2, 256), stage=3, ranks=2)
    s3.make_bucket(BUCKET)
    s3.upload(tmp_path / "run", BUCKET, "run")
    profiles = tmp_path / "profiles.toml"
    profiles.write_text(PROFILES.replace("ENDPOINT", s3.endpoint))
    profiles.chmod(0o600)
    stack = make_stack("celery")
    stack.scripted = False
    stack.database_url = stack.database_url.replace("postgres:@", f"postgres:{PASSWORD}@")
    assert PASSWORD in stack.database_url
    stack.extra = {
        "RESHARD_LOG_FORMAT": "json",
        # Libraries say most of all at this level.
        "RESHARD_LOG_LEVEL": "DEBUG",
        "RESHARD_PROFILES": str(profiles),
        "RESHARD_TOKEN": TOKEN,
        "RESHARD_ANONYMOUS": "",
        "RESHARD_ROOTS": f"s3://{BUCKET}",
        "RESHARD_SHARE_BYTES": "1",
        "RESHARD_LEASE_S": "10",
    }
    with ExitStack() as exits:
        url = exits.enter_context(stack.api())
        workers = [exits.enter_context(stack.worker(log_level="DEBUG")) for _ in range(2)]
        client = exits.enter_context(client_of(url, TOKEN))
        names = {"profile": "good", "target_profile": "good"}
        shared = client.submit(f"s3://{BUCKET}/run", f"s3://{BUCKET}/out", to="universal", part_bytes=4096, **names)
        assert client.wait(shared.id, timeout_s=PATIENCE_S).state is JobState.SUCCEEDED
        bad = {"profile": "good", "target_profile": "bad", "job_id": "named-by-a-caller"}
        failed = client.submit(f"s3://{BUCKET}/run", f"s3://{BUCKET}/bad", to="universal", max_attempts=1, **bad)
        assert client.wait(failed.id, timeout_s=PATIENCE_S).state is JobState.FAILED
        # A caller's mistakes.
        assert httpx.get(f"{url}/v1/jobs", headers={"Authorization": f"Bearer {WRONG}"}).status_code == 401
        assert httpx.get(f"{url}/v1/jobs?token={WRONG}").status_code == 401
        signed = f"s3://{BUCKET}/run?X-Amz-Credential={SIGNATURE}&X-Amz-Signature={SIGNATURE}"
        answer = httpx.post(
            f"{url}/v1/inspections", json={"url": signed}, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=20
        )
        assert answer.status_code == 422
        httpx.get(f"{url}/v1/jobs/x?X-Amz-Signature={SIGNATURE}", headers={"Authorization": f"Bearer {TOKEN}"})
        for worker in workers:
            assert worker.stop() == 0
    # Celery says its stop in words of its own, and not through a logger: "worker: Cold shutdown (MainProcess)".
    logs = sorted(stack.directory.glob("*.log"))
    assert len(logs) == 3
    text = "".join(log.read_text() for log in logs)
    said = [line for line in text.splitlines() if line and not line.startswith("worker: ")]
    return Logged(text, [json.loads(line) for line in said], shared.id, failed.id)


def test_a_real_run_logs_json_with_its_jobs_and_no_secrets(logged: Logged) -> None:
    assert [secret for secret in SECRETS if secret in logged.text] == []
    for line in logged.lines:
        assert {"time", "level", "logger", "message", "pid"} <= set(line), line
    by_logger: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in logged.lines:
        by_logger[line["logger"]].append(line)
        if line["message"].startswith("job job_"):
            assert line["message"].startswith(f"job {line['job']}:"), line
            assert line["tenant"] == "default"
    assert {"uvicorn.access", "uvicorn.error", "celery.worker.consumer.connection"} <= set(by_logger), set(by_logger)
    work = [line for line in logged.lines if line.get("job") == logged.shared and "attempt" in line]
    assert {line["attempt"] for line in work} == {1}
    runs = [line for line in work if "run" in line]
    assert runs
    assert {line["logger"] for line in runs} == {"reshard_engine.distributed.claimed_runs"}
    supervising = {line["pid"] for line in work if line["logger"] == "reshard_worker.supervisor"}
    assert not supervising & {line["pid"] for line in runs}
    # A line says both ids of a job that its caller has named.
    (named,) = {line["job"] for line in logged.lines if f"attempt 1 of {logged.failed} begins" in line["message"]}
    assert any(line.get("job") == named and line["message"].endswith("failed") for line in logged.lines)


@pytest.fixture
def restored() -> Generator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)


def test_fields_of_a_line_come_from_its_context_and_its_own_words(
    restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    del restored
    monkeypatch.setenv("RESHARD_LOG_FORMAT", "json")
    out = StringIO()
    configure_logs("INFO", stream=out)
    logger = logging.getLogger("reshard.test")
    with log_as(job="a", attempt=2), log_as(tenant="t"):
        assert log_context() == {"job": "a", "attempt": 2, "tenant": "t"}
        logger.info("one", extra={"run": "3-1", "password": "not a field"})
    logger.info("two\nlines \ud800")
    try:
        int("x")
    except ValueError:
        logger.exception("three")
    one, two, three = map(json.loads, out.getvalue().splitlines())
    assert (one["job"], one["attempt"], one["run"], one["tenant"]) == ("a", 2, "3-1", "t")
    assert "password" not in one
    assert not {"job", "attempt", "run", "tenant"} & set(two)
    assert two["message"] == "two\nlines \ud800"
    assert "ValueError: invalid" in three["exception"]


def test_text_names_the_job_behind_the_message(restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    del restored
    monkeypatch.delenv("RESHARD_LOG_FORMAT", raising=False)
    out = StringIO()
    configure_logs("INFO", stream=out)
    with log_as(job="a", attempt=2):
        logging.getLogger("reshard.test").info("one")
    assert out.getvalue().endswith(" INFO reshard.test: one [job=a attempt=2]\n")


def test_secrets_that_a_library_logs_are_hidden(
    restored: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    del restored
    profiles = tmp_path / "profiles.toml"
    profiles.write_text('[profiles.a]\nsecret_access_key = "pröfile\\"secret"\nregion = "us-east-1"\n')
    monkeypatch.setenv("RESHARD_PROFILES", str(profiles))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted-aws")
    monkeypatch.setenv("RESHARD_DATABASE_URL", "postgresql://u:planted-db@host/x")
    monkeypatch.setenv("RESHARD_TOKEN", "short")
    monkeypatch.setenv("RESHARD_LOG_FORMAT", "json")
    monkeypatch.setenv("SMTP_PASS", "planted-pass")
    monkeypatch.setenv("REDIS_AUTH", "planted-auth")
    assert {'pröfile"secret', "planted-aws", "planted-db", "planted-pass", "planted-auth"} <= secrets_of(os.environ)
    assert not {"short", "us-east-1"} & secrets_of(os.environ)
    out = StringIO()
    configure_logs("INFO", stream=out)
    logging.getLogger("x").info(
        'planted-aws planted-db pröfile"secret Bearer abcdefgh GET /?X-Amz-Signature=0123abc&page_token=kept&token=gone'
    )
    line = json.loads(out.getvalue())
    assert line["message"] == (
        "[hidden] [hidden] [hidden] Bearer [hidden] GET /?X-Amz-Signature=[hidden]&page_token=kept&token=[hidden]"
    )


def test_a_pipe_in_the_place_of_the_profiles_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "profiles")
    assert secrets_of({"RESHARD_PROFILES": str(tmp_path / "profiles")}) == set()


def test_a_record_that_cannot_be_formatted_ends_nothing(restored: None) -> None:
    del restored
    record = logging.LogRecord("x", logging.INFO, "", 0, "%s %s", ("one", "two"), None)
    assert json.loads(JsonLines().format(record))["message"] == "one two"


# What a service shows and stores while its stores fail: none of its operator's secrets.

CANARIES = {
    "password": "canary/p4ss+w0rd",
    "apikey": "canary-ap1-key",
    "secret": "canary/s3cret/access+key",
    "session": "canary/sess10n+token",
    "sas": "canary/s1g+nature=",
    "hub": "hf_canary0t0ken",
    "nameless": "canary-of-a-name",
}


class Echoing(Handler):
    """A store that refuses every request, and quotes it in its reply."""

    def do_GET(self) -> None:  # noqa: N802 - the name that the base class calls
        seen = escape(f"{self.requestline} {dict(self.headers)}").encode()
        body = b"<?xml version='1.0'?><Error><Code>OddRequest</Code><Message>" + seen + b"</Message></Error>"
        told = {"Content_Type": "application/xml", "x_ms_error_code": "OddRequest"}
        self.answer(400, body, X_Error_Message=seen.decode()[:4000], **told)

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815 - as above


def test_a_service_whose_stores_fail_shows_and_stores_none_of_its_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = {name: quote(value, safe="") for name, value in CANARIES.items()}
    away = f"ops:{hidden['password']}@127.0.0.1:{free_port()}"
    (tmp_path / "secrets").mkdir()
    profiles = tmp_path / "secrets" / "profiles.toml"
    kept = tmp_path / "kept"
    kept.mkdir()
    stack = Stack(kept, f"sqlite:///{kept}/jobs.db", scripted=False)
    with answering(Echoing) as echo, ExitStack() as exits:
        key = f'access_key_id = "AKID"\nsecret_access_key = "{CANARIES["secret"]}"\nregion = "us-east-1"\n'
        query = f"apikey={hidden['apikey']}&k={hidden['nameless']}"
        profiles.write_text(
            f'[profiles.away]\n{key}endpoint_url = "http://{away}/x?{query}"\n'
            f'[profiles.echo]\n{key}session_token = "{CANARIES["session"]}"\nendpoint_url = "{echo}"\n'
            f'[profiles.sas]\nendpoint_url = "{echo}/acct"\nsas_token = "sv=2025-01-05&sp=r&sig={hidden["sas"]}"\n'
            f'[profiles.sas_away]\nendpoint_url = "http://127.0.0.1:{free_port()}/acct"\n'
            f'sas_token = "sv=2025-01-05&sp=r&sig={hidden["sas"]}"\n'
        )
        profiles.chmod(0o600)
        stack.extra = {"RESHARD_PROFILES": str(profiles), "HF_ENDPOINT": echo, "HF_TOKEN": CANARIES["hub"]}
        stack.extra |= {"HF_HUB_OFFLINE": "0", "AWS_MAX_ATTEMPTS": "1", "RESHARD_LEASE_S": "60"}
        url = exits.enter_context(stack.api())
        exits.enter_context(stack.worker())
        monkeypatch.setenv("RESHARD_URL", url)
        shown: list[str] = []
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as http, client_of(url) as client:
            for place, profile in (
                *(("s3://bucket/run", "away"), ("s3://bucket/run", "echo"), ("az://bucket/run", "sas")),
                *(("az://bucket/run", "sas_away"), ("hf://org/name", None), ("gs://bucket/run", "away")),
            ):
                source = {"url": place, "profile": profile}
                shown.append(http.post("/v1/inspections", json=source).text)
                shown.append(http.post("/v1/layouts", json={"source": source, "to": "zero"}).text)
                body = {"source": source, "target": f"{tmp_path}/{profile}", "to": "universal", "max_attempts": 1}
                answer = http.post("/v1/jobs", json=body)
                shown.append(answer.text)
                if answer.is_success:
                    job = answer.json()["id"]
                    assert client.wait(job, timeout_s=PATIENCE_S).state is JobState.FAILED
                    paths = (f"/v1/jobs/{job}", f"/v1/jobs/{job}/result", f"/v1/jobs/{job}/events", f"/jobs/{job}")
                    shown += [http.get(path).text for path in paths]
                    run(["jobs", "show", job])
                    run(["jobs", "result", job])
            shown += [http.get(path).text for path in ("/", "/v1/jobs", "/v1/workers", "/metrics")]
    shown.append("".join(capsys.readouterr()))
    stored = {path.name: path.read_bytes() for path in kept.rglob("*") if path.is_file()}
    assert "jobs.db" in stored
    everything = "\n".join([*shown, *(data.decode(errors="replace") for data in stored.values())])
    assert re.findall(".{200}canary.{20}", everything, re.IGNORECASE | re.DOTALL) == []
    # The requests did fail as the secrets would have shown it.
    assert "OddRequest" in everything
    assert "Connect" in everything
