"""Ownership of jobs: claim, heartbeat, and the fenced writes of an owner.

A claim is one conditional UPDATE. Every later write of an owner carries the condition
`owner = ? AND attempt = ?` (the fence), so that a worker that lost its lease changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from sqlalchemy import ColumnElement, and_, case, delete, func, insert, or_, select, update
from sqlalchemy.orm import Session, aliased

from reshard.choices import JobKind, JobState
from reshard.errors import JobError, ReshardError
from reshard.models.jobs import ConvertRequest, Problem, Progress, WorkShare
from reshard_jobs.database import Database
from reshard_jobs.limits import TenantLimits, limits_of
from reshard_jobs.queue.discards import FIRST_PAUSE_S, being_discarded, forget_plans
from reshard_jobs.queue.helpers import free_of_helpers
from reshard_jobs.queue.leased_rows import RELEASED, change_row, claim_first, has_ended, lease_of, new_owner
from reshard_jobs.queue.refusals import others_may_try, refuse, refused_by
from reshard_jobs.queue.states import ACTIVE, TERMINAL, change, move, sources_of, state_of
from reshard_jobs.records import brief_of, tenant_of
from reshard_jobs.tables import ANY_PLAN, EventRow, JobRow, PlanRow, WorkerRow, db_now
from reshard_jobs.tenants.tenants import has_room, limited_tenant_of, refuse_bytes_above_quota, turns, with_turns

FULL = frozenset({"storage.no_space", "storage.no_room"})
"""Codes of a store without room. What the job left there is discarded at once: it may be what fills the store."""
_ENDED: Mapping[str, Any] = {"finished_at": db_now(), "lease_until": None}
_ACTIVE = [state.value for state in ACTIVE]
_CONVERTS = JobRow.kind == JobKind.CONVERT.value
_HAS_PLANS = select(PlanRow.digest).where(PlanRow.job_id == JobRow.id).correlate(JobRow).exists()
_LOST_HELPER = (
    select(WorkerRow.token)
    .where(WorkerRow.job_id == JobRow.id, WorkerRow.role == "helper")
    .where(or_(WorkerRow.left_at == WorkerRow.lease_until, has_ended(WorkerRow)))
    .correlate(JobRow)
    .exists()
)


@dataclass(frozen=True, slots=True)
class JobClaim:
    """A job that this process owns, and the fence of its writes."""

    job_id: str
    owner: str
    attempt: int
    kind: JobKind
    request: ConvertRequest
    limits: TenantLimits
    cleanup: bool
    """True if the job is to be cancelled and has no live owner: remove the files of its attempts and run nothing."""
    max_workers: int = 0
    """The number of workers that may run the job at once; 0 is the worker's own default."""
    worker: str = ""
    abandoned: tuple[str, ...] = ()
    """Plans that this job and ended jobs of this database may have left in the target."""
    tenant: str = "default"
    traceparent: str | None = None
    """The span of the request that made the job."""
    given_id: str | None = None
    """The id that the caller chose, if he did: the tenant knows the job by it."""
    own_attempts: int = 1
    """Attempts that count against `max_attempts`, this one included: not those that ended by a graceful stop, by a
    fault of their worker's host, or before a user's retry."""
    waited_s: float | None = None
    """Seconds in the queue before this attempt, by the database's clock; None if they are not known or not wanted."""


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
        keep_failed_s: Seconds for which the files of a job that FAILED are kept for a retry.
    """

    def __init__(self, database: Database, *, lease_s: float, keep_failed_s: float = 86_400.0) -> None:
        self._database = database
        self.lease_s = lease_s
        self._keep_failed_s = keep_failed_s

    def claim(self, job_id: str, *, worker: str) -> JobClaim | None:
        """Claim the next attempt of a job; None if the job is running, has ended or is not due."""
        owner = new_owner()
        values: dict[str, Any] = {
            "owner": owner,
            "worker": worker[:200],
            "attempt": JobRow.attempt + 1,
            **lease_of(self.lease_s),
            "takes_workers": 0,
            # Why the attempt before ended is not why this one does.
            "error": None,
        }
        with self._database.write() as session:
            self._database.lock_target_of(session, job_id)
            self._database.lock_tenant(session, limited_tenant_of(job_id))
            started = func.coalesce(JobRow.started_at, db_now())
            can = _runnable(worker)
            row = move(session, job_id, JobState.PLANNING, *can, progress=None, started_at=started, **values)
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
                limits=limits_of(session, row.tenant),
                cleanup=cleanup,
                max_workers=row.max_workers,
                worker=worker[:200],
                abandoned=_abandoned(session, row),
                tenant=tenant_of(row),
                traceparent=row.traceparent,
                given_id=row.given_id,
                own_attempts=row.attempt - row.releases,
                waited_s=_waited_s(session, row) if row.traceparent is not None else None,
            )

    def claim_next(self, *, worker: str) -> JobClaim | None:
        """Claim the available job whose turn it is; None if no job is available.

        The job has the highest priority. Of these, it is one of the tenant with the fewest workers by its weight, and
        of that tenant's jobs the oldest.
        """
        turn = turns()
        order = (JobRow.priority.desc(), turn.share, JobRow.created_at, JobRow.id)
        query = with_turns(select(JobRow.id), turn).where(_claimable(worker)).order_by(*order)
        while True:
            claim, some = claim_first(self._database, query, lambda job_id: self.claim(job_id, worker=worker))
            if claim is not None or not some:
                return claim
            # Other workers claimed each of these jobs, so there is progress; younger jobs may be left.

    def work_waits(self, *, worker: str | None = None) -> bool:
        """True if a job is available, to anybody or to this worker."""
        with self._database.read() as session:
            return work_waits(session, worker)

    def heartbeat(self, claim: JobClaim, progress: Progress | None = None) -> LeaseStatus:
        """Renew the lease and record progress; the answer says if the job must stop."""
        values = lease_of(self.lease_s)
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

    def record_plan(self, claim: JobClaim, digest: str, write_bytes: int = 0) -> bool:
        """Record that this attempt begins to write a plan. False if it may not: the lease was lost, or a cancel came.

        Other ended jobs with this plan and target have no files of their own any more.

        Raises:
            RequestError: `request.quota_bytes`: nobody has judged the job before, and it writes more than its tenant
                may. Nothing is recorded.
        """
        going = (*_fence(claim), JobRow.state.in_(_ACTIVE), JobRow.cancel_requested == 0)
        with self._database.write() as session:
            row = _set(session, claim.job_id, *going, plan_digest=digest)
            if row is None:
                return False
            if not (row.checked or row.planned_bytes):
                refuse_bytes_above_quota(session, row.tenant, write_bytes)
                row.checked, row.planned_bytes = 1, write_bytes
            ended = select(JobRow.id).where(
                JobRow.target == row.target, JobRow.id != row.id, JobRow.state.in_([s.value for s in TERMINAL])
            )
            same = (PlanRow.digest == digest, or_(PlanRow.job_id.in_(ended), PlanRow.job_id == row.id))
            session.execute(delete(PlanRow).where(*same).execution_options(synchronize_session=False))
            session.execute(insert(PlanRow).values(job_id=row.id, digest=digest))
            return True

    def plans_of(self, job_id: str) -> tuple[str, ...] | None:
        """The plans that attempts of a job may have begun to write; None if they are not known."""
        with self._database.read() as session:
            plans = tuple(session.scalars(select(PlanRow.digest).where(PlanRow.job_id == job_id)))
        return None if ANY_PLAN in plans else plans

    def succeed(
        self, claim: JobClaim, result: BaseModel, *, plan_digest: str | None, share: WorkShare | None = None
    ) -> bool:
        """Record the result, and the owner's share of the work. False if the lease was lost."""
        values: dict[str, Any] = {"result": result.model_dump_json(), "brief": brief_of(result), "checked": 1}
        values |= {"plan_digest": plan_digest, "error": None}
        # A worker that was lost may wake up later and write one more record: the target is looked at once more.
        later = case((and_(_CONVERTS, or_(JobRow.attempt > 1, _LOST_HELPER)), db_now() + self._keep_failed_s))
        return self._end(claim, JobState.SUCCEEDED, share=share, discard_at=later, **values)

    def fail(self, claim: JobClaim, problem: ReshardError) -> bool:
        """Record the error that ends the job. False if the lease was lost or the job is being cancelled.

        Its files are kept for a retry, unless the target's store is full.
        """
        return self._end(claim, JobState.FAILED, **failure(problem, keep_failed_s=self._keep_failed_s))

    def cancelled(self, claim: JobClaim, problem: ReshardError | None = None) -> bool:
        """Record that the job was stopped, and cleaned up unless there was a problem. False if the lease was lost."""
        if problem is None:
            return self._end(claim, JobState.CANCELLED, clean=True, error=None, discard_at=None)
        again: dict[str, Any] = {"discard_at": db_now() + FIRST_PAUSE_S, "discard_asked": 1}
        return self._end(claim, JobState.CANCELLED, error=problem_json(problem), **again)

    def hand_over(self, claim: JobClaim, problem: ReshardError) -> bool:
        """Requeue the job for another worker, because the problem may be the fault of this worker's host.

        The attempt does not count. False if no live worker is left that has not tried the job.
        """
        with self._database.write() as session:
            refuse(session, claim.job_id, claim.worker, problem.code)
            if not others_may_try(session, claim.job_id, lease_s=self.lease_s):
                return False
            again = {"releases": JobRow.releases + 1, "not_before": 0.0, "error": problem_json(problem)}
            return _left(session, claim, _requeue(session, claim, JobRow.cancel_requested == 0, **again))

    def retry(self, claim: JobClaim, problem: ReshardError, *, delay_s: float) -> bool:
        """Requeue the job after a transient failure, or fail it if this was the last attempt."""
        with self._database.write() as session:
            left = JobRow.attempt - JobRow.releases < JobRow.max_attempts
            row = _requeue(session, claim, left, not_before=db_now() + delay_s, error=problem_json(problem))
            if row is None:
                ending = failure(exhausted(claim.own_attempts, problem), keep_failed_s=self._keep_failed_s)
                row = move(session, claim.job_id, JobState.FAILED, *_fence(claim), **ending)
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

    def _end(
        self, claim: JobClaim, state: JobState, *, share: WorkShare | None = None, clean: bool = False, **values: Any
    ) -> bool:
        with self._database.write() as session:
            row = move(session, claim.job_id, state, *_fence(claim), **{**_ENDED, **values})
            if row is not None and (clean or row.discard_at is None):
                forget_plans(session, claim.job_id)
            return _left(session, claim, row, share)


