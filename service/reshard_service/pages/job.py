"""The page of one job: its facts, its throughput, and the forms that cancel and retry it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, cast

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from reshard.choices import JobKind, JobState
from reshard.models.jobs import Job, JobEvent, JobWorker
from reshard_jobs.queue.overview import JobOverview
from reshard_service.api.context import Canceller, Context, Reader, ServiceContext, Submitter
from reshard_service.api.jobs import cancel_job, retry_job
from reshard_service.pages.rendering import placed, render, rights
from reshard_service.pages.route import PageRoute
from reshard_service.pages.words import label_of, state_name, value_of

# The facts of a job as its page tells them: phases, actions, options of its request.

_ORDER = (JobState.QUEUED, JobState.PLANNING, JobState.RUNNING, JobState.VERIFYING, JobState.SUCCEEDED)
_OF_A_PLAN = (JobState.QUEUED, JobState.PLANNING, JobState.SUCCEEDED)
_TOLD_ELSEWHERE = {"target", "to", "plan"}


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a job's latest attempt."""

    name: str
    look: str
    """`done`, `now`, `bad`, `off` for a cancelled job, or empty for a phase that has not begun."""
    at: datetime | None = None
    seconds: float | None = None
    """Time that it took; None while it runs."""


def phases_of(job: Job, events: Sequence[JobEvent]) -> list[Phase]:
    """The phases of a job in order: those of its latest attempt, and those to come."""
    begun: dict[JobState, datetime] = {}
    for event in events:
        if event.kind == "state":
            if event.state is JobState.QUEUED:
                begun = {}
            begun[event.state] = event.at
    if job.created_at and JobState.QUEUED not in begun:
        begun = {JobState.QUEUED: job.created_at, **begun}
    path = list(_OF_A_PLAN if job.kind is JobKind.PLAN else _ORDER)
    if job.state not in path:
        path = [state for state in path if state in begun] + [job.state]
    found: list[Phase] = []
    for at, state in enumerate(path):
        since = begun.get(state)
        until = next((begun[s] for s in path[at + 1 :] if s in begun), None)
        last = state is job.state
        ended = {JobState.FAILED: "bad", JobState.CANCELLED: "off"}.get(state, "done")
        look = ("now" if not job.done else ended) if last else "done" if since is not None else ""
        seconds = (until - since).total_seconds() if since is not None and until is not None else None
        found.append(Phase(state_name(state), look, since, seconds))
    return found


@dataclass(frozen=True, slots=True)
class Happening:
    """An entry of a job's event log, in words."""

    at: datetime
    text: str
    worker: str = ""
    """The worker that the text is about; empty if it is about none."""


def happenings_of(job: Job, events: Sequence[JobEvent]) -> list[Happening]:
    """The events of a job in words, in order: all but those of progress."""
    owners = {worker.attempt: worker for worker in job.workers if worker.role == "owner"}
    found: list[Happening] = []
    attempt, before = 0, None
    for event in events:
        if event.kind == "worker" and event.worker is not None:
            text = "left; the others go on" if event.worker.left_at else "joined to help"
            found.append(Happening(event.at, text, event.worker.worker))
        elif event.kind == "state":
            attempt += event.state is JobState.PLANNING and before is JobState.QUEUED
            found.append(_state_told(event, before, owners.get(attempt), attempt))
            before = event.state
    return found


def _state_told(event: JobEvent, before: JobState | None, owner: JobWorker | None, attempt: int) -> Happening:
    name = owner.worker if owner is not None else ""
    match before, event.state:
        case None, JobState.QUEUED:
            return Happening(event.at, "The job was submitted and waits for a worker.")
        case JobState.FAILED, JobState.QUEUED:
            return Happening(event.at, "Somebody asked for a retry. It waits for a worker.")
        case _, JobState.QUEUED:
            # The log does not tell the three apart.
            text = "stopped, failed, or its lease ended. Another worker will go on where it stopped."
            return Happening(event.at, text if name else f"The worker {text}", name)
        case JobState.QUEUED, JobState.PLANNING:
            return Happening(event.at, f"began{f', attempt {attempt}' if attempt > 1 else ''}: it plans.", name)
        case _, JobState.PLANNING:
            return Happening(event.at, "began again within its attempt: the job database was away.", name)
        case _:
            return Happening(event.at, _TOLD[event.state])


