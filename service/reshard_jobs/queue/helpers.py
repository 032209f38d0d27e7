"""Helpers: workers that join a running job of another worker, do a part of it, and leave.

A helper owns nothing of the job. The engines divide the work and agree beside the target; the owner commits. The
database only says how many helpers a job has, and who they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import ColumnElement, ScalarSelect, and_, case, func, insert, or_, select
from sqlalchemy.orm import Session

from reshard.choices import JobKind, JobState
from reshard.models.jobs import ConvertRequest, WorkShare
from reshard_jobs.database import Database
from reshard_jobs.limits import TenantLimits, limits_of
from reshard_jobs.queue.leased_rows import change_row, claim_first, is_held, lease_of, new_owner
from reshard_jobs.queue.refusals import refused_by
from reshard_jobs.queue.states import ACTIVE, change
from reshard_jobs.records import tenant_of, worker_of
from reshard_jobs.tables import JobRow, WorkerRow, db_now
from reshard_jobs.tenants.tenants import has_room_for_helpers, limited_tenant_of, turns, with_turns

_MOST_FAILED = 3
"""Number of helpers of one attempt that may fail. A job that no helper can run would else call for one for ever."""


@dataclass(frozen=True, slots=True)
class HelperClaim:
    """A place among the workers of a job."""

    job_id: str
    token: str
    request: ConvertRequest
    limits: TenantLimits
    max_workers: int
    attempt: int = 0
    tenant: str = "default"
    traceparent: str | None = None
    """The span of the request that made the job."""


class Helpers:
    """The helpers of the jobs of a job database.

    Args:
        database: The job database.
        lease_s: Seconds that a helper's place lasts after its last heartbeat, by the database's clock.
        max_workers: The number of workers that may run a job at once, for jobs that name none.
    """

    def __init__(self, database: Database, *, lease_s: float, max_workers: int) -> None:
        self._database = database
        self._lease_s = lease_s
        self._max_workers = max_workers

    def wanted(self) -> bool:
        """True if a worker that asked now could help a job."""
        with self._database.read() as session:
            return help_wanted(session, self._max_workers)

    def join_next(self, *, worker: str) -> HelperClaim | None:
        """Join the job that needs help most: by priority, its tenant's turn, the number of its helpers, and age."""
        turn = turns()
        order = (JobRow.priority.desc(), turn.share, _present().asc(), JobRow.created_at, JobRow.id)
        open_to = (_takes_helper(self._max_workers), ~refused_by(worker))
        query = with_turns(select(JobRow.id), turn).where(*open_to).order_by(*order)
        return claim_first(self._database, query, lambda job_id: self._join(job_id, worker))[0]

    def _join(self, job_id: str, worker: str) -> HelperClaim | None:
        token = new_owner()
        with self._database.write() as session:
            self._database.lock_tenant(session, limited_tenant_of(job_id))
            # The lock on the job makes two helpers that join at once count one another.
            locked = select(JobRow).where(JobRow.id == job_id).with_for_update()
            if session.scalars(locked).one_or_none() is None:
                return None
            free = select(JobRow).where(JobRow.id == job_id, _takes_helper(self._max_workers))
            row = session.scalars(free).one_or_none()
            if row is None:
                return None
            place = session.scalars(
                insert(WorkerRow)
                .values(
                    job_id=job_id,
                    token=token,
                    worker=worker[:200],
                    role="helper",
                    attempt=row.attempt,
                    joined_at=db_now(),
                    **lease_of(self._lease_s),
                )
                .returning(WorkerRow)
            ).one()
            change(session, job_id, "worker", entry=worker_of(place).model_dump_json())
            request = ConvertRequest.model_validate_json(row.request)
            return HelperClaim(
                job_id=job_id,
                token=token,
                request=request,
                limits=limits_of(session, row.tenant),
                max_workers=row.max_workers or self._max_workers,
                attempt=row.attempt,
                tenant=tenant_of(row),
                traceparent=row.traceparent,
            )

    def heartbeat(self, claim: HelperClaim) -> bool:
        """Renew the place; False if the helper must stop: the job has ended, or is to be cancelled."""
        helped = select(JobRow.id).where(JobRow.id == claim.job_id, *_goes_on()).exists()
        with self._database.write() as session:
            return change_row(session, WorkerRow, *_place(claim), helped, **lease_of(self._lease_s)) is not None

    def peek(self, claim: HelperClaim) -> bool:
        """Report if the helper may go on, without renewing its place."""
        query = select(JobRow.id).where(JobRow.id == claim.job_id, *_goes_on())
        with self._database.read() as session:
            return session.scalars(query).one_or_none() is not None

    def leave(self, claim: HelperClaim, share: WorkShare | None = None, *, failed: bool = False) -> None:
        """Give up the place. `share` is the helper's report; `failed` says that its engine ended with an error."""
        with self._database.write() as session:
            report = {} if share is None else share.model_dump()
            place = change_row(session, WorkerRow, *_place(claim), left_at=db_now(), failed=int(failed), **report)
            if place is not None:
                change(session, claim.job_id, "worker", entry=worker_of(place).model_dump_json())

    def present(self, job_id: str) -> int:
        """The number of helpers of a job that have not left and whose lease has not ended."""
        with self._database.read() as session:
            return session.scalars(select(_present()).where(JobRow.id == job_id)).one()


def help_wanted(session: Session, max_workers: int) -> bool:
    """True if a worker that asked now could help a job."""
    return session.scalars(select(JobRow.id).where(_takes_helper(max_workers)).limit(1)).first() is not None


def free_of_helpers(other: type[JobRow]) -> ColumnElement[bool]:
    """The condition that no helper is at work for this job."""
    return ~(select(WorkerRow.token).where(WorkerRow.job_id == other.id, *_at_work()).exists())


def _place(claim: HelperClaim) -> tuple[ColumnElement[bool], ...]:
    return (WorkerRow.job_id == claim.job_id, WorkerRow.token == claim.token, WorkerRow.left_at.is_(None))


def _at_work() -> tuple[ColumnElement[bool], ...]:
    return (WorkerRow.role == "helper", WorkerRow.left_at.is_(None), is_held(WorkerRow))


def _present() -> ScalarSelect[int]:
    return select(func.count()).where(WorkerRow.job_id == JobRow.id, *_at_work()).correlate(JobRow).scalar_subquery()


def _goes_on() -> tuple[ColumnElement[bool], ...]:
    # Between two attempts a helper stays: it is among those that the next owner meets.
    states = [state.value for state in (JobState.QUEUED, *ACTIVE)]
    return (JobRow.state.in_(states), JobRow.cancel_requested == 0)


def _takes_helper(max_workers: int) -> ColumnElement[bool]:
    most = case((JobRow.max_workers > 0, JobRow.max_workers), else_=max_workers)
    failed = (
        select(func.count())
        .where(WorkerRow.job_id == JobRow.id, WorkerRow.attempt == JobRow.attempt, WorkerRow.failed == 1)
        .correlate(JobRow)
        .scalar_subquery()
    )
    return and_(
        JobRow.kind == JobKind.CONVERT.value,
        JobRow.state.in_([JobState.RUNNING.value, JobState.VERIFYING.value]),
        JobRow.takes_workers == 1,
        JobRow.cancel_requested == 0,
        or_(JobRow.lease_until.is_(None), is_held(JobRow)),
        has_room_for_helpers(JobRow),
        _present() + 1 < most,
        failed < _MOST_FAILED,
    )
