"""`reshard slim`: rewrites torch files without the parts of storages that no tensor uses."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from reshard.cli.flags import SourceFlags
from reshard.cli.help_pages import HERE, SOURCE, TARGET
from reshard.cli.local import JsonFlag, QuietFlag, TargetProfile, stoppable
from reshard.local import load_engine
from reshard.progress_bars import progress_shown
from reshard.sizes import format_size


def register(app: typer.Typer) -> None:
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
        sys.stdout.write(done.model_dump_json() + "\n")
        return
    saved = done.source_bytes - done.target_bytes
    share = f" ({saved / done.source_bytes:.1%})" if done.source_bytes else ""
    if not quiet:
        sys.stderr.write(
            f"{format_size(done.source_bytes)} -> {format_size(done.target_bytes)}, {format_size(saved)} saved{share}\n"
        )
    sys.stdout.write(f"{done.target}\n")
