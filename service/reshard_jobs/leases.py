"""Ownership of jobs: claim, heartbeat, and the fenced writes of an owner.

A claim is one conditional UPDATE. Every later write of an owner carries the condition
`owner = ? AND attempt = ?` (the fence), so that a worker that lost its lease changes nothing.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from sqlalchemy import ColumnElement, and_, func, insert, or_, select, update
from sqlalchemy.orm import Session, aliased

from reshard.errors import JobError, ReshardError
from reshard.models import ConvertRequest, JobKind, JobState, Problem, Progress, WorkShare
from reshard_jobs.database import Database
from reshard_jobs.helpers import free_of_helpers
from reshard_jobs.states import ACTIVE, sources_of, state_of
from reshard_jobs.tables import JobRow, WorkerRow, db_now
from reshard_jobs.transitions import change, move

_NEXT_CANDIDATES = 8
_ACTIVE = [state.value for state in ACTIVE]


@dataclass(frozen=True, slots=True)
class JobClaim:
    """A job that this process owns, and the fence of its writes."""

    job_id: str
    owner: str
    attempt: int
    kind: JobKind
    request: ConvertRequest
    cleanup: bool
    """True if the job is to be cancelled and has no live owner: remove the files of its attempts and run nothing."""
    max_workers: int = 0
    """The number of workers that may run the job at once; 0 is the worker's own default."""


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """The answer to a heartbeat."""

    held: bool
    cancel_requested: bool


_LOST = LeaseStatus(held=False, cancel_requested=False)


