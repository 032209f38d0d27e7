"""The facts of a job as its page tells them: phases, actions, options of its request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from reshard.models import Job, JobEvent, JobKind, JobState, JobWorker
from reshard_service.pages.words import label_of, state_name, value_of

_ORDER = (JobState.QUEUED, JobState.PLANNING, JobState.RUNNING, JobState.VERIFYING, JobState.SUCCEEDED)
_OF_A_PLAN = (JobState.QUEUED, JobState.PLANNING, JobState.SUCCEEDED)
_TOLD_ELSEWHERE = {"target", "to"}


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
