"""The `ensure` command, for job scripts: prints the path of a checkpoint in the layout that a run needs."""

from __future__ import annotations

import json
import os
import shlex
import sys
from typing import Annotated

import typer

from reshard.choices import EnsureWorkers, TargetFormat
from reshard.cli.flags import EnsureFlags, OptionsCommand, choice, takes_ensured, target_among
from reshard.cli.help_pages import HERE, RESOURCES, SERVICE, TARGET, say
from reshard.cli.local import JsonFlag, QuietFlag
from reshard.cli.output import DISTRIBUTED, followed
from reshard.progress import progress_shown


def register(app: typer.Typer) -> None:
    """Add the command of this module to the app."""
    app.command(cls=OptionsCommand, rich_help_panel=HERE)(ensure)


@takes_ensured
def ensure(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Save directory, `checkpoint-N`, or tag directory.")],
    *,
    flags: EnsureFlags,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="zero|dcp", help="Run that will load it: DeepSpeed, FSDP; default: SRC's.", rich_help_panel=TARGET
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Save directory to create; default: below .reshard in SRC.", rich_help_panel=TARGET
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Service that converts; default: RESHARD_URL, else no service.", rich_help_panel=SERVICE
        ),
    ] = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout", metavar="SECONDS", min=0, help="Seconds to wait; default: no limit.", rich_help_panel=SERVICE
        ),
    ] = None,
    workers: Annotated[
        EnsureWorkers,
        choice(
            EnsureWorkers,
            help="Processes that convert: one of each node, or one; auto: by nodes and size.",
            rich_help_panel=RESOURCES,
        ),
    ] = EnsureWorkers.AUTO,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Print the path of a checkpoint in the wanted layout; convert SRC if necessary. Safe to call from every rank.

    The path is SRC itself if it has that layout, or an earlier result if one exists.
    `OUT=$(reshard ensure SRC --dp 16)` works, because the path is the only output on stdout.
    """
    from reshard.ensuring.call import Outcome, ensured, loader_of
    from reshard.ensuring.world import Wanted, world_size

    said = {
        Outcome.SOURCE: "nothing was converted: the source has this layout already",
        Outcome.EARLIER: "converted earlier",
        Outcome.CONVERTED: "converted, target verified",
    }
    to = None if to is None else target_among((TargetFormat.ZERO, DISTRIBUTED), to)
    given = flags.values()
    loader = loader_of(source, flags.tag, to=to, framework=given.pop("framework", None))
    if loader.distributed:
        said[Outcome.SOURCE] = (
            "nothing was converted: a distributed checkpoint (DCP) loads on any number of ranks as it is; "
            f"for a copy: reshard convert {shlex.quote(source)} DST --to {DISTRIBUTED}{flags.words()}"
        )
    wanted = Wanted.of(given, choices=flags.spec(source).given(), environ=os.environ, loader=loader)
    if wanted.dp is None and not loader.any_ranks and not quiet and (told := world_size(os.environ)) is not None:
        sys.stderr.write(f"{told[0]} ranks, from {told[1]}; --dp N overrides\n")
    with progress_shown(quiet=quiet) as show:
        result = ensured(
            source,
            wanted,
            tag=flags.tag,
            out=out,
            url=url,
            timeout_s=timeout_s,
            workers=workers,
            on_progress=show,
        )
    path = result.path if "://" in result.path else os.path.abspath(result.path)
    if not quiet:
        if (pointer := followed(source, flags.tag)) is not None:
            sys.stderr.write(f"{pointer}\n")
        sys.stderr.write(f"{said[result.outcome]}\n")
    facts = {"schema_version": 1, "path": path, "outcome": result.outcome.value}
    say(json.dumps(facts) if as_json else path)