class Leases:
    """Claims on the jobs of a job database.

    Args:
        database: The job database.
        lease_s: Seconds that a claim lasts after its last heartbeat, by the database's clock.
    """

    def __init__(self, database: Database, *, lease_s: float) -> None:
        self._database = database
        self.lease_s = lease_s

    def claim(self, job_id: str, *, worker: str) -> JobClaim | None:
        """Claim the next attempt of a job; None if the job is running, has ended or is not due."""
        owner = secrets.token_hex(16)
        values: dict[str, Any] = {
            "owner": owner,
            "worker": worker[:200],
            "attempt": JobRow.attempt + 1,
            "lease_until": db_now() + self.lease_s,
            "takes_workers": 0,
        }
        with self._database.write() as session:
            self._database.lock_target_of(session, job_id)
            started = func.coalesce(JobRow.started_at, db_now())
            row = move(session, job_id, JobState.PLANNING, *_runnable(), progress=None, started_at=started, **values)
            cleanup = row is None
            if cleanup:
                row = _take_cleanup(session, job_id, values)
            if row is None:
                return None
            owners_left(session, job_id)
            owned = {"job_id": job_id, "token": owner, "worker": worker[:200], "role": "owner", "attempt": row.attempt}
            session.execute(insert(WorkerRow).values(**owned, joined_at=db_now()))
            return JobClaim(
                job_id=job_id,
                owner=owner,
                attempt=row.attempt,
                kind=JobKind(row.kind),
                request=ConvertRequest.model_validate_json(row.request),
                cleanup=cleanup,
                max_workers=row.max_workers,
            )

    def claim_next(self, *, worker: str) -> JobClaim | None:
        """Claim the available job with the highest priority, of these the oldest; None if no job is available."""
        order = (JobRow.priority.desc(), JobRow.created_at, JobRow.id)
        query = select(JobRow.id).where(_claimable()).order_by(*order).limit(_NEXT_CANDIDATES)
        while True:
            with self._database.read() as session:
                candidates = session.scalars(query).all()
            for job_id in candidates:
                if claim := self.claim(job_id, worker=worker):
                    return claim
            if not candidates:
                return None
            # Other workers claimed each of these jobs, so there is progress; younger jobs may be left.

    def work_waits(self) -> bool:
        """True if a job is available."""
        with self._database.read() as session:
            return work_waits(session)

    def heartbeat(self, claim: JobClaim, progress: Progress | None = None) -> LeaseStatus:
        """Renew the lease and record progress; the answer says if the job must stop."""
        values: dict[str, Any] = {"lease_until": db_now() + self.lease_s}
        owned = (*_fence(claim), JobRow.state.in_([*_ACTIVE, JobState.CANCELLING.value]))
        with self._database.write() as session:
            if progress is None:
                row = _set(session, claim.job_id, *owned, **values)
            else:
                values["progress"] = progress.model_dump_json()
                values["takes_workers"] = int(progress.takes_workers)
                state = state_of(progress)
                before = [source.value for source in sources_of(state) if source in ACTIVE and source is not state]
                entering = JobRow.state.in_(before)
                row = change(session, claim.job_id, "state", *_fence(claim), entering, state=state.value, **values)
                row = row or change(session, claim.job_id, "progress", *owned, **values)
        return _LOST if row is None else LeaseStatus(held=True, cancel_requested=bool(row.cancel_requested))

    def peek(self, claim: JobClaim) -> LeaseStatus:
        """Report if the claim still holds and if the job is to be cancelled, without renewing the lease."""
        held = (*_fence(claim), JobRow.state.in_([*_ACTIVE, JobState.CANCELLING.value]))
        with self._database.read() as session:
            flag = session.scalars(
                select(JobRow.cancel_requested).where(JobRow.id == claim.job_id, *held)
            ).one_or_none()
        return _LOST if flag is None else LeaseStatus(held=True, cancel_requested=bool(flag))

    def succeed(
        self, claim: JobClaim, result: BaseModel, *, plan_digest: str | None, share: WorkShare | None = None
    ) -> bool:
        """Record the result, and the owner's share of the work. False if the lease was lost."""
        values = {"result": result.model_dump_json(), "plan_digest": plan_digest, "error": None}
        return self._end(claim, JobState.SUCCEEDED, share=share, **values)

    def fail(self, claim: JobClaim, problem: ReshardError) -> bool:
        """Record the error that ends the job. False if the lease was lost or the job is being cancelled."""
        return self._end(claim, JobState.FAILED, error=problem_json(problem))

    def cancelled(self, claim: JobClaim, problem: ReshardError | None = None) -> bool:
        """Record that the job was stopped and cleaned up. False if the lease was lost."""
        return self._end(claim, JobState.CANCELLED, error=problem_json(problem) if problem else None)

    def retry(self, claim: JobClaim, problem: ReshardError, *, delay_s: float) -> bool:
        """Requeue the job after a transient failure, or fail it if this was the last attempt."""
        with self._database.write() as session:
            left = JobRow.attempt - JobRow.releases < JobRow.max_attempts
            row = _requeue(session, claim, left, not_before=db_now() + delay_s, error=problem_json(problem))
            if row is None:
                row = move(
                    session,
                    claim.job_id,
                    JobState.FAILED,
                    *_fence(claim),
                    error=problem_json(exhausted(claim.attempt, problem)),
                    finished_at=db_now(),
                    lease_until=None,
                )
            return _left(session, claim, row)

    def release(self, claim: JobClaim) -> bool:
        """Requeue the job because this worker was told to stop; the attempt does not count."""
        with self._database.write() as session:
            row = _requeue(session, claim, releases=JobRow.releases + 1, not_before=0.0)
            if row is None:
                # The job is being cancelled: the next worker may clean up at once.
                cancelling = JobRow.state == JobState.CANCELLING.value
                row = _set(session, claim.job_id, *_fence(claim), cancelling, lease_until=db_now(), owner=None)
            return _left(session, claim, row)

    def _end(self, claim: JobClaim, state: JobState, *, share: WorkShare | None = None, **values: Any) -> bool:
        with self._database.write() as session:
            ending = {"finished_at": db_now(), "lease_until": None, **values}
            row = move(session, claim.job_id, state, *_fence(claim), **ending)
            return _left(session, claim, row, share)


def work_waits(session: Session) -> bool:
    """True if a worker that asked now would get a job."""
    return session.scalars(select(JobRow.id).where(_claimable()).limit(1)).first() is not None


