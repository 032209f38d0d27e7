"""The event logs of jobs. Jobs are named by their keys (`JobStore.key_of`), which callers of the API do not choose."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import and_, or_, select

from reshard.errors import RequestError
from reshard.models import JobEvent, JobEventPage, JobState
from reshard_jobs.database import Database
from reshard_jobs.records import event_of
from reshard_jobs.tables import PUBLIC_ID, EventRow, JobRow

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
