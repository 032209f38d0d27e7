"""What nobody owns any more: lost leases, unheard jobs, orphaned cancels.

Any number of reapers may run at once: each step is a conditional UPDATE.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import and_, case, or_, select, update
from sqlalchemy.orm import Session

from reshard.errors import JobError, from_problem
from reshard.models import JobState, Problem
from reshard_jobs.database import Database
from reshard_jobs.leases import exhausted, problem_json
from reshard_jobs.moves import move
from reshard_jobs.states import ACTIVE
from reshard_jobs.tables import JobRow, db_now

_BATCH = 500
_CANCEL_GRACE_LEASES = 3.0
"""An orphaned cancel that no worker cleaned up for this many leases ends without the clean-up."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What one pass of the reaper did."""

    requeued: tuple[str, ...]
    failed: tuple[str, ...]
    cancelled: tuple[str, ...]
    to_ring: tuple[str, ...]
    """Jobs whose doorbell is to be rung (again)."""


class Reaper:
    """Finds what was lost in a job database.

    Args:
        database: The job database.
        lease_s: The lease of its workers.
        ring_s: How long a QUEUED job stays unheard before its doorbell is rung again.
    """

    def __init__(self, database: Database, *, lease_s: float, ring_s: float = 60.0) -> None:
        self._database = database
        self._lease_s = lease_s
        self._ring_s = ring_s

    def sweep(self) -> Sweep:
        """One pass over the jobs."""
        with self._database.write() as session:
            requeued, failed = self._requeue_lost(session)
            cancelled = self._end_orphaned_cancels(session)
            return Sweep(requeued, failed, cancelled, (*requeued, *self._find_unheard(session)))

    def _requeue_lost(self, session: Session) -> tuple[tuple[str, ...], tuple[str, ...]]:
        lost = (JobRow.state.in_([state.value for state in ACTIVE]), JobRow.lease_until < db_now())
        requeued: list[str] = []
        failed: list[str] = []
        for row in session.scalars(select(JobRow).where(*lost).limit(_BATCH)).all():
            # The fence of the owner that we saw: it may have renewed, or ended, in between.
            seen = (*lost, JobRow.attempt == row.attempt)
            if row.attempt - row.releases < row.max_attempts:
                gone = {"owner": None, "worker": None, "lease_until": None, "rung_at": db_now()}
                if move(session, row.id, JobState.QUEUED, *seen, **gone):
                    requeued.append(row.id)
                continue
            last = from_problem(Problem.model_validate_json(row.error).model_dump()) if row.error else _silent()
            error = problem_json(exhausted(row.attempt, last))
            if move(session, row.id, JobState.FAILED, *seen, error=error, finished_at=db_now(), lease_until=None):
                failed.append(row.id)
        return tuple(requeued), tuple(failed)

    def _end_orphaned_cancels(self, session: Session) -> tuple[str, ...]:
        dead = (
            JobRow.state == JobState.CANCELLING.value,
            JobRow.lease_until < db_now() - _CANCEL_GRACE_LEASES * self._lease_s,
        )
        ids = session.scalars(select(JobRow.id).where(*dead).limit(_BATCH)).all()
        return tuple(
            job_id
            for job_id in ids
            if move(session, job_id, JobState.CANCELLED, *dead, finished_at=db_now(), lease_until=None)
        )

    def _find_unheard(self, session: Session) -> tuple[str, ...]:
        # The pause grows with the job's age: a long queue must not fill the broker with echoes.
        age = db_now() - JobRow.created_at
        pause = case((age / 4 > self._ring_s, age / 4), else_=self._ring_s)
        waiting = or_(
            and_(JobRow.state == JobState.QUEUED.value, JobRow.not_before <= db_now()),
            and_(JobRow.state == JobState.CANCELLING.value, JobRow.lease_until <= db_now()),
        )
        # After a graceful release the bell is due at once: `rung_at` is 0.
        due = (waiting, or_(JobRow.rung_at < db_now() - pause, JobRow.rung_at < JobRow.not_before))
        ids = session.scalars(select(JobRow.id).where(*due).order_by(JobRow.created_at).limit(_BATCH)).all()
        statement = (
            update(JobRow)
            .where(JobRow.id.in_(ids), *due)
            .values(rung_at=db_now())
            .returning(JobRow.id)
            .execution_options(synchronize_session=False)
        )
        return tuple(session.scalars(statement).all()) if ids else ()


def _silent() -> JobError:
    return JobError("job.lost", "the worker stopped renewing its lease")