def owners_left(session: Session, job_id: str) -> None:
    """Take note that nobody owns a job any more: its last owner's lease ended."""
    present = (WorkerRow.job_id == job_id, WorkerRow.role == "owner", WorkerRow.left_at.is_(None))
    session.execute(update(WorkerRow).where(*present).values(left_at=db_now()))


def _left(session: Session, claim: JobClaim, row: JobRow | None, share: WorkShare | None = None) -> bool:
    """Take note that the owner has left, if it had the right to change the job."""
    if row is None:
        return False
    place = (WorkerRow.job_id == claim.job_id, WorkerRow.token == claim.owner)
    report = share.model_dump() if share is not None else {}
    session.execute(update(WorkerRow).where(*place).values(left_at=db_now(), **report))
    return True


def exhausted(attempts: int, last: ReshardError | None = None) -> JobError:
    """The error of a job whose allowed attempts all ended without a result."""
    details: dict[str, Any] = {"attempts": attempts}
    if last is not None:
        details["last_error"] = last.to_problem()
    return JobError(
        "job.attempts_exhausted",
        f"{attempts} attempts were lost" + (f"; the last one: {last.message}" if last else ""),
        fix="look at the worker's log for the cause, then submit the job again: finished work is kept",
        details=details,
    )


def problem_json(problem: ReshardError) -> str:
    """A problem as JSON text for the `error` column."""
    return Problem.model_validate(problem.to_problem()).model_dump_json()


def _fence(claim: JobClaim) -> tuple[ColumnElement[bool], ...]:
    return (JobRow.owner == claim.owner, JobRow.attempt == claim.attempt)


def _claimable() -> ColumnElement[bool]:
    return or_(and_(*_runnable()), and_(*_orphaned_cancel()))


def _runnable() -> tuple[ColumnElement[bool], ...]:
    # A job whose lease has ended is not among them: only the reaper knows if its owner could have renewed it.
    return (
        JobRow.state == JobState.QUEUED.value,
        JobRow.not_before <= db_now(),
        JobRow.cancel_requested == 0,
        JobRow.attempt - JobRow.releases < JobRow.max_attempts,
        _target_is_free((*ACTIVE, JobState.CANCELLING)),
    )


def _orphaned_cancel() -> tuple[ColumnElement[bool], ...]:
    # No clean-up while another job writes the same target: it would delete that job's work.
    return (JobRow.state == JobState.CANCELLING.value, JobRow.lease_until <= db_now(), _target_is_free(ACTIVE))


def _target_is_free(busy: tuple[JobState, ...]) -> ColumnElement[bool]:
    """The condition that no other job in one of these states, or with helpers at work, has the same target."""
    other = aliased(JobRow)
    at_work = or_(other.state.in_([state.value for state in busy]), ~free_of_helpers(other))
    rival = select(other.id).where(other.target == JobRow.target, other.id != JobRow.id, at_work)
    return or_(JobRow.target == "", ~rival.exists())


def _take_cleanup(session: Session, job_id: str, values: dict[str, Any]) -> JobRow | None:
    return _set(session, job_id, *_orphaned_cancel(), **values)


def _requeue(session: Session, claim: JobClaim, *conditions: ColumnElement[bool], **values: Any) -> JobRow | None:
    active = JobRow.state.in_(_ACTIVE)
    return move(
        session,
        claim.job_id,
        JobState.QUEUED,
        *_fence(claim),
        active,
        *conditions,
        owner=None,
        worker=None,
        lease_until=None,
        **values,
    )


def _set(session: Session, job_id: str, *conditions: ColumnElement[bool], **values: Any) -> JobRow | None:
    """Update a job without an event."""
    statement = (
        update(JobRow)
        .where(JobRow.id == job_id, *conditions)
        .values(**values)
        .returning(JobRow)
        .execution_options(synchronize_session=False, populate_existing=True)
    )
    return session.scalars(statement).one_or_none()
