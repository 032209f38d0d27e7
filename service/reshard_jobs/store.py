"""The API's access to jobs: create, look up, list, cancel, read events."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import and_, func, insert, or_, select, text
from sqlalchemy.orm import Session

from reshard.errors import JobError, RequestError, printable
from reshard.models import ConvertRequest, Job, JobEvent, JobKind, JobList, JobState, WorkShare
from reshard_jobs.database import Database
from reshard_jobs.discards import being_discarded
from reshard_jobs.idempotency import Hold, bind, job_exists
from reshard_jobs.pages import MAX_PAGE_SIZE, JobFilter, make_token, read_token
from reshard_jobs.records import event_of, job_of
from reshard_jobs.refusals import forget_refusals
from reshard_jobs.roots import normalized_url
from reshard_jobs.tables import EventRow, JobRow, LabelRow, WorkerRow, db_now
from reshard_jobs.transitions import log, move

MAX_EVENTS_PER_READ = 500
_JOBS_PER_LOOK = 500
_JOBS_PER_READ = 50


class JobStore:
    """The jobs of a job database, without their ownership (see `Leases`)."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(
        self,
        request: ConvertRequest,
        *,
        kind: JobKind = JobKind.CONVERT,
        labels: Mapping[str, str] | None = None,
        max_attempts: int = 3,
        max_workers: int = 0,
        priority: int = 0,
        hold: Hold | None = None,
        job_id: str | None = None,
    ) -> Job:
        """Record a job as QUEUED and, in the same transaction, bind the idempotency key.

        Raises:
            RequestError: `request.idempotency_conflict`: the key was lost to another request;
                `request.job_exists`: there is a job with this id;
                `request.invalid`: the target is ambiguous.
        """
        if job_id is None:
            job_id = f"job_{base64.b32encode(secrets.token_bytes(15)).decode().lower()}"
        with self._database.write() as session:
            if session.get(JobRow, job_id) is not None:
                raise job_exists(job_id)
            row = session.scalars(
                insert(JobRow)
                .values(
                    id=job_id,
                    kind=kind.value,
                    state=JobState.QUEUED.value,
                    request=request.model_dump_json(),
                    target=normalized_url(request.target) if kind is JobKind.CONVERT else "",
                    max_attempts=max_attempts,
                    max_workers=max_workers,
                    priority=priority,
                    created_at=db_now(),
                    last_seq=1,
                )
                .returning(JobRow)
            ).one()
            names = dict(labels or {})
            if names:
                session.execute(insert(LabelRow), [{"job_id": job_id, "name": k, "value": v} for k, v in names.items()])
            log(session, row, "state")
            if hold is not None:
                bind(session, hold, job_id)
            return job_of(row, names)

    def get(self, job_id: str) -> Job:
        """Get a job.

        Raises:
            RequestError: `request.not_found`.
        """
        return self.look(job_id)[0]

    def look(self, job_id: str) -> tuple[Job, int]:
        """Get a job and the sequence number of its last event."""
        with self._database.read() as session:
            row = _require(session, job_id)
            query = select(WorkerRow).where(WorkerRow.job_id == job_id).order_by(WorkerRow.joined_at)
            workers = session.scalars(query).all()
            return job_of(row, _labels(session, [job_id]).get(job_id, {}), workers), row.last_seq

    def list(self, chosen: JobFilter | None = None, *, page_size: int = 50, page_token: str = "") -> JobList:
        """Get one page of jobs, newest first. New jobs do not shift later pages.

        Raises:
            RequestError: `request.invalid`: the token does not belong to this listing.
        """
        chosen = chosen or JobFilter()
        query = select(JobRow).order_by(JobRow.created_at.desc(), JobRow.id.desc())
        if chosen.states:
            query = query.where(JobRow.state.in_([state.value for state in chosen.states]))
        for name, value in chosen.labels.items():
            matching = select(LabelRow.job_id).where(LabelRow.name == name, LabelRow.value == value)
            query = query.where(JobRow.id.in_(matching))
        if page_token:
            created_at, job_id = read_token(chosen, page_token)
            older = JobRow.created_at < created_at
            query = query.where(or_(older, and_(JobRow.created_at == created_at, JobRow.id < job_id)))
        size = max(1, min(page_size, MAX_PAGE_SIZE))
        with self._database.read() as session:
            rows = session.scalars(query.limit(size + 1)).all()
            shown = rows[:size]
            labels = _labels(session, [row.id for row in shown])
        more = make_token(chosen, shown[-1].created_at, shown[-1].id) if len(rows) > size else ""
        return JobList(jobs=tuple(job_of(row, labels.get(row.id, {})) for row in shown), next_page_token=more)

    def cancel(self, job_id: str) -> Job:
        """Cancel a job; cancelling it twice is harmless.

        A job that never ran is CANCELLED at once. Any other becomes CANCELLING; a worker removes the files of its
        attempts, and then the job is CANCELLED. A job that has FAILED stays so, and a worker removes its files now.

        Raises:
            RequestError: `request.not_found`.
            JobError: `job.finished`: it SUCCEEDED before.
        """
        with self._database.write() as session:
            row = (
                move(
                    session,
                    job_id,
                    JobState.CANCELLED,
                    JobRow.state == JobState.QUEUED.value,
                    JobRow.attempt == 0,
                    cancel_requested=1,
                    finished_at=db_now(),
                )
                or move(
                    session,
                    job_id,
                    JobState.CANCELLING,
                    JobRow.state == JobState.QUEUED.value,
                    cancel_requested=1,
                    lease_until=db_now(),
                )
                or move(session, job_id, JobState.CANCELLING, cancel_requested=1)
                or _require(session, job_id)
            )
            if row.state == JobState.SUCCEEDED.value:
                raise JobError("job.finished", f"job {job_id} is already {row.state}", details={"state": row.state})
            if JobState(row.state).terminal and row.discard_at is not None:
                row.discard_at = min(row.discard_at, session.execute(select(db_now())).scalar_one())
                row.discard_asked, row.discard_tries = 1, 0
            return job_of(row, _labels(session, [job_id]).get(job_id, {}))

    def retry(self, job_id: str) -> Job:
        """Send a job that FAILED back to the queue, with all its attempts; it goes on where it stopped.

        To retry a job twice is harmless: while it waits or runs again, nothing changes.

        Raises:
            RequestError: `request.not_found`.
            JobError: `job.finished`: it SUCCEEDED; `job.cancelled`; `job.not_finished`: it has not failed, or its files
                are being removed at this moment.
        """
        again: dict[str, Any] = {
            "retries": JobRow.retries + 1,
            "releases": JobRow.attempt,
            "not_before": 0.0,
            "error": None,
            "finished_at": None,
            "discard_at": None,
            "discard_asked": 0,
            "discard_tries": 0,
            "owner": None,
            "worker": None,
            "lease_until": None,
        }
        failed = JobRow.state == JobState.FAILED.value
        with self._database.write() as session:
            row = move(session, job_id, JobState.QUEUED, failed, ~being_discarded(JobRow), **again)
            if row is None:
                row = _require(session, job_id)
                _refuse_retry(row)
            forget_refusals(session, job_id)
            return job_of(row, _labels(session, [job_id]).get(job_id, {}))

    def events(self, job_id: str, *, after_seq: int = 0) -> list[JobEvent]:
        """Get the events after a sequence number, in order; at most `MAX_EVENTS_PER_READ`.

        Raises:
            RequestError: `request.not_found`.
        """
        query = select(EventRow).where(EventRow.job_id == job_id, EventRow.seq > after_seq).order_by(EventRow.seq)
        with self._database.read() as session:
            rows = session.scalars(query.limit(MAX_EVENTS_PER_READ)).all()
            if not rows:
                _require(session, job_id)
        return [event_of(row) for row in rows]

    def news(self, known: Mapping[str, int]) -> dict[str, list[JobEvent] | None]:
        """Get the events of many jobs, of each those after a sequence number; None for a job that does not exist.

        Jobs without such events are left out. Of very many events, the rest follows at the next call.
        """
        ids = list(known)
        last: dict[str, int] = {}
        found: dict[str, list[JobEvent]] = {}
        with self._database.read() as session:
            for start in range(0, len(ids), _JOBS_PER_LOOK):
                chosen = JobRow.id.in_(ids[start : start + _JOBS_PER_LOOK])
                last |= {row[0]: row[1] for row in session.execute(select(JobRow.id, JobRow.last_seq).where(chosen))}
            changed = [job_id for job_id, seq in last.items() if seq > known[job_id]]
            for start in range(0, len(changed), _JOBS_PER_READ):
                some = changed[start : start + _JOBS_PER_READ]
                newer = or_(*(and_(EventRow.job_id == job_id, EventRow.seq > known[job_id]) for job_id in some))
                query = select(EventRow).where(newer).order_by(EventRow.job_id, EventRow.seq)
                for row in session.scalars(query.limit(MAX_EVENTS_PER_READ)):
                    found.setdefault(row.job_id, []).append(event_of(row))
        gone: dict[str, list[JobEvent] | None] = dict.fromkeys(known.keys() - last.keys())
        return gone | found

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

    def ping(self) -> None:
        """Raise SQLAlchemy's error if the database does not answer."""
        with self._database.read() as session:
            session.execute(text("SELECT 1"))