_TOLD = {
    JobState.RUNNING: "The plan is made; the target is being written.",
    JobState.VERIFYING: "Everything is written; it is checked and then published.",
    JobState.SUCCEEDED: "The target is complete.",
    JobState.FAILED: "The job failed. The reason is at the top of this page.",
    JobState.CANCELLING: "Somebody cancelled the job. What it has written is removed.",
    JobState.CANCELLED: "The job is cancelled.",
}


def options_of(job: Job) -> dict[str, str]:
    """The options of a job's request in words, beside source, target and format; without those left to the defaults."""
    found: dict[str, str] = {}
    given = job.request.model_dump(mode="json", exclude_defaults=True)
    given["options"] = job.request.options.given()
    source = {name: value for name, value in given.pop("source").items() if name not in ("url", "tag")}
    _flatten("", {"source": source, **{k: v for k, v in given.items() if k not in _TOLD_ELSEWHERE}}, found)
    return found


def _flatten(prefix: str, value: Mapping[str, Any], found: dict[str, str]) -> None:
    for name, part in value.items():
        place = f"{prefix}{name}"
        if isinstance(part, dict):
            _flatten(f"{place}.", cast("dict[str, Any]", part), found)
        elif part is not None:
            label = label_of(place)
            found[f"{label} ({place})" if label in found else label] = value_of(place, part)


@dataclass(frozen=True, slots=True)
class Actions:
    """Operations that a caller may do to a job now."""

    cancel: bool
    give_up: bool
    """True to remove the files that a failed job keeps for a retry."""
    retry: bool


def actions_of(job: Job, may: Mapping[str, bool]) -> Actions:
    """The actions that make sense in the job's state and that the caller's scopes allow."""
    return Actions(
        cancel=may["cancel"] and not job.done and job.state is not JobState.CANCELLING,
        give_up=may["cancel"] and job.state is JobState.FAILED and job.leftovers_until is not None,
        retry=may["submit"] and job.state is JobState.FAILED,
    )


# The throughput of a job over time, from its event log, as the points of a drawing.

