"""Results as HTML for a notebook: their facts as tables, and the picture of the layout.

Names come from checkpoints and from services, so every text is escaped. Nothing is loaded and nothing runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from reshard.draw.layout import Picture, render
from reshard.draw.marks import markup
from reshard.engine import load_engine
from reshard.errors import ReshardError, counted, format_size
from reshard.models.jobs import (
    ConvertRequest,
    ConvertResult,
    FileEntry,
    Inspection,
    Job,
    JobList,
    NotCarried,
    PlanSummary,
    Problem,
    VerifyReport,
)
from reshard.models.reports import Difference, DiffReport, DiffSide, LayoutPair, LayoutPicture
from reshard.options import SourceSpec
from reshard.wire_model import RenderedModel, ShownModel

MAX_ROWS = 50
"""The most rows of a table; the rest are counted."""


def rendered(model: RenderedModel) -> str:
    """The HTML of a layout, or of a result with its picture if there is one."""
    if isinstance(model, LayoutPicture):
        return render(model)
    if isinstance(model, LayoutPair):
        return render(model.source, model.target)
    parts = {
        Inspection: _inspection,
        PlanSummary: _plan,
        ConvertResult: _result,
        VerifyReport: _verification,
        DiffReport: _difference_report,
        Job: _job,
        JobList: _jobs,
    }
    draw = next((draw for kind, draw in parts.items() if isinstance(model, kind)), None)
    body = _facts(model.model_dump(mode="json").items()) if draw is None else draw(model)  # pyright: ignore[reportArgumentType]
    picture = _picture_of(model.drawn) if isinstance(model, ShownModel) else None
    return f'<div class="reshard">{body}{"" if picture is None else picture.svg()}</div>'


def _picture_of(subject: object) -> Picture | None:
    """Read the metadata of what a result is about; None if that is not possible here, or not any more."""
    try:
        if isinstance(subject, SourceSpec):
            return Picture(load_engine().picture(subject))
        if isinstance(subject, ConvertRequest):
            pair = load_engine().planned_pictures(subject)
            return Picture(pair.source, pair.target)
    except ReshardError:
        # The source may have been removed since. A table without a picture still says what happened.
        return None
    return None


def _inspection(found: Inspection) -> str:
    world = ", ".join(f"{axis} {size}" for axis, size in found.world.items())
    facts = [
        ("checkpoint", found.url),
        ("tag", found.tag),
        ("format", found.format),
        ("written by", found.framework_version),
        ("step", found.step),
        ("ranks", world or None),
        ("parameters", f"{found.parameters:,} ({counted(found.parameter_elems, 'element')})"),
        ("optimizer states", ", ".join(found.optimizer_states) or None),
        ("types", ", ".join(found.dtypes) or None),
        ("files", f"{found.files:,} ({format_size(found.total_bytes)})"),
        ("can become", ", ".join(t.name for t in found.targets if t.possible) or None),
    ]
    refused = [(t.name, t.detail) for t in found.targets if not t.possible]
    tensors = [
        (t.fqn, str(list(t.shape)), t.dtype, ", ".join(t.states) + (" (frozen)" if t.frozen else ""))
        for t in found.tensors
    ]
    return (
        _facts(facts)
        + _warnings(found.warnings)
        + _folded("cannot become", ("target", "reason"), refused)
        + _folded("tensors", ("name", "shape", "type", "states"), tensors)
        + _not_carried(found.not_carried)
    )


def _plan(summary: PlanSummary) -> str:
    facts = [
        ("plan", f"{summary.source_format} to {summary.to}; nothing is written yet"),
        ("source", summary.source_url),
        ("target", summary.target),
        ("reads", format_size(summary.read_bytes)),
        ("writes", f"{format_size(summary.write_bytes)} in {counted(summary.files_count, 'file')}"),
        ("memory", format_size(summary.peak_memory_bytes)),
        ("units of work", f"{summary.units:,}"),
    ]
    return _facts(facts) + _warnings(summary.warnings) + _files(summary.files) + _not_carried(summary.not_carried)


def _result(result: ConvertResult) -> str:
    took = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in result.seconds.items())
    wrote = f"{format_size(result.write_bytes)} in {counted(result.files_count, 'file')}"
    facts = [
        ("target", result.target),
        ("format", str(result.to)),
        ("read", format_size(result.read_bytes)),
        ("wrote", "nothing: it was done already" if result.already_done else wrote),
        ("copied by the store", format_size(result.server_copied_bytes) if result.server_copied_bytes else None),
        ("kept from before", format_size(result.resumed_bytes) if result.resumed_bytes else None),
        ("time", took or None),
        ("target verified", str(result.verification)),
        ("source", None if result.source_check is None else str(result.source_check).removeprefix("source: ")),
    ]
    casts = [(c.fqn, str(c.overflowed), str(c.underflowed), str(c.nan), str(c.infinite)) for c in result.casts]
    return (
        _facts(facts)
        + _warnings(result.warnings)
        + _folded("lossy casts", ("parameter", "too large", "became zero", "NaN", "infinite"), casts)
        + _files(result.files)
        + _not_carried(result.not_carried)
    )


def _verification(report: VerifyReport) -> str:
    read = format_size(report.read_bytes)
    part = "" if report.sampled is None else f" (a sample of {report.sampled:.3%})"
    facts = [
        ("verified", "everything matches" if report.ok else counted(len(report.problems), "problem")),
        ("target", report.target),
        ("compared", f"{counted(report.files, 'file')}, {counted(report.tensors, 'tensor')}, {read}{part}"),
        ("time", f"{report.seconds:.2f} s"),
    ]
    problems = [(p.path, "" if p.offset is None else str(p.offset), p.tensor or "", p.problem) for p in report.problems]
    return _facts(facts) + _table(("file", "offset", "tensor", "problem"), problems)


def _difference_report(report: DiffReport) -> str:
    facts = [
        ("compared", report.verdict()),
        ("A", _side(report.a)),
        ("B", _side(report.b)),
        ("equal bit for bit", f"{report.identical:,} of {counted(report.tensors, 'tensor')}"),
        ("values", f"{report.values:,}"),
        ("read", f"{format_size(report.read_bytes)} in {report.seconds:.2f} s"),
    ]
    rows = [_difference(found) for found in report.differences]
    return _facts(facts) + _warnings(report.notes) + _table(("kind", "name", "A", "B", "elements", "most"), rows)


def _side(side: DiffSide) -> str:
    world = " ".join(f"{axis} {size}" for axis, size in side.world.items())
    step = "" if side.step is None else f"step {side.step}"
    return " · ".join(filter(None, (side.url, side.tag, side.format, world, step)))


def _difference(found: Difference) -> tuple[str, ...]:
    elements = "" if found.differing is None else f"{found.differing:,} of {found.elements or 0:,}"
    return (
        found.kind.value,
        f"{found.name}/{found.state}" if found.state else found.name,
        found.a if found.a is not None else "(none)",
        found.b if found.b is not None else "(none)",
        elements,
        "" if found.max_abs is None else f"{found.max_abs:.3g}",
    )


def _job(job: Job) -> str:
    facts = [
        ("job", job.id),
        (
            "state",
            f"{job.state.value}, attempt {job.attempt} of {job.max_attempts}" if job.attempt else job.state.value,
        ),
        ("source", job.request.source.url),
        ("target", f"{job.request.target} ({job.request.to})"),
        ("labels", ", ".join(f"{name}={value}" for name, value in job.labels.items()) or None),
        ("created", job.created_at.isoformat(timespec="seconds")),
        ("started", job.started_at.isoformat(timespec="seconds") if job.started_at else None),
        ("ended", job.finished_at.isoformat(timespec="seconds") if job.finished_at else None),
        ("worker", job.worker),
    ]
    bar = ""
    if job.progress is not None and job.progress.bytes_total and not job.done:
        done, total = job.progress.bytes_done, job.progress.bytes_total
        bar = f'<progress max="{total}" value="{done}"></progress> {format_size(done)} of {format_size(total)}'
    outcome = "" if job.result is None else _result(job.result)
    return _facts(facts) + bar + ("" if job.error is None else _error(job.error)) + outcome


def _jobs(page: JobList) -> str:
    rows = [
        (
            job.id,
            job.state.value,
            job.request.source.url,
            job.request.target,
            job.created_at.isoformat(timespec="seconds"),
        )
        for job in page.jobs
    ]
    return _table(("job", "state", "source", "target", "created"), rows) if rows else "<p>No jobs.</p>"


def _error(problem: Problem) -> str:
    fix = f"<br>fix: {markup(problem.fix)}" if problem.fix else ""
    return f"<p><b>error: {markup(problem.code)}</b>: {markup(problem.detail)}{fix}</p>"


def _facts(facts: Iterable[tuple[str, object]]) -> str:
    rows = "".join(
        f'<tr><th style="text-align:left">{markup(name)}</th><td style="text-align:left">{markup(str(value))}</td></tr>'
        for name, value in facts
        if value is not None
    )
    return f"<table>{rows}</table>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f'<th style="text-align:left">{markup(name)}</th>' for name in heads)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows[:MAX_ROWS])
    more = f"<p>... and {len(rows) - MAX_ROWS:,} more</p>" if len(rows) > MAX_ROWS else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _cells(row: Sequence[str]) -> str:
    return "".join(f'<td style="text-align:left">{markup(cell)}</td>' for cell in row)


def _folded(name: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    return f"<details><summary>{markup(name)} ({len(rows):,})</summary>{_table(heads, rows)}</details>"


def _files(files: Sequence[FileEntry]) -> str:
    return _folded("files", ("path", "size"), [(f.path, format_size(f.size_bytes)) for f in files])


def _not_carried(found: Sequence[NotCarried]) -> str:
    rows = [(n.path, n.file, n.reason) for n in found]
    return _folded("not carried over", ("value", "file", "reason"), rows)


def _warnings(texts: Iterable[str]) -> str:
    return "".join(f"<p>note: {markup(text)}</p>" for text in texts)
