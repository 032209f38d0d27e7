"""Discards: removals of what the attempts of ended jobs left in and beside their targets.

A job that FAILED keeps its files for a while, so that a retry goes on where it stopped. When `discard_at` has come, a
worker claims the discard as it claims jobs, and removes what conversions of the job's recorded plans left. Nothing else
in the target is touched: another program may convert into it.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, delete, or_, select, update
from sqlalchemy.orm import Session, aliased

from reshard.choices import JobState
from reshard.models.jobs import ConvertRequest
from reshard_jobs.database import Database
from reshard_jobs.limits import TenantLimits, limits_of
from reshard_jobs.queue.helpers import free_of_helpers
from reshard_jobs.queue.leased_rows import RELEASED, change_row, claim_first, is_free, is_held, lease_of, new_owner
from reshard_jobs.queue.states import ACTIVE, TERMINAL
from reshard_jobs.records import tenant_of
from reshard_jobs.tables import ANY_PLAN, JobRow, PlanRow, db_now

FIRST_PAUSE_S = 60.0
"""Seconds until a discard that failed is tried again for the first time."""
_LONGEST_PAUSE_S = 6 * 3600.0
_TERMINAL = [state.value for state in TERMINAL]
_BUSY = [state.value for state in (*ACTIVE, JobState.CANCELLING)]


@dataclass(frozen=True, slots=True)
class DiscardClaim:
    """An ended job whose files this process removes."""

    job_id: str
    owner: str
    request: ConvertRequest
    limits: TenantLimits
    plans: tuple[str, ...] | None
    """The plans whose files are removed; None for whatever is unfinished in the target."""
    asked: bool
    """True if someone wants the files to go, even if they look as if a conversion still used them."""
    succeeded: bool
    attempt: int = 0
    tenant: str = "default"


class Discards:
    """The discards of a job database.

    Args:
        database: The job database.
        lease_s: Seconds that a claim lasts after its last heartbeat, by the database's clock.
    """

    def __init__(self, database: Database, *, lease_s: float) -> None:
        self._database = database
        self.lease_s = lease_s

    def waits(self) -> bool:
        """True if a worker that asked now would get a discard."""
        with self._database.read() as session:
            return discard_waits(session)

    def pending(self, *, due: bool = False) -> list[str]:
        """The ids of ended jobs that have files to discard, now or later; with `due`, now."""
        query = select(JobRow.id).where(JobRow.discard_at.is_not(None)).order_by(JobRow.discard_at)
        with self._database.read() as session:
            return list(session.scalars(query.where(JobRow.discard_at <= db_now()) if due else query))

    def bring_forward(self) -> None:
        """Make all discards due now, also of files that look as if a conversion still used them."""
        values = {"discard_at": db_now(), "discard_asked": 1, "discard_tries": 0}
        with self._database.write() as session:
            session.execute(update(JobRow).where(JobRow.discard_at.is_not(None)).values(**values))

    def claim_next(self) -> DiscardClaim | None:
        """Claim the discard that has been due for longest; None if none is due."""
        order = (JobRow.discard_at, JobRow.id)
        return claim_first(self._database, select(JobRow.id).where(*_due()).order_by(*order), self._claim)[0]

    def _claim(self, job_id: str) -> DiscardClaim | None:
        owner = new_owner()
        with self._database.write() as session:
            self._database.lock_target_of(session, job_id)
            row = change_row(session, JobRow, JobRow.id == job_id, *_due(), owner=owner, **lease_of(self.lease_s))
            if row is None:
                return None
            plans = tuple(session.scalars(select(PlanRow.digest).where(PlanRow.job_id == job_id)))
            return DiscardClaim(
                job_id=job_id,
                owner=owner,
                request=ConvertRequest.model_validate_json(row.request),
                limits=limits_of(session, row.tenant),
                plans=None if ANY_PLAN in plans else plans,
                asked=bool(row.discard_asked),
                succeeded=row.state == JobState.SUCCEEDED.value,
                attempt=row.attempt,
                tenant=tenant_of(row),
            )

    def heartbeat(self, claim: DiscardClaim) -> bool:
        """Renew the claim; False if it was lost."""
        return self._write(claim, **lease_of(self.lease_s))

    def done(self, claim: DiscardClaim) -> bool:
        """Record that nothing is left. False if the claim was lost."""
        with self._database.write() as session:
            if not _set(session, claim, discard_at=None, discard_asked=0, discard_tries=0, **RELEASED):
                return False
            forget_plans(session, claim.job_id)
            return True

    def failed(self, claim: DiscardClaim) -> bool:
        """Record that files are left: the discard is tried again after a pause, which doubles each time."""
        with self._database.write() as session:
            query = select(JobRow.discard_tries).where(JobRow.id == claim.job_id, *_fence(claim))
            tries = session.scalars(query).one_or_none()
            if tries is None:
                return False
            pause_s = min(FIRST_PAUSE_S * 2 ** min(tries, 20), _LONGEST_PAUSE_S)
            return _set(session, claim, discard_at=db_now() + pause_s, discard_tries=tries + 1, **RELEASED)

    def give_back(self, claim: DiscardClaim) -> bool:
        """Leave the discard to the next worker, because this one was told to stop."""
        return self._write(claim, **RELEASED)

    def _write(self, claim: DiscardClaim, **values: object) -> bool:
        with self._database.write() as session:
            return _set(session, claim, **values)


def discard_waits(session: Session) -> bool:
    """True if a worker that asked now would get a discard."""
    return session.scalars(select(JobRow.id).where(*_due()).limit(1)).first() is not None


def forget_plans(session: Session, job_id: str) -> None:
    """Take note that attempts of a job have left nothing."""
    session.execute(delete(PlanRow).where(PlanRow.job_id == job_id))


def being_discarded(job: type[JobRow]) -> ColumnElement[bool]:
    """The condition that a worker is removing the files of this ended job."""
    return and_(job.state.in_(_TERMINAL), is_held(job))


def _fence(claim: DiscardClaim) -> tuple[ColumnElement[bool], ...]:
    return (JobRow.owner == claim.owner, JobRow.state.in_(_TERMINAL), JobRow.lease_until.is_not(None))


def _set(session: Session, claim: DiscardClaim, **values: object) -> bool:
    return change_row(session, JobRow, JobRow.id == claim.job_id, *_fence(claim), **values) is not None


def _due() -> tuple[ColumnElement[bool], ...]:
    other = aliased(JobRow)
    busy = or_(other.state.in_(_BUSY), being_discarded(other), ~free_of_helpers(other))
    rival = select(other.id).where(other.target == JobRow.target, other.id != JobRow.id, busy)
    return (
        JobRow.discard_at.is_not(None),
        JobRow.discard_at <= db_now(),
        JobRow.state.in_(_TERMINAL),
        is_free(JobRow),
        free_of_helpers(JobRow),
        or_(JobRow.target == "", ~rival.exists()),
    )
