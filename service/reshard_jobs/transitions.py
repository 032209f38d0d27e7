"""The one statement that moves a job from state to state, with its entry in the event log."""

from __future__ import annotations

from typing import Any, Literal

from sqlalchemy import ColumnElement, insert
from sqlalchemy.orm import Session

from reshard.models import JobState
from reshard_jobs.leased_rows import change_row
from reshard_jobs.outbox import announce
from reshard_jobs.states import sources_of
from reshard_jobs.tables import EventRow, JobRow, db_now


def move(session: Session, job_id: str, to: JobState, *conditions: ColumnElement[bool], **values: Any) -> JobRow | None:
    """Move a job to `to` if the state machine and all `conditions` allow it: one conditional UPDATE.

    Returns:
        The job as it is now; None if it was not changed.
    """
    allowed = JobRow.state.in_([state.value for state in sources_of(to)])
    return change(session, job_id, "state", allowed, *conditions, state=to.value, **values)


def change(
    session: Session,
    job_id: str,
    kind: Literal["state", "progress", "worker"],
    *conditions: ColumnElement[bool],
    entry: str | None = None,
    **values: Any,
) -> JobRow | None:
    """Update a job under `conditions` and log the change with the next sequence number.

    Args:
        session: A transaction that writes.
        job_id: The job.
        kind: The kind of the entry in the log.
        conditions: The update is made only if all of them hold.
        entry: The helper that joined or left, as JSON.
        values: New values by column.

    Returns:
        The job as it is now; None if it was not changed.
    """
    row = change_row(session, JobRow, JobRow.id == job_id, *conditions, last_seq=JobRow.last_seq + 1, **values)
    if row is not None:
        log(session, row, kind, entry)
    return row


def log(session: Session, row: JobRow, kind: Literal["state", "progress", "worker"], worker: str | None = None) -> None:
    """Append the job as it is now to its event log, and a change of its state to the outbox of webhooks."""
    if kind == "state":
        announce(session, row)
    session.execute(
        insert(EventRow).values(
            job_id=row.id,
            seq=row.last_seq,
            at=db_now(),
            kind=kind,
            state=row.state,
            progress=row.progress,
            worker=worker,
        )
    )
