"""Ownership of jobs: claim, heartbeat, and the fenced writes of an owner.

A claim is one conditional UPDATE. Everything that an owner writes later carries the fence
`owner = ? AND attempt = ?`; a zombie that lost its lease changes nothing.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from sqlalchemy import ColumnElement, and_, func, or_, select, update
from sqlalchemy.orm import Session, aliased

from reshard.errors import JobError, ReshardError
from reshard.models import ConvertRequest, JobKind, JobState, Problem, Progress
from reshard_jobs.database import Database
from reshard_jobs.moves import change, move
from reshard_jobs.states import ACTIVE, sources_of, state_of
from reshard_jobs.tables import JobRow, db_now

_NEXT_CANDIDATES = 8
_ACTIVE = [state.value for state in ACTIVE]


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that this process owns, and the fence of its writes."""

    job_id: str
    owner: str
    attempt: int
    kind: JobKind
    request: ConvertRequest
    cleanup: bool
    """The job is to be cancelled and has no live owner: remove what its attempts left, run nothing."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a heartbeat learned."""

    held: bool
    cancel_requested: bool


_LOST = Pulse(held=False, cancel_requested=False)


class Leases:
    """Claims on the jobs of a job database.

    Args:
        database: The job database.
        lease_s: How long a claim lasts after its last heartbeat, by the database's clock.
    """

    def __init__(self, database: Database, *, lease_s: float) -> None:
        self._database = database
        self.lease_s = lease_s

    def claim(self, job_id: str, *, worker: str) -> Claim | None:
        """Own the job's next attempt, or None if it is not to be had (run, ended, or not due)."""
        owner = secrets.token_hex(16)
        values: dict[str, Any] = {
            "owner": owner,
            "worker": worker[:200],
            "attempt": JobRow.attempt + 1,
            "lease_until": db_now() + self.lease_s,
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
        return Claim(
            job_id=job_id,
            owner=owner,
            attempt=row.attempt,
            kind=JobKind(row.kind),
            request=ConvertRequest.model_validate_json(row.request),
            cleanup=cleanup,
        )

    def claim_next(self, *, worker: str) -> Claim | None:
        """Own the oldest job that is to be had; None once nothing is."""
        query = select(JobRow.id).where(_claimable()).order_by(JobRow.created_at, JobRow.id).limit(_NEXT_CANDIDATES)
        while True:
            with self._database.read() as session:
                candidates = session.scalars(query).all()
            for job_id in candidates:
                if claim := self.claim(job_id, worker=worker):
                    return claim
            if not candidates:
                return None
            # Others took each of them, so there is progress; younger ones may be left.

    def work_waits(self) -> bool:
        """Whether a job is to be had."""
        with self._database.read() as session:
            return work_waits(session)

    def heartbeat(self, claim: Claim, progress: Progress | None = None) -> Pulse:
        """Renew the lease, record progress, and learn whether the job is to stop."""
        values: dict[str, Any] = {"lease_until": db_now() + self.lease_s}
        owned = (*_fence(claim), JobRow.state.in_([*_ACTIVE, JobState.CANCELLING.value]))
        with self._database.write() as session:
            if progress is None:
                row = _set(session, claim.job_id, *owned, **values)
            else:
                values["progress"] = progress.model_dump_json()
                state = state_of(progress)
                before = [source.value for source in sources_of(state) if source in ACTIVE and source is not state]
                entering = JobRow.state.in_(before)
                row = change(session, claim.job_id, "state", *_fence(claim), entering, state=state.value, **values)
                row = row or change(session, claim.job_id, "progress", *owned, **values)
        return _LOST if row is None else Pulse(held=True, cancel_requested=bool(row.cancel_requested))

    def peek(self, claim: Claim) -> Pulse:
        """Whether the claim still holds and is wanted, without renewing it."""
        held = (*_fence(claim), JobRow.state.in_([*_ACTIVE, JobState.CANCELLING.value]))
        with self._database.read() as session:
            flag = session.scalars(
                select(JobRow.cancel_requested).where(JobRow.id == claim.job_id, *held)
            ).one_or_none()
        return _LOST if flag is None else Pulse(held=True, cancel_requested=bool(flag))

    def succeed(self, claim: Claim, result: BaseModel, *, plan_digest: str | None) -> bool:
        """Record the result. False if the lease was lost."""
        return self._end(
            claim, JobState.SUCCEEDED, result=result.model_dump_json(), plan_digest=plan_digest, error=None
        )

    def fail(self, claim: Claim, problem: ReshardError) -> bool:
        """Record the error that ends the job. False if the lease was lost or the job is being cancelled."""
        return self._end(claim, JobState.FAILED, error=problem_json(problem))

    def cancelled(self, claim: Claim, problem: ReshardError | None = None) -> bool:
        """Record that the job was stopped and cleaned up. False if the lease was lost."""
        return self._end(claim, JobState.CANCELLED, error=problem_json(problem) if problem else None)

    def retry(self, claim: Claim, problem: ReshardError, *, delay_s: float) -> bool:
        """Give the job back after a passing failure, or fail it when this was the last attempt."""
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
        return row is not None

    def release(self, claim: Claim) -> bool:
        """Give the job back because this worker is told to stop; the attempt does not count."""
        with self._database.write() as session:
            row = _requeue(session, claim, releases=JobRow.releases + 1, not_before=0.0)
            if row is None:
                # A cancel that is under way: the next worker may clean up at once.
                cancelling = JobRow.state == JobState.CANCELLING.value
                row = _set(session, claim.job_id, *_fence(claim), cancelling, lease_until=db_now())
        return row is not None

    def _end(self, claim: Claim, state: JobState, **values: Any) -> bool:
        with self._database.write() as session:
            ending = {"finished_at": db_now(), "lease_until": None, **values}
            row = move(session, claim.job_id, state, *_fence(claim), **ending)
        return row is not None


def work_waits(session: Session) -> bool:
    """Whether a worker that asked now would be given a job."""
    return session.scalars(select(JobRow.id).where(_claimable()).limit(1)).first() is not None


def exhausted(attempts: int, last: ReshardError | None = None) -> JobError:
    """Every allowed attempt ended without a result."""
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
    """A problem as the `error` column holds it."""
    return Problem.model_validate(problem.to_problem()).model_dump_json()


def _fence(claim: Claim) -> tuple[ColumnElement[bool], ...]:
    return (JobRow.owner == claim.owner, JobRow.attempt == claim.attempt)


def _claimable() -> ColumnElement[bool]:
    return or_(and_(*_runnable()), and_(*_orphaned_cancel()))


def _runnable() -> tuple[ColumnElement[bool], ...]:
    due = and_(JobRow.state == JobState.QUEUED.value, JobRow.not_before <= db_now())
    orphaned = and_(JobRow.state.in_(_ACTIVE), JobRow.lease_until < db_now())
    return (
        or_(due, orphaned),
        JobRow.cancel_requested == 0,
        JobRow.attempt - JobRow.releases < JobRow.max_attempts,
        _target_is_free((*ACTIVE, JobState.CANCELLING)),
    )


def _orphaned_cancel() -> tuple[ColumnElement[bool], ...]:
    # Not while another job writes there: the clean-up would take that job's work away.
    return (JobRow.state == JobState.CANCELLING.value, JobRow.lease_until <= db_now(), _target_is_free(ACTIVE))


def _target_is_free(busy: tuple[JobState, ...]) -> ColumnElement[bool]:
    """Whether no other job in one of these states writes where this one writes."""
    other = aliased(JobRow)
    rival = select(other.id).where(
        other.target == JobRow.target, other.id != JobRow.id, other.state.in_([state.value for state in busy])
    )
    return or_(JobRow.target == "", ~rival.exists())


def _take_cleanup(session: Session, job_id: str, values: dict[str, Any]) -> JobRow | None:
    return _set(session, job_id, *_orphaned_cancel(), **values)


def _requeue(session: Session, claim: Claim, *conditions: ColumnElement[bool], **values: Any) -> JobRow | None:
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
