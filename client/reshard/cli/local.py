"""The commands that run in this process, without a service, such as inspect, plan, convert, verify and diff."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from reshard.cli.flags import (
    ConversionFlags,
    CutFlags,
    LayoutFlags,
    OptionsCommand,
    PlannedCommand,
    SourceFlags,
    choice,
    save_plan,
    takes_conversion,
    takes_cut_source,
    takes_layout,
    takes_source,
    takes_two_sources,
)
from reshard.cli.help_pages import (
    CHECKING,
    COMPARISON,
    GENERAL,
    HERE,
    PICTURE,
    RESOURCES,
    SOURCE,
    TARGET,
    Style,
    complain,
    hint,
    painted_on_stdout,
    say,
    warn,
)
from reshard.cli.output import (
    SHOWN_DIFFERENCES,
    cast_line,
    check_lines,
    done_lines,
    fingerprint_lines,
    followed,
    html_of,
    inspection_lines,
    next_steps,
    not_carried_lines,
    not_covered,
    picture_lines,
    plan_lines,
    possible_commands,
    quantized_line,
    report_lines,
    with_model_files,
)
from reshard.doctor import Finding, environment, machine, service
from reshard.draw.layout import Picture, render
from reshard.engine import load_engine
from reshard.errors import (
    CODES,
    ExitCode,
    JobError,
    RequestError,
    ReshardError,
    SourceError,
    counted,
    format_size,
    printable,
)
from reshard.option import parse_percent
from reshard.progress import progress_shown

if TYPE_CHECKING:
    from reshard.models.jobs import ConvertRequest, ConvertResult, Inspection, PlanSummary, VerifyReport
    from reshard.models.reports import Signing
    from reshard.options import Options, SourceSpec
    from reshard.shared_work import SharedWork


Source = Annotated[
    str, typer.Argument(metavar="SRC", help="Checkpoint: a directory or URL (s3://...), local by default.")
]
Target = Annotated[str, typer.Argument(metavar="DST", help="Target; for universal and zero, the tag directory.")]
TargetProfile = Annotated[
    str | None, typer.Option(metavar="NAME", help="Storage profile for DST.", rich_help_panel=TARGET)
]
PublicKey = Annotated[
    str | None,
    typer.Option(metavar="PUB", help="Public key of a key that a service keeps.", rich_help_panel=CHECKING),
]
JsonFlag = Annotated[
    bool, typer.Option("--json", help="Machine-readable output with a schema version.", rich_help_panel=GENERAL)
]
QuietFlag = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=GENERAL)]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the app."""
    app.command(cls=OptionsCommand, rich_help_panel=HERE)(inspect)
    app.command(cls=PlannedCommand, rich_help_panel=HERE)(plan)
    app.command(cls=PlannedCommand, rich_help_panel=HERE)(convert)
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
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Read what must agree, and compare it: copies, masters and weights.",
            rich_help_panel=GENERAL,
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Describe a checkpoint from its metadata; nothing in it is executed. `reshard SRC` is short for this."""
    if beside is not None and svg is None and html is None:
        raise RequestError("request.invalid", "--beside draws a picture and needs a file for it", fix="add --svg FILE")
    if tensor is not None or files or svg is not None or html is not None:
        from reshard.functions import picture  # it loads the models, which `reshard --help` does not need

        spec = flags.spec(source)  # its errors name flags
        if compare:
            _inspected(spec, compare=True, as_json=as_json)
        drawn = picture(source, tensor=tensor, beside=beside, **flags.given())
        _write(drawn, svg, html)
        say(*([drawn.source.model_dump_json()] if as_json else _table_of(drawn)))
        if written := ", ".join(printable(str(path)) for path in (svg, html) if path is not None):
            hint(f"wrote {written}")
        return
    found = _inspected(flags.spec(source), compare=compare, as_json=as_json)
    if as_json:
        say(found.model_dump_json())
        return
    commands = possible_commands(found.newest or source, found, flags.words())
    say(*inspection_lines(found, commands, every_tensor=tensors, every_target=every))
    for warning in found.warnings:
        warn(warning)
    for line in not_carried_lines(found.not_carried):
        hint(line)
    if (said := followed(source, flags.tag)) is not None:
        hint(said)


def _inspected(spec: SourceSpec, *, compare: bool, as_json: bool) -> Inspection:
    """The description of a checkpoint; the names of all parameters whose tensors do not agree are printed first."""
    try:
        return load_engine().inspect(spec, compare=compare)
    except SourceError as error:
        if compare and not as_json:
            say(*map(str, error.details.get("parameters", ())))
        raise


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


PlanFlag = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Run the plan of `reshard plan --out FILE`, in place of SRC, DST and their options."
    ),
]


@takes_conversion
def plan(
    context: typer.Context,
    source: Source,
    target: Target,
    *,
    flags: ConversionFlags,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save the plan: `convert --plan FILE` runs it.", rich_help_panel=GENERAL),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Plan anew what a saved plan asks for.", rich_help_panel=GENERAL),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the reads, writes and memory of `convert` with the same options; nothing is written but FILE of --out."""
    request = asked(flags, context, plan, source, target, quiet=True).model_copy(update={"plan": None})
    show_plan(load_engine().plan(request), as_json=as_json, saved=(request, out))


