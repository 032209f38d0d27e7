"""Numbers about unfinished jobs by state and tenant, and about the engines of live workers, for metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import func, literal, select

from reshard.models import Progress
from reshard_jobs.database import Database
from reshard_jobs.states import TERMINAL
from reshard_jobs.tables import JobRow, NodeRow, db_now

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
