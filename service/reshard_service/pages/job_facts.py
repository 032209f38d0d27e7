"""The facts of a job as its page tells them: phases, actions, options of its request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from reshard.models import Job, JobEvent, JobKind, JobState

_ORDER = (JobState.QUEUED, JobState.PLANNING, JobState.RUNNING, JobState.VERIFYING, JobState.SUCCEEDED)
_OF_A_PLAN = (JobState.QUEUED, JobState.PLANNING, JobState.SUCCEEDED)
_TOLD_ELSEWHERE = {"source", "target", "to"}


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a job's latest attempt."""

    name: str
    look: str
    """`done`, `now`, `bad`, or empty for a phase that has not begun."""
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
        bad = last and state in (JobState.FAILED, JobState.CANCELLED)
        look = "bad" if bad else "now" if last and not job.done else "done" if since is not None or last else ""
        seconds = (until - since).total_seconds() if since is not None and until is not None else None
        found.append(Phase(state.value, look, since, seconds))
    return found


def options_of(job: Job) -> dict[str, str]:
    """Return what the request says beside source, target and format, without what it leaves to the defaults."""
    found: dict[str, str] = {}
    given = job.request.model_dump(mode="json", exclude_defaults=True)
    given["options"] = job.request.options.given()
    _flatten("", {k: v for k, v in given.items() if k not in _TOLD_ELSEWHERE}, found)
    return found


def _flatten(prefix: str, value: Mapping[str, Any], found: dict[str, str]) -> None:
    for name, part in value.items():
        if isinstance(part, dict):
            _flatten(f"{prefix}{name}.", cast("dict[str, Any]", part), found)
        elif part is not None:
            found[f"{prefix}{name}".removeprefix("options.")] = (
                str(part).lower() if isinstance(part, bool) else str(part)
            )


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
