"""Numbers about the jobs of all tenants, for metrics."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import ColumnElement, Insert, case, func, literal, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from reshard.choices import JobState
from reshard.models.access import DeliveryState
from reshard.models.jobs import Progress, WorkShare
from reshard_jobs.database import Database
from reshard_jobs.queue.states import TERMINAL
from reshard_jobs.tables import DeliveryRow, JobRow, NodeRow, TotalRow, WorkerRow, db_now

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


# Numbers about unfinished jobs by state and tenant, and about the engines of live workers, for metrics.

MOST_TENANTS = 50
"""Number of tenants that metrics name; those with the smallest numbers are one label, `OTHERS`."""
OTHERS = "(others)"
"""No tenant can have this name."""


@dataclass
class Activity:
    """The unfinished jobs now."""

    jobs: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """The number of jobs by tenant and state."""
    bytes_done: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """The bytes that running jobs have written, by tenant and state."""
    bytes_total: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """The bytes that running jobs are to write, as far as they are planned."""


def activity(database: Database) -> Activity:
    """Read the unfinished jobs. Only jobs with an owner have progress: there are no more of them than workers."""
    tenant = getattr(JobRow, "tenant", literal("default"))
    unfinished = JobRow.state.not_in([state.value for state in TERMINAL])
    found = Activity()
    with database.read() as session:
        counted = select(tenant, JobRow.state, func.count()).where(unfinished).group_by(tenant, JobRow.state)
        for name, state, count in session.execute(counted):
            found.jobs[name, state] = count
            # Shown as 0, so that all three have the same labels.
            found.bytes_done[name, state] = found.bytes_total[name, state] = 0
        owned = select(tenant, JobRow.state, JobRow.progress).where(
            unfinished, JobRow.owner.is_not(None), JobRow.progress.is_not(None)
        )
        for name, state, text in session.execute(owned):
            progress = Progress.model_validate_json(text or "")
            found.bytes_done[name, state] += progress.bytes_done
            found.bytes_total[name, state] += progress.bytes_total
    return found


def engine_peak_bytes(database: Database, *, lease_s: float) -> int:
    """The most memory that the last engine of any live worker took; 0 if none is known."""
    alive = NodeRow.seen_at >= db_now() - lease_s
    with database.read() as session:
        return session.scalars(select(func.max(NodeRow.engine_peak_bytes)).where(alive)).one() or 0


def few_tenants(counts: Mapping[tuple[str, str], int]) -> Counter[tuple[str, str]]:
    """The counts with at most `MOST_TENANTS` tenants, those with the largest numbers, and the rest as `OTHERS`."""
    sums: Counter[str] = Counter()
    for (tenant, _), count in counts.items():
        sums[tenant] += count
    named = {tenant for tenant, _ in sorted(sums.items(), key=lambda item: (-item[1], item[0]))[:MOST_TENANTS]}
    found: Counter[tuple[str, str]] = Counter()
    for (tenant, label), count in counts.items():
        found[tenant if tenant in named else OTHERS, label] += count
    return found


# Totals that outlive the jobs they count, for metrics: ends of attempts, errors of stores, bytes by tenant.

logger = logging.getLogger(__name__)

ATTEMPTS = "attempts"
"""Attempts that ended, by their end: the outcomes of the supervisor, and `lost` for a lease that expired."""
STORE_ERRORS = "store_errors"
"""Attempts, helpers and removals that ended with an error of a store, by the error's code."""
READ_BYTES = "read_bytes"
WRITE_BYTES = "write_bytes"
"""Bytes of conversions that succeeded, by tenant."""


def add_totals(session: Session, counts: Mapping[tuple[str, str], int]) -> None:
    """Add to totals, by name and label, in the caller's transaction."""
    make = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    # In one order: two transactions that add to the same totals then never wait for each other in turn.
    for (name, label), count in sorted(counts.items()):
        statement: Insert = make(TotalRow).values(name=name, label=label[:64], value=count)
        session.execute(
            statement.on_conflict_do_update(
                index_elements=["name", "label"], set_={"value": TotalRow.value + statement.excluded.value}
            )
        )


class Totals:
    """The totals of a job database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Add to totals. A failure is logged: it must not change what happens to a job."""
        try:
            with self._database.write() as session:
                add_totals(session, counts)
        except DBAPIError as error:
            logger.warning("totals could not be added: %s", error)

    def read(self) -> dict[str, dict[str, int]]:
        """All totals, by name and label."""
        found: dict[str, dict[str, int]] = defaultdict(dict)
        with self._database.read() as session:
            for row in session.scalars(select(TotalRow)):
                found[row.name][row.label] = row.value
        return found
