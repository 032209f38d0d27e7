"""The flags of a conversion, spelled once for every command that takes them.

`takes_conversion` gives a command with a parameter `flags: ConversionFlags` all the options of that class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from reshard.choices import (
    NameScheme,
    OpaquePolicy,
    OverflowPolicy,
    ReplicaPolicy,
    RngPolicy,
    ServerCopyPolicy,
    TargetFormat,
    VerifyLevel,
    WeightDtype,
    ZeroStage,
)
from reshard.cli.sizes import parse_size
from reshard.errors import RequestError, printable

if TYPE_CHECKING:
    # At run time where a command makes them: the help of a command needs the choices, and no model.
    from reshard.models import ConvertRequest, NativeLayout, SourceSpec

CALLED = {
    "url": "SRC",
    "target": "DST",
    "max_shard_bytes": "--max-shard-size",
    "part_bytes": "--part-size",
    "memory_limit_bytes": "--memory-limit",
}
"""Fields of requests that commands take under other names than an option of the same one."""
_MAX_RULES_BYTES = 1 << 16
_WORLD = "Layout (--to zero)"
_CUTS = "Model parallelism"


@dataclass(frozen=True, kw_only=True)
class ConversionFlags:
    """What a user may say about a conversion. Each field is an option of the command line."""

    to: Annotated[TargetFormat, typer.Option("--to", help="What to write.")]
    tag: Annotated[
        str | None, typer.Option(help="Checkpoint tag; default: what `latest` (or `latest_universal`) names.")
    ] = None
    dtype: Annotated[
        WeightDtype | None,
        typer.Option(help="Of weights: default fp32 from masters, else as stored; with --to zero the source's."),
    ] = None
    max_shard_size: Annotated[str | None, typer.Option(help="Largest weights file, such as 5GB.")] = None
    exclude_frozen: Annotated[bool, typer.Option("--exclude-frozen", help="Leave frozen parameters out.")] = False
    dp: Annotated[int | None, typer.Option(min=1, help="Data-parallel ranks.", rich_help_panel=_WORLD)] = None
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.", rich_help_panel=_WORLD)] = 1
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.", rich_help_panel=_WORLD)] = 1
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks.", rich_help_panel=_WORLD)] = 1
    zero_stage: Annotated[
        ZeroStage | None, typer.Option(help="ZeRO stage; default: the source's.", rich_help_panel=_WORLD)
    ] = None
    partition_method: Annotated[
        str | None,
        typer.Option(
            help="Of pipeline stages: uniform, parameters, type:REGEX, or each stage's first layer: 0,3,6.",
            rich_help_panel=_WORLD,
        ),
    ] = None
    pipeline_layers: Annotated[
        int | None,
        typer.Option(min=1, help="Layers in all, for --partition-method uniform.", rich_help_panel=_WORLD),
    ] = None
    vocab_divisor: Annotated[
        int | None,
        typer.Option(min=1, help="Vocabulary rows: a multiple of this times --tp.", rich_help_panel=_WORLD),
    ] = None
    round_robin_gradients: Annotated[
        bool | None,
        typer.Option(
            "--round-robin-gradients/--no-round-robin-gradients",
            help="As the target run's config; default: the source's.",
            rich_help_panel=_WORLD,
        ),
    ] = None
    parameter_alignment: Annotated[
        bool | None,
        typer.Option(
            "--parameter-alignment/--no-parameter-alignment",
            help="As the target run's config; default: the source's.",
            rich_help_panel=_WORLD,
        ),
    ] = None
    sub_group_size: Annotated[
        int | None,
        typer.Option(min=1, help="As the target run's config; default: the source's.", rich_help_panel=_WORLD),
    ] = None
    rng: Annotated[
        RngPolicy, typer.Option(help="Random states: of source rank r mod N, or none.", rich_help_panel=_WORLD)
    ] = RngPolicy.KEEP
    rules: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="How parameters are cut, where the source does not say.", rich_help_panel=_CUTS
        ),
    ] = None
    family: Annotated[
        str | None,
        typer.Option(help="A named pack of rules: gpt-megatron, llama-megatron, bloom.", rich_help_panel=_CUTS),
    ] = None
    names: Annotated[
        NameScheme | None,
        typer.Option(help="Names with or without pipeline; default: the source's.", rich_help_panel=_CUTS),
    ] = None
    replicas: Annotated[
        ReplicaPolicy,
        typer.Option(help="When copies that must agree do not: stop, or take the first.", rich_help_panel=_CUTS),
    ] = ReplicaPolicy.ERROR
    model_files: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Its config.json, tokenizer and generation files go beside the weights."),
    ] = None
    merge_adapter: Annotated[
        bool, typer.Option("--merge-adapter", help="Merge a LoRA adapter into the weights; names without PEFT's.")
    ] = False
    adapter: Annotated[str | None, typer.Option(help="Of --to peft and --merge-adapter, if there are several.")] = None
    lora_alpha: Annotated[
        float | None, typer.Option(min=0.0, help="Scale of an adapter that has no adapter_config.json.")
    ] = None
    base: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="The base model's weights, if SRC was saved without frozen parameters."),
    ] = None
    on_overflow: Annotated[
        OverflowPolicy, typer.Option(help="Elements too large for --dtype: infinite, the largest number, or stop.")
    ] = OverflowPolicy.INF
    opaque: Annotated[OpaquePolicy, typer.Option(help="Objects of classes that are not on the allow-list.")] = (
        OpaquePolicy.REFUSE
    )
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is at DST. The old data is gone, even if the run fails.")
    ] = False
    verify: Annotated[
        VerifyLevel, typer.Option(help="`full` also reads source and output whole before the commit.")
    ] = VerifyLevel.DEFAULT
    memory_limit: Annotated[str | None, typer.Option(help="For buffers and metadata, such as 1GiB (the default).")] = (
        None
    )
    part_size: Annotated[
        str | None, typer.Option(help="Grain of work and of multipart parts, such as 64MiB (the default).")
    ] = None
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Units at once; default: cores, more for object stores.")
    ] = None
    server_copy: Annotated[
        ServerCopyPolicy, typer.Option(help="`never`: no copies within an object store, every byte is read and sent.")
    ] = ServerCopyPolicy.AUTO
    offload: Annotated[ServerCopyPolicy | None, typer.Option("--offload", hidden=True)] = None
    """The former name of `--server-copy`, taken for one release more."""
    profile: Annotated[str | None, typer.Option(help="Storage profile for SRC (see RESHARD_PROFILES).")] = None
    target_profile: Annotated[str | None, typer.Option(help="Storage profile for DST.")] = None

    @property
    def layout(self) -> NativeLayout | None:
        """The layout that the flags ask for.

        Raises:
            RequestError: `request.invalid` if it is incomplete, or asked of a format that has none.
        """
        from reshard.models import NativeLayout

        world: dict[str, Any] = {"dp": self.dp, "tp": self.tp, "pp": self.pp, "ep": self.ep, "rng": self.rng}
        options: dict[str, Any] = {
            "zero_stage": self.zero_stage,
            "partition_method": self.partition_method,
            "pipeline_layers": self.pipeline_layers,
            "vocab_divisor": self.vocab_divisor,
            "round_robin_gradients": self.round_robin_gradients,
            "parameter_alignment": self.parameter_alignment,
            "sub_group_size": self.sub_group_size,
        }
        if self.to is TargetFormat.ZERO:
            if self.dp is None:
                raise RequestError("request.invalid", "--to zero needs the number of ranks", fix="add --dp N")
            return NativeLayout.model_validate(world | options)
        asked = self.dp is not None or any(v is not None for v in options.values())
        if asked or (self.tp, self.pp, self.ep) != (1, 1, 1):
            raise RequestError("request.invalid", f"--to {self.to.value} has no layout", fix="--to zero")
        return None

    def request(self, source: str, target: str) -> ConvertRequest:
        """The flags as the wire model: the one place where they become it.

        Raises:
            RequestError: `request.invalid`.
        """
        from pydantic import ValidationError

        from reshard._wire import invalid
        from reshard.models import DEFAULT_MEMORY_LIMIT_BYTES, DEFAULT_PART_BYTES, ConvertRequest

        try:
            return ConvertRequest(
                source=source_spec(source, self.tag, self.profile),
                target=target,
                to=self.to,
                target_profile=self.target_profile,
                dtype=self.dtype,
                layout=self.layout,
                rules=read_rules(self.rules) if self.rules else None,
                family=self.family,
                names=self.names,
                replicas=self.replicas,
                max_shard_bytes=parse_size(self.max_shard_size) if self.max_shard_size else None,
                exclude_frozen=self.exclude_frozen,
                model_files=self.model_files,
                merge_adapter=self.merge_adapter,
                adapter=self.adapter,
                lora_alpha=self.lora_alpha,
                base=self.base,
                on_overflow=self.on_overflow,
                opaque=self.opaque,
                overwrite=self.overwrite,
                verify=self.verify,
                memory_limit_bytes=parse_size(self.memory_limit) if self.memory_limit else DEFAULT_MEMORY_LIMIT_BYTES,
                part_bytes=parse_size(self.part_size) if self.part_size else DEFAULT_PART_BYTES,
                threads=self.threads,
                server_copy=self.offload or self.server_copy,
            )
        except ValidationError as error:
            raise invalid(error, CALLED) from None


def read_rules(path: Path) -> str:
    """The text of a rules file.

    Raises:
        RequestError: `request.invalid` if it cannot be read, or is no small text.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_RULES_BYTES + 1)
        text = data.decode()
    except OSError as error:
        text = f"--rules {printable(str(path))}: {error.strerror}"
        raise RequestError("request.invalid", text, fix="name a file that you may read: docs/rules.md") from None
    except UnicodeDecodeError:
        text = f"--rules {printable(str(path))} is no text"
        raise RequestError("request.invalid", text, fix="name a YAML file: docs/rules.md") from None
    if len(data) > _MAX_RULES_BYTES:
        raise RequestError("request.invalid", f"--rules {printable(str(path))} has more than {_MAX_RULES_BYTES} bytes")
    return text


def source_spec(url: str, tag: str | None, profile: str | None) -> SourceSpec:
    """A source as the wire model.

    Raises:
        RequestError: `request.invalid`.
    """
    from pydantic import ValidationError

    from reshard._wire import invalid
    from reshard.models import SourceSpec

    try:
        return SourceSpec(url=url, tag=tag, profile=profile)
    except ValidationError as error:
        raise invalid(error, CALLED) from None


def takes_conversion(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of `ConversionFlags` in place of its parameter `flags`."""
    hints = get_type_hints(ConversionFlags, include_extras=True)
    names = [f.name for f in fields(ConversionFlags)]
    required = inspect.Parameter.empty
    options = [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=required if f.name == "to" else f.default,
            annotation=hints[f.name],
        )
        for f in fields(ConversionFlags)
    ]
    own = inspect.signature(command, eval_str=True)
    first = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    last = [p for n, p in own.parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY and n != "flags"]

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        command(*args, flags=ConversionFlags(**{n: kwargs.pop(n) for n in names}), **kwargs)

    run.__signature__ = own.replace(parameters=[*first, *options, *last])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in [*first, *options, *last]}
    return run