def show_plan(summary: PlanSummary, *, as_json: bool, saved: tuple[ConvertRequest, Path | None] | None = None) -> None:
    """Print a plan on stdout, and what it leaves out on stderr; save it with its request, if a file is named."""
    if saved is not None and saved[1] is not None:
        save_plan(saved[1], saved[0], summary)
    if as_json:
        say(summary.model_dump_json())
        return
    say(*plan_lines(summary))
    for warning in summary.warnings:
        warn(warning)
    for line in not_carried_lines(summary.not_carried):
        hint(line)
    if saved is not None and saved[1] is not None:
        hint(f"saved; to run it: reshard convert --plan {shlex.quote(printable(str(saved[1])))}")


@takes_conversion
def convert(
    context: typer.Context,
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
    plan: PlanFlag = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only show the plan, as `plan` does; write nothing.", rich_help_panel=GENERAL),
    ] = False,
    sign: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="Write certificates of source and target beside DST, signed with this private key.",
            rich_help_panel=CHECKING,
        ),
    ] = None,
    cert: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="With --sign: the certificate that SRC has already.", rich_help_panel=CHECKING
        ),
    ] = None,
    trust: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PUB",
            help="Public key that signed --cert, if it is not that of --sign. May be repeated.",
            rich_help_panel=CHECKING,
        ),
    ] = None,
    public_key: PublicKey = None,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Then upload DST, with a model card, to hf://ORG/NAME[@BRANCH] by one commit.",
            rich_help_panel=TARGET,
        ),
    ] = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Convert a checkpoint in this process. The last line on stdout is the output path.

    The same command resumes an interrupted conversion. A finished one is recognised and not repeated.
    """
    request = asked(flags, context, plan, source, target, quiet=quiet)
    if push is not None:
        request = request.for_hub()
    with planning_again(plan):
        if dry_run:
            show_plan(load_engine().plan(request), as_json=as_json)
            return
        from reshard.shared_work import shared_work  # it loads pydantic, which `reshard --help` does not need

        work = shared_work(workers, worker, os.environ)
        signing = None if sign is None else _signing_of(sign, public_key, cert, trust)
        run_conversion(request, work=work, signing=signing, push=push, as_json=as_json, quiet=quiet)


def asked(
    flags: ConversionFlags, context: typer.Context, plan: str | None, *places: str, quiet: bool
) -> ConvertRequest:
    """The request of a command: that of a plan file if one is named, else that of the flags.

    Raises:
        RequestError: `request.invalid`.
    """
    if plan is None:
        return flags.request(*places)
    request = flags.planned(context, plan, *places)
    tag = "" if request.source.tag is None else f" ({printable(request.source.tag)})"
    hint(f"as planned: {printable(request.source.url)}{tag} -> {printable(request.target)}", quiet=quiet)
    return request


@contextmanager
def planning_again(plan: str | None) -> Generator[None]:
    """Say the command that makes a plan file anew, in the error of a plan that has changed."""
    try:
        yield
    except RequestError as error:
        if error.code == "request.plan_changed" and plan is not None:
            file = shlex.quote(printable(plan, max_chars=1_024))
            error.fix = f"plan again, and look at the new plan: reshard plan --plan {file} --out {file}"
        raise


def run_conversion(
    request: ConvertRequest,
    *,
    into: bool = False,
    work: SharedWork | None = None,
    signing: Signing | None = None,
    push: str | None = None,
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Run a conversion in this process and print its result.

    Args:
        request: What to convert.
        into: True to write into an existing directory.
        work: This process's place among those that run the conversion together; None if it runs alone.
        signing: The key that signs certificates of source and target; None for no certificates.
        push: The URL of a repository to which the finished target is uploaded; None for none.
        as_json: True to print the whole result on stdout, not only the path.
        quiet: True to print nothing on stderr but errors.
    """
    engine = load_engine()
    call = engine.convert_into if into else partial(engine.convert, work=work, signing=signing)
    try:
        with stoppable() as stop, progress_shown(quiet=quiet) as show:
            result = call(request, on_progress=show, should_stop=stop.is_set)
    except JobError as error:
        if error.code != "job.cancelled" or request.target.startswith("hf://"):  # an upload leaves nothing to clean
            raise
        raise JobError(
            "job.cancelled",
            "cancelled this local run; finished work is kept: the same command resumes it",
            fix=f"run the same command again; to give it up: reshard clean {shlex.quote(request.target)}",
        ) from None
    for url in result.certificates:
        hint(f"wrote {printable(url)}", quiet=quiet)
    more = () if into or quiet else with_model_files(request, {file.path for file in result.files})
    _say_result(result, as_json=as_json, quiet=quiet, first=more)
    if push is not None:
        done = engine.push(request.target, push, overwrite=request.overwrite)
        what = "holds these files already, at" if done.already_done else "got them with"
        hint(f"{printable(done.url)} {what} commit {done.commit}", quiet=quiet)


