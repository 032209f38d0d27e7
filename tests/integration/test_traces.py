"""Traces of real processes, as a real receiver of OTLP/HTTP decodes them; and jobs beside collectors that fail."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest
from checkpoints import write_zero_checkpoint

from house.waiting import PATIENCE_S
from reshard.choices import JobState, TargetFormat
from reshard.options import SourceSpec
from servers.collector import Collector, Received, collector
from servers.process import free_port
from servers.proxy import LoggingProxy, logging_proxy
from servers.s3 import S3Server
from servers.scripted import scripted
from servers.stack import Stack, client_of, tree_of

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"
TOKEN = "planted-token-of-the-operator"
HEADER = "planted-key-of-the-collector"
PARAMETERS = [(f"layer.{n}.weight", (1024, 1024)) for n in range(12)]

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def received() -> Generator[Collector]:
    with collector() as found:
        yield found


def submit(url: str, source: str, target: str, *, token: str = "", **more: object) -> str:
    """The id of a job that a caller with a trace of its own has made."""
    body = {"source": {"url": source}, "target": target, "to": "universal", **more}
    headers = {"traceparent": TRACEPARENT, **({"Authorization": f"Bearer {token}"} if token else {})}
    answer = httpx.post(f"{url}/v1/jobs?page_token={TOKEN}", json=body, headers=headers, timeout=PATIENCE_S)
    assert answer.status_code == 202, answer.text
    return answer.json()["id"]


def within(child: Received, parent: Received) -> bool:
    return child.parent == parent.id and parent.begin_ns <= child.begin_ns <= child.end_ns <= parent.end_ns


def test_one_trace_from_the_callers_request_to_the_runs_of_two_workers(
    make_stack: Callable[[str], Stack], s3: S3Server, tmp_path: Path, received: Collector
) -> None:
    write_zero_checkpoint(tmp_path / "run", PARAMETERS, stage=2, ranks=2)
    bucket = f"traces-{os.getpid()}"
    s3.make_bucket(bucket)
    s3.upload(tmp_path / "run", bucket, "run")
    stack = make_stack("celery")
    stack.scripted = False
    headers = f"api-key={HEADER}"
    stack.extra = {
        **received.env(OTEL_EXPORTER_OTLP_HEADERS=headers, OTEL_EXPORTER_OTLP_COMPRESSION="gzip"),
        "RESHARD_SHARE_BYTES": "1",
        "RESHARD_MAX_WORKERS": "2",
        "RESHARD_ADMISSION_S": "40",
        "RESHARD_LEASE_S": "10",
        "RESHARD_LOG_FORMAT": "json",
        "RESHARD_TOKEN": TOKEN,
        "RESHARD_ANONYMOUS": "",
        "RESHARD_ROOTS": f"s3://{bucket}",
    }
    with ExitStack() as exits:
        url = exits.enter_context(stack.api(s3.env()))
        uploading = set[LoggingProxy]()

        def waits_for_the_other(proxy: LoggingProxy, method: str, target: str) -> bool:
            """Until both workers upload parts: each of them has taken a run then."""
            if s3.part_of(method, target) is not None:
                uploading.add(proxy)
                return len(uploading) < 2
            return False

        for _ in range(2):
            proxy = exits.enter_context(logging_proxy(s3.endpoint))
            proxy.held = partial(waits_for_the_other, proxy)
            exits.enter_context(stack.worker(s3.env(proxy.endpoint)))
        client = exits.enter_context(client_of(url, TOKEN))
        parts = {"to": "safetensors", "part_bytes": 5 << 20, "threads": 1}
        job = submit(url, f"s3://{bucket}/run", f"s3://{bucket}/out", token=TOKEN, **parts)
        ended = client.wait(job, timeout_s=PATIENCE_S)
        assert ended.state is JobState.SUCCEEDED, ended.error
        received.wait_until(lambda: bool(received.named("attempt", job)) and bool(received.named("help", job)))

    (post,) = received.named("POST /v1/jobs")
    assert (post.trace, post.parent, post.service, post.kind) == (TRACE, CALLER, "reshard-api", 2)
    assert post.facts == {"http.request.method": "POST", "http.route": "/v1/jobs", "http.response.status_code": 202}
    (queue,), (attempt,) = received.named("queue", job), received.named("attempt", job)
    helped = received.named("help", job)
    assert {queue.parent, attempt.parent, *(h.parent for h in helped)} == {post.id}
    assert attempt.service == "reshard-worker"
    assert post.begin_ns <= queue.begin_ns <= queue.end_ns == attempt.begin_ns
    assert all(attempt.begin_ns <= h.begin_ns <= h.end_ns <= attempt.end_ns + 10**9 for h in helped)
    facts = attempt.facts
    assert (facts["reshard.attempt"], facts["reshard.tenant"]) == (1, "default")
    assert (facts["reshard.target_format"], facts["reshard.outcome"]) == ("safetensors", "succeeded")
    assert facts["reshard.write_bytes"] > 12 << 22

    mine = [s for s in received.spans if s.trace == TRACE]
    phases = [s for s in mine if s.parent == attempt.id]
    assert {s.name for s in phases} == {"plan", "units", "verify", "commit"}
    assert all(within(s, attempt) for s in phases)
    by_id = {s.id: s for s in mine}
    runs = [s for s in mine if s.name == "run"]
    assert runs
    strays = [(r, by_id[r.parent]) for r in runs if not within(r, by_id[r.parent]) or by_id[r.parent].name != "units"]
    assert [(r.facts, r.begin_ns - p.begin_ns, p.end_ns - r.end_ns, p.name) for r, p in strays] == []
    owners = {by_id[by_id[run.parent].parent].name for run in runs}
    assert owners == {"attempt", "help"}
    assert sum(run.facts["reshard.bytes"] for run in runs) == facts["reshard.write_bytes"]
    (agreements,) = [s for s in mine if s.name == "agreements"]
    assert within(agreements, by_id[agreements.parent])
    assert [(s.name, s.error) for s in mine if s.failed] == []

    # The log lines of all processes lead to the trace.
    text = "".join(log.read_text() for log in stack.directory.glob("*.log"))
    of_run = [line for line in text.splitlines() if '"run": ' in line]
    assert of_run
    assert all(f'"trace_id": "{TRACE}"' in line for line in of_run)
    assert all(h["api-key"] == HEADER for h in received.headers)
    # Neither a secret nor the caller's query nor a URL is in what was sent.
    sent = b"".join(received.bodies)
    assert [word for word in (TOKEN, HEADER, "page_token", "s3://", bucket, "http://") if word.encode() in sent] == []
    assert HEADER not in text


def test_attempts_and_failures_have_spans_of_their_own(stack: Stack, received: Collector, tmp_path: Path) -> None:
    stack.extra |= received.env()
    with stack.api() as url, stack.worker() as worker, client_of(url) as client:
        again = submit(url, scripted(units=3, fail="storage.unavailable", at=1, times=1), str(tmp_path / "again"))
        assert client.wait(again, timeout_s=PATIENCE_S).state is JobState.SUCCEEDED
        crashed = submit(url, scripted(units=2, crash=int(signal.SIGKILL)), str(tmp_path / "crashed"), max_attempts=1)
        assert client.wait(crashed, timeout_s=PATIENCE_S).state is JobState.FAILED
        failed = submit(url, scripted(fail="checkpoint.incomplete"), str(tmp_path / "failed"))
        assert client.wait(failed, timeout_s=PATIENCE_S).state is JobState.FAILED
        assert httpx.get(f"{url}/v1/jobs/{TOKEN}", timeout=PATIENCE_S).status_code == 404
        httpx.get(f"{url}/healthz", timeout=PATIENCE_S)
        received.wait_until(lambda: bool(received.named("attempt", failed)) and len(received.named("queue")) == 4)
        assert worker.stop() in {0, -signal.SIGTERM}
    first, second = received.named("attempt", again)
    assert (first.failed, first.error, first.facts["error.type"]) == (
        True,
        "storage.unavailable",
        "storage.unavailable",
    )
    assert first.facts["reshard.outcome"] == "retried"
    assert not second.failed
    assert (first.facts["reshard.attempt"], second.facts["reshard.attempt"]) == (1, 2)
    assert first.end_ns <= second.begin_ns
    (lost,) = received.named("attempt", crashed)
    assert (lost.failed, lost.error) == (True, "job.lost")
    (bad,) = received.named("attempt", failed)
    assert (bad.failed, bad.error, bad.facts["reshard.outcome"]) == (True, "checkpoint.incomplete", "failed")
    by_id = {s.id: s for s in received.spans}
    for span in received.spans:
        if span.name in {"plan", "units", "verify", "commit"}:
            assert within(span, by_id[span.parent]), span
    # The phase in which the engine failed or died has the same code.
    codes = {by_id[s.parent].job: s.error for s in received.spans if s.failed and s.name in {"plan", "units"}}
    assert codes == {again: "storage.unavailable", crashed: "job.lost", failed: "checkpoint.incomplete"}
    asked = {s.name for s in received.spans if s.service == "reshard-api"}
    assert "GET /v1/jobs/{job_id}" in asked
    assert not {name for name in asked if "healthz" in name}
    assert TOKEN.encode() not in b"".join(received.bodies)


def test_a_trace_that_is_not_sampled_and_one_that_is_no_trace(
    stack: Stack, received: Collector, tmp_path: Path
) -> None:
    stack.extra |= received.env()
    with stack.api() as url, stack.worker(), client_of(url) as client:
        for number, header in enumerate((f"00-{TRACE}-{CALLER}-00", "00-x-y-01", f"00-{'0' * 32}-{CALLER}-01")):
            body = {"source": {"url": scripted(units=1)}, "target": str(tmp_path / f"o{number}"), "to": "universal"}
            made = httpx.post(f"{url}/v1/jobs", json=body, headers={"traceparent": header}, timeout=PATIENCE_S)
            assert made.status_code == 202
            assert client.wait(made.json()["id"], timeout_s=PATIENCE_S).state is JobState.SUCCEEDED
        received.wait_until(lambda: len(received.named("attempt")) == 2)
    posts = received.named("POST /v1/jobs")
    assert [p.parent for p in posts] == ["", ""]
    assert TRACE not in {s.trace for s in received.spans}
    assert {a.parent for a in received.named("attempt")} == {p.id for p in posts}


@pytest.mark.parametrize("how", [pytest.param("refuses", marks=pytest.mark.full), "hangs"])
def test_a_collector_that_fails_costs_no_job_its_time(
    how: str, stack: Stack, received: Collector, tmp_path: Path
) -> None:
    endpoint = received.endpoint if how == "hangs" else f"http://127.0.0.1:{free_port()}"
    received.hangs.set()
    stack.extra |= received.env(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_BSP_MAX_QUEUE_SIZE="16")
    stack.extra |= {"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "8"}
    with stack.api() as url, stack.worker() as worker, client_of(url) as client:
        began = time.monotonic()
        jobs = [submit(url, scripted(units=2), str(tmp_path / f"out{n}")) for n in range(8)]
        for job in jobs:
            assert client.wait(job, timeout_s=PATIENCE_S).state is JobState.SUCCEEDED
        # One export alone would wait for 10 s, and there are 8 jobs one after the other: 80 s.
        assert time.monotonic() - began < 60
        ending = time.monotonic()
        before = tree_of(worker.pid)
        assert worker.stop() in {0, -signal.SIGTERM}
        assert time.monotonic() - ending < 25
        assert before
    text = "".join(log.read_text() for log in stack.directory.glob("*.log"))
    said = [line for line in text.splitlines() if "opentelemetry" in line]
    # Each process complains once in a minute.
    assert len(said) <= 4, said


def test_a_missing_package_is_said_once_and_jobs_run(stack: Stack, received: Collector, tmp_path: Path) -> None:
    missing = tmp_path / "site" / "opentelemetry" / "sdk"
    missing.mkdir(parents=True)
    hidden = tmp_path / "site" / "sitecustomize.py"
    hidden.write_text("import sys\nsys.modules['opentelemetry.sdk'] = None\n")
    stack.extra |= received.env(PYTHONPATH=f"{hidden.parent}")
    missing.rmdir()
    missing.parent.rmdir()
    with stack.api() as url, stack.worker(), client_of(url) as client:
        for name in ("one", "two"):
            job = submit(url, scripted(units=1), str(tmp_path / name))
            assert client.wait(job, timeout_s=PATIENCE_S).state is JobState.SUCCEEDED
    for log in stack.directory.glob("*.log"):
        said = [line for line in log.read_text().splitlines() if "[otel]" in line]
        assert len(said) == 1, (log, said)
    assert received.spans == []


def test_without_the_variables_nothing_is_sent_or_stored(stack: Stack, received: Collector, tmp_path: Path) -> None:
    from sqlalchemy import text

    from reshard_jobs.database import engine_of

    stack.extra |= received.env(OTEL_SDK_DISABLED="true")
    with stack.api() as url, stack.worker(), client_of(url) as client:
        job = submit(url, scripted(units=1), str(tmp_path / "out"))
        assert client.wait(job, timeout_s=PATIENCE_S).state is JobState.SUCCEEDED
    engine = engine_of(stack.database_url)
    with engine.begin() as connection:
        assert connection.execute(text("SELECT traceparent FROM jobs")).scalar_one() is None
    engine.dispose()
    assert received.spans == []


def test_the_worker_traces_a_job_of_an_api_without_traces(stack: Stack, received: Collector, tmp_path: Path) -> None:
    with stack.api() as url, stack.worker(received.env()), client_of(url) as client:
        source = SourceSpec(url=scripted(units=1))
        job = client.submit(source, str(tmp_path / "out"), to=TargetFormat.UNIVERSAL)
        assert client.wait(job.id, timeout_s=PATIENCE_S).state is JobState.SUCCEEDED
        received.wait_until(lambda: bool(received.named("attempt", job.id)))
    (attempt,) = received.named("attempt", job.id)
    assert attempt.parent == ""
    assert received.named("queue") == []
