"""Repairs jobs without an owner: lost leases, cancels without a worker, and jobs whose message was lost.

Any number of reapers may run at once: each step is a conditional UPDATE.

A lease can end because the database was away, not its owner. Nobody could sweep then, either. So the database keeps the
time of the last sweep by any reaper. A sweep after a gap renews all leases: the owners have one more lease to come
back. A SQLite file is never away.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import ColumnElement, case, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from reshard.errors import JobError, ReshardError, from_problem
from reshard.models import JobKind, JobState, Problem
from reshard_jobs.database import Database
from reshard_jobs.discards import discard_waits
from reshard_jobs.helpers import help_wanted
from reshard_jobs.leased_rows import RELEASED, has_ended, lease_of
from reshard_jobs.leases import exhausted, failure, owners_left, work_waits
from reshard_jobs.refusals import last_refused_at, others_may_try, somebody_lives
from reshard_jobs.retention import Retention
from reshard_jobs.states import ACTIVE
from reshard_jobs.tables import JobRow, MetaRow, WorkerRow, db_now
from reshard_jobs.totals import ATTEMPTS, add_totals
from reshard_jobs.transitions import move

_BATCH = 500
_SWEPT_AT = "swept_at"
_CANCEL_GRACE_LEASES = 3.0
"""Number of leases after which a cancel that no worker has cleaned up ends. The clean-up follows when one is there."""
_RESTART_LEASES = 3.0
"""Number of leases after which a worker that was not seen will not come back for a job that all others refused."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """The result of one pass of the reaper."""

    requeued: tuple[str, ...]
    failed: tuple[str, ...]
    cancelled: tuple[str, ...]
    work_waits: bool
    """True if a job is available or takes helpers, or files of an ended one are to be discarded. The caller rings the
    doorbell: the message may be lost."""
    forgotten: int = 0
    """The number of old jobs whose record was removed."""


class Reaper:
    """Finds and repairs jobs without an owner in a job database.

    Args:
        database: The job database.
        lease_s: The lease of its workers.
        interval_s: Seconds between two sweeps.
        max_workers: The number of workers that may run a job at once, for jobs that name none.
        retention: Times for which ended jobs and their files are kept.
    """

    def __init__(
        self,
        database: Database,
        *,
        lease_s: float,
        interval_s: float = 0.0,
        max_workers: int = 1,
        retention: Retention | None = None,
    ) -> None:
        self._database = database
        self._lease_s = lease_s
        # An owner renews its lease at least twice within it, so that a shorter outage costs no lease.
        self._longest_gap_s = max(lease_s / 2, 2 * interval_s)
        self._max_workers = max_workers
        self._retention = retention or Retention()

    def sweep(self) -> Sweep:
        """Make one pass over the jobs."""
        with self._database.write() as session:
            if not self._database.is_sqlite and self._gap_s(session) > self._longest_gap_s:
                self._renew_all(session)
            requeued, failed = self._requeue_lost(session)
            if requeued or failed:
                add_totals(session, {(ATTEMPTS, "lost"): len(requeued) + len(failed)})
            failed += self._fail_untried(session)
            cancelled = self._end_orphaned_cancels(session)
            self._end_lost_helpers(session)
            forgotten = self._retention.sweep(session, lease_s=self._lease_s)
            waits = work_waits(session) or help_wanted(session, self._max_workers) or discard_waits(session)
            return Sweep(requeued, failed, cancelled, waits, forgotten)

    def _gap_s(self, session: Session) -> float:
        """Seconds since the last sweep of any reaper; this one is recorded as the last."""
        session.execute(insert(MetaRow).values(name=_SWEPT_AT, value="0").on_conflict_do_nothing())
        # The lock makes one reaper sweep at a time.
        row = session.scalars(select(MetaRow).where(MetaRow.name == _SWEPT_AT).with_for_update()).one()
        now = session.scalars(select(db_now())).one()
        gap_s = now - float(row.value)
        row.value = repr(now)
        return gap_s

    def _renew_all(self, session: Session) -> None:
        states = [state.value for state in (*ACTIVE, JobState.CANCELLING)]
        owned = (JobRow.state.in_(states), JobRow.owner.is_not(None))
        helping = (WorkerRow.role == "helper", WorkerRow.left_at.is_(None))
        session.execute(update(JobRow).where(*owned).values(lease_of(self._lease_s)))
        session.execute(update(WorkerRow).where(*helping).values(lease_of(self._lease_s)))

    def _requeue_lost(self, session: Session) -> tuple[tuple[str, ...], tuple[str, ...]]:
        lost = (JobRow.state.in_([state.value for state in ACTIVE]), has_ended(JobRow))
        requeued: list[str] = []
        failed: list[str] = []
        for row in session.scalars(select(JobRow).where(*lost).limit(_BATCH)).all():
            # The fence of the owner that was read: it may have renewed its lease or ended in between.
            seen = (*lost, JobRow.attempt == row.attempt)
            if row.attempt - row.releases < row.max_attempts:
                if move(session, row.id, JobState.QUEUED, *seen, worker=None, **RELEASED):
                    owners_left(session, row.id)
                    requeued.append(row.id)
                continue
            error = exhausted(row.attempt - row.releases, _last_error(row))
            if self._fail(session, row.id, error, *seen):
                owners_left(session, row.id)
                failed.append(row.id)
        return tuple(requeued), tuple(failed)

    def _fail(self, session: Session, job_id: str, problem: ReshardError, *conditions: ColumnElement[bool]) -> bool:
        ending = failure(problem, keep_failed_s=self._retention.keep_failed_s)
        return move(session, job_id, JobState.FAILED, *conditions, **ending) is not None

    def _fail_untried(self, session: Session) -> tuple[str, ...]:
        """End jobs that every live worker has refused. One that restarts gets the time of two leases to come back."""
        if not somebody_lives(session, lease_s=self._lease_s):
            return ()
        waiting = (JobRow.state == JobState.QUEUED.value, last_refused_at() < db_now() - 2 * self._lease_s)
        found = session.scalars(select(JobRow).where(*waiting).limit(_BATCH)).all()
        return tuple(
            row.id
            for row in found
            if not others_may_try(session, row.id, lease_s=_RESTART_LEASES * self._lease_s)
            and self._fail(session, row.id, _last_error(row), *waiting)
        )

    def _end_lost_helpers(self, session: Session) -> None:
        lost = (WorkerRow.role == "helper", WorkerRow.left_at.is_(None), has_ended(WorkerRow))
        session.execute(update(WorkerRow).where(*lost).values(left_at=WorkerRow.lease_until))

    def _end_orphaned_cancels(self, session: Session) -> tuple[str, ...]:
        silent = has_ended(JobRow, for_s=_CANCEL_GRACE_LEASES * self._lease_s)
        dead = (JobRow.state == JobState.CANCELLING.value, silent)
        ids = session.scalars(select(JobRow.id).where(*dead).limit(_BATCH)).all()
        return tuple(
            job_id
            for job_id in ids
            if move(
                session,
                job_id,
                JobState.CANCELLED,
                *dead,
                finished_at=db_now(),
                lease_until=None,
                # Whoever lives again removes the files.
                discard_at=case((JobRow.kind == JobKind.CONVERT.value, db_now())),
                discard_asked=1,
            )
        )


def _last_error(row: JobRow) -> ReshardError:
    """The error of the last attempt that recorded one; without one, its worker fell silent."""
    if row.error:
        return from_problem(Problem.model_validate_json(row.error).model_dump())
    return JobError("job.lost", "the worker stopped renewing its lease")
