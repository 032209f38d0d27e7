"""The list of a tenant's jobs for people: found by a text, in the order of any column, counted by state.

`JobStore.list` is for programs: its pages do not shift when jobs are added. This one has numbered pages and totals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, and_, case, func, or_, select
from sqlalchemy.orm import Session

from reshard.choices import JobKind, JobState
from reshard.models.jobs import ConvertRequest, Job, Problem, Progress
from reshard_jobs.database import Database
from reshard_jobs.queue.store import JobFilter, have_labels, labels_of
from reshard_jobs.records import time_of
from reshard_jobs.tables import PUBLIC_ID, AuditRow, JobRow, TokenRow, db_now

_SUBMIT = "job.submit"
_SAME_TIME_S = 60.0
"""The entry of the audit log is made in the transaction that makes the job, and so at nearly the same time."""


class Column(StrEnum):
    """The columns by which the list can be ordered."""

    CREATED = "created"
    DURATION = "duration"
    STATE = "state"
    SOURCE = "source"
    TARGET = "target"


_SOURCE = JobRow.source.expression
_SECONDS = func.coalesce(JobRow.finished_at, db_now()) - JobRow.started_at
_KEYS: Mapping[Column, ColumnElement[Any]] = {
    Column.CREATED: JobRow.created_at.expression,
    Column.DURATION: _SECONDS,
    Column.STATE: case(*((JobRow.state == s.value, at) for at, s in enumerate(JobState)), else_=len(JobState)),
    Column.SOURCE: _SOURCE,
    Column.TARGET: JobRow.target.expression,
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """The jobs that a page shows, and their order."""

    filter: JobFilter = field(default_factory=JobFilter)
    text: str = ""
    """A text in the id, the source or the target, in any case of letters; empty for all jobs."""
    by: Column = Column.CREATED
    descending: bool = True
    page: int = 1
    page_size: int = 25


@dataclass(frozen=True, slots=True)
class JobLine:
    """One job of the list. Unlike `Job` it has no result, which may name thousands of files."""

    id: str
    kind: JobKind
    state: JobState
    request: ConvertRequest
    labels: Mapping[str, str]
    progress: Progress | None
    error: Problem | None
    created_at: datetime
    seconds: float | None
    """Seconds from its first start to its end, or until now; None if it never started."""
    submitted_by: str

    @property
    def done(self) -> bool:
        """True if the job has ended."""
        return self.state.terminal


@dataclass(frozen=True, slots=True)
class JobLines:
    """One page of the list."""

    jobs: Sequence[JobLine]
    total: int
    """Number of jobs on all pages."""
    by_state: Mapping[JobState, int]
    """Number of jobs in each state that the text and the labels find, whatever states are chosen."""
    pages: int


class JobOverview:
    """The jobs of one tenant as people look at them.

    Args:
        database: The job database.
        tenant: The tenant. Nothing of another one is read.
    """

    def __init__(self, database: Database, tenant: str) -> None:
        self._database = database
        self._tenant = tenant

    def page(self, wanted: Wanted) -> JobLines:
        """One page of the list; empty if there are fewer pages."""
        found = self._found(wanted)
        states = wanted.filter.states
        chosen = (*found, JobRow.state.in_([state.value for state in states])) if states else found
        key = _KEYS[wanted.by]
        # A job that never started has no duration, and is last in both directions.
        last = (key.is_(None),) if wanted.by is Column.DURATION else ()
        order = (*last, key.desc() if wanted.descending else key.asc(), JobRow.created_at.desc(), JobRow.id.desc())
        columns: list[Any] = [JobRow.id, PUBLIC_ID.label("public_id"), JobRow.kind, JobRow.state, JobRow.request]
        columns += [JobRow.progress, JobRow.error, JobRow.created_at, _SECONDS.label("seconds")]
        query = select(*columns).where(*chosen)
        query = query.order_by(*order).offset((wanted.page - 1) * wanted.page_size).limit(wanted.page_size)
        counts = select(JobRow.state, func.count()).where(*found).group_by(JobRow.state)
        with self._database.read() as session:
            by_state = {JobState(state): count for state, count in session.execute(counts)}
            rows: Sequence[Any] = session.execute(query).all()
            labels = labels_of(session, [row.id for row in rows])
            by = self._submitters(session, {row.public_id: row.created_at for row in rows})
        total = sum(count for state, count in by_state.items() if not states or state in states)
        lines = [_line_of(row, labels.get(row.id, {}), by.get(row.public_id, "")) for row in rows]
        return JobLines(lines, total, by_state, max(1, -(-total // wanted.page_size)))

    def submitted_by(self, job: Job) -> str:
        """The submitter of a job: the name of a token, or a subject; empty if the audit log does not know."""
        with self._database.read() as session:
            return self._submitters(session, {job.id: job.created_at.timestamp()}).get(job.id, "")

    def _found(self, wanted: Wanted) -> tuple[ColumnElement[bool], ...]:
        found = [JobRow.tenant == self._tenant, *have_labels(wanted.filter.labels)]
        if text := wanted.text:
            places = (PUBLIC_ID, _SOURCE, JobRow.target)
            found.append(or_(*(place.icontains(text, autoescape=True) for place in places)))
        return tuple(found)

    def _submitters(self, session: Session, created_s: Mapping[str, float]) -> dict[str, str]:
        """The submitter of each job, by the job's id."""
        if not created_s:
            return {}
        token = and_(TokenRow.id == AuditRow.actor, TokenRow.tenant == self._tenant)
        query = select(AuditRow.object, func.coalesce(TokenRow.name, AuditRow.actor)).outerjoin(TokenRow, token)
        query = query.where(AuditRow.tenant == self._tenant, AuditRow.action == _SUBMIT, AuditRow.outcome == "ok")
        entries = (
            and_(AuditRow.at.between(at - _SAME_TIME_S, at + _SAME_TIME_S), AuditRow.object == job_id)
            for job_id, at in created_s.items()
        )
        query = query.where(or_(*entries))
        return {row[0]: row[1] for row in session.execute(query.order_by(AuditRow.id))}


def _line_of(row: Any, labels: Mapping[str, str], submitted_by: str) -> JobLine:
    state = JobState(row.state)
    return JobLine(
        id=row.public_id,
        kind=JobKind(row.kind),
        state=state,
        request=ConvertRequest.model_validate_json(row.request),
        labels=labels,
        progress=Progress.model_validate_json(row.progress) if row.progress else None,
        error=Problem.model_validate_json(row.error) if row.error and state.terminal else None,
        created_at=time_of(row.created_at),
        seconds=row.seconds,
        submitted_by=submitted_by,
    )