def _signing_of(key: str, public_key: str | None, cert: str | None = None, trust: list[str] | None = None) -> Signing:
    from reshard.models.reports import Signing

    return Signing(key=key, public_key=public_key, certificate=cert, trusted=tuple(trust or ()))


def _say_result(result: ConvertResult, *, as_json: bool, quiet: bool, first: Sequence[str] = ()) -> None:
    """Print a result; `first` are next steps that come before the others."""
    for warning in result.warnings:
        warn(warning)
    lossy = [c for c in result.casts if c.overflowed or c.underflowed or c.nan or c.infinite]
    if lossy and not quiet:
        hint(cast_line(lossy))
    if (line := quantized_line(result.casts)) and not quiet:
        hint(line)
    for line in () if quiet else not_carried_lines(result.not_carried):
        hint(line)
    if as_json:
        say(result.model_dump_json())
        return
    if result.already_done:
        hint("already done: the target is this conversion's result, unchanged since its commit")
    elif not quiet:
        hint("\n".join(done_lines(result)))
    if not quiet:
        for line in (*first, *next_steps(result.to, result.target, (file.path for file in result.files))):
            hint(f"next: {line}")
    say(result.target)


@contextmanager
def stoppable(*more: signal.Signals) -> Generator[threading.Event]:
    """Set the event at the first Ctrl-C, so that running units end; end the process at the second one.

    `more` are signals that do as Ctrl-C does.
    """
    stop = threading.Event()

    def on_interrupt(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            # Threads may wait for a store that never answers. The journal survives when the process ends here.
            os._exit(int(ExitCode.INTERRUPTED))
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous = {number: signal.signal(number, on_interrupt) for number in (signal.SIGINT, *more)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def verify(
    target: Annotated[str, typer.Argument(metavar="DST", help="Target that `convert` wrote.")],
    *,
    sample: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT", help="Read only a random part, such as 2%, of a huge target.", rich_help_panel=CHECKING
        ),
    ] = None,
    cert: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Certificate of DST, then those of its sources: compare with them, not with the manifest.",
            rich_help_panel=CHECKING,
        ),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PUB", help="Public key that signed a certificate. May be repeated.", rich_help_panel=CHECKING
        ),
    ] = None,
    profile: TargetProfile = None,
    as_json: JsonFlag = False,
) -> None:
    """Read every byte of a target and compare its checksums and tensor digests with its manifest.

    With --cert: compare any checkpoint with a certificate that was signed by --key, file by file and tensor by tensor.
    """
    if cert or key:
        _verify_sealed(target, cert, key, profile=profile, as_json=as_json)
        return
    report = load_engine().verify(target, profile=profile, sample=parse_percent(sample) if sample else None)
    if as_json:
        say(report.model_dump_json())
    else:
        for problem in report.problems:
            where = "" if problem.offset is None else f" bytes {problem.offset}+{problem.length_bytes}"
            tensor = "" if problem.tensor is None else f" of {problem.tensor}"
            say(f"{problem.path}{where}{tensor}: {problem.problem}")
        if report.ok:
            say(_verified(report))
    if not report.ok:
        count = len(report.problems)
        complain(
            "integrity.mismatch",
            f"{counted(count, 'problem')} in {printable(target)}",
            "convert again with --overwrite, or restore the files",
        )
        raise typer.Exit(int(ExitCode.MISMATCH))


