"""Makes wire models from rows of the job database."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache, wraps
from typing import Any, Literal, ParamSpec

from pydantic import BaseModel
from sqlalchemy import Row, SQLColumnExpression

from reshard.choices import JobKind, JobState
from reshard.models.jobs import (
    ConvertRequest,
    ConvertResult,
    Job,
    JobEvent,
    JobWorker,
    PlanSummary,
    Problem,
    Progress,
    WorkShare,
)
from reshard.wire_model import SCHEMA_VERSION
from reshard_jobs.tables import PUBLIC_ID, EventRow, JobRow, WorkerRow

_KINDS: Mapping[str, Literal["state", "progress", "worker"]] = {
    "state": "state",
    "progress": "progress",
    "worker": "worker",
}


_LONGEST_LISTED = 20
"""Entries of a list in a result that a list of jobs shows."""


def job_of(row: JobRow, labels: Mapping[str, str], workers: Sequence[WorkerRow] = ()) -> Job:
    """The job as the API shows it. The error of an attempt is shown only when it has become the job's error."""
    state = JobState(row.state)
    kind = JobKind(row.kind)
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
        checked=bool(row.checked),
        created_at=time_of(row.created_at),
        started_at=None if row.started_at is None else time_of(row.started_at),
        finished_at=None if row.finished_at is None else time_of(row.finished_at),
        leftovers_until=time_of(row.discard_at) if row.discard_at is not None and state.terminal else None,
        error=Problem.model_validate_json(row.error) if row.error and state.terminal else None,
        result=ConvertResult.model_validate_json(result) if result and kind is JobKind.CONVERT else None,
        plan=PlanSummary.model_validate_json(result) if result and kind is JobKind.PLAN else None,
        links=_links_of(row.public_id),
    )


def brief_of(result: BaseModel) -> str:
    """A result as a list of jobs shows it, as JSON: `left_out` has the lengths of its long lists, which are empty."""
    values = {name: getattr(result, name) for name in type(result).model_fields}
    long = {name: len(value) for name, value in values.items() if isinstance(value, tuple | list)}  # pyright: ignore[reportUnknownArgumentType]
    long = {name: length for name, length in long.items() if length > _LONGEST_LISTED}
    if long:
        result = result.model_copy(update={**dict.fromkeys(long, ()), "left_out": long})
    return result.model_dump_json()


LISTED: tuple[SQLColumnExpression[Any], ...] = (
    JobRow.id,
    PUBLIC_ID.label("public_id"),
    *(JobRow.kind, JobRow.state, JobRow.attempt, JobRow.max_attempts, JobRow.retries, JobRow.request, JobRow.progress),
    *(JobRow.plan_digest, JobRow.worker, JobRow.max_workers, JobRow.priority, JobRow.checked, JobRow.created_at),
    *(JobRow.started_at, JobRow.finished_at, JobRow.discard_at, JobRow.error),
    JobRow.brief,
)
"""The columns of which `listed_json` makes a job."""


def listed_json(row: Row[*tuple[Any, ...]], labels: Mapping[str, str]) -> str:
    """A job of a list, as JSON, from the columns of `LISTED`.

    It equals the JSON of `job_of` but for the long lists of results and the files of saved plans. No model of the job
    is made: that of 200 jobs would take a process of the API 100 ms.
    """
    state, ended = row.state, JobState(row.state).terminal
    shown = {
        "schema_version": SCHEMA_VERSION,
        "id": row.public_id,
        "kind": row.kind,
        "state": state,
        "done": ended,
        "attempt": row.attempt,
        "max_attempts": row.max_attempts,
        "retries": row.retries,
        "labels": labels,
        "plan_digest": row.plan_digest,
        "worker": row.worker,
        "workers": (),
        "max_workers": row.max_workers,
        "priority": row.priority,
        "checked": bool(row.checked),
        "created_at": _json_time(row.created_at),
        "started_at": _json_time(row.started_at),
        "finished_at": _json_time(row.finished_at),
        "leftovers_until": _json_time(row.discard_at) if ended else None,
        "links": _links_of(row.public_id),
    }
    outcome = "null"
    if state == JobState.SUCCEEDED.value and row.brief:
        model = PlanSummary if row.kind == JobKind.PLAN.value else ConvertResult
        outcome = _as_now(model, row.brief)
    texts = {
        "request": _as_now(ConvertRequest, row.request) if '"plan"' not in row.request else _short(row.request),
        "progress": _written_again(Progress, row.progress) if row.progress else "null",
        "error": _as_now(Problem, row.error) if row.error and ended else "null",
        "result": "null" if row.kind == JobKind.PLAN.value else outcome,
        "plan": outcome if row.kind == JobKind.PLAN.value else "null",
    }
    spliced = "".join(f',"{name}":{text}' for name, text in texts.items())
    return f"{json.dumps(shown)[:-1]}{spliced}}}"


P = ParamSpec("P")
_KEPT_CHARS = 8192


def _kept(write: Callable[P, str]) -> Callable[P, str]:
    """The function with its newest answers to short texts kept: a request may be a megabyte long."""
    cached = lru_cache(maxsize=2048)(write)

    @wraps(write)
    def answer(*args: P.args, **kwargs: P.kwargs) -> str:
        return (cached if len(str(args[-1])) <= _KEPT_CHARS else write)(*args, **kwargs)

    return answer


def _written_again(model: type[BaseModel], text: str) -> str:
    """A record as this release writes it: another release may have known fewer fields, or other ones."""
    return model.model_validate_json(text).model_dump_json()


_as_now = _kept(_written_again)


def _short(text: str) -> str:
    """A request that names its plan, without the files of that."""
    request = ConvertRequest.model_validate_json(text)
    plan = None if request.plan is None else request.plan.without_files()
    return request.model_copy(update={"plan": plan}).model_dump_json()


def _json_time(epoch_s: float | None) -> str | None:
    return None if epoch_s is None else time_of(epoch_s).isoformat().replace("+00:00", "Z")


def _links_of(public_id: str) -> dict[str, str]:
    path = f"/v1/jobs/{public_id}"
    return {"self": path, **{name: f"{path}/{name}" for name in ("events", "cancel", "retry", "result")}}


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
