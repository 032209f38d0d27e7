"""The commands that run in this process, without service or torch: `inspect`, `plan`, `convert`, `verify`."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from reshard.cli.colours import complain, warn
from reshard.cli.flags import ConversionFlags, OptionsCommand, SourceFlags, takes_conversion, takes_source
from reshard.cli.help_pages import CHECKING, GENERAL, HERE, PICTURE, RESOURCES, TARGET
from reshard.cli.next_steps import followed, next_steps, possible_commands
from reshard.cli.picture import html_of, picture_lines
from reshard.cli.tables import cast_line, inspection_lines, not_carried_lines, plan_lines
from reshard.errors import ExitCode, JobError, RequestError, printable
from reshard.layout_svg import Picture, render
from reshard.local import load_engine
from reshard.progress_bars import progress_shown
from reshard.sizes import counted, format_size, parse_percent

if TYPE_CHECKING:
    from reshard.models import ConvertRequest, ConvertResult, PlanSummary, VerifyReport
    from reshard.shared_work import SharedWork

Source = Annotated[
    str, typer.Argument(metavar="SRC", help="Checkpoint: a directory or URL (s3://...), local by default.")
]
Target = Annotated[str, typer.Argument(metavar="DST", help="Target; for universal and zero, the tag directory.")]
TargetProfile = Annotated[
    str | None, typer.Option(metavar="NAME", help="Storage profile for DST.", rich_help_panel=TARGET)
]
JsonFlag = Annotated[
    bool, typer.Option("--json", help="Machine-readable output with a schema version.", rich_help_panel=GENERAL)
]
QuietFlag = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=GENERAL)]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the app."""
    app.command(cls=OptionsCommand, rich_help_panel=HERE)(inspect)
    app.command(cls=OptionsCommand, rich_help_panel=HERE)(plan)
    app.command(cls=OptionsCommand, rich_help_panel=HERE)(convert)
    app.command(rich_help_panel=HERE)(verify)


@takes_source
def inspect(
    source: Source,
    *,
    flags: SourceFlags,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor, not a summary.", rich_help_panel=GENERAL)
    ] = False,
    tensor: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[/STATE]", help="List the files that hold parts of one tensor.", rich_help_panel=PICTURE
        ),
    ] = None,
    files: Annotated[
        bool, typer.Option("--files", help="List the contents of each file.", rich_help_panel=PICTURE)
    ] = False,
    svg: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the tensor, or all files, as SVG.", rich_help_panel=PICTURE),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The drawing and its table as a page.", rich_help_panel=PICTURE)
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option(metavar="DST", help="Draw SRC and the checkpoint DST side by side.", rich_help_panel=PICTURE),
    ] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help="Also say what SRC cannot become, and why.", rich_help_panel=GENERAL),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Describe a checkpoint from its metadata; nothing in it is executed. `reshard SRC` is short for this."""
    if beside is not None and svg is None and html is None:
        raise RequestError("request.invalid", "--beside draws a picture and needs a file for it", fix="add --svg FILE")
    if tensor is not None or files or svg is not None or html is not None:
        from reshard.examining import picture  # it loads the models, which `reshard --help` does not need

        flags.spec(source)  # its errors name flags
        drawn = picture(source, tensor=tensor, beside=beside, **flags.given())
        _write(drawn, svg, html)
        for line in [drawn.source.model_dump_json()] if as_json else _table_of(drawn):
            _say(line)
        if written := ", ".join(printable(str(path)) for path in (svg, html) if path is not None):
            _hint(f"wrote {written}")
        return
    found = load_engine().inspect(flags.spec(source))
    if as_json:
        _say(found.model_dump_json())
        return
    commands = possible_commands(source, found, flags.words())
    for line in inspection_lines(found, commands, every_tensor=tensors, every_target=every):
        _say(line)
    for warning in found.warnings:
        warn(warning)
    for line in not_carried_lines(found.not_carried):
        _hint(line)
    if (said := followed(source, flags.tag)) is not None:
        _hint(said)


def _table_of(drawn: Picture) -> Iterator[str]:
    """The table of SRC, and that of the checkpoint beside it."""
    if drawn.target is None:
        yield from picture_lines(drawn.source)
        return
    for shown in (drawn.source, drawn.target):
        yield f"{printable(shown.url)} ({shown.format})"
        yield from picture_lines(shown)


def _write(drawn: Picture, svg: Path | None, html: Path | None) -> None:
    for path, text in ((svg, render), (html, html_of)):
        if path is not None:
            try:
                path.write_text(text(drawn.source, drawn.target), encoding="utf-8")
            except OSError as error:
                raise RequestError(
                    "request.invalid",
                    f"{printable(str(path))}: {error.strerror}",
                    fix="name a file in a directory that exists",
                ) from None


@takes_conversion
def plan(source: Source, target: Target, *, flags: ConversionFlags, as_json: JsonFlag = False) -> None:
    """Show the reads, writes and memory of `convert` with the same options; nothing is written."""
    show_plan(load_engine().plan(flags.request(source, target)), as_json=as_json)


def show_plan(summary: PlanSummary, *, as_json: bool) -> None:
    """Print a plan on stdout, and what it leaves out on stderr."""
    if as_json:
        _say(summary.model_dump_json())
        return
    for line in plan_lines(summary):
        _say(line)
    for warning in summary.warnings:
        warn(warning)
    for line in not_carried_lines(summary.not_carried):
        _hint(line)


@takes_conversion
def convert(
    source: Source,
    target: Target,
    *,
    flags: ConversionFlags,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Number of processes that run this command together; auto: the launcher's.",
            rich_help_panel=RESOURCES,
        ),
    ] = None,
    worker: Annotated[
        int | None, typer.Option(metavar="I", help="Number of this process, from 0 to N-1.", rich_help_panel=RESOURCES)
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only show the plan, as `plan` does; write nothing.", rich_help_panel=GENERAL),
    ] = False,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Convert a checkpoint in this process. The last line on stdout is the output path.

    The same command resumes an interrupted conversion. A finished one is recognised and not repeated.
    """
    if dry_run:
        show_plan(load_engine().plan(flags.request(source, target)), as_json=as_json)
        return
    from reshard.shared_work import shared_work  # it loads pydantic, which `reshard --help` does not need

    work = shared_work(workers, worker, os.environ)
    run_conversion(flags.request(source, target), work=work, as_json=as_json, quiet=quiet)


