"""What nobody owns any more: lost leases, orphaned cancels, and work that nobody heard of.

Any number of reapers may run at once: each step is a conditional UPDATE.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from reshard.errors import JobError, from_problem
from reshard.models import JobState, Problem
from reshard_jobs.database import Database
from reshard_jobs.leases import exhausted, problem_json, work_waits
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
    work_waits: bool
    """A job is to be had: ring, in case nobody has heard of it."""


class Reaper:
    """Finds what was lost in a job database.

    Args:
        database: The job database.
        lease_s: The lease of its workers.
    """

    def __init__(self, database: Database, *, lease_s: float) -> None:
        self._database = database
        self._lease_s = lease_s

    def sweep(self) -> Sweep:
        """One pass over the jobs."""
        with self._database.write() as session:
            requeued, failed = self._requeue_lost(session)
            cancelled = self._end_orphaned_cancels(session)
            return Sweep(requeued, failed, cancelled, work_waits(session))

    def _requeue_lost(self, session: Session) -> tuple[tuple[str, ...], tuple[str, ...]]:
        lost = (JobRow.state.in_([state.value for state in ACTIVE]), JobRow.lease_until < db_now())
        requeued: list[str] = []
        failed: list[str] = []
        for row in session.scalars(select(JobRow).where(*lost).limit(_BATCH)).all():
            # The fence of the owner that we saw: it may have renewed, or ended, in between.
            seen = (*lost, JobRow.attempt == row.attempt)
            if row.attempt - row.releases < row.max_attempts:
                gone = {"owner": None, "worker": None, "lease_until": None}
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


def _silent() -> JobError:
    return JobError("job.lost", "the worker stopped renewing its lease")
