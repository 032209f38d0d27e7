"""Jobs of a service as lines for people, found by the beginnings of their ids, and followed to their end."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reshard.choices import JobKind, JobState
from reshard.cli.help_pages import Style, aligned, painted_on_stdout
from reshard.errors import (
    ExitCode,
    JobError,
    RequestError,
    ReshardError,
    counted,
    format_size,
    from_problem,
    listed,
    printable,
)
from reshard.progress import line_of, shown

if TYPE_CHECKING:
    from datetime import datetime

    from reshard.api.client import Client
    from reshard.models.jobs import Job, JobEvent, JobWorker, Problem, Progress, WorkerNode


_HEADER = ("ID", "STATE", "DONE", "CREATED", "WHAT")
_REASON_CHARS = 100
_STYLES: Mapping[str, Style] = {
    JobState.SUCCEEDED: Style.GOOD,
    JobState.FAILED: Style.ERROR,
    JobState.CANCELLED: Style.WARNING,
    JobState.CANCELLING: Style.WARNING,
    JobState.PLANNING: Style.BUSY,
    JobState.RUNNING: Style.BUSY,
    JobState.VERIFYING: Style.BUSY,
}
"""The style of each state; its word stands beside it always."""


def table(jobs: Sequence[Job]) -> Iterator[str]:
    """A header and a line for each job. The line of a failed job ends with the reason."""
    return aligned(
        [_HEADER, *map(_row, jobs)], lambda column, cell: _STYLES.get(cell) if _HEADER[column] == "STATE" else None
    )


def facts(job: Job) -> Iterator[str]:
    """The facts of one job, one line each."""
    for name, value in _facts(job):
        style = _STYLES.get(value) if name == "state" else None
        yield f"{name:<9} {painted_on_stdout(value, style)}"


def outcome(job: Job) -> str:
    """The result of a job that SUCCEEDED, in one line; empty for any other job."""
    if job.plan is not None:
        reads, writes = format_size(job.plan.read_bytes), format_size(job.plan.write_bytes)
        return f"planned, nothing written: {counted(job.plan.units, 'unit')} would read {reads} and write {writes}"
    if job.result is None:
        return ""
    files = counted(job.result.files_count, "file")
    if job.result.already_done:
        return f"already done: the target ({files}) is this conversion's result, unchanged since its commit"
    return f"wrote {format_size(job.result.write_bytes)} in {files}, target verified"


def nodes(workers: Sequence[WorkerNode]) -> Iterator[str]:
    """A header and a line for each live worker. The line of one in quarantine ends with the reason."""
    return aligned([("STATE", "WORKER", "JOB"), *((w.state, printable(w.name), _node(w)) for w in workers)])


def _node(worker: WorkerNode) -> str:
    if worker.quarantined_until is None or worker.problem is None:
        return worker.job_id or "-"
    return f"claims nothing until {_local(worker.quarantined_until)}: {_reason(worker.problem)}"


def _row(job: Job) -> tuple[str, ...]:
    source, target = printable(job.request.source.url), printable(job.request.target)
    what = f"{source} -> {target} ({job.request.to})"
    if job.kind is JobKind.PLAN:
        what = f"plan only: {what}"
    if job.error is not None:
        what = f"{what}  {_reason(job.error)}"
    created = job.created_at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return job.id, job.state.value, _done(job), created, what


def _done(job: Job) -> str:
    if job.state is JobState.SUCCEEDED:
        return "100%"
    if job.progress is None or not job.progress.bytes_total:
        return "-"
    return f"{100 * job.progress.bytes_done / job.progress.bytes_total:.0f}%"


def _reason(problem: Problem) -> str:
    return f"{problem.code}: {printable(problem.detail, max_chars=_REASON_CHARS)}"


def _facts(job: Job) -> Iterator[tuple[str, str]]:
    target = f"{printable(job.request.target)} ({job.request.to})"
    yield "id", job.id
    yield "state", job.state.value
    yield "kind", "plan only: it writes nothing" if job.kind is JobKind.PLAN else "conversion"
    yield "source", printable(job.request.source.url)
    yield "target", target
    if job.request.plan is not None:
        yield "plan", f"saved, digest {job.request.plan.digest}"
    yield "attempt", f"{job.attempt} of {job.max_attempts}"
    yield "worker", printable(job.worker or "-")
    if any(worker.role == "helper" for worker in job.workers):
        yield from (("", line) for line in map(_worker, job.workers))
    for name, at in (("created", job.created_at), ("started", job.started_at), ("finished", job.finished_at)):
        if at is not None:
            yield name, _local(at)
    if job.labels:
        yield "labels", " ".join(f"{printable(name)}={printable(value)}" for name, value in sorted(job.labels.items()))
    if found := outcome(job):
        yield "result", found
    elif job.progress is not None:
        yield "progress", _progress(job.progress)
    if job.leftovers_until is not None:
        until = f"kept for a retry until {_local(job.leftovers_until)}"
        yield "leftovers", until if job.state is JobState.FAILED else f"looked for at {_local(job.leftovers_until)}"
    if job.error is not None:
        yield "error", f"{job.error.code}: {printable(job.error.detail)}"
        yield "fix", printable(job.error.fix)


def _worker(worker: JobWorker) -> str:
    until = "now" if worker.left_at is None else _local(worker.left_at)
    line = f"{worker.role} {printable(worker.worker)}, attempt {worker.attempt}, {_local(worker.joined_at)} to {until}"
    if worker.share is None:
        return line
    share = worker.share
    taken = f" ({share.takeovers} taken over)" if share.takeovers else ""
    return (
        f"{line}: {counted(share.runs, 'run')}{taken}, {counted(share.units, 'unit')}, {format_size(share.write_bytes)}"
    )


def _progress(progress: Progress) -> str:
    if not progress.bytes_total:
        return progress.phase
    share = 100 * progress.bytes_done / progress.bytes_total
    size = f"{format_size(progress.bytes_done)} of {format_size(progress.bytes_total)}"
    units = f", {progress.units_done} of {counted(progress.units_total, 'unit')}" if progress.units_total else ""
    return f"{progress.phase}, {share:.0f}%: {size}{units}"


def _local(at: datetime) -> str:
    return at.astimezone().isoformat(timespec="seconds")


# Job ids as people type them: whole, or a beginning that only one job has.

_WHOLE = re.compile("job_[a-z2-7]{24}")
_LEAST_CHARS = 3
_MOST_JOBS = 1000
_PAGE = 200


def whole_id(client: Client, text: str) -> str:
    """The id of the job that a text names: its id, or a beginning of it, with or without `job_`.

    Only the newest jobs are looked through for a beginning.

    Raises:
        RequestError: `request.not_found`: none; `request.invalid`: several.
    """
    if _WHOLE.fullmatch(text):
        return text
    try:
        return client.get(text).id
    except ReshardError as error:
        if error.code != "request.not_found" or len(text.removeprefix("job_")) < _LEAST_CHARS:
            raise
    found = _beginning_with(client, text)
    if len(found) == 1:
        return found[0]
    if found:
        raise RequestError(
            "request.invalid",
            f"{len(found)} jobs have an id that begins with {printable(text, max_chars=64)}: {listed(found, 4)}",
            fix="write more of the id; to see all: reshard jobs list",
        )
    raise RequestError(
        "request.not_found",
        f"no job has this id, and none of the newest {_MOST_JOBS} one that begins with {printable(text, max_chars=64)}",
        fix="reshard jobs list",
    )


def _beginning_with(client: Client, text: str) -> list[str]:
    found: list[str] = []
    seen, token = 0, ""
    while seen < _MOST_JOBS:
        page = client.list(page_size=_PAGE, page_token=token)
        found += [job.id for job in page.jobs if job.id.startswith((text, f"job_{text}"))]
        seen, token = seen + len(page.jobs), page.next_page_token
        if not token:
            break
    return found


# Following a service's job to its end, with its progress on stderr.


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
