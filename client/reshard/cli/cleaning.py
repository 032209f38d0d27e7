"""`reshard clean`: removes files of unfinished conversions."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from reshard.cli.colours import complain
from reshard.cli.help_pages import GENERAL, HERE
from reshard.cli.local import JsonFlag, TargetProfile
from reshard.errors import ExitCode, format_size, printable
from reshard.local import load_engine

if TYPE_CHECKING:
    from reshard.models import CleanReport


def register(app: typer.Typer) -> None:
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
    for line in [report.model_dump_json()] if as_json else _lines(report, dry_run=dry_run):
        sys.stdout.write(f"{line}\n")
    for path in report.below:
        sys.stderr.write(f"note: a conversion left files below it: reshard clean {shlex.quote(path)}\n")
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
