"""The commands that keep directories: `ls` and `prune` for the checkpoints of a run, `clean` and `slim`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from reshard.cli.flags import SourceFlags
from reshard.cli.help_pages import GENERAL, HERE, SOURCE, TARGET, aligned, complain, hint, say
from reshard.cli.local import JsonFlag, QuietFlag, TargetProfile, stoppable
from reshard.engine import load_engine
from reshard.errors import ExitCode, counted, format_size, printable
from reshard.progress import progress_shown

if TYPE_CHECKING:
    from reshard.models.jobs import CleanReport
    from reshard.models.reports import PruneReport, RunListing, RunStep

Run = Annotated[
    str, typer.Argument(metavar="RUN", help="Directory of a run: a path or URL. Its checkpoints lie directly in it.")
]
Profile = Annotated[
    str | None, typer.Option(metavar="NAME", help="Storage profile (see RESHARD_PROFILES).", rich_help_panel=SOURCE)
]
_KEEP = "Keeping"


def register(app: typer.Typer) -> None:
    """Mount the commands."""
    app.command("ls", rich_help_panel=HERE)(list_steps)
    app.command(rich_help_panel=HERE)(prune)


def list_steps(run: Run, *, profile: Profile = None, as_json: JsonFlag = False) -> None:
    """List the checkpoints of a run: step, format, layout, size, and whether each is complete. Reads only metadata."""
    found = load_engine().steps(run, profile=profile)
    if as_json:
        say(found.model_dump_json())
        return
    say(*(step_lines(found) if found.steps else ["no checkpoint is here"]))
    if found.others:
        hint(f"not one checkpoint: {', '.join(map(printable, found.others))}")
    if found.removing:
        names = ", ".join(map(printable, found.removing))
        hint(f"a removal has not ended: {names}; to end it: reshard prune {shlex.quote(run)} --keep-last N --yes")


def step_lines(found: RunListing) -> Iterator[str]:
    """A header and a line for each checkpoint."""
    rows = [("STEP", "NAME", "FORMAT", "LAYOUT", "FILES", "SIZE", "STATE"), *map(_row, found.steps)]
    return aligned(rows)


def _row(step: RunStep) -> tuple[str, ...]:
    state = "complete" if step.complete else f"{step.code}: {printable(step.detail, max_chars=96)}"
    marks = [
        state,
        *(["in use"] if step.in_use else []),
        *(["sealed"] if step.sealed else []),
        *(f"<- {name}" for name in step.named_by),
    ]
    layout = " ".join(f"{axis}={size}" for axis, size in step.world.items() if size > 1)
    known = "-" if step.step is None else f"{step.step:,}"
    size = format_size(step.size_bytes)
    return known, printable(step.name), step.format or "-", layout or "-", f"{step.files:,}", size, "  ".join(marks)


def prune(
    run: Run,
    *,
    keep_last: Annotated[
        int, typer.Option(metavar="N", min=1, help="Keep the N latest complete steps.", rich_help_panel=_KEEP)
    ],
    keep_every: Annotated[
        int | None,
        typer.Option(metavar="STEPS", min=1, help="Also keep every multiple of STEPS.", rich_help_panel=_KEEP),
    ] = None,
    keep_sealed: Annotated[
        bool,
        typer.Option("--keep-sealed", help="Also keep those with a certificate beside them.", rich_help_panel=_KEEP),
    ] = False,
    weights_only: Annotated[
        bool,
        typer.Option(
            "--weights-only",
            help="Of what goes, keep weights that are in files of their own; others stay whole.",
            rich_help_panel=_KEEP,
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would go; ask nothing.", rich_help_panel=GENERAL)
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.", rich_help_panel=GENERAL)] = False,
    profile: Profile = None,
    as_json: JsonFlag = False,
) -> None:
    """Remove old checkpoints of a run. Shows what would go, and asks; without a terminal, only --yes removes.

    Kept whatever the options say: what `latest`, a tracker or a link names, what is not complete, what a conversion
    writes, what has no known step or a name of its own such as `best`, and everything that is not one checkpoint.
    """
    engine = load_engine()
    kept = {"keep_last": keep_last, "keep_every": keep_every, "keep_sealed": keep_sealed}
    call = partial(engine.prune, run, **kept, weights_only=weights_only, profile=profile)
    shown = call()
    going = tuple(found.name for found in shown.decisions if not found.kept_for)
    if not as_json:
        say(*decision_lines(shown))
    asked = yes or (not dry_run and sys.stdin.isatty() and _agreed(shown))
    if dry_run or not asked or not (going or shown.finished):
        if as_json:
            say(shown.model_dump_json())
        elif not dry_run and not asked and (going or shown.finished):
            hint("nothing was removed; to remove it: --yes")
        return
    done = call(only=going)
    if as_json:
        say(done.model_dump_json())
        return
    gone = [found for found in done.decisions if found.name in going and not found.kept_for]
    freed = format_size(sum(found.size_bytes for found in gone))
    say(f"removed {counted(len(gone), 'checkpoint')}, {freed}")
    for found in done.decisions:
        if found.name in going and found.kept_for:
            hint(f"stays after all: {printable(found.name)}: {printable(found.kept_for)}")


def _agreed(shown: PruneReport) -> bool:
    count = sum(not found.kept_for for found in shown.decisions) + len(shown.finished)
    return bool(count) and typer.confirm(f"remove {counted(count, 'checkpoint')}?", err=True)


def decision_lines(shown: PruneReport) -> Iterator[str]:
    """A line for each checkpoint: what becomes of it and why, then the sums."""
    for name in shown.finished:
        yield f"goes: the rest of {printable(name)}, whose removal has begun"
    for found in shown.decisions:
        what = f"stays: {printable(found.name)} ({printable(found.kept_for)})" if found.kept_for else ""
        part = "training state of " if shown.weights_only else ""
        yield what or f"goes: {part}{printable(found.name)} ({format_size(found.size_bytes)})"
    for name in shown.others:
        yield f"stays: {printable(name)} (not one checkpoint)"
    going = [found for found in shown.decisions if not found.kept_for]
    freed = format_size(sum(found.size_bytes for found in going))
    yield f"{counted(len(going), 'checkpoint')} of {len(shown.decisions)} would go: {freed}"


# `reshard clean`: removes files of unfinished conversions.


def register_clean(app: typer.Typer) -> None:
    """Mount the command."""
    app.command(rich_help_panel=HERE)(clean)


def clean(
    target: Annotated[str, typer.Argument(metavar="DST", help="Target of the unfinished conversion.")],
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would be removed.", rich_help_panel=GENERAL)
    ] = False,
    idle: Annotated[
        bool,
        typer.Option(
            "--idle",
            help="No process uses DST: remove its files from an object store without waiting an hour.",
            rich_help_panel=GENERAL,
        ),
    ] = False,
    profile: TargetProfile = None,
    as_json: JsonFlag = False,
) -> None:
    """Remove files that unfinished conversions into DST left: staging directories, journals, uploads, claims.

    A finished DST stays, and so does every file that a process uses.
    """
    report = load_engine().clean(target, profile=profile, dry_run=dry_run, idle=idle)
    say(*([report.model_dump_json()] if as_json else _lines(report, dry_run=dry_run)))
    for path in report.below:
        hint(f"note: a conversion left files below it: reshard clean {shlex.quote(path)}")
    used = [found for found in report.leftovers if found.in_use]
    if used and not dry_run:
        local = "://" not in report.target
        complain(
            "request.target_busy",
            f"a conversion into {printable(report.target)} is at work on {len(used)} of "
            f"{len(report.leftovers)}: they stay",
            "wait for it to end, or stop it" if local else "wait for it to end; if you know that it is dead: --idle",
        )
        raise typer.Exit(int(ExitCode.CONFLICT))


def _lines(report: CleanReport, *, dry_run: bool) -> list[str]:
    if not report.leftovers:
        return [f"nothing is left beside {printable(report.target)}"]
    lines: list[str] = []
    for found in report.leftovers:
        done = "would be removed" if dry_run else "removed" if report.removed else "stays"
        what = "in use, stays" if found.in_use else done
        lines.append(f"{what}: {found.kind} {printable(found.path)} ({format_size(found.size_bytes)})")
    free = format_size(sum(f.size_bytes for f in report.leftovers if not f.in_use))
    return [*lines, f"{free} {'would be' if dry_run else 'are'} free"] if report.removed or dry_run else lines


# `reshard slim`: rewrites torch files without the parts of storages that no tensor uses.


def register_slim(app: typer.Typer) -> None:
    """Mount the command."""
    app.command(rich_help_panel=HERE)(slim)


def slim(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Torch file, or directory with torch files.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="File or directory to create.")],
    *,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST.", rich_help_panel=TARGET)] = False,
    profile: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Storage profile (see RESHARD_PROFILES).", rich_help_panel=SOURCE),
    ] = None,
    target_profile: TargetProfile = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Rewrite torch files so that each storage is only as long as its tensors; other files are copied.

    `torch.save` writes the whole storage of a tensor, also if the tensor is a small view of it (a slice, or a view of
    ZeRO's flat buffer). DeepSpeed's `clone_tensors_for_torch_save` avoids this before saving; this command repairs
    files that were saved without it. Nothing in a file is executed.
    """
    engine = load_engine()
    with stoppable() as stop, progress_shown(quiet=quiet) as show:
        done = engine.slim(
            SourceFlags(profile=profile).spec(source),
            target,
            overwrite=overwrite,
            target_profile=target_profile,
            on_progress=show,
            should_stop=stop.is_set,
        )
    if as_json:
        say(done.model_dump_json())
        return
    saved = done.source_bytes - done.target_bytes
    share = f" ({saved / done.source_bytes:.1%})" if done.source_bytes else ""
    if not quiet:
        sys.stderr.write(
            f"{format_size(done.source_bytes)} -> {format_size(done.target_bytes)}, {format_size(saved)} saved{share}\n"
        )
    say(done.target)
