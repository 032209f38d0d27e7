"""The state machine of a job.

::

    QUEUED -> PLANNING -> RUNNING -> VERIFYING -> SUCCEEDED
      ^          |           |           |
      `----------+-----------+-----------'   lost lease or graceful stop: the next attempt
    any of the four -> FAILED
    any of the four -> CANCELLING -> CANCELLED
    FAILED -> QUEUED   a user's retry
"""

from __future__ import annotations

from collections.abc import Mapping

from reshard.models import JobState, Progress

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
