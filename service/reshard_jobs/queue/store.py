"""The API's access to the jobs of one tenant: create, look up, list, cancel, retry."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, insert, or_, select
from sqlalchemy.orm import Session

from reshard.choices import JobKind, JobState
from reshard.errors import JobError, RequestError, printable
from reshard.models.jobs import ConvertRequest, Job, JobList
from reshard_jobs.database import Database
from reshard_jobs.limits import normalized_url
from reshard_jobs.queue.discards import being_discarded
from reshard_jobs.queue.idempotency import Hold, bind, job_exists
from reshard_jobs.queue.leased_rows import RELEASED
from reshard_jobs.queue.refusals import forget_refusals
from reshard_jobs.queue.states import log, move
from reshard_jobs.records import LISTED, job_of, listed_json
from reshard_jobs.tables import (
    DEFAULT_TENANT,
    JOB_ID,
    PUBLIC_ID,
    SOURCE_BEGIN,
    SOURCE_CHARS,
    JobRow,
    LabelRow,
    WorkerRow,
    db_now,
)
from reshard_jobs.tenants.principals import Principal, record
from reshard_jobs.tenants.tenants import refuse_above_quota

# Opaque page tokens. A token holds the last job of a page and a digest of the listing's tenant and filter.

MAX_PAGE_SIZE = 200
_END_OF_TIME = 1e11
_JOB_ID = re.compile(JOB_ID)


@dataclass(frozen=True, slots=True)
class JobFilter:
    """The filter of a listing: a job must be in one of the states and have all of the labels."""

    states: tuple[JobState, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    def digest(self, tenant: str) -> str:
        """The digest of this filter of a tenant's jobs, which a page token contains."""
        text = json.dumps([tenant, sorted(self.states), sorted(self.labels.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_token(chosen: JobFilter, tenant: str, created_at: float, key: str) -> str:
    """Make the token of the page after this job."""
    fields = [chosen.digest(tenant), created_at, key]
    return base64.urlsafe_b64encode(json.dumps(fields).encode()).decode().rstrip("=")


def read_token(chosen: JobFilter, tenant: str, token: str) -> tuple[float, str]:
    """Read the creation time (seconds since the epoch) and the key of the job after which a page begins.

    Raises:
        RequestError: `request.invalid`: the token is malformed, or belongs to another filter or tenant.
    """
    try:
        fields: Any = json.loads(base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError) as error:
        raise _bad_token() from error
    match fields:
        case [str(digest), float(created_at), str(key)] if digest == chosen.digest(tenant) and _may_be_ours(
            created_at, key
        ):
            return created_at, key
        case _:
            raise _bad_token()


def _may_be_ours(created_at: float, key: str) -> bool:
    # A database refuses to compare values that it cannot store. That error would look like a failure of the database.
    return 0 <= created_at < _END_OF_TIME and _JOB_ID.fullmatch(key) is not None


def _bad_token() -> RequestError:
    return RequestError(
        "request.invalid",
        "the page token does not belong to this listing",
        fix="repeat the listing without page_token, with the same filters on every page",
    )


# The jobs of one tenant.


class JobStore:
    """The jobs of one tenant, without their ownership (see `Leases`). Ids are those by which the tenant knows its jobs.

    Args:
        database: The job database.
        tenant: The tenant. No method reads or changes anything of another one.
        by: The caller, for the audit log.
    """

    def __init__(self, database: Database, tenant: str = DEFAULT_TENANT, *, by: Principal | None = None) -> None:
        self._database = database
        self._tenant = tenant
        self._by = by

    def create(  # noqa: PLR0913 - the fields of a job
        self,
        request: ConvertRequest,
        *,
        kind: JobKind = JobKind.CONVERT,
        labels: Mapping[str, str] | None = None,
        max_attempts: int = 3,
        max_workers: int = 0,
        priority: int = 0,
        planned_bytes: int | None = None,
        hold: Hold | None = None,
        job_id: str | None = None,
        traceparent: str | None = None,
    ) -> Job:
        """Record a job as QUEUED and, in the same transaction, bind the idempotency key.

        `planned_bytes` is what the conversion writes; None if nobody has planned it. Then its worker judges the plan.

        Raises:
            RequestError: `request.idempotency_conflict`: the key was lost to another request;
                `request.job_exists`: there is a job with this id;
                `request.quota_jobs`, `request.quota_bytes`: the tenant has too many jobs already;
                `request.invalid`: the target is ambiguous.
        """
        key = f"job_{base64.b32encode(secrets.token_bytes(15)).decode().lower()}"
        with self._database.write() as session:
            if job_id is not None and session.scalars(self._known_as(job_id)).one_or_none() is not None:
                raise job_exists(job_id)
            refuse_above_quota(session, self._tenant, planned_bytes or 0)
            row = session.scalars(
                insert(JobRow)
                .values(
                    id=key,
                    tenant=self._tenant,
                    given_id=job_id,
                    kind=kind.value,
                    state=JobState.QUEUED.value,
                    request=request.model_dump_json(),
                    target=normalized_url(request.target) if kind is JobKind.CONVERT else "",
                    source=_place_of(request),
                    max_attempts=max_attempts,
                    max_workers=max_workers,
                    priority=priority,
                    planned_bytes=planned_bytes or 0,
                    checked=int(planned_bytes is not None),
                    created_at=db_now(),
                    last_seq=1,
                    traceparent=traceparent,
                )
                .returning(JobRow)
            ).one()
            names = dict(labels or {})
            if names:
                session.execute(insert(LabelRow), [{"job_id": key, "name": k, "value": v} for k, v in names.items()])
            log(session, row, "state")
            record(session, self._by, "job.submit", row.public_id)
            if hold is not None:
                bind(session, hold, key)
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
            row = self._require(session, job_id)
            query = select(WorkerRow).where(WorkerRow.job_id == row.id).order_by(WorkerRow.joined_at)
            workers = session.scalars(query).all()
            return job_of(row, labels_of(session, [row.id]).get(row.id, {}), workers), row.last_seq

    def key_of(self, job_id: str) -> str:
        """The key by which workers and event logs know a job.

        Raises:
            RequestError: `request.not_found`.
        """
        with self._database.read() as session:
            return self._require(session, job_id).id

    def writer_of(self, url: str, tag: str | None) -> str | None:
        """The newest job of this tenant that wrote a checkpoint; None if there is none."""
        places = [url.rstrip("/"), *([f"{url.rstrip('/')}/{tag}"] if tag else [])]
        done = (JobRow.tenant == self._tenant, JobRow.state == JobState.SUCCEEDED.value, JobRow.target.in_(places))
        query = select(PUBLIC_ID).where(*done).order_by(JobRow.created_at.desc())
        with self._database.read() as session:
            return session.scalars(query.limit(1)).one_or_none()

    def readers_of(self, job: Job, most: int = 10) -> Sequence[str]:
        """The newest jobs of this tenant that read the target of a job, and began after it; at most `most`."""
        places = [job.request.target, normalized_url(job.request.target)]
        begins = SOURCE_BEGIN.in_([place[:SOURCE_CHARS] for place in places])
        # The sum keeps SQLite from going through all jobs by their age.
        age = JobRow.created_at + 0.0
        since = age >= job.created_at.timestamp()
        query = select(PUBLIC_ID).where(JobRow.tenant == self._tenant, begins, JobRow.source.in_(places), since)
        with self._database.read() as session:
            return session.scalars(query.order_by(age.desc()).limit(most)).all()

    def recent_rates(self, most: int = 5) -> Sequence[float]:
        """Bytes per second that the newest conversions of this tenant wrote, from their start to their end."""
        done = (JobRow.tenant == self._tenant, JobRow.state == JobState.SUCCEEDED.value, JobRow.kind == "convert")
        query = select(JobRow.result, JobRow.finished_at - JobRow.started_at).where(*done)
        with self._database.read() as session:
            rows = session.execute(query.order_by(JobRow.created_at.desc()).limit(most)).all()
        found = ((json.loads(text)["write_bytes"], seconds) for text, seconds in rows if text and seconds)
        return [size / seconds for size, seconds in found if size > 0 and seconds > 0]

    def list(self, chosen: JobFilter | None = None, *, page_size: int = 50, page_token: str = "") -> JobList:
        """Get one page of jobs, newest first. New jobs do not shift later pages. Results are short (see `JobList`).

        Raises:
            RequestError: `request.invalid`: the token does not belong to this listing.
        """
        return JobList.model_validate_json(self.list_json(chosen, page_size=page_size, page_token=page_token))

    def list_json(self, chosen: JobFilter | None = None, *, page_size: int = 50, page_token: str = "") -> str:
        """The JSON of `list`, made without models of the jobs.

        Raises:
            RequestError: `request.invalid`: the token does not belong to this listing.
        """
        chosen = chosen or JobFilter()
        mine = JobRow.tenant == self._tenant
        query: Select[*tuple[Any, ...]] = select(*LISTED).where(mine)
        query = query.order_by(JobRow.created_at.desc(), JobRow.id.desc())
        if chosen.states:
            query = query.where(JobRow.state.in_([state.value for state in chosen.states]))
        query = query.where(*have_labels(chosen.labels))
        if page_token:
            created_at, key = read_token(chosen, self._tenant, page_token)
            older = JobRow.created_at < created_at
            query = query.where(or_(older, and_(JobRow.created_at == created_at, JobRow.id < key)))
        size = max(1, min(page_size, MAX_PAGE_SIZE))
        with self._database.read() as session:
            rows = session.execute(query.limit(size + 1)).all()
            shown = rows[:size]
            labels = labels_of(session, [row.id for row in shown])
        more = make_token(chosen, self._tenant, shown[-1].created_at, shown[-1].id) if len(rows) > size else ""
        jobs = ",".join(listed_json(row, labels.get(row.id, {})) for row in shown)
        return f'{{"jobs":[{jobs}],"next_page_token":{json.dumps(more)}}}'

    def cancel(self, job_id: str) -> Job:
        """Cancel a job; cancelling it twice is harmless.

        A job that never ran is CANCELLED at once. Any other becomes CANCELLING; a worker removes the files of its
        attempts, and then the job is CANCELLED. A job that has FAILED stays so, and a worker removes its files now.

        Raises:
            RequestError: `request.not_found`.
            JobError: `job.finished`: it SUCCEEDED before.
        """
        with self._database.write() as session:
            key = self._require(session, job_id).id
            row = (
                move(
                    session,
                    key,
                    JobState.CANCELLED,
                    JobRow.state == JobState.QUEUED.value,
                    JobRow.attempt == 0,
                    cancel_requested=1,
                    finished_at=db_now(),
                )
                or move(
                    session,
                    key,
                    JobState.CANCELLING,
                    JobRow.state == JobState.QUEUED.value,
                    cancel_requested=1,
                    lease_until=db_now(),
                )
                or move(session, key, JobState.CANCELLING, cancel_requested=1)
                or self._require(session, job_id)
            )
            if row.state == JobState.SUCCEEDED.value:
                raise JobError(
                    "job.finished",
                    f"job {job_id} is already {row.state}",
                    details={"state": row.state},
                    fix=f"reshard jobs show {job_id}",
                )
            if JobState(row.state).terminal and row.discard_at is not None:
                row.discard_at = min(row.discard_at, session.execute(select(db_now())).scalar_one())
                row.discard_asked, row.discard_tries = 1, 0
            record(session, self._by, "job.cancel", job_id)
            return job_of(row, labels_of(session, [row.id]).get(row.id, {}))

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
            "worker": None,
            **RELEASED,
        }
        failed = JobRow.state == JobState.FAILED.value
        with self._database.write() as session:
            key = self._require(session, job_id).id
            row = move(session, key, JobState.QUEUED, failed, ~being_discarded(JobRow), **again)
            if row is None:
                row = self._require(session, job_id)
                _refuse_retry(row)
            forget_refusals(session, key)
            record(session, self._by, "job.retry", job_id)
            return job_of(row, labels_of(session, [row.id]).get(row.id, {}))

    def _known_as(self, job_id: str) -> Select[JobRow]:
        return select(JobRow).where(JobRow.tenant == self._tenant, PUBLIC_ID.in_([job_id]))

    def _require(self, session: Session, job_id: str) -> JobRow:
        row = session.scalars(self._known_as(job_id).execution_options(populate_existing=True)).one_or_none()
        if row is None:
            raise RequestError(
                "request.not_found", f"there is no job {printable(job_id, max_chars=64)!r}", fix="reshard jobs list"
            )
        return row


def _refuse_retry(row: JobRow) -> None:
    """Refuse the retry of a job that is not FAILED, unless it was retried before and goes on."""
    details = {"state": row.state}
    if row.state == JobState.SUCCEEDED.value:
        fix = f"to see its result: reshard jobs show {row.public_id}"
        raise JobError("job.finished", f"job {row.public_id} has SUCCEEDED", fix=fix, details=details)
    if row.state in (JobState.CANCELLED.value, JobState.CANCELLING.value):
        fix = "submit it again: its files are removed"
        raise JobError("job.cancelled", f"job {row.public_id} was cancelled", fix=fix, details=details)
    if row.state == JobState.FAILED.value:
        fix = "run the same command again in a few seconds: the job then begins anew"
        raise JobError("job.not_finished", f"files of job {row.public_id} are being removed", fix=fix, details=details)
    if row.retries == 0:
        fix = f"nothing is to be done: it goes on by itself; to follow it: reshard jobs watch {row.public_id}"
        raise JobError("job.not_finished", f"job {row.public_id} is {row.state}, not FAILED", fix=fix, details=details)


def have_labels(labels: Mapping[str, str]) -> Iterator[ColumnElement[bool]]:
    """Yield the conditions of jobs that have all these labels."""
    for name, value in labels.items():
        yield JobRow.id.in_(select(LabelRow.job_id).where(LabelRow.name == name, LabelRow.value == value))


def labels_of(session: Session, job_ids: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the labels of these jobs, by the keys of the jobs; a job without labels is left out."""
    found: dict[str, dict[str, str]] = {}
    query = select(LabelRow.job_id, LabelRow.name, LabelRow.value).where(LabelRow.job_id.in_(job_ids))
    for job_id, name, value in session.execute(query):
        found.setdefault(job_id, {})[name] = value
    return found


def _place_of(request: ConvertRequest) -> str:
    """Return the place of the source, as targets of other jobs are compared with it."""
    try:
        return normalized_url(request.source.url)
    except RequestError:
        return request.source.url  # its worker refuses it