WIDTH, HEIGHT = 720, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 12, 12, 28
_MOST_STEPS = 90
_LEAST_STEP_S = 0.5


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing of bytes per second over time; places are in its own units."""

    curve: str
    area: str
    marks: tuple[tuple[float, float], ...]
    """(place from the top, bytes per second) of the horizontal lines."""
    times: tuple[tuple[float, float], ...]
    """(place from the left, seconds) of the labels below."""
    seconds: float
    mean: float
    most: float
    steps: tuple[tuple[float, float], ...]
    """(seconds since the start, bytes per second): the drawing as numbers."""
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    bottom: int = HEIGHT - _BOTTOM


def chart_of(events: Sequence[JobEvent]) -> Chart | None:
    """The chart of a job; None while there is nothing to draw."""
    gained = _gains(events)
    if not gained:
        return None
    begin, end = gained[0][0], gained[-1][1]
    seconds = end - begin
    step = max(_LEAST_STEP_S, seconds / _MOST_STEPS)
    count = max(1, math.ceil(seconds / step - 1e-9))
    sums = [0.0] * count
    for since, until, size in gained:
        _spread(sums, (since - begin) / step, (until - begin) / step, size)
    lengths = [min(step, seconds - at * step) for at in range(count)]
    rates = [size / length if length > 0 else 0.0 for size, length in zip(sums, lengths, strict=True)]
    most = max(rates)
    top = _round_up(most)
    if top <= 0:
        return None
    across, down = (WIDTH - _LEFT - _RIGHT) / seconds, (HEIGHT - _TOP - _BOTTOM) / top
    floor = HEIGHT - _BOTTOM
    path = [f"M{_LEFT:.1f} {floor - rates[0] * down:.1f}"]
    for at, rate in enumerate(rates):
        right = _LEFT + min(seconds, (at + 1) * step) * across
        path.append(f"V{floor - rate * down:.1f}H{right:.1f}")
    curve = "".join(path)
    return Chart(
        curve=curve,
        area=f"{curve}V{floor}H{_LEFT}Z",
        marks=tuple((floor - top * part * down, top * part) for part in (0.0, 0.5, 1.0)),
        times=tuple((_LEFT + seconds * part * across, seconds * part) for part in (0.0, 0.5, 1.0)),
        seconds=seconds,
        mean=sum(sums) / seconds,
        most=most,
        steps=tuple((at * step, rate) for at, rate in enumerate(rates)),
    )


def _gains(events: Sequence[JobEvent]) -> list[tuple[float, float, int]]:
    """(from, until, bytes) between entries of progress. An attempt that begins again has gained none."""
    told = [
        (e.at.timestamp(), e.progress.bytes_done) for e in events if e.progress is not None and e.progress.bytes_total
    ]
    return [
        (since, until, max(0, after - before)) for (since, before), (until, after) in pairwise(told) if until > since
    ]


def _spread(sums: list[float], since: float, until: float, size: float) -> None:
    """Add bytes to the steps in whose time they were written."""
    length = until - since
    for at in range(int(since), min(len(sums), math.ceil(until))):
        overlap = min(until, at + 1) - max(since, at)
        if overlap > 0:
            sums[at] += size * overlap / length


def _round_up(rate: float) -> float:
    """The next round number of bytes, KiB, MiB or GiB: a scale that reads well."""
    unit = 1
    while unit * 1024 <= rate:
        unit *= 1024
    for part in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1024):
        if rate <= part * unit:
            return float(part * unit)
    return rate


router = APIRouter(prefix="/jobs", include_in_schema=False, route_class=PageRoute)

_MOST_FILES = 200
_MOST_EVENTS = 100


@router.get("/{job_id}")
async def job_page(job_id: str, request: Request, context: Context, caller: Reader) -> Response:
    """Show one job."""
    job, seq, events, wrote_source, submitted_by = await run_in_threadpool(_look, context, caller, job_id)
    told = happenings_of(job, events)
    return render(
        request,
        "job.html",
        job=job,
        seq=seq,
        phases=phases_of(job, events),
        options=options_of(job),
        actions=actions_of(job, rights(caller)),
        chart=chart_of(events),
        events=told[::-1][:_MOST_EVENTS],
        left_out=max(0, len(told) - _MOST_EVENTS),
        most_files=_MOST_FILES,
        wrote_source=wrote_source,
        submitted_by=submitted_by,
        seconds=_seconds(job),
    )


def _seconds(job: Job) -> float | None:
    """Seconds from a job's first start to its end; None if it did not start, or has not ended."""
    if job.started_at is None or job.finished_at is None:
        return None
    return (job.finished_at - job.started_at).total_seconds()


def _look(context: ServiceContext, caller: Reader, job_id: str) -> tuple[Job, int, list[JobEvent], str | None, str]:
    store = context.jobs_of(caller)
    job, seq = store.look(job_id)
    events = context.events.sampled(store.key_of(job_id))
    source = job.request.source
    submitted_by = JobOverview(context.database, caller.tenant).submitted_by(job)
    return job, seq, events, store.writer_of(source.url, source.tag), submitted_by


@router.post("/{job_id}/cancel")
async def cancel(job_id: str, request: Request, context: Context, caller: Canceller) -> Response:
    """Cancel a job, or give up the files of one that failed."""
    job = await cancel_job(context, caller, job_id)
    return RedirectResponse(placed(request, f"/jobs/{job.id}"), status_code=303)


@router.post("/{job_id}/retry")
async def retry(job_id: str, request: Request, context: Context, caller: Submitter) -> Response:
    """Send a job that FAILED back to the queue."""
    job = await retry_job(context, caller, job_id)
    return RedirectResponse(placed(request, f"/jobs/{job.id}"), status_code=303)