def _verify_sealed(
    target: str, cert: list[str] | None, key: list[str] | None, *, profile: str | None, as_json: bool
) -> None:
    if not cert or not key:
        raise RequestError(
            "request.invalid", "a certificate is checked with a key", fix="give both: --cert FILE --key PUB"
        )
    from reshard.functions import verify_sealed

    check = verify_sealed(target, cert, key, profile=profile)
    if as_json:
        say(check.model_dump_json())
    else:
        say(*check_lines(check))
    if not check.ok:
        count = counted(len(check.problems), "difference")
        complain(
            "integrity.sealed",
            f"{count} between {printable(target)} and its certificate",
            "restore the files that were sealed, or have the checkpoint sealed again",
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


# The `diff` command: compares two checkpoints by logical tensor, across layouts and formats.


class States(StrEnum):
    """The parts of a checkpoint to compare."""

    ALL = "all"
    WEIGHTS = "weights"


def register_diff(app: typer.Typer) -> None:
    """Add the command of this module to the app."""
    app.command(cls=OptionsCommand, rich_help_panel=HERE)(diff)


@takes_two_sources
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="Checkpoint: a directory or URL.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Checkpoint to compare it with.")],
    *,
    flags_a: SourceFlags,
    flags_b: SourceFlags,
    cuts: CutFlags,
    states: Annotated[
        States,
        choice(States, help="`weights`: skip optimizer states, counters and client state.", rich_help_panel=COMPARISON),
    ] = States.ALL,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Short for `--states weights`.", rich_help_panel=COMPARISON)
    ] = False,
    common: Annotated[
        bool,
        typer.Option("--common", help="Ignore tensors and values that only one side has.", rich_help_panel=COMPARISON),
    ] = False,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Leave names out, such as '*.bias' or '*/exp_avg*'. May be repeated.",
            rich_help_panel=COMPARISON,
        ),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="Compare only a random part of the elements, such as 2%.",
            rich_help_panel=COMPARISON,
        ),
    ] = None,
    every: Annotated[
        bool,
        typer.Option(
            "--all", help=f"List every difference, not the worst {SHOWN_DIFFERENCES}.", rich_help_panel=GENERAL
        ),
    ] = False,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Compare two checkpoints by logical tensor, bit by bit, across layouts and formats. Exit code 7 if they differ.

    It compares weights, optimizer states, step counters, hyper-parameters, buffers, frozen and tied weights and client
    state.
    """
    from reshard.models.reports import DiffOptions

    options = DiffOptions(
        weights_only=weights_only or states is States.WEIGHTS,
        common=common,
        ignore=tuple(ignore or ()),
        sample=None if sample is None else parse_percent(sample),
        options=_options_of(cuts),
    )
    with progress_shown(quiet=quiet) as show:
        report = load_engine().diff(flags_a.spec(a), flags_b.spec(b), options, on_progress=show)
    say(*([report.model_dump_json()] if as_json else report_lines(report, every=every)))
    if not report.equal:
        raise typer.Exit(int(ExitCode.MISMATCH))


def _options_of(cuts: CutFlags) -> Options:
    from reshard.installed_formats import options_of

    return options_of(cuts.values())


# The `fingerprint` command: digests of a checkpoint's state that do not depend on its layout.


def register_fingerprint(app: typer.Typer) -> None:
    """Add the command of this module to the app."""
    app.command(cls=OptionsCommand, rich_help_panel=HERE)(fingerprint)


@takes_cut_source
def fingerprint(
    source: Source,
    *,
    flags: SourceFlags,
    cuts: CutFlags,
    states: Annotated[
        States,
        choice(States, help="`weights`: only the model, as of a file of weights.", rich_help_panel=COMPARISON),
    ] = States.ALL,
    tensors: Annotated[
        bool,
        typer.Option(
            "--tensors", help="List the lines that are digested: each tensor and value.", rich_help_panel=GENERAL
        ),
    ] = False,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Digest the state of a checkpoint: equal digests for equal states, in every layout and format.

    The first line on stdout is the digest of the whole. The others are the digests of its components.
    """
    from reshard.models.reports import FingerprintOptions

    options = FingerprintOptions(
        weights_only=states is States.WEIGHTS,
        lines=tensors,
        options=_options_of(cuts),
    )
    with progress_shown(quiet=quiet) as show:
        report = load_engine().fingerprint(flags.spec(source), options, on_progress=show)
    if as_json:
        say(report.model_dump_json())
        return
    say(*fingerprint_lines(report))
    for line in not_carried_lines(report.not_carried):
        hint(line)


