"""The progress of a service's job on stderr: a bar on a terminal, else single lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reshard.choices import JobState
from reshard.cli.sizes import format_size
from reshard.errors import ExitCode, JobError, from_problem

if TYPE_CHECKING:
    from reshard.client import Client
    from reshard.models import Job, JobEvent

_LINE_EVERY_S = 10.0


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
    if quiet:
        yield _show_nothing
        return
    # Imported here so that commands which draw no bar start sooner.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from reshard.cli.bars import SpeedColumn

    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[size]}"))
        with Progress(*columns, SpeedColumn(), TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task("QUEUED", total=None, size="")

            def show(event: JobEvent) -> None:
                bar.update(task, description=event.state.value)
                if event.progress and event.progress.bytes_total:
                    done, total = event.progress.bytes_done, event.progress.bytes_total
                    size = f"{format_size(done)} of {format_size(total)}"
                    bar.update(task, completed=done, total=total, size=size)

            yield show
    else:
        yield _Lines().show


class _Lines:
    """Writes one line for each change of state, and one every ten seconds."""

    def __init__(self) -> None:
        self._written_at = 0.0

    def show(self, event: JobEvent) -> None:
        now = time.monotonic()
        if event.kind == "progress" and now - self._written_at < _LINE_EVERY_S:
            return
        self._written_at = now
        sys.stderr.write(f"{line_of(event)}\n")
        sys.stderr.flush()


def _show_nothing(_event: JobEvent) -> None:
    return


def line_of(event: JobEvent) -> str:
    """An event as one line: state, share, bytes, rate, time left."""
    progress = event.progress
    if progress is None or not progress.bytes_total:
        return event.state.value
    share = 100 * progress.bytes_done / progress.bytes_total
    parts = [
        event.state.value,
        f"{share:.0f}%",
        f"{format_size(progress.bytes_done)}/{format_size(progress.bytes_total)}",
    ]
    if progress.rate_bytes_per_s:
        parts.append(f"{format_size(progress.rate_bytes_per_s)}/s")
    if progress.eta_s is not None:
        parts.append(f"eta {progress.eta_s:.0f}s")
    return " ".join(parts)
