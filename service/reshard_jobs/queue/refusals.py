"""Refusals: jobs that failed on a worker in a way that may be the fault of the worker's host.

Such a job is tried on another worker. It fails for good when no live worker is left that has not tried it, or when
`MOST_REFUSALS` workers have.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, ScalarSelect, delete, func, insert, or_, select, update
from sqlalchemy.orm import Session, aliased

from reshard.choices import JobState
from reshard_jobs.tables import JobRow, NodeRow, RefusalRow, db_now

MOST_REFUSALS = 5
"""Number of workers on which a job may fail before it counts as the job's fault. A service may have hundreds."""


def refused_by(worker: str) -> ColumnElement[bool]:
    """The condition that a job has failed on this worker, which does not try it again."""
    mine = select(RefusalRow.job_id).where(RefusalRow.job_id == JobRow.id, RefusalRow.worker == worker[:200])
    return mine.correlate(JobRow).exists()


def refuse(session: Session, job_id: str, worker: str, code: str) -> None:
    """Take note that a job failed on a worker."""
    session.execute(delete(RefusalRow).where(RefusalRow.job_id == job_id, RefusalRow.worker == worker[:200]))
    session.execute(insert(RefusalRow).values(job_id=job_id, worker=worker[:200], code=code, at=db_now()))


def forget_refusals(session: Session, job_id: str) -> None:
    """Let all workers try a job again."""
    session.execute(delete(RefusalRow).where(RefusalRow.job_id == job_id))


def others_may_try(session: Session, job_id: str, *, lease_s: float) -> bool:
    """True if a live worker is left that has not tried this job, and not too many have."""
    count = select(func.count()).where(RefusalRow.job_id == job_id)
    if session.execute(count).scalar_one() >= MOST_REFUSALS:
        return False
    tried = select(RefusalRow.worker).where(RefusalRow.job_id == job_id)
    left = select(NodeRow.name).where(NodeRow.seen_at >= db_now() - lease_s, NodeRow.name.not_in(tried))
    return session.scalars(left.limit(1)).first() is not None


def somebody_lives(session: Session, *, lease_s: float) -> bool:
    """True if a worker was seen lately."""
    seen = select(NodeRow.name).where(NodeRow.seen_at >= db_now() - lease_s)
    return session.scalars(seen.limit(1)).first() is not None


def streak(session: Session, worker: str) -> int:
    """The number of jobs that a worker refused since a job ended well there.

    A job that FAILED is not counted if a worker of good record has refused it too: then the fault is the job's.
    """
    mine, peer = aliased(RefusalRow), aliased(RefusalRow)
    good_at = select(NodeRow.good_at).where(NodeRow.name == worker[:200]).scalar_subquery()
    confirmed = (
        select(peer.job_id)
        .join(NodeRow, NodeRow.name == peer.worker)
        .where(
            peer.job_id == mine.job_id,
            peer.worker != mine.worker,
            NodeRow.good_at > 0,
            NodeRow.quarantined_until < db_now(),
        )
        .exists()
    )
    query = (
        select(func.count())
        .select_from(mine)
        .join(JobRow, JobRow.id == mine.job_id)
        .where(
            mine.worker == worker[:200],
            mine.at > func.coalesce(good_at, 0.0),
            or_(JobRow.state != JobState.FAILED.value, ~confirmed),
        )
    )
    return session.execute(query).scalar_one()


def last_refused_at() -> ScalarSelect[float]:
    """The time at which a worker last refused the job; null if none has."""
    query = select(func.max(RefusalRow.at)).where(RefusalRow.job_id == JobRow.id)
    return query.correlate(JobRow).scalar_subquery()


def begin_quarantine(session: Session, worker: str, pause_s: float, problem: str) -> None:
    """Record that a worker claims nothing for a while."""
    session.execute(
        update(NodeRow)
        .where(NodeRow.name == worker[:200])
        .values(quarantined_until=db_now() + pause_s, quarantines=NodeRow.quarantines + 1, problem=problem)
    )
