"""Helpers of running jobs in the job database, on SQLite and on PostgreSQL: who may join, and when each must leave."""

from __future__ import annotations

import threading
from collections.abc import Generator

import pytest

from house.database_time import let_pass
from house.expected import some
from house.waiting import at_once
from reshard.choices import JobState, TargetFormat
from reshard.models.jobs import ConvertRequest, ConvertResult, Progress, WorkShare
from reshard.options import SourceSpec
from reshard_jobs.database import Database
from reshard_jobs.queue.helpers import HelperClaim, Helpers
from reshard_jobs.queue.leases import JobClaim, Leases
from reshard_jobs.queue.reaper import Reaper
from reshard_jobs.queue.states import EventLog
from reshard_jobs.queue.store import JobStore
from reshard_jobs.statistics import JobStatistics

LEASE_S = 60.0
MAX_WORKERS = 3
RESULT = ConvertResult(
    target="/out", to=TargetFormat.UNIVERSAL, files=(), read_bytes=1, write_bytes=2, seconds={}, plan_digest="d"
)


def request(target: str) -> ConvertRequest:
    return ConvertRequest(source=SourceSpec(url="/in"), target=target, to=TargetFormat.UNIVERSAL)


def running(*, takes_workers: bool = True) -> Progress:
    return Progress(phase="running", bytes_done=1, bytes_total=100, takes_workers=takes_workers)


class Jobs:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.store = JobStore(database)
        self.log = EventLog(database)
        self.statistics = JobStatistics(database)
        self.leases = Leases(database, lease_s=LEASE_S)
        self.helpers = Helpers(database, lease_s=LEASE_S, max_workers=MAX_WORKERS)
        self.reaper = Reaper(database, lease_s=LEASE_S, max_workers=MAX_WORKERS)

    def claimed(self, target: str = "/out", *, max_workers: int = 0, priority: int = 0) -> JobClaim:
        job = self.store.create(request(target), max_workers=max_workers, priority=priority)
        return some(self.leases.claim(job.id, worker="owner"))

    def open(self, target: str = "/out", *, max_workers: int = 0, priority: int = 0) -> JobClaim:
        """A running job that takes helpers."""
        claim = self.claimed(target, max_workers=max_workers, priority=priority)
        assert self.leases.heartbeat(claim, running()).held
        return claim

    def join(self, worker: str = "helper") -> HelperClaim:
        return some(self.helpers.join_next(worker=worker))


@pytest.fixture
def jobs(database_url: str) -> Generator[Jobs]:
    database = Database(database_url)
    yield Jobs(database)
    database.close()


def test_a_job_takes_helpers_only_while_its_engine_says_so(jobs: Jobs) -> None:
    claim = jobs.claimed()
    assert not jobs.helpers.wanted()
    jobs.leases.heartbeat(claim, running())
    assert jobs.helpers.wanted()
    jobs.leases.heartbeat(claim)
    assert jobs.helpers.wanted(), "a heartbeat without progress changes nothing"
    jobs.leases.heartbeat(claim, running(takes_workers=False))
    assert not jobs.helpers.wanted()
    assert jobs.helpers.join_next(worker="w") is None


def test_a_job_takes_helpers_while_it_verifies_everything(jobs: Jobs) -> None:
    claim = jobs.claimed()
    jobs.leases.heartbeat(claim, running(takes_workers=False))
    jobs.leases.heartbeat(claim, Progress(phase="verifying", bytes_done=100, bytes_total=100, takes_workers=True))
    assert jobs.helpers.wanted()
    assert jobs.helpers.heartbeat(jobs.join())
    jobs.leases.heartbeat(claim, Progress(phase="committing", bytes_done=100, bytes_total=100))
    assert not jobs.helpers.wanted()


def test_no_more_than_the_allowed_workers_join_at_once(jobs: Jobs) -> None:
    jobs.open()
    jobs.open("/other", max_workers=1)
    found: list[HelperClaim | None] = []
    start = threading.Barrier(8)

    def join() -> None:
        start.wait()
        found.append(jobs.helpers.join_next(worker="w"))

    at_once([join] * 8)
    places = [place for place in found if place is not None]
    assert len(found) == 8
    assert len(places) == MAX_WORKERS - 1
    assert len({place.job_id for place in places}) == 1
    assert not jobs.helpers.wanted()
    jobs.helpers.leave(places[0])
    assert jobs.helpers.wanted()


