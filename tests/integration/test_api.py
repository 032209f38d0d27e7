"""The API in a real uvicorn: what a caller sees, with the engine scripted and no worker unless one is named."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Generator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import event, select

from house.expected import raised, some
from house.requests import asked
from house.waiting import PATIENCE_S, at_once
from reshard.api.client import Client
from reshard.choices import JobKind, JobState, TargetFormat
from reshard.errors import JobError, RequestError, ReshardError, SourceError
from reshard.models.jobs import ConvertRequest, ConvertResult, FileEntry, Job, PlanSummary, Progress
from reshard.options import SourceSpec
from reshard_jobs.database import Database
from reshard_jobs.queue.leases import Leases
from reshard_jobs.queue.store import JobFilter, JobStore
from reshard_jobs.tables import JobRow
from servers.scripted import scripted
from servers.stack import Stack, client_of

TOKEN = "a token with späce"


@dataclass
class Api:
    url: str
    stack: Stack
    directory: Path

    def post(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=PATIENCE_S)

    def put(self, path: str, body: Any) -> httpx.Response:
        return httpx.put(f"{self.url}{path}", json=body, timeout=PATIENCE_S)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers=headers, timeout=PATIENCE_S)

    def body(self, name: str = "out", **script: object) -> dict[str, Any]:
        return {"source": {"url": scripted(**script)}, "target": str(self.directory / name), "to": "universal"}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Generator[Api]:
    directory = tmp_path_factory.mktemp("api")
    stack = Stack(directory / "logs", f"sqlite:///{directory}/jobs.db", extra={"RESHARD_ADMISSION_S": "4"})
    with stack.api() as url:
        yield Api(url, stack, directory)


@pytest.fixture(scope="module")
def hurried(api: Api) -> Generator[Api]:
    """Another API of the service, which looks at a source for a second."""
    with api.stack.api({"RESHARD_ADMISSION_S": "1"}) as url:
        yield Api(url, api.stack, api.directory)


@pytest.fixture
def client(api: Api) -> Generator[Client]:
    with client_of(api.url) as found:
        yield found


def test_submission_says_where_to_look(api: Api) -> None:
    answer = api.post("/v1/jobs", {**api.body(), "labels": {"team": "x"}, "max_attempts": 5})
    assert answer.status_code == 202
    job = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert answer.headers["operation-location"] == answer.headers["location"]
    assert answer.headers["retry-after"] == "2"
    assert job["state"] == "QUEUED"
    assert job["labels"] == {"team": "x"}
    assert job["max_attempts"] == 5
    again = api.get(answer.headers["location"])
    assert again.json() == job
    unchanged = api.get(answer.headers["location"], **{"If-None-Match": again.headers["etag"]})
    assert unchanged.status_code == 304
    result = api.get(f"/v1/jobs/{job['id']}/result")
    assert result.status_code == 409
    assert result.json()["code"] == "job.not_finished"


def test_idempotency_key_in_sequence(api: Api) -> None:
    first = api.post("/v1/jobs", api.body(), **{"Idempotency-Key": "sequence"})
    again = api.post("/v1/jobs", api.body(), **{"Idempotency-Key": "sequence"})
    assert first.status_code == again.status_code == 202
    assert first.json()["id"] == again.json()["id"]
    other = api.post("/v1/jobs", api.body("other"), **{"Idempotency-Key": "sequence"})
    assert other.status_code == 422
    assert other.json()["code"] == "request.idempotency_mismatch"
    refused = api.post("/v1/jobs", api.body(refuse="source.not_found"), **{"Idempotency-Key": "corrected"})
    assert refused.json()["code"] == "source.not_found"
    assert api.post("/v1/jobs", api.body(), **{"Idempotency-Key": "corrected"}).status_code == 202


def test_idempotency_key_sixteen_at_once(api: Api) -> None:
    answers: list[httpx.Response] = []
    start = threading.Barrier(16)

    def post() -> None:
        start.wait()
        answers.append(api.post("/v1/jobs", {**api.body(), "labels": {"n": "16"}}, **{"Idempotency-Key": "at once"}))

    at_once([post] * 16)
    assert {answer.status_code for answer in answers} <= {202, 409}
    under_way = [answer for answer in answers if answer.status_code == 409]
    assert {answer.json()["code"] for answer in under_way} <= {"request.idempotency_conflict"}
    assert all(answer.json()["retryable"] and answer.headers["Retry-After"] == "1" for answer in under_way)
    assert len({answer.json()["id"] for answer in answers if answer.status_code == 202}) == 1
    assert len(api.get("/v1/jobs?label=n=16").json()["jobs"]) == 1


def test_job_with_an_id_of_its_own(api: Api) -> None:
    path = "/v1/jobs/run1-step.500"
    first = api.put(path, api.body())
    again = api.put(path, api.body())
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json()["id"] == again.json()["id"] == "run1-step.500"
    assert first.headers["location"] == path
    assert api.get(path).json()["state"] == "QUEUED"
    other = api.put(path, api.body("other"))
    assert (other.status_code, other.json()["code"]) == (409, "request.job_exists")
    listed = api.get("/v1/jobs?page_size=1").json()
    assert [job["id"] for job in listed["jobs"]] == ["run1-step.500"]
    assert api.get(f"/v1/jobs?page_size=1&page_token={listed['next_page_token']}").status_code == 200
    refused = api.put("/v1/jobs/corrected", api.body(refuse="source.not_found"))
    assert refused.json()["code"] == "source.not_found"
    assert api.put("/v1/jobs/corrected", api.body()).status_code == 202
    assert api.post(f"{path}/cancel").json()["state"] == "CANCELLED"
    assert api.put(path, api.body()).status_code == 200


@pytest.mark.parametrize("job_id", ["job_mine", "-x", ".x", "a b", "a%2Fb", "%00", "ä", "x" * 41, "%1fjob"])
def test_id_that_no_caller_may_give(api: Api, job_id: str) -> None:
    answer = api.put(f"/v1/jobs/{job_id}", api.body())
    assert answer.status_code in (404, 405, 422)
    assert answer.json()["code"] in ("request.invalid", "request.not_found")


def test_sixteen_requests_with_one_id_at_once_make_one_job(api: Api) -> None:
    answers: list[httpx.Response] = []
    start = threading.Barrier(16)

    def put(number: int) -> None:
        start.wait()
        answers.append(api.put("/v1/jobs/one-of-two", api.body(f"out{number % 2}")))

    at_once(partial(put, number) for number in range(16))
    assert {a.status_code for a in answers} <= {202, 409}
    codes = {a.json()["code"] for a in answers if a.status_code == 409}
    assert codes <= {"request.idempotency_conflict", "request.job_exists"}
    made = {a.json()["request"]["target"] for a in answers if a.status_code == 202}
    assert len(made) == 1
    assert api.get("/v1/jobs/one-of-two").json()["request"]["target"] == made.pop()


def test_key_of_a_caller_is_no_job_id(api: Api) -> None:
    assert api.post("/v1/jobs", api.body(), **{"Idempotency-Key": "job/apart"}).status_code == 202
    assert api.put("/v1/jobs/apart", api.body("other")).status_code == 202


def test_client_submits_under_an_id_of_its_own(api: Api) -> None:
    with client_of(api.url) as client:
        for _ in range(2):
            job = client.submit(scripted(), str(api.directory / "own"), to="universal", job_id="of-the-client")
            assert job.id == "of-the-client"
        with pytest.raises(RequestError, match=r"request\.job_exists"):
            client.submit(scripted(), str(api.directory / "else"), to="universal", job_id="of-the-client")


def test_client_submissions_with_one_key_at_once_all_get_the_job(api: Api) -> None:
    ids: list[str] = []

    def submit() -> None:
        with client_of(api.url) as client:
            job = client.submit(scripted(), str(api.directory / "out"), to="universal", idempotency_key="sdk")
            ids.append(job.id)

    at_once([submit] * 6)
    assert len(ids) == 6
    assert len(set(ids)) == 1


@pytest.mark.parametrize("code", ["source.not_found", "checkpoint.bad_latest", "storage.no_bucket", "storage.denied"])
def test_what_is_known_at_once_is_refused_at_submission(client: Client, api: Api, code: str) -> None:
    error = raised(ReshardError, client.submit, scripted(refuse=code), str(api.directory / "out"), to="universal")
    assert error.code == code
    assert error.fix == "change the script"


@pytest.mark.parametrize("script", [{"refuse": "storage.unavailable"}, {"inspect_s": 600}])
def test_what_is_not_known_in_time_is_accepted(hurried: Api, script: dict[str, object]) -> None:
    began = time.monotonic()
    with client_of(hurried.url) as client:
        job = client.submit(scripted(**script), str(hurried.directory / "out"), to="universal")
    assert job.state is JobState.QUEUED
    assert time.monotonic() - began < 100


def _look_for_long(url: str) -> None:
    with suppress(httpx.HTTPError):
        httpx.post(f"{url}/v1/inspections", json={"url": scripted(inspect_s=120)}, timeout=PATIENCE_S)


def test_a_busy_service_accepts_a_job_unchecked_and_its_worker_judges_it(api: Api, client: Client) -> None:
    """No submission waits for a process that looks at sources: each would keep it for two minutes."""
    bad = scripted(refuse="source.not_found", fail="source.not_found")
    with api.stack.api({"RESHARD_ADMISSION_S": "120", "RESHARD_INSPECTION_S": "120"}) as url, client_of(url) as busy:
        for _ in range(max(2, os.cpu_count() or 2)):
            threading.Thread(target=_look_for_long, args=(url,), daemon=True).start()
        deadline = time.monotonic() + 100
        # Until all processes are taken.
        while (good := busy.submit(scripted(units=1), str(api.directory / "good"), to="universal")).checked:
            assert time.monotonic() < deadline
        job = busy.submit(bad, str(api.directory / "bad"), to="universal")
        assert (good.state, job.state, job.checked) == (JobState.QUEUED, JobState.QUEUED, False)
        assert api.get(f"/v1/jobs/{job.id}").json()["checked"] is False
        with api.stack.worker():
            assert busy.wait(good.id, timeout_s=PATIENCE_S).checked
            error = busy.wait(job.id, timeout_s=PATIENCE_S).error
        assert error is not None
        assert error.code == "source.not_found"
    assert client.submit(scripted(units=1), str(api.directory / "checked"), to="universal").checked
    with pytest.raises(SourceError):
        client.submit(bad, str(api.directory / "bad"), to="universal")


def test_lists_show_short_results(api: Api) -> None:
    """A list is made without models of its jobs, and equals them all the same, but for long lists of results."""
    with closing(Database(api.stack.database_url)) as database:
        store, leases = JobStore(database), Leases(database, lease_s=600)
        files = tuple(FileEntry(path=f"f{n}", size_bytes=n) for n in range(200))
        ended = [_converted(store, leases, str(api.directory / f"{n}"), files[:n]) for n in (0, 20, 21, 200)]
        running = store.create(_request("/in", "/out"), labels={"long": "list", "é": "\u2028\"'"})
        claim = some(leases.claim(running.id, worker="w"))
        leases.heartbeat(claim, Progress(phase="running", bytes_done=1))
        failed = store.create(_request("/in", "/elsewhere"), labels={"long": "list"})
        claim = some(leases.claim(failed.id, worker="w"))
        assert leases.fail(claim, SourceError("checkpoint.incomplete", "rank 1 is missing"))
        planned = store.create(_request("/in", "/planned"), kind=JobKind.PLAN, labels={"long": "list"})
        listed = {job.id: job for job in store.list(JobFilter(labels={"long": "list"})).jobs}
        for job_id, left_out in zip(ended, ({}, {}, {"files": 21}, {"files": 200}), strict=True):
            whole, short = store.get(job_id), listed[job_id]
            assert whole.result is not None
            assert short.result is not None
            assert (short.result.left_out, whole.result.left_out) == (left_out, {})
            assert short.result == (
                whole.result.model_copy(update={"files": (), "left_out": left_out}) if left_out else whole.result
            )
            assert short.model_copy(update={"result": None}) == whole.model_copy(update={"result": None, "workers": ()})
        for job_id in (running.id, failed.id, planned.id):
            assert listed[job_id] == store.get(job_id).model_copy(update={"workers": ()})
        with database.read() as session:
            kept = session.scalars(select(JobRow.result).where(JobRow.result.is_not(None)))
            assert not any("left_out" in text for text in kept)
        names = {name for name, model in Job.model_fields.items() if model.exclude_if is None}
        raw = api.get("/v1/jobs?label=long=list").json()
        assert all(job.keys() == names for job in raw["jobs"])


def test_the_readers_of_a_target_are_found_by_an_index(api: Api) -> None:
    with closing(Database(api.stack.database_url)) as database:
        store = JobStore(database)
        made = store.create(_request("/in", "/made//by/../it"))
        readers = [store.create(_request(url, f"/r{n}")) for n, url in enumerate(("/made/it", "/made//it", "/made"))]
        assert set(store.readers_of(made)) == {reader.id for reader in readers[:2]}
        said: list[tuple[str, Any]] = []
        event.listen(database._engine, "before_cursor_execute", lambda *told: said.append(told[2:4]))
        store.readers_of(made)
        (query, values) = said[-1]
        with database.read() as session:
            plan = session.connection().exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", values).all()
        assert "jobs_by_source" in str(plan)


def _request(source: str, target: str) -> ConvertRequest:
    return ConvertRequest(source=SourceSpec(url=source), target=target, to=TargetFormat.UNIVERSAL)


def _converted(store: JobStore, leases: Leases, target: str, files: tuple[FileEntry, ...]) -> str:
    """A job that has SUCCEEDED with these files."""
    job = store.create(_request("/in", target), labels={"long": "list"})
    claim = some(leases.claim(job.id, worker="w"))
    for phase in ("running", "verifying"):
        leases.heartbeat(claim, Progress(phase=phase))
    facts = {"read_bytes": 1, "write_bytes": 2, "seconds": {"read": 0.5}, "plan_digest": "d", "warnings": ("one",)}
    result = ConvertResult(target=target, to=TargetFormat.UNIVERSAL, files=files, **facts)
    assert leases.succeed(claim, result, plan_digest="d")
    return job.id


def test_plans_and_inspections(client: Client, api: Api, hurried: Api) -> None:
    plan = client.plan(scripted(units=3), str(api.directory / "out"), to="universal")
    assert plan.units == 3
    assert client.inspect(scripted()).format == "scripted"
    with pytest.raises(SourceError, match=r"source\.not_found"):
        client.inspect(scripted(refuse="source.not_found"))
    slow = hurried.post("/v1/plans", hurried.body("planned", plan_s=1.5, units=5))
    assert slow.status_code == 202
    job = client.get(slow.json()["id"])
    assert job.kind is JobKind.PLAN
    with api.stack.worker():
        ended = client.wait(job.id, timeout_s=PATIENCE_S)
    assert ended.state is JobState.SUCCEEDED
    outcome = client.result(job.id)
    assert isinstance(outcome, PlanSummary)
    assert outcome == ended.plan
    assert outcome.units == 5
    assert not (api.directory / "planned").exists()


def test_a_hostile_checkpoint_harms_only_its_probe(api: Api) -> None:
    hungry = api.post("/v1/inspections", {"url": scripted(eat=8 << 30)})
    assert (hungry.status_code, hungry.json()["code"]) == (422, "checkpoint.too_large")
    assert api.post("/v1/jobs", api.body(eat=8 << 30)).json()["code"] == "checkpoint.too_large"
    crashed = api.post("/v1/inspections", {"url": scripted(inspect_crash=11)})
    assert (crashed.status_code, crashed.json()["code"]) == (500, "internal.error")
    assert api.get("/healthz").status_code == 200


def test_events_as_stream_and_as_pages(api: Api) -> None:
    job = api.post("/v1/jobs", api.body()).json()
    assert api.post(f"/v1/jobs/{job['id']}/cancel").status_code == 202
    stream = api.get(f"/v1/jobs/{job['id']}/events")
    assert stream.headers["content-type"].startswith("text/event-stream")
    blocks = [block for block in stream.text.replace("\r\n", "\n").split("\n\n") if "data:" in block]
    assert [block.split("\n")[0] for block in blocks] == ["id: 1", "id: 2"]
    resumed = api.get(f"/v1/jobs/{job['id']}/events", **{"Last-Event-ID": "1"})
    assert "id: 1" not in resumed.text
    assert "id: 2" in resumed.text
    assert api.get(f"/v1/jobs/{job['id']}/events", **{"Last-Event-ID": "2"}).status_code == 204
    page = api.get(f"/v1/jobs/{job['id']}/events?after_seq=1", Accept="application/json").json()
    assert [event["state"] for event in page["events"]] == ["CANCELLED"]
    assert page["done"]
    data = [line.removeprefix("data: ") for block in blocks for line in block.split("\n") if line.startswith("data")]
    assert json.loads(data[1]) == page["events"][0]
    wrong = api.get(f"/v1/jobs/{job['id']}/events", **{"Last-Event-ID": "x"})
    assert wrong.json()["code"] == "request.invalid"
    assert api.get("/v1/jobs/job_none/events").json()["code"] == "request.not_found"


def test_a_stream_that_continues_repeats_nothing(api: Api, client: Client) -> None:
    job = client.submit(scripted(), str(api.directory / "resumed"), to="universal")
    last = api.get(f"/v1/jobs/{job.id}/events?after_seq=0", Accept="application/json")
    newest = str(last.json()["events"][-1]["seq"])
    threading.Timer(1.0, lambda: client.cancel(job.id)).start()
    headers = {"Accept": "text/event-stream", "Last-Event-ID": newest}
    with httpx.stream("GET", f"{api.url}/v1/jobs/{job.id}/events", headers=headers, timeout=PATIENCE_S) as stream:
        ids = [line.partition(":")[2].strip() for line in stream.iter_lines() if line.startswith("id:")]
    assert ids == [str(int(newest) + 1)]


def test_watchers_of_one_job_all_see_all_of_it(api: Api, client: Client) -> None:
    job = client.submit(scripted(units=30, unit_s=0.05), str(api.directory / "watched"), to="universal")
    seen: dict[int, list[int]] = {}

    def watch(number: int) -> None:
        with client_of(api.url) as own:
            # They come at different times, and one of them continues in the middle.
            time.sleep(number * 0.2)
            seen[number] = [event.seq for event in own.watch(job.id, after_seq=2 if number == 3 else 0)]

    threads = [threading.Thread(target=watch, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    with api.stack.worker():
        for thread in threads:
            thread.join(100)
    whole = [event.seq for event in client.watch(job.id)]
    assert whole == list(range(1, len(whole) + 1))
    assert seen == {number: whole[2:] if number == 3 else whole for number in range(6)}


def test_waits_end_in_time(api: Api, client: Client) -> None:
    job = client.submit(scripted(), str(api.directory / "out"), to="universal")
    began = time.monotonic()
    assert api.get(f"/v1/jobs/{job.id}?wait=1").json()["state"] == "QUEUED"
    # A busy machine answers late; without its limit, the wait would be for ever.
    assert 0.9 < time.monotonic() - began < 100
    with pytest.raises(JobError, match=r"job\.wait_timeout"):
        client.wait(job.id, timeout_s=0.5)
    with pytest.raises(JobError, match=r"job\.wait_timeout"):
        list(client.watch(job.id, timeout_s=0.5))
    began = time.monotonic()
    answer = api.post("/v1/jobs", api.body(), Prefer="respond-async, wait=1")
    assert answer.status_code == 202
    assert time.monotonic() - began > 0.9
    tag = api.get(f"/v1/jobs/{job.id}").headers["etag"]
    threading.Timer(0.3, client.cancel, [job.id]).start()
    changed = api.get(f"/v1/jobs/{job.id}?wait=20", **{"If-None-Match": tag})
    assert changed.json()["state"] == "CANCELLED"


def test_every_error_is_a_problem(api: Api) -> None:
    cases = {
        api.post("/v1/jobs", {"source": {"url": "x" * 5000}}): (422, "request.invalid"),
        api.post("/v1/jobs", {**api.body(), "credentials": "secret-value"}): (422, "request.invalid"),
        api.post("/v1/jobs", {**api.body(), "target": "relative/path"}): (422, "request.invalid"),
        api.post("/v1/jobs", {**api.body(), "priority": False}): (422, "request.invalid"),
        api.post("/v1/jobs", {**api.body(), "threads": "2"}): (422, "request.invalid"),
        api.get("/v1/jobs/job_none"): (404, "request.not_found"),
        api.get("/nothing/here"): (404, "request.not_found"),
        httpx.delete(f"{api.url}/v1/jobs"): (405, "request.invalid"),
        api.get("/v1/jobs?page_token=zzz"): (422, "request.invalid"),
        api.get("/v1/jobs?state=ODD"): (422, "request.invalid"),
        httpx.post(f"{api.url}/v1/jobs", content=b"{", headers={"Content-Type": "application/json"}): (
            422,
            "request.invalid",
        ),
        httpx.post(f"{api.url}/v1/jobs", content=b"[" * 2_000_000): (413, "request.invalid"),
    }
    for answer, (status, code) in cases.items():
        assert answer.headers["content-type"].startswith("application/problem+json"), answer.text
        problem = answer.json()
        assert (answer.status_code, problem["code"]) == (status, code)
        assert problem["status"] == status
        assert problem["type"] == f"urn:reshard:error:{code}"
        assert "secret-value" not in answer.text


def test_operations(api: Api) -> None:
    assert api.get("/healthz").json() == {"status": "ok"}
    assert api.get("/readyz").json() == {"status": "ok", "database": "ok", "broker": "ok"}
    api.get("/v1/jobs/job_none")
    metrics = api.get("/metrics").text
    assert 'reshard_jobs{state="QUEUED"}' in metrics
    assert 'reshard_job_workers{role="helper"} 0.0' in metrics
    assert "reshard_shared_runs_total 0.0" in metrics
    assert 'reshard_http_requests_total{method="GET",route="/v1/jobs/{job_id}",status="404"}' in metrics
    paths = api.get("/openapi.json").json()["paths"]
    for path in ("/v1/jobs", "/v1/jobs/{job_id}/events", "/v1/plans", "/v1/inspections", "/metrics", "/readyz"):
        assert path in paths
    api.post("/v1/jobs", api.body("<script>alert(1)</script>"))
    page = api.get("/")
    assert "&lt;script&gt;" in page.text
    assert "<script>" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_a_method_that_is_not_served_is_told_which_are(api: Api) -> None:
    for path, methods in (
        ("/v1/jobs", "GET, POST"),
        ("/v1/jobs/job_x", "GET, PUT"),
        ("/v1/jobs/job_x/cancel", "POST"),
        ("/v1/plans", "POST"),
        ("/readyz", "GET"),
        ("/login", "GET, POST"),
        ("/", "GET"),
    ):
        for method in {"DELETE", "PUT", "PATCH", "TRACE", "QUERY", "GET", "POST"} - set(methods.split(", ")):
            refused = httpx.request(method, f"{api.url}{path}")
            assert refused.status_code == 405, (method, path)
            assert refused.headers["allow"] == methods, (method, path)
    assert "HEAD" in httpx.delete(f"{api.url}/openapi.json").headers["allow"]


def test_a_jobs_own_error_is_not_the_answer_of_the_api(api: Api, client: Client) -> None:
    # Their own statuses are 507, 403, 500, 422 and 500.
    codes = ("storage.no_space", "storage.denied", "integrity.journal", "checkpoint.incomplete", "integrity.mismatch")
    with api.stack.worker():
        for code in codes:
            job = client.submit(scripted(fail=code), str(api.directory / code), to="universal")
            assert client.wait(job.id, timeout_s=PATIENCE_S).state is JobState.FAILED
            answer = api.get(f"/v1/jobs/{job.id}/result")
            assert (answer.status_code, answer.json()["code"]) == (409, "job.failed")
            assert answer.json()["details"]["error"]["code"] == code
            assert not answer.json()["retryable"]
            assert "retry-after" not in answer.headers
            error = raised(ReshardError, client.result, job.id)
            assert error.code == code
            assert error.fix == "change the script"


def test_the_operator_sets_the_most_that_a_request_may_ask_for(tmp_path: Path) -> None:
    extra = {"RESHARD_MAX_MEMORY_BYTES": "512MiB", "RESHARD_MAX_THREADS": "6"}
    for broker in ("", "redis://127.0.0.1:1/0"):
        stack = Stack(tmp_path / "logs", f"sqlite:///{tmp_path}/jobs.db", broker, extra=extra)
        with stack.api() as url:
            here = Api(url, stack, tmp_path)
            key = {"Idempotency-Key": f"key-of-{broker}"}
            for asked, maximum in (
                ({"memory_limit_bytes": (512 << 20) + 1}, 512 << 20),
                ({"memory_limit_bytes": 10**18, "threads": 1024}, 512 << 20),
                ({"threads": 7}, 6),
            ):
                for path in ("/v1/jobs", "/v1/plans"):
                    refused = here.post(path, {**here.body(), **asked}, **key)
                    assert (refused.status_code, refused.json()["code"]) == (422, "request.above_maximum")
                    assert str(maximum) in refused.json()["detail"]
            assert here.post("/v1/jobs", {**here.body(), "memory_limit_bytes": 10**30}).status_code == 422
            # A request that names nothing is taken, and its record says what it gets.
            taken = here.post("/v1/jobs", here.body(), **key)
            assert taken.status_code == 202
            assert taken.json()["request"]["memory_limit_bytes"] == 512 << 20
            assert here.post("/v1/jobs", {**here.body("o2"), "threads": 6}).status_code == 202


def test_without_settings_a_request_is_measured_by_the_machine_that_runs_it(api: Api) -> None:
    refused = api.post("/v1/jobs", {**api.body(), "memory_limit_bytes": 10**18, "threads": 1024})
    assert (refused.status_code, refused.json()["code"]) == (422, "request.above_maximum")


def test_tokens_and_roots(tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "link").symlink_to(tmp_path)
    extra = {"RESHARD_TOKEN": TOKEN, "RESHARD_ROOTS": f"{allowed},/scripted,s3://bucket/some"}
    stack = Stack(tmp_path / "logs", f"sqlite:///{tmp_path}/jobs.db", extra=extra)
    with stack.api() as url:
        assert httpx.get(f"{url}/healthz").status_code == 200
        for path in ("/v1/jobs", "/metrics", "/"):
            refused = httpx.get(f"{url}{path}")
            assert refused.status_code == 401
            assert refused.json()["code"] == "request.unauthorized"
        with client_of(url, "wrong") as wrong, pytest.raises(RequestError, match="unauthorized"):
            wrong.list()
        with client_of(url, TOKEN) as client:
            client.submit(scripted(), f"{allowed}/out", to="universal")
            outside = (f"{tmp_path}/out", f"{allowed}-twin/out", f"{allowed}/link/out", f"{allowed}/../out", "/")
            for target in (*outside, "s3://bucket/something/x", "s3://bucket", "http://127.0.0.1/x"):
                error = raised(RequestError, client.submit, scripted(), target, to="universal")
                assert error.code == "request.root_forbidden", target
            for target in ("s3://bucket/some/../x", "simplecache::s3://bucket/some/x", "s3://bucket//some"):
                with pytest.raises(RequestError, match=r"request\.invalid"):
                    client.submit(scripted(), target, to="universal")
            with pytest.raises(RequestError, match="root_forbidden"):
                client.inspect(f"{tmp_path}/x")
            with pytest.raises(RequestError, match="root_forbidden"):
                client.plan(f"{tmp_path}/x", f"{allowed}/out", to="universal")


def test_no_spelling_leads_out_of_the_roots(tmp_path: Path) -> None:
    data = Path(__file__).parent.parent / "data" / "zero2_tiny"
    root, secret = tmp_path / "root", tmp_path / "secret"
    for directory in (root, secret):
        shutil.copytree(data, directory / "ck")
    (root / "link").symlink_to(secret)
    (root / "ck?x").mkdir()
    tricks = [
        f"{root}/ck/../../secret/ck",
        f"{root}/link/ck",
        f"file://{root}/ck?x/../../secret/ck",
        f"{root}/ck?x/../../secret/ck",
        f"file://{root}/ck#x/../../secret/ck",
        f"file://{root}/%2e%2e/secret/ck",
        f"file://{root}%2f..%2fsecret/ck",
        f"file://localhost{secret}/ck",
        f"file://localhost{root}/../secret/ck",
        f"file://host{root}/ck",
        f"local://{secret}/ck",
        f"FILE://{root}/link/ck",
        f"file:{root}/ck",
        f"simplecache::file://{root}/ck",
        f"{root}/x://{secret}/ck",
        f"dir://{secret}/ck::file://{root}/ck",
        f"{secret}/ck",
        f"{root}-twin/ck",
        "~/ck",
        "ck",
        "s3a://other/ck",
        "s3a://bucket/some/../ck",
        "s3n://bucket/something/ck",
        "s3://bucket/some/ck?versionId=1",
        "s3://bucket/some%2f..%2fother/ck",
        "s3://bucket/%73ome/ck",
        "s3://bucket%2fsome/ck",
        "gs://bucket/some/%2e%2e/ck",
        "memory://ck",
    ]
    extra = {"RESHARD_ROOTS": f"{root},s3://bucket/some", "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    stack = Stack(tmp_path / "logs", f"sqlite:///{tmp_path}/jobs.db", scripted=False, extra=extra)
    with stack.api() as url:

        def post(path: str, body: dict[str, Any]) -> httpx.Response:
            return httpx.post(f"{url}{path}", json=body, timeout=PATIENCE_S)

        def conversion(source: str, target: str) -> dict[str, Any]:
            return {"source": {"url": source}, "target": target, "to": "universal"}

        inside = f"{root}/ck"
        for trick in tricks:
            for path, body in (
                ("/v1/inspections", {"url": trick}),
                ("/v1/plans", conversion(trick, f"{root}/out")),
                ("/v1/plans", conversion(inside, trick)),
                ("/v1/jobs", conversion(trick, f"{root}/out")),
                ("/v1/jobs", conversion(inside, trick)),
            ):
                refused = post(path, body)
                found = (refused.status_code, refused.json().get("code"))
                assert found in {(403, "request.root_forbidden"), (422, "request.invalid")}, (path, body, refused.text)
        assert post("/v1/jobs", conversion(inside, str(root))).json()["code"] == "request.root_forbidden"
        assert httpx.get(f"{url}/v1/jobs").json()["jobs"] == []
        # Read as a text or as the file system reads it: neither reading is the secret checkpoint.
        assert post("/v1/inspections", {"url": f"{root}/link/../secret/ck"}).status_code in {403, 422}
        for spelling in (inside, f"FILE://localhost{root}/./ck//", f"{root}/x/../ck"):
            inspected = post("/v1/inspections", {"url": spelling})
            assert inspected.status_code == 200, inspected.text
            assert inspected.json()["url"].startswith(inside)
        # What planning would refuse, and is known within seconds, is refused at submission.
        for body, code in (
            ({**conversion(inside, f"{root}/out"), "dtype": "bf16"}, "request.invalid"),
            (
                {**conversion(inside, f"{root}/out"), "options": {"weights": {"max_shard_bytes": 1000}}},
                "request.invalid",
            ),
            (conversion(inside, f"{root}/x/../ck/global_step3"), "request.overlap"),
            (conversion(inside, f"{root}/ck/global_step3/below"), "request.overlap"),
            ({**conversion(inside, f"{root}/out"), "memory_limit_bytes": 1}, "request.budget_too_small"),
        ):
            refused = post("/v1/jobs", body)
            assert (refused.status_code, refused.json()["code"]) == (422, code), refused.text
        assert post("/v1/jobs", conversion(inside, f"{root}/out")).status_code == 202
        assert len(httpx.get(f"{url}/v1/jobs").json()["jobs"]) == 1


def test_no_link_below_a_root_leads_out_of_it(tmp_path: Path) -> None:
    data = Path(__file__).parent.parent / "data" / "zero2_tiny"
    (tag,) = [entry.name for entry in data.iterdir() if entry.is_dir()]
    root, secret = tmp_path / "root", tmp_path / "secret"
    shutil.copytree(data, secret)
    shutil.copytree(data, root / "run")
    (root / "run" / "away").symlink_to(secret / tag)
    (root / "run" / "inside").symlink_to(root / "run" / tag)
    # One file of a checkpoint, and the pointer, can be links, too.
    for name in ("filed", "pointed"):
        shutil.copytree(data, root / name)
    stolen = min((root / "filed" / tag).glob("*.pt"))
    stolen.unlink()
    stolen.symlink_to(secret / tag / stolen.name)
    (root / "pointed" / "latest").write_text("away")
    (root / "pointed" / "away").symlink_to(secret / tag)
    stack = Stack(tmp_path / "logs", f"sqlite:///{tmp_path}/jobs.db", scripted=False)
    stack.extra["RESHARD_ROOTS"] = str(root)
    store = JobStore(database := Database(stack.database_url))
    forbidden = (("run", "away"), ("filed", tag), ("pointed", None))
    with stack.api() as url, stack.worker():
        for place, wanted in forbidden:
            source = {"url": str(root / place), "tag": wanted}
            body = {"source": source, "target": str(root / "out"), "to": "universal"}
            for answer in (
                httpx.post(f"{url}/v1/inspections", json=source, timeout=PATIENCE_S),
                httpx.post(f"{url}/v1/plans", json=body, timeout=PATIENCE_S),
                httpx.post(f"{url}/v1/jobs", json=body, timeout=PATIENCE_S),
            ):
                assert (answer.status_code, answer.json()["code"]) == (403, "request.root_forbidden"), answer.text
            # A worker judges what it opens itself: links change after a job was accepted.
            with client_of(url) as client:
                ended = client.wait(store.create(asked(**body)).id, timeout_s=PATIENCE_S)
            assert ended.error is not None
            assert ended.error.code == "request.root_forbidden"
        inside = {"url": str(root / "run"), "tag": "inside"}
        assert httpx.post(f"{url}/v1/inspections", json=inside, timeout=PATIENCE_S).status_code == 200
    database.close()


def test_a_broker_that_is_away_does_not_lose_jobs(tmp_path: Path) -> None:
    stack = Stack(tmp_path / "logs", f"sqlite:///{tmp_path}/jobs.db", "redis://127.0.0.1:1/0")
    with stack.api() as url, client_of(url) as client:
        job = client.submit(scripted(), str(tmp_path / "out"), to="universal")
        assert job.state is JobState.QUEUED
        ready = httpx.get(f"{url}/readyz", timeout=PATIENCE_S)
        # A load balancer that took this process out would stop what works: jobs are accepted, looked up and watched.
        assert ready.status_code == 200
        assert ready.json() == {"status": "degraded", "database": "ok", "broker": "away"}
        stack.broker_url = ""
        with stack.worker():
            assert client.wait(job.id, timeout_s=PATIENCE_S).state is JobState.SUCCEEDED
