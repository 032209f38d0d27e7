"""Retention: how long ended jobs, their files, their progress and idempotency keys are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import CursorResult, delete, or_, select
from sqlalchemy.orm import Session

from reshard_jobs.idempotency import JOB_KEY
from reshard_jobs.identity_tables import AuditRow
from reshard_jobs.settings import JobSettings
from reshard_jobs.states import TERMINAL
from reshard_jobs.tables import EventRow, IdempotencyRow, JobRow, NodeRow, db_now

_BATCH = 200
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
        ended = JobRow.state.in_(_TERMINAL)
        # `created_at` is a part of an index, and no job ends before it was created.
        quiet = (ended, JobRow.created_at < db_now() - self.keep_events_s)
        quiet = (*quiet, JobRow.finished_at < db_now() - self.keep_events_s)
        noisy = select(EventRow.job_id).where(EventRow.job_id == JobRow.id, EventRow.kind == "progress").exists()
        silent = select(JobRow.id).where(*quiet, noisy).limit(_BATCH)
        _delete(session, EventRow, EventRow.kind == "progress", EventRow.job_id.in_(silent))
        old = (ended, JobRow.created_at < db_now() - self.keep_jobs_s, JobRow.finished_at < db_now() - self.keep_jobs_s)
        gone = select(JobRow.id).where(*old, JobRow.discard_at.is_(None)).limit(_BATCH)
        return _delete(session, JobRow, JobRow.id.in_(gone))


def _delete(session: Session, table: type[Any], *conditions: Any) -> int:
    statement = delete(table).where(*conditions).execution_options(synchronize_session=False)
    result = session.execute(statement)
    return result.rowcount if isinstance(result, CursorResult) else 0