def test_jobs_begin_and_get_help_by_priority_then_evenly(jobs: Jobs) -> None:
    low, high = jobs.store.create(request("/a")), jobs.store.create(request("/b"), priority=5)
    first = some(jobs.leases.claim_next(worker="w"))
    assert first.job_id == high.id
    second = some(jobs.leases.claim_next(worker="w"))
    assert second.job_id == low.id
    third = jobs.claimed("/c")
    for claim in (first, second, third):
        jobs.leases.heartbeat(claim, running())
    order = [jobs.join().job_id for _ in range(6)]
    assert order == [high.id, high.id, low.id, third.job_id, low.id, third.job_id]


def test_a_helper_stops_when_its_job_ends_or_is_cancelled(jobs: Jobs) -> None:
    claim, other = jobs.open(), jobs.open("/other")
    places = {(place := jobs.join()).job_id: place for _ in range(2)}
    here, there = places[claim.job_id], places[other.job_id]
    assert jobs.helpers.heartbeat(here)
    assert jobs.helpers.peek(here)
    jobs.store.cancel(claim.job_id)
    assert not jobs.helpers.peek(here)
    assert not jobs.helpers.heartbeat(here)
    assert jobs.helpers.present(claim.job_id) == 1, "it may still write"
    jobs.helpers.leave(here)
    assert jobs.helpers.present(claim.job_id) == 0
    assert jobs.leases.succeed(other, RESULT, plan_digest="d")
    assert not jobs.helpers.heartbeat(there)


def test_helpers_stay_between_two_attempts(jobs: Jobs) -> None:
    claim = jobs.open()
    place = jobs.join()
    assert jobs.leases.release(claim)
    assert jobs.helpers.heartbeat(place)
    again = some(jobs.leases.claim_next(worker="next"))
    assert again.attempt == 2
    assert jobs.helpers.heartbeat(place)
    assert not jobs.helpers.wanted(), "the new engine has not said that it takes helpers"


def test_a_place_ends_with_its_lease(jobs: Jobs) -> None:
    claim = jobs.open()
    places = [jobs.join() for _ in range(MAX_WORKERS - 1)]
    for _ in range(5):
        let_pass(jobs.database, LEASE_S / 4)
        jobs.leases.heartbeat(claim)
        assert jobs.helpers.heartbeat(places[0])
        jobs.reaper.sweep()
    assert jobs.helpers.present(claim.job_id) == 1
    assert jobs.helpers.wanted()
    jobs.reaper.sweep()
    left = [w.left_at is not None for w in jobs.store.get(claim.job_id).workers]
    assert left == [False, False, True]
    assert not jobs.helpers.heartbeat(places[1]), "a place that the reaper ended does not come back"


def test_no_other_job_writes_the_target_while_a_helper_does(jobs: Jobs) -> None:
    claim = jobs.open()
    place = jobs.join()
    later = jobs.store.create(request("/out"))
    assert jobs.leases.succeed(claim, RESULT, plan_digest="d")
    assert jobs.leases.claim(later.id, worker="w") is None
    jobs.helpers.leave(place)
    assert jobs.leases.claim(later.id, worker="w") is not None


def test_a_job_that_helpers_cannot_run_stops_calling_for_them(jobs: Jobs) -> None:
    jobs.open()
    for _ in range(3):
        jobs.helpers.leave(jobs.join(), failed=True)
    assert not jobs.helpers.wanted()
    assert jobs.helpers.join_next(worker="w") is None


def test_the_job_tells_who_did_what(jobs: Jobs) -> None:
    claim = jobs.open()
    place = jobs.join("second")
    jobs.helpers.leave(place, WorkShare(runs=2, units=5, write_bytes=99))
    jobs.leases.heartbeat(claim, running(takes_workers=False))
    assert jobs.leases.succeed(claim, RESULT, plan_digest="d", share=WorkShare(runs=3, takeovers=1))
    owner, helper = jobs.store.get(claim.job_id).workers
    assert (owner.role, owner.worker, owner.attempt) == ("owner", "owner", 1)
    assert (helper.role, helper.worker, helper.attempt) == ("helper", "second", 1)
    assert owner.share == WorkShare(runs=3, takeovers=1)
    assert helper.share == WorkShare(runs=2, units=5, write_bytes=99)
    assert owner.left_at is not None
    events = jobs.log.after(claim.job_id, 0).events
    told = [e.worker for e in events if e.kind == "worker"]
    assert [w is not None and w.left_at is not None for w in told] == [False, True]
    assert [e.state for e in events if e.kind == "state"][-1] is JobState.SUCCEEDED
    assert [e.seq for e in events] == list(range(1, len(events) + 1))
    shares = jobs.statistics.total_shares()
    assert (shares.runs, shares.takeovers, shares.units) == (5, 1, 5)
