"""Following a service's job to its end, with its progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reshard.choices import JobState
from reshard.errors import ExitCode, JobError, from_problem, printable
from reshard.progress_bars import line_of, shown

if TYPE_CHECKING:
    from reshard.client import Client
    from reshard.models import Job, JobEvent


class DetachedError(Exception):
    """Raised by Ctrl-C: this process stops watching, and the job goes on."""

    exit_code = ExitCode.INTERRUPTED


def follow(
    client: Client,
    job_id: str,
    *,
    timeout_s: float | None = None,
    quiet: bool = False,
    on_event: Callable[[JobEvent], None] | None = None,
) -> Job:
    """Show the progress of a job until it ends; returns the job after it SUCCEEDED.

    With `on_event`, events are passed to that function and not shown.

    Raises:
        ReshardError: The error that ended the job, `job.cancelled`, or `job.wait_timeout`.
        DetachedError: After a Ctrl-C.
    """
    try:
        with _screen(quiet=quiet or on_event is not None) as show:
            for event in client.watch(job_id, timeout_s=timeout_s):
                (on_event or show)(event)
        return succeeded(client.get(job_id))
    except KeyboardInterrupt as error:
        sys.stderr.write(f"detached: job {job_id} goes on\nfix: re-attach with: reshard jobs watch {job_id}\n")
        raise DetachedError from error


def succeeded(job: Job) -> Job:
    """Return the job if it SUCCEEDED.

    Raises:
        ReshardError: The error that ended the job, or `job.cancelled`.
    """
    if job.state is JobState.SUCCEEDED:
        return job
    if job.error is not None and job.state is JobState.FAILED:
        raise from_problem(job.error.model_dump())
    raise JobError("job.cancelled", f"job {job.id} was cancelled", fix="submit it again: finished work is not kept")


@contextmanager
def _screen(*, quiet: bool) -> Generator[Callable[[JobEvent], None]]:
    with shown(quiet=quiet) as show:

        def show_event(event: JobEvent) -> None:
            show(event.state.value, event.progress)

        yield show_event


def log_line(event: JobEvent) -> str:
    """An event of a job's log as one line: local time, state, and what happened."""
    at = event.at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    if event.worker is not None:
        worker, gone = event.worker, event.worker.left_at is not None
        return f"{at}  {event.state.value}  {worker.role} {printable(worker.worker)} {'left' if gone else 'joined'}"
    return f"{at}  {line_of(event.state.value, event.progress)}"
