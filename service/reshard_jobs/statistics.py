"""Numbers about the queue and about jobs that ended lately, for metrics."""

from __future__ import annotations

from sqlalchemy import ColumnElement, case, func, select

from reshard.models import JobState
from reshard_jobs.database import Database
from reshard_jobs.tables import JobRow, db_now

LATELY_S = 3600
"""Jobs that ended within so many seconds have ended lately."""
_ENDED = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class JobStatistics:
    """Numbers that are read from a job database, with one query each."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def queue_age_s(self) -> float:
        """Seconds since the oldest waiting job was posted, or since its pause between two attempts ended; 0 if none.

        A job that waits for another job's target counts.
        """
        since = case((JobRow.not_before > JobRow.created_at, JobRow.not_before), else_=JobRow.created_at)
        waiting = (JobRow.state == JobState.QUEUED.value, JobRow.not_before <= db_now(), JobRow.cancel_requested == 0)
        with self._database.read() as session:
            age = session.scalars(select(db_now() - func.min(since)).where(*waiting)).one()
        return max(0.0, age or 0.0)

    def ended_lately(self) -> dict[JobState, int]:
        """The number of jobs that ended within the last hour, by state."""
        query = select(JobRow.state, func.count()).where(*_lately()).group_by(JobRow.state)
        with self._database.read() as session:
            found = {JobState(state): count for state, count in session.execute(query).all()}
        return {state: found.get(state, 0) for state in _ENDED}

    def retried_lately(self) -> int:
        """The number of jobs that ended within the last hour and needed more than one attempt.

        Attempts that a worker gave back, because it was told to stop, do not count.
        """
        query = select(func.count()).select_from(JobRow).where(*_lately(), JobRow.attempt - JobRow.releases > 1)
        with self._database.read() as session:
            return session.scalars(query).one()


def _lately() -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    states = [state.value for state in _ENDED]
    return (JobRow.state.in_(states), JobRow.finished_at >= db_now() - LATELY_S)
