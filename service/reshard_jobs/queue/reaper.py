"""Repairs jobs without an owner (lost leases, cancels without a worker, lost messages), and removes old records.

Any number of reapers may run at once: each step is a conditional UPDATE.

A lease can end because the database was away, not its owner. Nobody could sweep then, either. So the database keeps the
time of the last sweep by any reaper. A sweep after a gap renews all leases: the owners have one more lease to come
back. A SQLite file is never away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, CursorResult, case, delete, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from reshard.choices import JobKind, JobState
from reshard.errors import JobError, ReshardError, from_problem
from reshard.models.jobs import Problem
from reshard_jobs.database import Database
from reshard_jobs.queue.discards import discard_waits
from reshard_jobs.queue.helpers import help_wanted
from reshard_jobs.queue.idempotency import JOB_KEY
from reshard_jobs.queue.leased_rows import RELEASED, has_ended, lease_of
from reshard_jobs.queue.leases import exhausted, failure, owners_left, work_waits
from reshard_jobs.queue.refusals import last_refused_at, others_may_try, somebody_lives
from reshard_jobs.queue.states import ACTIVE, TERMINAL, move
from reshard_jobs.settings import JobSettings
from reshard_jobs.statistics import ATTEMPTS, add_totals
from reshard_jobs.tables import (
    AuditRow,
    EventRow,
    IdempotencyRow,
    JobRow,
    LayoutRow,
    MetaRow,
    NodeRow,
    WorkerRow,
    db_now,
)
from reshard_jobs.tenants.tenants import DAY_S

# Retention: how long ended jobs, their files, their progress and idempotency keys are kept.

_ROWS_AT_ONCE = 200
"""Number of jobs that one sweep forgets at most: a sweep is one transaction, beside those of the workers."""
_TERMINAL = [state.value for state in TERMINAL]
_NODE_LEASES = 10.0


@dataclass(frozen=True, slots=True)
class Retention:
    """Seconds for which each kind of record is kept after the end of its job.

    Attributes:
        keep_failed_s: The files of a job that FAILED.
        keep_jobs_s: The record of a job, unless files of it are still to be discarded.
        keep_events_s: The entries of progress in the log of a job.
        keep_keys_s: An idempotency key, counted from its first request.
        keep_audit_s: An entry of the audit log.
    """

    keep_failed_s: float = 86_400.0
    keep_jobs_s: float = 30 * 86_400.0
    keep_events_s: float = 7 * 86_400.0
    keep_keys_s: float = 7 * 86_400.0
    keep_audit_s: float = 366 * 86_400.0

    @classmethod
    def of(cls, settings: JobSettings) -> Retention:
        """The times that an operator has set."""
        return cls(
            settings.keep_failed_s,
            settings.keep_jobs_s,
            settings.keep_events_s,
            settings.keep_keys_s,
            settings.keep_audit_s,
        )

    def sweep(self, session: Session, *, lease_s: float) -> int:
        """Remove a batch of what is too old; returns the number of jobs that were forgotten."""
        # An id that a caller gave to a job finds it as long as there is the job: it goes with it.
        loose = or_(IdempotencyRow.job_id.is_(None), ~IdempotencyRow.key.startswith(JOB_KEY, autoescape=True))
        _delete(session, IdempotencyRow, loose, IdempotencyRow.held_until < db_now() - self.keep_keys_s)
        _delete(session, NodeRow, NodeRow.seen_at < db_now() - _NODE_LEASES * lease_s)
        _delete(session, AuditRow, AuditRow.at < db_now() - self.keep_audit_s)
        # The quota of a day counts layouts, too, and for a day a request for one that has expired is `request.gone`.
        _delete(session, LayoutRow, LayoutRow.expires_at < db_now() - DAY_S)
        ended = JobRow.state.in_(_TERMINAL)
        # `created_at` is a part of an index, and no job ends before it was created.
        quiet = (ended, JobRow.created_at < db_now() - self.keep_events_s)
        quiet = (*quiet, JobRow.finished_at < db_now() - self.keep_events_s)
        noisy = select(EventRow.job_id).where(EventRow.job_id == JobRow.id, EventRow.kind == "progress").exists()
        silent = select(JobRow.id).where(*quiet, noisy).limit(_ROWS_AT_ONCE)
        _delete(session, EventRow, EventRow.kind == "progress", EventRow.job_id.in_(silent))
        old = (ended, JobRow.created_at < db_now() - self.keep_jobs_s, JobRow.finished_at < db_now() - self.keep_jobs_s)
        gone = select(JobRow.id).where(*old, JobRow.discard_at.is_(None)).limit(_ROWS_AT_ONCE)
        return _delete(session, JobRow, JobRow.id.in_(gone))


def _delete(session: Session, table: type[Any], *conditions: Any) -> int:
    statement = delete(table).where(*conditions).execution_options(synchronize_session=False)
    result = session.execute(statement)
    return result.rowcount if isinstance(result, CursorResult) else 0


# The repair of jobs.

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
