"""JobClaim, lease, fence, reaper and idempotency keys, on SQLite and on PostgreSQL."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from functools import partial
from pathlib import Path

import pytest

from house.database_time import let_pass
from house.expected import some
from house.waiting import at_once
from reshard.choices import JobState, TargetFormat
from reshard.errors import ExitCode, JobError, RequestError, StorageError
from reshard.models.jobs import ConvertRequest, ConvertResult, Progress
from reshard.options import SourceSpec
from reshard_jobs.database import Database
from reshard_jobs.queue.idempotency import Hold, IdempotencyKeys
from reshard_jobs.queue.leases import JobClaim, Leases
from reshard_jobs.queue.reaper import Reaper, Sweep
from reshard_jobs.queue.states import EventLog
from reshard_jobs.queue.store import JobFilter, JobStore
from reshard_jobs.tables import MAX_ID_CHARS

LEASE_S = 60.0
REQUEST = ConvertRequest(source=SourceSpec(url="/in"), target="/out", to=TargetFormat.UNIVERSAL)
RESULT = ConvertResult(
    target="/out", to=TargetFormat.UNIVERSAL, files=(), read_bytes=1, write_bytes=2, seconds={}, plan_digest="d"
)
LOST = JobError("job.lost", "the engine died")


class Jobs:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.store = JobStore(database)
        self.events = EventLog(database)
        self.leases = Leases(database, lease_s=LEASE_S)
        self.reaper = Reaper(database, lease_s=LEASE_S)
        self.keys = IdempotencyKeys(database)

    def claimed(self, *, max_attempts: int = 3) -> JobClaim:
        return some(self.leases.claim(self.store.create(REQUEST, max_attempts=max_attempts).id, worker="w"))

    def lapse(self, leases: float = 1.5) -> Sweep:
        """Let time pass while the reaper sweeps; what its last sweep did."""
        self.reaper.sweep()
        let_pass(self.database, leases * LEASE_S)
        return self.reaper.sweep()

    def log(self, job_id: str) -> list[tuple[str, str]]:
        events = self.events.after(job_id, 0).events
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        return [(event.kind, event.state.value) for event in events]

    def states(self, job_id: str) -> list[str]:
        return [state for kind, state in self.log(job_id) if kind == "state"]


@pytest.fixture
def jobs(database_url: str) -> Generator[Jobs]:
    database = Database(database_url)
    yield Jobs(database)
    database.close()


def test_one_of_many_claims_wins(jobs: Jobs) -> None:
    job_id = jobs.store.create(REQUEST).id
    won: list[JobClaim | None] = []
    start = threading.Barrier(8)

    def claim() -> None:
        start.wait()
        won.append(jobs.leases.claim(job_id, worker="w"))

    at_once([claim] * 8)
    claims = [found for found in won if found]
    assert len(won) == 8
    assert len(claims) == 1
    assert claims[0].attempt == 1
    assert not claims[0].cleanup


def test_a_whole_life_is_logged(jobs: Jobs) -> None:
    claim = jobs.claimed()
    for phase, done in (("planning", 0), ("running", 1), ("running", 2), ("verifying", 2), ("committing", 2)):
        pulse = jobs.leases.heartbeat(claim, Progress.model_validate({"phase": phase, "bytes_done": done}))
        assert pulse.held
        assert not pulse.cancel_requested
    assert jobs.leases.succeed(claim, RESULT, plan_digest="d")
    assert jobs.log(claim.job_id) == [
        ("state", "QUEUED"),
        ("state", "PLANNING"),
        ("progress", "PLANNING"),
        ("state", "RUNNING"),
        ("progress", "RUNNING"),
        ("state", "VERIFYING"),
        ("progress", "VERIFYING"),
        ("state", "SUCCEEDED"),
    ]
    job = jobs.store.get(claim.job_id)
    assert job.result == RESULT
    assert job.plan_digest == "d"
    assert job.started_at is not None
    assert job.finished_at is not None
    assert job.created_at <= job.started_at <= job.finished_at
    assert jobs.leases.claim(claim.job_id, worker="w") is None


def test_a_zombie_is_fenced_and_its_successor_is_not(jobs: Jobs) -> None:
    zombie = jobs.claimed()
    assert jobs.leases.claim(zombie.job_id, worker="w2") is None
    assert jobs.lapse().requeued == (zombie.job_id,)
    heir = some(jobs.leases.claim(zombie.job_id, worker="w2"))
    assert heir.attempt == 2
    assert not jobs.leases.heartbeat(zombie).held
    assert not jobs.leases.heartbeat(zombie, Progress(phase="running")).held
    assert not jobs.leases.peek(zombie).held
    assert not jobs.leases.succeed(zombie, RESULT, plan_digest="d")
    assert not jobs.leases.fail(zombie, LOST)
    assert not jobs.leases.retry(zombie, LOST, delay_s=0)
    assert not jobs.leases.release(zombie)
    assert not jobs.leases.cancelled(zombie)
    assert jobs.leases.heartbeat(heir).held
    assert jobs.leases.succeed(heir, RESULT, plan_digest="d")


def test_heartbeats_keep_a_lease(jobs: Jobs) -> None:
    claim = jobs.claimed()
    for _ in range(6):
        let_pass(jobs.database, LEASE_S / 3)
        assert jobs.leases.heartbeat(claim).held
        assert jobs.reaper.sweep().requeued == ()
    assert jobs.store.get(claim.job_id).state is JobState.PLANNING


def test_leases_that_ended_while_nobody_could_renew_them_are_renewed(jobs: Jobs) -> None:
    claim = jobs.claimed(max_attempts=1)
    jobs.reaper.sweep()
    # Nobody reaches the database for this long, as the reaper sees it.
    let_pass(jobs.database, LEASE_S * 1.5, swept=False)
    if jobs.database.is_sqlite:
        assert jobs.reaper.sweep().failed == (claim.job_id,), "a file is never away"
        return
    assert jobs.leases.claim_next(worker="thief") is None, "only the reaper takes a job from its owner"
    assert jobs.reaper.sweep().failed == ()
    assert jobs.leases.heartbeat(claim).held
    assert jobs.lapse().failed == (claim.job_id,), "an owner that does not come back has lost its job"


def test_reaper_requeues_until_attempts_are_exhausted(jobs: Jobs) -> None:
    claim = jobs.claimed(max_attempts=2)
    sweep = jobs.lapse()
    assert sweep.requeued == (claim.job_id,)
    assert sweep.work_waits
    assert not jobs.leases.heartbeat(claim).held
    again = some(jobs.leases.claim_next(worker="w"))
    assert again.attempt == 2
    assert jobs.leases.claim(claim.job_id, worker="w") is None
    assert jobs.lapse().failed == (claim.job_id,)
    job = jobs.store.get(claim.job_id)
    assert job.state is JobState.FAILED
    assert job.error is not None
    assert job.error.code == "job.attempts_exhausted"
    assert jobs.states(job.id) == ["QUEUED", "PLANNING", "QUEUED", "PLANNING", "FAILED"]


def test_a_passing_failure_is_retried_later(jobs: Jobs) -> None:
    claim = jobs.claimed(max_attempts=2)
    problem = StorageError("storage.unavailable", "503")
    assert jobs.leases.retry(claim, problem, delay_s=30.0)
    job = jobs.store.get(claim.job_id)
    assert job.state is JobState.QUEUED
    assert job.error is None
    assert jobs.leases.claim_next(worker="w") is None
    assert not jobs.reaper.sweep().work_waits
    let_pass(jobs.database, 31)
    assert jobs.reaper.sweep().work_waits
    again = some(jobs.leases.claim_next(worker="w"))
    assert jobs.leases.retry(again, problem, delay_s=0)
    failed = jobs.store.get(claim.job_id)
    assert failed.state is JobState.FAILED
    assert failed.error is not None
    assert failed.error.details["last_error"]["code"] == "storage.unavailable"


def test_a_graceful_stop_costs_no_attempt(jobs: Jobs) -> None:
    claim = jobs.claimed(max_attempts=1)
    for _ in range(3):
        assert jobs.leases.release(claim)
        assert jobs.reaper.sweep().work_waits
        found = some(jobs.leases.claim(claim.job_id, worker="w"))
        claim = found
    assert jobs.leases.succeed(claim, RESULT, plan_digest="d")


def test_work_is_announced_until_it_is_taken(jobs: Jobs) -> None:
    assert not jobs.reaper.sweep().work_waits
    ids = [jobs.store.create(REQUEST.model_copy(update={"target": f"/out{number}"})).id for number in range(2)]
    assert jobs.reaper.sweep().work_waits
    claims = [jobs.leases.claim_next(worker="w") for _ in ids]
    assert [claim.job_id for claim in claims if claim] == ids
    assert not jobs.reaper.sweep().work_waits
    assert not jobs.leases.work_waits()
    assert jobs.leases.claim_next(worker="w") is None


def test_nobody_leaves_empty_handed_while_there_is_work(jobs: Jobs) -> None:
    # More workers than one look shows candidates: whoever loses each of them looks again.
    count = 12
    ids = {jobs.store.create(REQUEST.model_copy(update={"target": f"/out{number}"})).id for number in range(count)}
    leases = Leases(jobs.database, lease_s=60)
    won: list[JobClaim | None] = []
    start = threading.Barrier(count)

    def claim() -> None:
        start.wait()
        won.append(leases.claim_next(worker="w"))

    at_once([claim] * count)
    assert {found.job_id for found in won if found} == ids


def test_cancel_before_the_first_attempt_ends_at_once(jobs: Jobs) -> None:
    job_id = jobs.store.create(REQUEST).id
    assert jobs.store.cancel(job_id).state is JobState.CANCELLED
    assert jobs.store.cancel(job_id).state is JobState.CANCELLED
    assert jobs.leases.claim(job_id, worker="w") is None
    assert jobs.states(job_id) == ["QUEUED", "CANCELLED"]


def test_cancel_of_a_running_job_is_its_owners_to_finish(jobs: Jobs) -> None:
    claim = jobs.claimed()
    assert jobs.store.cancel(claim.job_id).state is JobState.CANCELLING
    assert jobs.leases.peek(claim).cancel_requested
    pulse = jobs.leases.heartbeat(claim, Progress(phase="running"))
    assert pulse.held
    assert pulse.cancel_requested
    assert jobs.store.get(claim.job_id).state is JobState.CANCELLING
    assert not jobs.leases.fail(claim, LOST)
    assert jobs.leases.cancelled(claim)
    with pytest.raises(JobError, match=r"job\.finished"):
        jobs.store.cancel(jobs_finished(jobs))


def jobs_finished(jobs: Jobs) -> str:
    claim = jobs.claimed()
    assert not claim.cleanup
    assert jobs.leases.succeed(claim, RESULT, plan_digest="d")
    return claim.job_id


def test_a_commit_that_crosses_a_cancel_wins(jobs: Jobs) -> None:
    claim = jobs.claimed()
    jobs.store.cancel(claim.job_id)
    assert jobs.leases.succeed(claim, RESULT, plan_digest="d")
    assert jobs.states(claim.job_id) == ["QUEUED", "PLANNING", "CANCELLING", "SUCCEEDED"]


def test_a_cancel_whose_owner_died_is_cleaned_up_by_another(jobs: Jobs) -> None:
    claim = jobs.claimed(max_attempts=1)
    jobs.store.cancel(claim.job_id)
    assert jobs.leases.claim(claim.job_id, worker="w2") is None
    assert jobs.lapse().work_waits
    cleaner = some(jobs.leases.claim_next(worker="w2"))
    assert cleaner.cleanup
    assert not jobs.leases.cancelled(claim)
    assert jobs.leases.cancelled(cleaner)


def test_a_cancel_that_nobody_cleans_up_ends_too(jobs: Jobs) -> None:
    claim = jobs.claimed()
    jobs.store.cancel(claim.job_id)
    assert jobs.lapse(5).cancelled == (claim.job_id,)
    ended = jobs.store.get(claim.job_id)
    assert ended.state is JobState.CANCELLED
    # Files may be left, and its record says so: a worker removes them when one is there.
    assert ended.leftovers_until is not None


def test_cancel_between_attempts_leaves_a_clean_up(jobs: Jobs) -> None:
    claim = jobs.claimed()
    assert jobs.leases.retry(claim, LOST, delay_s=0)
    assert jobs.store.cancel(claim.job_id).state is JobState.CANCELLING
    cleaner = some(jobs.leases.claim_next(worker="w"))
    assert cleaner.cleanup


def test_one_writer_per_target(jobs: Jobs) -> None:
    ids = [jobs.store.create(REQUEST).id for _ in range(4)]
    elsewhere = jobs.store.create(REQUEST.model_copy(update={"target": "/out2"})).id
    won: list[JobClaim] = []
    start = threading.Barrier(4)

    def claim(job_id: str) -> None:
        start.wait()
        if found := jobs.leases.claim(job_id, worker="w"):
            won.append(found)

    at_once(partial(claim, job_id) for job_id in ids)
    assert len(won) == 1
    other = some(jobs.leases.claim_next(worker="w"))
    assert other.job_id == elsewhere
    assert jobs.leases.claim_next(worker="w") is None
    assert not jobs.reaper.sweep().work_waits
    assert jobs.leases.succeed(won[0], RESULT, plan_digest="d")
    waiting = set(ids) - {won[0].job_id}
    assert jobs.reaper.sweep().work_waits
    following = some(jobs.leases.claim_next(worker="w"))
    assert following.job_id in waiting


def test_one_target_in_many_spellings_has_one_writer(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    local = f"{tmp_path}/real/out"
    spellings = [
        *(local, f"{local}/", f"/{local}", f"{tmp_path}/./real//out", f"{tmp_path}/x/../real/out"),
        *(f"{tmp_path}/link/out", f"file://{local}", f"FILE://localhost{tmp_path}/link/out"),
    ]
    for many in (spellings, ["s3://b/out", "s3://b/out/", "S3://b/out", "s3a://b/out", "s3n://b/out"]):
        ids = [jobs.store.create(REQUEST.model_copy(update={"target": target})).id for target in many]
        claims = [found for found in (jobs.leases.claim(job_id, worker="w") for job_id in ids) if found]
        assert len(claims) == 1
    with pytest.raises(RequestError, match=r"request\.invalid"):
        jobs.store.create(REQUEST.model_copy(update={"target": "relative"}))


def test_a_clean_up_waits_for_another_writer(jobs: Jobs) -> None:
    first = jobs.claimed()
    assert jobs.leases.retry(first, LOST, delay_s=0)
    second = jobs.claimed()
    assert jobs.store.cancel(first.job_id).state is JobState.CANCELLING
    assert jobs.leases.claim(first.job_id, worker="w") is None
    assert jobs.leases.heartbeat(second).held
    assert jobs.leases.succeed(second, RESULT, plan_digest="d")
    cleaner = some(jobs.leases.claim(first.job_id, worker="w"))
    assert cleaner.cleanup


def test_many_posts_with_one_key_make_one_job(jobs: Jobs) -> None:
    outcomes: list[str] = []
    start = threading.Barrier(16)

    def post() -> None:
        start.wait()
        try:
            held = jobs.keys.begin("key", "body")
            if isinstance(held, Hold):
                time.sleep(0.05)
                outcomes.append(jobs.store.create(REQUEST, hold=held).id)
            else:
                outcomes.append(held)
        except RequestError as error:
            outcomes.append(error.code)

    at_once([post] * 16)
    ids = {outcome for outcome in outcomes if outcome.startswith("job_")}
    assert len(outcomes) == 16
    assert len(ids) == 1
    assert set(outcomes) - ids <= {"request.idempotency_conflict"}
    assert jobs.keys.begin("key", "body") in ids
    with pytest.raises(RequestError, match="idempotency_mismatch"):
        jobs.keys.begin("key", "another body")
    assert len(jobs.store.list().jobs) == 1


def test_the_longest_id_of_a_caller_is_stored_whole(jobs: Jobs) -> None:
    name = "x" * MAX_ID_CHARS
    held = jobs.keys.begin_job(name, "body")
    assert isinstance(held, Hold)
    assert jobs.store.create(REQUEST, hold=held, job_id=name).id == name
    assert jobs.keys.begin_job(name, "body") == jobs.store.get(name).id == name
    with pytest.raises(RequestError, match="job_exists"):
        jobs.store.create(REQUEST, job_id=name)
    with pytest.raises(RequestError, match=r"request\.invalid"):
        jobs.keys.begin_job(name + "x", "body")


def test_a_refused_request_frees_its_key(jobs: Jobs) -> None:
    held = jobs.keys.begin("key", "body")
    assert isinstance(held, Hold)
    with pytest.raises(RequestError, match="idempotency_conflict") as under_way:
        jobs.keys.begin("key", "body")
    assert under_way.value.retryable
    assert under_way.value.exit_code is ExitCode.RETRYABLE
    assert "the same request again" in under_way.value.fix
    with pytest.raises(RequestError, match="idempotency_mismatch") as used:
        jobs.keys.begin("key", "another body")
    assert not used.value.retryable
    assert "another key" in used.value.fix
    jobs.keys.abandon(held)
    with pytest.raises(RequestError, match="idempotency_conflict"):
        jobs.store.create(REQUEST, hold=held)
    assert jobs.store.list().jobs == ()
    assert isinstance(jobs.keys.begin("key", "corrected body"), Hold)


def test_pages_are_stable_while_jobs_arrive(jobs: Jobs) -> None:
    made = [jobs.store.create(REQUEST, labels={"n": str(n % 2), "all": "yes"}).id for n in range(7)]
    seen: list[str] = []
    token = ""
    while True:
        page = jobs.store.list(page_size=3, page_token=token)
        seen += [job.id for job in page.jobs]
        jobs.store.create(REQUEST)
        token = page.next_page_token
        if not token:
            break
    assert seen == list(reversed(made))
    odd = JobFilter(labels={"n": "1", "all": "yes"})
    assert [job.id for job in jobs.store.list(odd).jobs] == [made[5], made[3], made[1]]
    assert jobs.store.list(JobFilter(states=(JobState.FAILED,))).jobs == ()
    first = jobs.store.list(odd, page_size=1)
    assert first.jobs[0].labels == {"n": "1", "all": "yes"}
    for wrong in (first.next_page_token, "x", "AAAA", "e30"):
        with pytest.raises(RequestError, match=r"request\.invalid"):
            jobs.store.list(page_token=wrong)


def test_unknown_jobs_are_not_found(jobs: Jobs) -> None:
    for call in (jobs.store.get, jobs.store.key_of, jobs.store.cancel):
        with pytest.raises(RequestError, match=r"request\.not_found"):
            call("job_none")
    assert jobs.leases.claim("job_none", worker="w") is None


def test_a_second_host_is_refused_on_sqlite_only(database_url: str) -> None:
    Database(database_url, host="one").close()
    Database(database_url, host="one").close()
    if database_url.startswith("sqlite"):
        with pytest.raises(JobError, match=r"service\.wrong_host") as caught:
            Database(database_url, host="two")
        assert "RESHARD_HOST_ID='one'" in caught.value.fix
    else:
        Database(database_url, host="two").close()
