"""The one statement that moves a job from state to state, with its entry in the event log."""

from __future__ import annotations

from typing import Any, Literal

from sqlalchemy import ColumnElement, insert, update
from sqlalchemy.orm import Session

from reshard.models import JobState
from reshard_jobs.states import sources_of
from reshard_jobs.tables import EventRow, JobRow, db_now


def move(session: Session, job_id: str, to: JobState, *conditions: ColumnElement[bool], **values: Any) -> JobRow | None:
    """Move a job to `to` if the state machine and all `conditions` allow it: one conditional UPDATE.

    Returns:
        The job as it is now, or None if it was left alone.
    """
    allowed = JobRow.state.in_([state.value for state in sources_of(to)])
    return change(session, job_id, "state", allowed, *conditions, state=to.value, **values)


def change(
    session: Session,
    job_id: str,
    kind: Literal["state", "progress"],
    *conditions: ColumnElement[bool],
    **values: Any,
) -> JobRow | None:
    """Update a job under `conditions` and log the change with the next sequence number."""
    statement = (
        update(JobRow)
        .where(JobRow.id == job_id, *conditions)
        .values(last_seq=JobRow.last_seq + 1, **values)
        .returning(JobRow)
        .execution_options(synchronize_session=False, populate_existing=True)
    )
    row = session.scalars(statement).one_or_none()
    if row is not None:
        log(session, row, kind)
    return row


def log(session: Session, row: JobRow, kind: Literal["state", "progress"]) -> None:
    """Append the job as it is now to its event log."""
    session.execute(
        insert(EventRow).values(
            job_id=row.id, seq=row.last_seq, at=db_now(), kind=kind, state=row.state, progress=row.progress
        )
    )
