"""The `diff` command: compares two checkpoints by logical tensor, across layouts and formats."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reshard.cli.choosing import choice
from reshard.cli.flags import OptionsCommand, SourceFlags, takes_two_sources
from reshard.cli.help_pages import COMPARISON, GENERAL, HERE, SOURCE
from reshard.cli.local import JsonFlag, QuietFlag
from reshard.errors import ExitCode, printable
from reshard.local import load_engine
from reshard.option_files import read_rules
from reshard.progress_bars import progress_shown
from reshard.sizes import counted, format_size, parse_percent

if TYPE_CHECKING:
    from reshard.diffs import Difference, DiffReport, DiffSide

_SHOWN = 20
_NAME_CHARS = 64
_OF_TRAINING = frozenset({"optimizer states", "counters and client state"})
"""The names under which a comparison says that one side has no state of training at all."""


class States(StrEnum):
    """The parts of a checkpoint to compare."""

    ALL = "all"
    WEIGHTS = "weights"


def register(app: typer.Typer) -> None:
    """Add the command of this module to the app."""
    app.command(cls=OptionsCommand, rich_help_panel=HERE)(diff)


@takes_two_sources
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="Checkpoint: a directory or URL.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Checkpoint to compare it with.")],
    *,
    flags_a: SourceFlags,
    flags_b: SourceFlags,
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
        bool, typer.Option("--all", help=f"List every difference, not the worst {_SHOWN}.", rich_help_panel=GENERAL)
    ] = False,
    rules: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Rules (YAML) for tensor-parallel sides that do not say how they are cut.",
            rich_help_panel=SOURCE,
        ),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Built-in set of rules, such as gpt-megatron.", rich_help_panel=SOURCE),
    ] = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Compare two checkpoints by logical tensor, bit by bit, across layouts and formats. Exit code 7 if they differ.

    It compares weights, optimizer states, step counters, hyper-parameters, buffers, frozen and tied weights and client
    state.
    """
    from reshard.diffs import DiffOptions
    from reshard.options import DeepSpeedOptions, Options

    options = DiffOptions(
        weights_only=weights_only or states is States.WEIGHTS,
        common=common,
        ignore=tuple(ignore or ()),
        sample=None if sample is None else parse_percent(sample),
        options=Options(deepspeed=DeepSpeedOptions(rules=None if rules is None else read_rules(rules), family=family)),
    )
    with progress_shown(quiet=quiet) as show:
        report = load_engine().diff(flags_a.spec(a), flags_b.spec(b), options, on_progress=show)
    lines = [report.model_dump_json()] if as_json else report_lines(report, every=every)
    for line in lines:
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
    if not report.equal:
        raise typer.Exit(int(ExitCode.MISMATCH))


def report_lines(report: DiffReport, *, every: bool) -> Iterator[str]:
    """A comparison as lines of text: the verdict first, then the largest differences."""
    yield report.verdict()
    yield f"  A  {_side(report.a)}"
    yield f"  B  {_side(report.b)}"
    yield (
        f"  {report.identical:,} of {counted(report.tensors, 'tensor')} equal bit for bit, "
        f"{counted(report.elements, 'element')}, {counted(report.values, 'value')}; "
        f"read {format_size(report.read_bytes)} in {report.seconds:.1f} s"
    )
    for note in report.notes:
        yield f"  note: {printable(note)}"
    shown = report.differences if every else report.differences[:_SHOWN]
    for difference in shown:
        yield f"  {_difference(difference)}"
    if {d.name for d in report.differences if d.a is None or d.b is None} & _OF_TRAINING:
        yield "  only one side holds a training state: --weights-only compares the rest"
    if len(shown) < len(report.differences):
        yield f"  ... and {len(report.differences) - len(shown)} more: --all"


def _side(side: DiffSide) -> str:
    facts = [side.format, *(f"{axis}={size}" for axis, size in side.world.items())]
    facts += [] if side.step is None else [f"step {side.step}"]
    tag = "" if side.tag is None else f" ({printable(side.tag)})"
    return f"{printable(side.url)}{tag}  {' '.join(facts)}"


def _difference(found: Difference) -> str:
    from reshard.diffs import DifferenceKind

    name = printable(found.name, max_chars=_NAME_CHARS) + (f"/{printable(found.state)}" if found.state else "")
    if found.kind is DifferenceKind.ELEMENTS:
        return f"{name}: {_elements(found)}"
    if found.a is None or found.b is None:
        side, value = ("B", found.b) if found.a is None else ("A", found.a)
        if value == "present":
            return f"only in {side}: {name}"
        text = f"only in {side}: {printable(value)}"
    else:
        text = f"{printable(found.a)} | {printable(found.b)}"
    shared = f" (and {counted(found.parameters - 1, 'more parameter')})" if found.parameters > 1 else ""
    return f"{name}: {found.kind.value}: {text}{shared}"


def _elements(found: Difference) -> str:
    parts = [f"{found.differing or 0:,} of {counted(found.elements or 0, 'element')}"]
    if found.max_abs is not None and found.max_rel is not None:
        parts.append(f"max |a-b| {found.max_abs:.3g}, relative {found.max_rel:.3g}")
    if found.nonfinite:
        parts.append(f"{found.nonfinite:,} not finite")
    where = list(found.first_index or ())
    parts.append(f"first at {where}: {printable(found.a)} | {printable(found.b)}")
    if found.compared_as is not None:
        parts.append(f"as {found.compared_as}")
    return ", ".join(parts)
