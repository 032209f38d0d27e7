"""Jobs of a service as lines for people: a table of many, the facts of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from reshard.choices import JobKind, JobState
from reshard.cli.colours import Style, painted_on_stdout
from reshard.errors import printable
from reshard.sizes import counted, format_size

if TYPE_CHECKING:
    from datetime import datetime

    from reshard.models import Job, JobWorker, Problem, Progress, WorkerNode

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
    rows = [_HEADER, *(_row(job) for job in jobs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        cells[1] = painted_on_stdout(cells[1], _STYLES.get(row[1]))
        yield "  ".join([*cells, row[-1]])


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
    return f"wrote {format_size(job.result.write_bytes)} in {files}, verified"


def nodes(workers: Sequence[WorkerNode]) -> Iterator[str]:
    """A header and a line for each live worker. The line of one in quarantine ends with the reason."""
    rows = [("STATE", "WORKER", "JOB"), *((w.state, printable(w.name), _node(w)) for w in workers)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for row in rows:
        yield "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])


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
