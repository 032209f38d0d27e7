"""The `ensure` command, for job scripts: prints the path of a checkpoint in the layout that a run needs."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from reshard.choices import DTYPE_NAMES, EnsureWorkers, OpaquePolicy, TargetFormat, WeightDtype, ZeroStage
from reshard.cli.flags import CheckpointFlags, MemoryLimitFlag, OptionsCommand, choice, takes_checkpoint, target_among
from reshard.cli.help_pages import CHECKING, HERE, RESOURCES, SERVICE, SOURCE, TARGET, WORLD
from reshard.cli.local import JsonFlag, QuietFlag
from reshard.cli.output import DISTRIBUTED, followed
from reshard.option import parse_size, read_rules
from reshard.progress import progress_shown


def register(app: typer.Typer) -> None:
    """Add the command of this module to the app."""
    app.command(cls=OptionsCommand, rich_help_panel=HERE)(ensure)


@takes_checkpoint
def ensure(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Save directory, `checkpoint-N`, or tag directory.")],
    *,
    dp: Annotated[
        int | None,
        typer.Option(
            help="Data-parallel ranks; default: processes of the launcher / (tp x pp).", rich_help_panel=WORLD
        ),
    ] = None,
    tp: Annotated[
        int | None, typer.Option(help="Tensor-parallel ranks; default: as in SRC.", rich_help_panel=WORLD)
    ] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages; default: as in SRC.", rich_help_panel=WORLD)] = None,
    ep: Annotated[
        int | None, typer.Option(help="Expert-parallel ranks; default: as in SRC.", rich_help_panel=WORLD)
    ] = None,
    zero_stage: Annotated[
        ZeroStage | None, choice(ZeroStage, help="ZeRO stage; default: as in SRC.", rich_help_panel=WORLD)
    ] = None,
    dtype: Annotated[
        WeightDtype | None,
        choice(
            WeightDtype, also=DTYPE_NAMES, help="Element type of the model; default: as in SRC.", rich_help_panel=WORLD
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="zero|dcp", help="Run that will load it: DeepSpeed, FSDP; default: SRC's.", rich_help_panel=TARGET
        ),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Framework that loads a dcp: state-dict, torchtitan, accelerate, trainer, lightning.",
            rich_help_panel=TARGET,
        ),
    ] = None,
    grammar: Annotated[str | None, typer.Option(hidden=True)] = None,
    flags: CheckpointFlags,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Save directory to create; default: below .reshard in SRC.", rich_help_panel=TARGET
        ),
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Rules (YAML) for a tensor-parallel SRC.", rich_help_panel=SOURCE),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Built-in set of rules, such as gpt-megatron.", rich_help_panel=SOURCE),
    ] = None,
    opaque: Annotated[
        OpaquePolicy,
        choice(OpaquePolicy, help="Policy for objects of classes not on the allow-list.", rich_help_panel=CHECKING),
    ] = (OpaquePolicy.REFUSE),
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
    memory_limit: MemoryLimitFlag = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Print the path of a checkpoint in the wanted layout; convert SRC if necessary. Safe to call from every rank.

    The path is SRC itself if it has that layout, or an earlier result if one exists.
    `OUT=$(reshard ensure SRC --dp 16)` works, because the path is the only output on stdout.
    """
    spec = flags.spec(source)
    from reshard.ensuring.call import Outcome, ensured, loader_of
    from reshard.ensuring.world import Wanted, world_size

    said = {
        Outcome.SOURCE: "nothing was converted: the source has this layout already",
        Outcome.EARLIER: "converted earlier",
        Outcome.CONVERTED: "converted and verified",
    }
    to = None if to is None else target_among((TargetFormat.ZERO, DISTRIBUTED), to)
    loader = loader_of(source, flags.tag, to=to, framework=framework or grammar)
    if loader.distributed:
        said[Outcome.SOURCE] = (
            "nothing was converted: a distributed checkpoint (DCP) loads on any number of ranks as it is; "
            f"for a copy: reshard convert {shlex.quote(source)} DST --to {DISTRIBUTED}{flags.words()}"
        )
    wanted = Wanted.of(
        {"dp": dp, "tp": tp, "pp": pp, "ep": ep},
        zero_stage=zero_stage,
        dtype=dtype,
        rules=None if rules is None else read_rules(rules),
        family=family,
        opaque=opaque,
        environ=os.environ,
        loader=loader,
    )
    wanted = replace(wanted, choices=spec.given())
    if memory_limit is not None:
        wanted = replace(wanted, memory_limit_bytes=parse_size(memory_limit))
    if dp is None and not loader.distributed and not quiet and (told := world_size(os.environ)) is not None:
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
    if as_json:
        facts = {"schema_version": 1, "path": path, "outcome": result.outcome.value}
        sys.stdout.write(json.dumps(facts) + "\n")
    else:
        sys.stdout.write(f"{path}\n")
    sys.stdout.flush()
