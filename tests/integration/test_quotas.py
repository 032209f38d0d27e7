"""Quotas of tenants and their share of the workers, on a real database of each kind."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from house.expected import raised, some
from house.requests import asked
from house.waiting import at_once
from reshard.errors import RequestError
from reshard.models.access import NewTenant, TenantSettings
from reshard.models.jobs import Job, Progress
from reshard_jobs.database import Database
from reshard_jobs.queue.helpers import Helpers
from reshard_jobs.queue.leases import JobClaim, Leases
from reshard_jobs.queue.store import JobStore
from reshard_jobs.settings import JobSettings
from reshard_jobs.tenants.principals import OPERATOR
from reshard_jobs.tenants.tenants import Tenants
from reshard_worker.settings import WorkerSettings, engine_command
from reshard_worker.supervisor import Outcome, Supervisor
from servers.scripted import scripted
from servers.stack import Stack


class Jobs:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.leases = Leases(database, lease_s=60)
        self.helpers = Helpers(database, lease_s=60, max_workers=16)
        self.tenants = Tenants(database)
        self.made = 0

    def tenant(self, name: str, **settings: Any) -> JobStore:
        self.tenants.create(NewTenant(name=name, **settings), by=OPERATOR)
        return JobStore(self.database, name)

    def job(self, store: JobStore, **more: Any) -> Job:
        self.made += 1
        body = {"source": {"url": "/in"}, "target": f"/out/{self.made}", "to": "universal"}
        return store.create(asked(**body), **more)

    def claim(self) -> JobClaim | None:
        return self.leases.claim_next(worker=f"w{time.monotonic_ns()}")

    def tenants_of_claims(self, count: int) -> list[str]:
        claims = [claim for _ in range(count) if (claim := self.claim()) is not None]
        with self.database.read() as session:
            rows: dict[str, str] = {r[0]: r[1] for r in session.execute(text("SELECT id, tenant FROM jobs"))}
        return [rows[claim.job_id] for claim in claims]


@pytest.fixture
def jobs(database_url: str) -> Generator[Jobs]:
    database = Database(database_url)
    yield Jobs(database)
    database.close()


def test_waiting_jobs_are_limited_and_the_limit_holds_at_once(jobs: Jobs) -> None:
    store = jobs.tenant("a", max_queued=3)
    other = jobs.tenant("b")
    start = threading.Barrier(8)
    refused: list[RequestError] = []

    def submit() -> None:
        start.wait()
        try:
            jobs.job(store)
        except RequestError as error:
            refused.append(error)

    at_once([submit] * 8)
    assert len(store.list().jobs) == 3
    assert {error.code for error in refused} == {"request.quota_jobs"}
    assert refused[0].details == {"waiting": 3, "quota": 3, "retry_after_s": 10}
    jobs.job(other)
    # A job that begins makes room.
    assert jobs.claim() is not None
    jobs.job(store)


def test_bytes_of_a_day_are_limited_and_the_window_moves(jobs: Jobs) -> None:
    store = jobs.tenant("a", bytes_per_day=1000)
    first = jobs.job(store, planned_bytes=600)
    error = raised(RequestError, jobs.job, store, planned_bytes=500)
    assert error.code == "request.quota_bytes"
    assert error.details["used"] == 600
    assert 86_390 < error.details["retry_after_s"] <= 86_400
    assert "retry_after_s" not in raised(RequestError, jobs.job, store, planned_bytes=1001).details
    jobs.job(store, planned_bytes=400)
    with jobs.database.write() as session:
        session.execute(text("UPDATE jobs SET created_at = created_at - 86401 WHERE planned_bytes = 600"))
    kept = jobs.job(store, planned_bytes=500)
    # A job that was cancelled before it began has written nothing.
    with pytest.raises(RequestError):
        jobs.job(store, planned_bytes=500)
    store.cancel(kept.id)
    jobs.job(store, planned_bytes=500)
    assert first.id != kept.id


def test_bytes_that_nobody_planned_at_submission_are_judged_from_the_workers_plan(jobs: Jobs) -> None:
    store = jobs.tenant("a", bytes_per_day=1000)
    jobs.job(store, planned_bytes=600)
    small, large, later = (jobs.job(store) for _ in range(3))
    assert [job.checked for job in (small, large)] == [False, False]
    claims = {claim.job_id: claim for _ in range(4) if (claim := jobs.claim()) is not None}
    assert jobs.leases.record_plan(claims[small.id], "p", 400)
    assert store.get(small.id).checked
    error = raised(RequestError, jobs.leases.record_plan, claims[large.id], "q", 401)
    assert (error.code, error.details["used"]) == ("request.quota_bytes", 1000)
    assert jobs.leases.plans_of(large.id) == (), "nothing is recorded, and so nothing may be written"
    # The plan of a job's next attempt is not counted twice.
    assert jobs.leases.record_plan(claims[small.id], "p2", 400)
    # Nothing is left for jobs that are submitted unplanned, either.
    with pytest.raises(RequestError):
        jobs.job(store)
    assert later.checked is False


def test_a_worker_fails_a_job_that_writes_more_than_its_tenant_may(database_url: str, tmp_path: Path) -> None:
    with closing(Database(database_url)) as database:
        jobs = Jobs(database)
        store = jobs.tenant("a", bytes_per_day=1000)
        body = {"source": {"url": scripted(writes=1001)}, "target": str(tmp_path / "out"), "to": "universal"}
        job = store.create(asked(**body))
        runner = (sys.executable, "-P", str(Path(__file__).parent.parent / "servers" / "scripted.py"))
        settings = WorkerSettings(jobs=JobSettings(lease_s=60.0), runner_command=runner, max_workers=1)
        assert Supervisor(jobs.leases, settings, name="w").run_next() is Outcome.FAILED
        ended = store.get(job.id)
        assert ended.error is not None
        assert (ended.error.code, ended.leftovers_until) == ("request.quota_bytes", None)
        assert list(tmp_path.glob("out*")) == []


def test_running_jobs_above_the_quota_wait_also_for_many_workers_at_once(jobs: Jobs) -> None:
    store = jobs.tenant("a", max_running=2)
    waiting = [jobs.job(store).id for _ in range(8)]
    start = threading.Barrier(8)
    claims: list[JobClaim] = []

    def work(job_id: str) -> None:
        start.wait()
        # Each another job: no row makes one of them wait for another.
        if claim := jobs.leases.claim(job_id, worker=job_id):
            claims.append(claim)

    at_once(partial(work, job_id) for job_id in waiting)
    assert len(claims) == 2
    assert not jobs.leases.work_waits()
    assert jobs.leases.release(claims[0])
    assert jobs.leases.work_waits()
    jobs.tenants.set("a", TenantSettings(max_running=3), by=OPERATOR)
    assert len([claim for _ in range(4) if (claim := jobs.claim())]) == 2


def test_workers_are_limited_helpers_included(jobs: Jobs) -> None:
    store = jobs.tenant("a", max_workers=3)
    jobs.job(store)
    jobs.job(store)
    claim = some(jobs.claim())
    progress = Progress(phase="running", takes_workers=True)
    assert jobs.leases.heartbeat(claim, progress).held
    assert jobs.claim() is not None
    helper = some(jobs.helpers.join_next(worker="h1"))
    assert jobs.helpers.join_next(worker="h2") is None
    assert not jobs.helpers.wanted()
    jobs.helpers.leave(helper)
    assert jobs.helpers.join_next(worker="h2") is not None


def test_tenants_share_the_workers_by_their_weights(jobs: Jobs) -> None:
    a, b, c = jobs.tenant("a"), jobs.tenant("b"), jobs.tenant("c", weight=2)
    for store in (a, b, c):
        for _ in range(12):
            jobs.job(store)
    assert Counter(jobs.tenants_of_claims(12)) == {"a": 3, "b": 3, "c": 6}


def test_one_who_submits_much_does_not_hold_up_the_others(jobs: Jobs) -> None:
    a, b = jobs.tenant("a"), jobs.tenant("b")
    for _ in range(20):
        jobs.job(a)
    jobs.job(b)
    assert jobs.tenants_of_claims(2) == ["a", "b"]


def test_priority_goes_before_the_share_and_has_a_maximum(jobs: Jobs) -> None:
    a, b = jobs.tenant("a"), jobs.tenant("b", max_priority=5)
    for _ in range(3):
        jobs.job(a, priority=10)
    jobs.job(b, priority=5)
    assert jobs.tenants_of_claims(4) == ["a", "a", "a", "b"]
    limits = jobs.tenants.limits("b")
    limits.require_priority(5)
    with pytest.raises(RequestError, match=r"priority is 6.*maximum of this tenant is 5"):
        limits.require_priority(6)


def test_helpers_go_to_the_tenant_with_the_fewest_workers(jobs: Jobs) -> None:
    a, b = jobs.tenant("a"), jobs.tenant("b")
    claims: list[JobClaim] = []
    for store in (a, a, b):
        jobs.job(store)
    for _ in range(3):
        claim = some(jobs.claim())
        jobs.leases.heartbeat(claim, Progress(phase="running", takes_workers=True))
        claims.append(claim)
    first = some(jobs.helpers.join_next(worker="h"))
    assert first.job_id == b.list().jobs[0].id


def test_a_worker_judges_by_the_tenants_roots_of_now(jobs: Jobs, tmp_path: Path) -> None:
    read, write = tmp_path / "read", tmp_path / "write"
    settings = {"read_roots": [str(read)], "write_roots": [str(write)], "profiles": ["mine"]}
    store = jobs.tenant("a", **settings)
    body = {"source": {"url": f"{read}/in"}, "target": f"{write}/out", "to": "universal"}
    store.create(asked(**body))
    jobs.tenants.set("a", TenantSettings(read_roots=(str(tmp_path / "other"),)), by=OPERATOR)
    claim = some(jobs.claim())
    error = raised(RequestError, engine_command, "convert", claim.request, WorkerSettings(), limits=claim.limits)
    assert error.code == "request.root_forbidden"
    jobs.tenants.set("a", TenantSettings(**settings), by=OPERATOR)
    limits = jobs.tenants.limits("a")
    command = engine_command("convert", claim.request, WorkerSettings(), limits=limits)
    assert command.roots == (str(read), str(write))
    swapped = claim.request.model_copy(update={"target": f"{read}/out"})
    with pytest.raises(RequestError):
        engine_command("convert", swapped, WorkerSettings(), limits=limits)
    gone = jobs.tenants.limits("nobody")
    with pytest.raises(RequestError):
        engine_command("convert", claim.request, WorkerSettings(), limits=gone)


def test_a_tenant_is_removed_with_its_records_when_no_worker_needs_them(jobs: Jobs) -> None:
    store = jobs.tenant("a")
    job = jobs.job(store, labels={"x": "y"})
    assert raised(RequestError, jobs.tenants.remove, "a", by=OPERATOR).code == "request.tenant_busy"
    store.cancel(job.id)
    jobs.tenants.remove("a", by=OPERATOR)
    with jobs.database.read() as session:
        for table in ("jobs", "job_labels", "job_events"):
            assert session.execute(text(f"SELECT count(*) FROM {table}")).scalar_one() == 0
    # Who gets the name later finds nothing.
    assert jobs.tenant("a").list().jobs == ()
    with pytest.raises(RequestError, match="operator's own"):
        jobs.tenants.remove("default", by=OPERATOR)


def test_the_api_says_when_a_quota_has_room_again(tmp_path: Path) -> None:
    stack = Stack(tmp_path / "logs", f"sqlite:///{tmp_path}/jobs.db", extra={"RESHARD_TOKEN": "operator"})
    with stack.api() as url:

        def ask(method: str, path: str, body: Any, token: str = "operator") -> httpx.Response:
            return httpx.request(method, f"{url}{path}", json=body, headers={"Authorization": f"Bearer {token}"})

        # The scripted engine plans 4000 bytes.
        made = ask("POST", "/v1/tenants", {"name": "a", "max_queued": 1, "bytes_per_day": 7000, "max_priority": 0})
        assert made.status_code == 201
        token = ask("POST", "/v1/tokens", {"name": "x", "scopes": ["submit", "cancel"], "tenant": "a"}).json()["secret"]
        body = {"source": {"url": f"{tmp_path}/scripted"}, "target": f"{tmp_path}/out", "to": "universal"}
        high = ask("POST", "/v1/jobs", {**body, "priority": 1}, token)
        assert (high.status_code, high.json()["code"]) == (422, "request.above_maximum")
        first = ask("POST", "/v1/jobs", body, token)
        assert first.status_code == 202
        queue = ask("POST", "/v1/jobs", body, token)
        assert (queue.status_code, queue.json()["code"]) == (429, "request.quota_jobs")
        assert queue.headers["retry-after"] == "10"
        ask("PUT", "/v1/tenants/a", {"bytes_per_day": 7000})
        day = ask("POST", "/v1/jobs", body, token)
        assert (day.status_code, day.json()["code"]) == (429, "request.quota_bytes")
        assert 86_000 < int(day.headers["retry-after"]) <= 86_400
        ask("POST", f"/v1/jobs/{first.json()['id']}/cancel", None, token)
        assert ask("POST", "/v1/jobs", body, token).status_code == 202
