"""The state machine of a job: the one statement that moves a job, and the log of its events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from sqlalchemy import ColumnElement, and_, insert, or_, select
from sqlalchemy.orm import Session

from reshard.choices import JobState
from reshard.errors import RequestError
from reshard.models.jobs import JobEvent, JobEventPage, Progress
from reshard_jobs.database import Database
from reshard_jobs.queue.leased_rows import change_row
from reshard_jobs.records import event_of
from reshard_jobs.tables import PUBLIC_ID, EventRow, JobRow, db_now
from reshard_jobs.webhooks import announce

# The states, and the changes between them:
#
#     QUEUED -> PLANNING -> RUNNING -> VERIFYING -> SUCCEEDED
#       ^          |           |           |
#       `----------+-----------+-----------'   lost lease or graceful stop: the next attempt
#     any of the four -> FAILED
#     any of the four -> CANCELLING -> CANCELLED
#     FAILED -> QUEUED   a user's retry

ACTIVE = (JobState.PLANNING, JobState.RUNNING, JobState.VERIFYING)
"""The states in which an owner works on a result."""

TERMINAL = tuple(state for state in JobState if state.terminal)

TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    # From RUNNING or VERIFYING to PLANNING: the database was away, and the engine began again within its attempt.
    # From QUEUED to FAILED: the reaper found that every attempt was lost.
    # From QUEUED to CANCELLED: nothing ran yet, so there is nothing to clean up.
    JobState.QUEUED: frozenset({JobState.PLANNING, JobState.CANCELLING, JobState.CANCELLED, JobState.FAILED}),
    JobState.PLANNING: frozenset(
        {
            JobState.QUEUED,
            JobState.RUNNING,
            JobState.VERIFYING,
            JobState.SUCCEEDED,
            JobState.FAILED,
            JobState.CANCELLING,
        }
    ),
    JobState.RUNNING: frozenset(
        {
            JobState.QUEUED,
            JobState.PLANNING,
            JobState.VERIFYING,
            JobState.SUCCEEDED,
            JobState.FAILED,
            JobState.CANCELLING,
        }
    ),
    JobState.VERIFYING: frozenset(
        {JobState.QUEUED, JobState.PLANNING, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLING}
    ),
    # SUCCEEDED: the commit won the race against the cancel, and the output is whole and readable.
    JobState.CANCELLING: frozenset({JobState.CANCELLED, JobState.SUCCEEDED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset({JobState.QUEUED}),
    JobState.CANCELLED: frozenset(),
}

_PHASES: Mapping[str, JobState] = {
    "planning": JobState.PLANNING,
    "running": JobState.RUNNING,
    "verifying": JobState.VERIFYING,
    "committing": JobState.VERIFYING,
    "done": JobState.VERIFYING,
}


def sources_of(state: JobState) -> tuple[JobState, ...]:
    """The states from which a job may move to `state`."""
    return tuple(source for source, targets in TRANSITIONS.items() if state in targets)


def state_of(progress: Progress) -> JobState:
    """The state of a job whose engine reports this phase."""
    return _PHASES[progress.phase]


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


# The event logs of jobs. Jobs are named by their keys (`JobStore.key_of`), which callers of the API do not choose.

MAX_EVENTS_PER_READ = 500
_MOST_SAMPLED = 5_000
_JOBS_PER_LOOK = 500
_JOBS_PER_READ = 50


class EventLog:
    """The event logs of all jobs of a job database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def after(self, key: str, seq: int) -> JobEventPage:
        """The events of a job after a sequence number, in order; at most `MAX_EVENTS_PER_READ`.

        Raises:
            RequestError: `request.not_found`: the record of the job was removed.
        """
        with self._database.read() as session:
            job = session.get(JobRow, key)
            if job is None:
                raise RequestError("request.not_found", "the job is not kept any more", fix="reshard jobs list")
            query = select(EventRow).where(EventRow.job_id == key, EventRow.seq > seq).order_by(EventRow.seq)
            rows = session.scalars(query.limit(MAX_EVENTS_PER_READ)).all()
            events = tuple(event_of(row, job.public_id) for row in rows)
            last = events[-1].seq if events else seq
            # An event may have been added between the two reads. A job that FAILED may have been sent back to the
            # queue, and then its log goes on.
            ended = events[-1].ends_job if events else JobState(job.state).terminal
            return JobEventPage(events=events, done=ended and job.last_seq <= last)

    def sampled(self, key: str, most: int = 600) -> list[JobEvent]:
        """The events of a job from its beginning, in order; of many entries of progress, about `most` spread evenly."""
        with self._database.read() as session:
            job = session.get(JobRow, key)
            if job is None:
                return []
            step = max(1, -(-job.last_seq // most))
            chosen = or_(EventRow.kind != "progress", EventRow.seq % step == 0, EventRow.seq == job.last_seq)
            query = select(EventRow).where(EventRow.job_id == key, chosen).order_by(EventRow.seq)
            return [event_of(row, job.public_id) for row in session.scalars(query.limit(_MOST_SAMPLED))]

    def news(self, known: Mapping[str, int]) -> dict[str, list[JobEvent] | None]:
        """Get the events of many jobs, of each those after a sequence number; None for a job that does not exist.

        Jobs without such events are left out. Of very many events, the rest follows at the next call.
        """
        keys = list(known)
        last: dict[str, tuple[int, str]] = {}
        found: dict[str, list[JobEvent]] = {}
        with self._database.read() as session:
            for start in range(0, len(keys), _JOBS_PER_LOOK):
                chosen = JobRow.id.in_(keys[start : start + _JOBS_PER_LOOK])
                query = select(JobRow.id, JobRow.last_seq, PUBLIC_ID).where(chosen)
                last |= {row[0]: (row[1], row[2]) for row in session.execute(query)}
            changed = [key for key, (seq, _) in last.items() if seq > known[key]]
            for start in range(0, len(changed), _JOBS_PER_READ):
                some = changed[start : start + _JOBS_PER_READ]
                newer = or_(*(and_(EventRow.job_id == key, EventRow.seq > known[key]) for key in some))
                events = select(EventRow).where(newer).order_by(EventRow.job_id, EventRow.seq)
                for row in session.scalars(events.limit(MAX_EVENTS_PER_READ)):
                    found.setdefault(row.job_id, []).append(event_of(row, last[row.job_id][1]))
        gone: dict[str, list[JobEvent] | None] = dict.fromkeys(known.keys() - last.keys())
        return gone | found