def _refuse_retry(row: JobRow) -> None:
    """Refuse the retry of a job that is not FAILED, unless it was retried before and goes on."""
    details = {"state": row.state}
    if row.state == JobState.SUCCEEDED.value:
        fix = "reshard jobs show ID shows its result"
        raise JobError("job.finished", f"job {row.id} has SUCCEEDED", fix=fix, details=details)
    if row.state in (JobState.CANCELLED.value, JobState.CANCELLING.value):
        fix = "submit it again: its files are removed"
        raise JobError("job.cancelled", f"job {row.id} was cancelled", fix=fix, details=details)
    if row.state == JobState.FAILED.value:
        fix = "run the same command again in a few seconds: the job then begins anew"
        raise JobError("job.not_finished", f"files of job {row.id} are being removed", fix=fix, details=details)
    if row.retries == 0:
        fix = "nothing is to be done: it goes on by itself; reshard jobs watch ID follows it"
        raise JobError("job.not_finished", f"job {row.id} is {row.state}, not FAILED", fix=fix, details=details)


def _require(session: Session, job_id: str) -> JobRow:
    row = session.get(JobRow, job_id)
    if row is None:
        raise RequestError(
            "request.not_found", f"there is no job {printable(job_id, max_chars=64)!r}", fix="reshard jobs list"
        )
    return row


def _labels(session: Session, job_ids: Sequence[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for row in session.scalars(select(LabelRow).where(LabelRow.job_id.in_(job_ids))):
        found.setdefault(row.job_id, {})[row.name] = row.value
    return found