def work_waits(session: Session, worker: str | None = None) -> bool:
    """True if this worker, or without a name any worker, would get a job if it asked now."""
    return session.scalars(select(JobRow.id).where(_claimable(worker)).limit(1)).first() is not None


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


def failure(problem: ReshardError, *, keep_failed_s: float) -> dict[str, Any]:
    """The columns of a job that fails for good with this error, whoever records it.

    What its attempts wrote is kept for a retry for `keep_failed_s` seconds, unless the store is full: then it goes now.
    """
    full = not FULL.isdisjoint((problem.code, problem.details.get("last_error", {}).get("code")))
    later = case((and_(_CONVERTS, _HAS_PLANS), db_now() + (0.0 if full else keep_failed_s)))
    return {**_ENDED, "error": problem_json(problem), "discard_at": later, "discard_asked": int(full)}


def problem_json(problem: ReshardError) -> str:
    """A problem as JSON text for the `error` column."""
    return Problem.model_validate(problem.to_problem()).model_dump_json()


def _waited_s(session: Session, row: JobRow) -> float | None:
    """Seconds between the last two changes of a job's state: it was QUEUED, and now it is claimed."""
    query = select(EventRow.at).where(EventRow.job_id == row.id, EventRow.kind == "state")
    times = session.scalars(query.order_by(EventRow.seq.desc()).limit(2)).all()
    return max(times[0] - times[1], 0.0) if len(times) == 2 else None