# The `seal` command: a signed statement about a checkpoint.


def register_seal(app: typer.Typer) -> None:
    """Add the command of this module to the app."""
    app.command(cls=OptionsCommand, rich_help_panel=HERE)(seal)


@takes_cut_source
def seal(
    source: Source,
    *,
    flags: SourceFlags,
    cuts: CutFlags,
    key: Annotated[
        str,
        typer.Option(
            metavar="KEY",
            help="Private key in PEM, or the URI of a key that a service keeps, such as awskms:...",
            rich_help_panel=CHECKING,
        ),
    ],
    public_key: PublicKey = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Certificate to write; default: NAME.sealed.json here.", rich_help_panel=CHECKING
        ),
    ] = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Sign a statement about a checkpoint: its files and its state. The last line on stdout is the certificate's path.

    The signature is made on this machine, without a network. `reshard verify SRC --cert FILE --key PUB` checks it.
    """
    with progress_shown(quiet=quiet) as show:
        report = load_engine().seal(
            flags.spec(source), _signing_of(key, public_key), _options_of(cuts), on_progress=show
        )
    place = out or f"{report.name}.sealed.json"
    load_engine().put_text(place, report.certificate)
    if as_json:
        say(report.model_dump_json())
        return
    if report.weights_only and not quiet:
        warn("the files leave open what the optimizer's states mean: the statement is about files and weights")
    if report.not_covered_count and not quiet:
        warn(not_covered(report.url, report.not_covered, report.not_covered_count))
    if not quiet:
        hint(f"files {report.contents}, state {report.fingerprint}, signed by {report.key[:16]}")
    say(place)


# `reshard mount`: a target that is not written, as read-only files.


def register_mount(app: typer.Typer) -> None:
    """Mount the command."""
    app.command(cls=OptionsCommand, rich_help_panel=HERE)(mount)


@takes_layout
def mount(
    source: Source,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Empty directory to mount on, or one to create.")],
    *,
    flags: LayoutFlags,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Tag of the target, where it has one; default: SRC's.", rich_help_panel=TARGET
        ),
    ] = None,
    exact_crcs: Annotated[
        bool,
        typer.Option(
            "--exact-crcs",
            help="Compute the CRC-32 fields of torch files; torch ignores them, `unzip` does not.",
            rich_help_panel=TARGET,
        ),
    ] = False,
    allow_other: Annotated[
        bool, typer.Option("--allow-other", help="Let other users read DIR.", rich_help_panel=TARGET)
    ] = False,
    unchecked: Annotated[
        bool,
        typer.Option(
            "--no-compare",
            help="Mount at once: do not read and compare what must agree in SRC.",
            rich_help_panel=CHECKING,
        ),
    ] = False,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Show a target as read-only files in DIR, without writing it, until Ctrl-C, SIGTERM, or `umount DIR`.

    DIR shows what `convert SRC DIR/TAG` leaves: the tag directory with `latest` beside it, or the files themselves.
    Bytes are computed from SRC when they are read. The line on stdout is DIR, printed when the files are there.
    """
    engine = load_engine()
    with (
        stoppable(signal.SIGTERM) as stop,
        engine.open_layout(flags.request(source, name or "-"), exact_crcs=exact_crcs, compare=not unchecked) as layout,
        engine.mount(layout, directory, allow_other=allow_other, on_error=_say_error) as mounted,
    ):
        for warning in layout.warnings:
            warn(warning)
        for line in () if quiet else not_carried_lines(layout.not_carried):
            hint(line)
        count, size = len(layout.files), sum(file.size_bytes for file in layout.files)
        if not quiet:
            hint(f"mounted: {counted(count, 'file')}, {format_size(size)}, none of it written; Ctrl-C unmounts")
        facts = {"path": mounted.directory, "target": mounted.target, "pointer": mounted.pointer}
        facts |= {"files": count, "bytes": size}
        say(json.dumps({"schema_version": 1, **facts}) if as_json else mounted.directory)
        sys.stdout.flush()
        mounted.wait(stop)