def run_conversion(
    request: ConvertRequest,
    *,
    into: bool = False,
    work: SharedWork | None = None,
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Run a conversion in this process and print its result.

    Args:
        request: What to convert.
        into: True to write into an existing directory.
        work: This process's place among those that run the conversion together; None if it runs alone.
        as_json: True to print the whole result on stdout, not only the path.
        quiet: True to print nothing on stderr but errors.
    """
    engine = load_engine()
    call = engine.convert_into if into else partial(engine.convert, work=work)
    try:
        with stoppable() as stop, progress_shown(quiet=quiet) as show:
            result = call(request, on_progress=show, should_stop=stop.is_set)
    except JobError as error:
        if error.code != "job.cancelled":
            raise
        raise JobError(
            "job.cancelled",
            "cancelled this local run; finished work is kept: the same command resumes it",
            fix=f"run the same command again; to give it up: reshard clean {shlex.quote(request.target)}",
        ) from None
    _say_result(result, as_json=as_json, quiet=quiet)


def _say_result(result: ConvertResult, *, as_json: bool, quiet: bool) -> None:
    for warning in result.warnings:
        warn(warning)
    if result.casts and not quiet:
        _hint(cast_line(result.casts))
    for line in () if quiet else not_carried_lines(result.not_carried):
        _hint(line)
    if as_json:
        _say(result.model_dump_json())
        return
    if result.already_done:
        _hint("already done: the target is this conversion's result, unchanged since its commit")
    elif not quiet:
        _hint(_done_line(result))
    if not quiet:
        for line in next_steps(result.to, result.target, (file.path for file in result.files)):
            _hint(f"next: {line}")
    _say(result.target)


def _done_line(result: ConvertResult) -> str:
    kept = f", kept {format_size(result.resumed_bytes)} of an earlier run" if result.resumed_bytes else ""
    # A plan counts tensors only; neighbours are read in one call, with the bytes between them.
    return (
        f"read {format_size(result.read_bytes)} with gaps, wrote {format_size(result.write_bytes)} "
        f"in {counted(len(result.files), 'file')}{kept}, {sum(result.seconds.values()):.1f} s, verified"
    )


@contextmanager
def stoppable() -> Generator[threading.Event]:
    """Set the event at the first Ctrl-C, so that running units end; end the process at the second one."""
    stop = threading.Event()

    def on_interrupt(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            # Threads may wait for a store that never answers. The journal survives when the process ends here.
            os._exit(int(ExitCode.INTERRUPTED))
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)


def verify(
    target: Annotated[str, typer.Argument(metavar="DST", help="Target that `convert` wrote.")],
    *,
    sample: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT", help="Read only a random part, such as 2%, of a huge target.", rich_help_panel=CHECKING
        ),
    ] = None,
    profile: TargetProfile = None,
    as_json: JsonFlag = False,
) -> None:
    """Read every byte of a target and compare its checksums and tensor digests with its manifest."""
    report = load_engine().verify(target, profile=profile, sample=parse_percent(sample) if sample else None)
    if as_json:
        _say(report.model_dump_json())
    else:
        for problem in report.problems:
            where = "" if problem.offset is None else f" bytes {problem.offset}+{problem.length_bytes}"
            tensor = "" if problem.tensor is None else f" of {problem.tensor}"
            _say(f"{problem.path}{where}{tensor}: {problem.problem}")
        if report.ok:
            _say(_verified(report))
    if not report.ok:
        count = len(report.problems)
        complain(
            "integrity.mismatch",
            f"{counted(count, 'problem')} in {printable(target)}",
            "convert again with --overwrite, or restore the files",
        )
        raise typer.Exit(int(ExitCode.MISMATCH))


def _verified(report: VerifyReport) -> str:
    size = format_size(report.read_bytes)
    if report.sampled is not None:
        return (
            f"sampled: {size} ({report.sampled:.3%} was asked for) of {counted(report.files, 'file')} match "
            f"their checksums ({report.seconds:.1f} s); the rest was not read"
        )
    files, tensors = counted(report.files, "file"), counted(report.tensors, "tensor")
    return f"ok: {files}, {tensors}, {size} match their checksums ({report.seconds:.1f} s)"


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _hint(line: str) -> None:
    sys.stderr.write(f"{line}\n")