def _fence(claim: JobClaim) -> tuple[ColumnElement[bool], ...]:
    return (JobRow.owner == claim.owner, JobRow.attempt == claim.attempt)


def _abandoned(session: Session, job: JobRow) -> tuple[str, ...]:
    """Plans that no live job writes: those of ended jobs with this target, and of earlier attempts of this job."""
    if not job.target:
        return ()
    ended = JobRow.state.in_([state.value for state in TERMINAL])
    query = (
        select(PlanRow.digest)
        .join(JobRow, JobRow.id == PlanRow.job_id)
        .where(JobRow.target == job.target, or_(ended, JobRow.id == job.id), PlanRow.digest != ANY_PLAN)
        .distinct()
    )
    return tuple(sorted(session.scalars(query)))


def _claimable(worker: str | None = None) -> ColumnElement[bool]:
    return or_(and_(*_runnable(worker)), and_(*_orphaned_cancel()))


def _runnable(worker: str | None = None) -> tuple[ColumnElement[bool], ...]:
    # A job whose lease has ended is not among them: only the reaper knows if its owner could have renewed it.
    return (
        JobRow.state == JobState.QUEUED.value,
        JobRow.not_before <= db_now(),
        JobRow.cancel_requested == 0,
        JobRow.attempt - JobRow.releases < JobRow.max_attempts,
        has_room(JobRow),
        _target_is_free((*ACTIVE, JobState.CANCELLING)),
        *(() if worker is None else (~refused_by(worker),)),
    )


def _orphaned_cancel() -> tuple[ColumnElement[bool], ...]:
    # No clean-up while another job writes the same target: it would delete that job's work.
    return (JobRow.state == JobState.CANCELLING.value, has_ended(JobRow), _target_is_free(ACTIVE))


def _target_is_free(busy: tuple[JobState, ...]) -> ColumnElement[bool]:
    """The condition that no other job in one of these states, or with helpers at work, has the same target."""
    other = aliased(JobRow)
    at_work = or_(other.state.in_([state.value for state in busy]), being_discarded(other), ~free_of_helpers(other))
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
        worker=None,
        **RELEASED,
        **values,
    )


def _set(session: Session, job_id: str, *conditions: ColumnElement[bool], **values: Any) -> JobRow | None:
    """Update a job without an event."""
    return change_row(session, JobRow, JobRow.id == job_id, *conditions, **values)
