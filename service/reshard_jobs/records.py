"""Makes wire models from rows of the job database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

from reshard.models import (
    ConvertRequest,
    ConvertResult,
    Job,
    JobEvent,
    JobKind,
    JobState,
    JobWorker,
    PlanSummary,
    Problem,
    Progress,
    WorkShare,
)
from reshard_jobs.tables import EventRow, JobRow, WorkerRow

_KINDS: Mapping[str, Literal["state", "progress", "worker"]] = {
    "state": "state",
    "progress": "progress",
    "worker": "worker",
}


def job_of(row: JobRow, labels: Mapping[str, str], workers: Sequence[WorkerRow] = ()) -> Job:
    """The job as the API shows it. The error of an attempt is shown only when it has become the job's error."""
    state = JobState(row.state)
    kind = JobKind(row.kind)
    path = f"/v1/jobs/{row.public_id}"
    links = {name: f"{path}/{name}" for name in ("events", "cancel", "retry", "result")}
    result = row.result if state is JobState.SUCCEEDED else None
    return Job(
        id=row.public_id,
        kind=kind,
        state=state,
        done=state.terminal,
        attempt=row.attempt,
        max_attempts=row.max_attempts,
        retries=row.retries,
        request=ConvertRequest.model_validate_json(row.request),
        labels=dict(labels),
        progress=_progress_of(row.progress),
        plan_digest=row.plan_digest,
        worker=row.worker,
        workers=tuple(map(worker_of, workers)),
        max_workers=row.max_workers,
        priority=row.priority,
        created_at=time_of(row.created_at),
        started_at=None if row.started_at is None else time_of(row.started_at),
        finished_at=None if row.finished_at is None else time_of(row.finished_at),
        leftovers_until=time_of(row.discard_at) if row.discard_at is not None and state.terminal else None,
        error=Problem.model_validate_json(row.error) if row.error and state.terminal else None,
        result=ConvertResult.model_validate_json(result) if result and kind is JobKind.CONVERT else None,
        plan=PlanSummary.model_validate_json(result) if result and kind is JobKind.PLAN else None,
        links={"self": path, **links},
    )


def tenant_of(row: JobRow) -> str:
    """The tenant of a job."""
    return row.tenant


def event_of(row: EventRow, job_id: str) -> JobEvent:
    """One entry of the event log of a job, which its tenant knows by `job_id`."""
    return JobEvent(
        seq=row.seq,
        job_id=job_id,
        at=time_of(row.at),
        kind=_KINDS[row.kind],
        state=JobState(row.state),
        progress=_progress_of(row.progress),
        worker=JobWorker.model_validate_json(row.worker) if row.worker else None,
    )


def worker_of(row: WorkerRow) -> JobWorker:
    """A worker of a job as the API shows it."""
    return JobWorker(
        worker=row.worker,
        role="owner" if row.role == "owner" else "helper",
        attempt=row.attempt,
        joined_at=time_of(row.joined_at),
        left_at=None if row.left_at is None else time_of(row.left_at),
        share=None if row.runs is None else WorkShare(**{n: getattr(row, n) for n in WorkShare.model_fields}),
    )


def time_of(epoch_s: float) -> datetime:
    """The database's time as an aware UTC time."""
    return datetime.fromtimestamp(epoch_s, tz=UTC)


def _progress_of(text: str | None) -> Progress | None:
    return Progress.model_validate_json(text) if text else None
