"""Records of ended jobs: retries, discards, retention, and jobs that a host fails, on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from sqlalchemy import func, select

from house.database_time import let_pass
from house.expected import raised, some
from reshard.choices import JobState, TargetFormat
from reshard.errors import JobError, ReshardError, StorageError
from reshard.models.jobs import ConvertRequest, ConvertResult, Progress
from reshard.options import SourceSpec
from reshard_jobs.database import Database
from reshard_jobs.queue.discards import Discards
from reshard_jobs.queue.idempotency import Hold, IdempotencyKeys
from reshard_jobs.queue.leases import JobClaim, Leases
from reshard_jobs.queue.nodes import Nodes
from reshard_jobs.queue.reaper import Reaper, Retention
from reshard_jobs.queue.states import EventLog
from reshard_jobs.queue.store import JobStore
from reshard_jobs.tables import EventRow, IdempotencyRow, JobRow

LEASE_S = 60.0
REQUEST = ConvertRequest(source=SourceSpec(url="/in"), target="/out", to=TargetFormat.UNIVERSAL)
RESULT = ConvertResult(
    target="/out", to=TargetFormat.UNIVERSAL, files=(), read_bytes=1, write_bytes=2, seconds={}, plan_digest="d"
)
WRONG = StorageError("storage.protocol", "no")
DENIED = StorageError("storage.denied", "403")


class Jobs:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.store = JobStore(database)
        self.log = EventLog(database)
        self.leases = Leases(database, lease_s=LEASE_S, keep_failed_s=100.0)
        self.discards = Discards(database, lease_s=LEASE_S)
        self.nodes = Nodes(database, lease_s=LEASE_S)
        self.keys = IdempotencyKeys(database)

    def claimed(self, worker: str = "w", target: str = "/out", *, plan: str = "d") -> JobClaim:
        claim = some(
            self.leases.claim(self.store.create(REQUEST.model_copy(update={"target": target})).id, worker=worker)
        )
        assert self.leases.record_plan(claim, plan)
        return claim

    def failed(self, target: str = "/out", *, plan: str = "d") -> str:
        claim = self.claimed(target=target, plan=plan)
        assert self.leases.fail(claim, WRONG)
        return claim.job_id

    def age(self, job_id: str, seconds: float) -> None:
        """Make a job, and everything about it, older."""
        with self.database.write() as session:
            row = some(session.get(JobRow, job_id))
            row.created_at -= seconds
            row.finished_at = None if row.finished_at is None else row.finished_at - seconds
            row.discard_at = None if row.discard_at is None else row.discard_at - seconds

    def count(self, table: type[EventRow] | type[IdempotencyRow] | type[JobRow]) -> int:
        with self.database.read() as session:
            return session.execute(select(func.count()).select_from(table)).scalar_one()

    def code_of_retry(self, job_id: str) -> str:
        return raised(ReshardError, self.store.retry, job_id).code


@pytest.fixture
def jobs(database_url: str) -> Generator[Jobs]:
    database = Database(database_url)
    yield Jobs(database)
    database.close()


def test_a_retried_job_has_all_its_attempts_again(jobs: Jobs) -> None:
    job_id = jobs.store.create(REQUEST, max_attempts=2).id
    for _ in range(2):
        claim = some(jobs.leases.claim(job_id, worker="w"))
        assert jobs.leases.retry(claim, WRONG, delay_s=0)
    assert jobs.store.get(job_id).state is JobState.FAILED
    assert jobs.store.retry(job_id).state is JobState.QUEUED
    for _ in range(2):
        claim = some(jobs.leases.claim(job_id, worker="w"))
        assert jobs.leases.retry(claim, WRONG, delay_s=0)
    assert jobs.store.get(job_id).state is JobState.FAILED
    states = [event.state.value for event in jobs.log.after(job_id, 0).events if event.kind == "state"]
    lost_twice = ["QUEUED", "PLANNING", "QUEUED", "PLANNING", "FAILED"]
    assert states == lost_twice + lost_twice


def test_a_job_that_failed_before_it_wrote_anything_has_nothing_to_discard(jobs: Jobs) -> None:
    claim = some(jobs.leases.claim(jobs.store.create(REQUEST).id, worker="w"))
    assert jobs.leases.fail(claim, WRONG)
    assert jobs.store.get(claim.job_id).leftovers_until is None
    assert jobs.store.get(jobs.failed()).leftovers_until is not None


def test_only_failed_jobs_are_retried(jobs: Jobs) -> None:
    assert jobs.code_of_retry("job_none") == "request.not_found"
    claim = jobs.claimed()
    assert jobs.code_of_retry(claim.job_id) == "job.not_finished"
    assert jobs.leases.succeed(claim, RESULT, plan_digest="d")
    assert jobs.code_of_retry(claim.job_id) == "job.finished"
    cancelled = jobs.store.create(REQUEST).id
    jobs.store.cancel(cancelled)
    assert jobs.code_of_retry(cancelled) == "job.cancelled"
    with pytest.raises(JobError, match=r"job\.finished"):
        jobs.store.cancel(claim.job_id)


def test_a_job_whose_files_are_being_removed_is_neither_retried_nor_its_target_written(jobs: Jobs) -> None:
    job_id = jobs.failed()
    jobs.store.cancel(job_id)
    discard = some(jobs.discards.claim_next())
    assert (discard.job_id, discard.plans, discard.asked, discard.succeeded) == (job_id, ("d",), True, False)
    assert jobs.discards.claim_next() is None
    assert jobs.code_of_retry(job_id) == "job.not_finished"
    other = jobs.store.create(REQUEST).id
    assert jobs.leases.claim(other, worker="w") is None
    assert jobs.discards.heartbeat(discard)
    assert jobs.discards.done(discard)
    assert not jobs.discards.heartbeat(discard)
    assert jobs.store.retry(job_id).state is JobState.QUEUED
    assert jobs.leases.claim(other, worker="w") is not None


def test_a_discard_waits_for_the_writer_of_its_target(jobs: Jobs) -> None:
    job_id = jobs.failed()
    writer = jobs.claimed(plan="other")
    assert writer.abandoned == ("d",)
    jobs.store.cancel(job_id)
    assert jobs.discards.claim_next() is None
    assert jobs.leases.succeed(writer, RESULT, plan_digest="other")
    assert jobs.discards.claim_next() is not None


def test_a_discard_that_fails_is_tried_again_with_pauses(jobs: Jobs) -> None:
    job_id = jobs.failed()
    jobs.store.cancel(job_id)
    discard = some(jobs.discards.claim_next())
    assert jobs.discards.failed(discard)
    assert jobs.discards.claim_next() is None
    assert jobs.discards.pending() == [job_id]
    assert jobs.discards.pending(due=True) == []
    jobs.age(job_id, 61.0)
    assert jobs.discards.pending(due=True) == [job_id]
    again = some(jobs.discards.claim_next())
    let_pass(jobs.database, LEASE_S * 1.3)
    third = jobs.discards.claim_next()
    assert third is not None, "whoever had it died"
    assert not jobs.discards.done(again)
    assert jobs.discards.done(third)
    assert not jobs.discards.waits()


def test_old_records_are_forgotten_and_young_ones_kept(jobs: Jobs) -> None:
    reaper = Reaper(jobs.database, lease_s=LEASE_S, retention=Retention(keep_jobs_s=1000, keep_events_s=100))
    hold = jobs.keys.begin("key", "body")
    assert isinstance(hold, Hold)
    old = jobs.store.create(REQUEST, labels={"a": "b"}, hold=hold).id
    claim = some(jobs.leases.claim(old, worker="w"))
    for done in (1, 2, 3):
        jobs.leases.heartbeat(claim, Progress(phase="running", bytes_done=done))
    assert jobs.leases.succeed(claim, RESULT, plan_digest="d")
    full = len(jobs.log.after(old, 0).events)
    assert reaper.sweep().forgotten == 0
    jobs.age(old, 200)
    reaper.sweep()
    kept = jobs.log.after(old, 0).events
    assert len(kept) < full
    assert {event.kind for event in kept} == {"state"}
    assert kept[-1].state is JobState.SUCCEEDED
    with_files = jobs.failed("/kept")
    waiting = jobs.store.create(REQUEST.model_copy(update={"target": "/waits"})).id
    for job_id in (old, with_files, waiting):
        jobs.age(job_id, 2000)
    assert reaper.sweep().forgotten == 1
    assert (jobs.count(IdempotencyRow), jobs.count(JobRow)) == (0, 2)
    assert jobs.store.get(waiting).state is JobState.QUEUED
    discard = some(jobs.discards.claim_next())
    assert jobs.discards.done(discard)
    assert reaper.sweep().forgotten == 1


def test_old_keys_are_forgotten(jobs: Jobs) -> None:
    assert isinstance(jobs.keys.begin("old", "body"), Hold)
    chosen = jobs.keys.begin_job("my-id", "body")
    assert isinstance(chosen, Hold)
    jobs.store.create(REQUEST, hold=chosen, job_id="my-id")
    let_pass(jobs.database, 500)
    assert isinstance(jobs.keys.begin("young", "body"), Hold)
    Reaper(jobs.database, lease_s=LEASE_S, retention=Retention(keep_keys_s=400)).sweep()
    assert jobs.count(IdempotencyRow) == 2
    assert jobs.keys.begin_job("my-id", "body") == "my-id", "an id that its caller chose finds the job as long as it is"


def test_a_job_that_a_host_may_have_failed_is_tried_on_every_live_worker(jobs: Jobs) -> None:
    for name in ("a", "b"):
        jobs.nodes.seen(name)
    leases = Leases(jobs.database, lease_s=30.0)
    job_id = jobs.store.create(REQUEST, max_attempts=1).id
    first = some(leases.claim_next(worker="a"))
    assert leases.hand_over(first, DENIED)
    assert jobs.store.get(job_id).state is JobState.QUEUED
    assert leases.claim_next(worker="a") is None, "it does not try again where it failed"
    second = some(leases.claim_next(worker="b"))
    assert not leases.hand_over(second, DENIED), "nobody is left"
    assert leases.fail(second, DENIED)
    error = some(jobs.store.get(job_id).error)
    assert error.code == "storage.denied"
    jobs.store.retry(job_id)
    assert leases.claim_next(worker="a") is not None, "a retry begins with everybody"


def test_a_job_does_not_wait_for_a_worker_that_has_gone(jobs: Jobs) -> None:
    for name in ("a", "b"):
        jobs.nodes.seen(name)
    claim = jobs.claimed("a")
    assert jobs.leases.hand_over(claim, DENIED)
    jobs.nodes.leave("b")
    reaper = Reaper(jobs.database, lease_s=LEASE_S)
    assert reaper.sweep().failed == (), "it may come back"
    let_pass(jobs.database, 2 * LEASE_S + 0.1)
    assert reaper.sweep().failed == (), "no worker lives: they all restart"
    jobs.nodes.seen("a")
    assert reaper.sweep().failed == (claim.job_id,)
    error = some(jobs.store.get(claim.job_id).error)
    assert error.code == "storage.denied"


def refused(jobs: Jobs, worker: str, number: int) -> JobClaim:
    claim = jobs.claimed(worker, f"/out{number}")
    jobs.leases.hand_over(claim, DENIED)
    return claim


def test_a_worker_that_refuses_several_jobs_doubts_its_host(jobs: Jobs) -> None:
    for name in ("bad", "good"):
        jobs.nodes.seen(name)
    for number in range(2):
        claim = refused(jobs, "bad", number)
        assert jobs.nodes.refused("bad", claim.job_id, DENIED, pause_s=10) is None
    claim = refused(jobs, "bad", 3)
    found = some(jobs.nodes.refused("bad", claim.job_id, DENIED, pause_s=10))
    assert (found.jobs, found.pause_s) == (3, 10)
    assert 9 < jobs.nodes.quarantine_left_s("bad") <= 10
    shown = {node.name: node for node in jobs.nodes.live()}
    assert {name: node.state for name, node in shown.items()} == {"bad": "quarantined", "good": "idle"}
    assert shown["bad"].problem is not None
    assert shown["bad"].problem.code == "storage.denied"
    probe = refused(jobs, "bad", 4)
    again = some(jobs.nodes.refused("bad", probe.job_id, DENIED, pause_s=10))
    assert again.pause_s == 20, "pauses grow"
    jobs.nodes.good("bad")
    assert jobs.nodes.quarantine_left_s("bad") == 0
    healed = refused(jobs, "bad", 5)
    assert jobs.nodes.refused("bad", healed.job_id, DENIED, pause_s=10) is None, "the count begins anew"


def test_jobs_that_fail_everywhere_bring_no_worker_into_quarantine(jobs: Jobs) -> None:
    """A stranger's jobs name a bucket that nobody may read."""
    for name in ("a", "b"):
        jobs.nodes.seen(name)
        jobs.nodes.good(name)
    for number in range(6):
        for name in ("a", "b"):
            jobs.nodes.seen(
                name
            )  # as live workers do; on a busy machine six rounds take longer than a worker's absence
        claim = refused(jobs, "a", number)
        second = some(jobs.leases.claim(claim.job_id, worker="b"))
        assert not jobs.leases.hand_over(second, DENIED)
        assert jobs.leases.fail(second, DENIED)
        assert jobs.nodes.refused("a", claim.job_id, DENIED, pause_s=10) is None
        assert jobs.nodes.refused("b", claim.job_id, DENIED, pause_s=10) is None