def _say_error(error: ReshardError) -> None:
    """Say why readers of a mount got EIO."""
    complain(error.code, error.message, error.fix)


# `reshard doctor`: checks this machine, its credentials and its service before a conversion needs them.


def register_doctor(app: typer.Typer) -> None:
    """Mount the command."""
    app.command(rich_help_panel=HERE)(doctor)


def doctor(
    places: Annotated[
        list[str] | None,
        typer.Argument(metavar="PLACE...", help="Directories or URLs to look at, too: can they be read, written?"),
    ] = None,
    *,
    profile: Annotated[
        str | None, typer.Option(metavar="NAME", help="Storage profile for the places.", rich_help_panel=SOURCE)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check Python, settings, space, credentials, service and GPU; each line says ok, warn or fail, and what to do.

    The exit code is 0 if nothing fails, else the one that a command would end with. It changes nothing.
    """
    found: list[Finding] = []
    for finding in _findings(places or [], profile):
        found.append(finding)
        if not as_json:
            _show(finding)
    failed = [finding for finding in found if finding.health == "fail"]
    if as_json:
        rows = [{n: getattr(f, n) for n in ("subject", "health", "text", "fix", "code")} for f in found]
        say(json.dumps({"schema_version": 1, "ok": not failed, "findings": rows}))
    if failed:
        code = failed[0].code
        raise typer.Exit(int(CODES[code].exit_code if code in CODES else ExitCode.FAILED))


def _findings(places: list[str], profile: str | None) -> Iterator[Finding]:
    yield from machine()
    yield environment(os.environ)
    yield service(os.environ)
    try:
        engine = load_engine()
    except ReshardError as error:
        yield Finding.of_error("engine", error)
        return
    yield from engine.checkup(tuple(places), profile)


_STYLES = {"ok": Style.GOOD, "warn": Style.WARNING, "fail": Style.ERROR}


def _show(finding: Finding) -> None:
    word = painted_on_stdout(f"{finding.health.value:<5}", _STYLES[finding.health.value])
    said = [f"{word} {finding.subject:<12} {finding.text}"]
    say(*said, *([f"{'':<18} fix: {finding.fix}"] if finding.fix else []))
