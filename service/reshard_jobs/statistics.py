"""Numbers about the jobs of all tenants, for metrics."""

from __future__ import annotations

from sqlalchemy import ColumnElement, case, func, select, text

from reshard.models import JobState, WorkShare
from reshard.webhook_models import DeliveryState
from reshard_jobs.database import Database
from reshard_jobs.tables import JobRow, WorkerRow, db_now
from reshard_jobs.webhook_tables import DeliveryRow

LATELY_S = 3600
"""Jobs and deliveries that ended within so many seconds have ended lately."""
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

    def count_by_state(self) -> dict[JobState, int]:
        """The number of jobs in each state, including states without jobs."""
        with self._database.read() as session:
            rows = session.execute(select(JobRow.state, func.count()).group_by(JobRow.state)).all()
        found = {JobState(state): count for state, count in rows}
        return {state: found.get(state, 0) for state in JobState}

    def total_shares(self) -> WorkShare:
        """The sums of what all workers of all jobs reported."""
        names = list(WorkShare.model_fields)
        with self._database.read() as session:
            sums = session.execute(select(*(func.sum(getattr(WorkerRow, name)) for name in names))).one()
        return WorkShare(**{name: int(found or 0) for name, found in zip(names, sums, strict=True)})

    def workers_at_work(self) -> dict[str, int]:
        """The number of owners and of helpers that have not left."""
        query = select(WorkerRow.role, func.count()).where(WorkerRow.left_at.is_(None)).group_by(WorkerRow.role)
        with self._database.read() as session:
            found: dict[str, int] = {row[0]: row[1] for row in session.execute(query)}
        return {role: found.get(role, 0) for role in ("owner", "helper")}

    def count_leftovers(self) -> int:
        """The number of ended jobs whose attempts may have left files that are not removed yet."""
        with self._database.read() as session:
            return session.execute(select(func.count()).where(JobRow.discard_at.is_not(None))).scalar_one()

    def dead_lately(self) -> int:
        """The number of deliveries of webhooks that were given up within the last hour."""
        lately = (DeliveryRow.state == DeliveryState.DEAD.value, DeliveryRow.ended_at >= db_now() - LATELY_S)
        with self._database.read() as session:
            return session.scalars(select(func.count()).select_from(DeliveryRow).where(*lately)).one()

    def delivery_age_s(self) -> float:
        """Seconds since the event of the oldest delivery that waits to be sent or tried again; 0 if none."""
        query = select(db_now() - func.min(DeliveryRow.created_at))
        with self._database.read() as session:
            age = session.scalars(query.where(DeliveryRow.state == DeliveryState.PENDING.value)).one()
        return max(0.0, age or 0.0)

    def ping(self) -> None:
        """Raise SQLAlchemy's error if the database does not answer."""
        with self._database.read() as session:
            session.execute(text("SELECT 1"))


def _lately() -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    states = [state.value for state in _ENDED]
    return (JobRow.state.in_(states), JobRow.finished_at >= db_now() - LATELY_S)
