"""The flags of a conversion, defined once for every command that takes them.

`takes_conversion` gives a command with a parameter `flags: ConversionFlags` all the options of that class.
"""

from __future__ import annotations

import copy
import inspect
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

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
    WeightDecayGroups,
    WeightDtype,
    ZeroStage,
)
from reshard.cli.choosing import DTYPE_NAMES, TARGET_FIXES, TARGET_NAMES, choice, chosen
from reshard.cli.help_pages import ADAPTERS, CHECKING, LAYOUT, RESOURCES, SOURCE, TARGET
from reshard.errors import RequestError, printable
from reshard.option_files import read_order, read_rules
from reshard.sizes import SIZE_FIELDS, parse_size

if TYPE_CHECKING:
    # Commands import the models when they make one: the help of a command needs only the choices.
    from reshard.models import ConvertRequest, SourceSpec

CALLED = {
    "url": "SRC",
    "target": "DST",
    "max_shard_bytes": "--max-shard-size",
    "part_bytes": "--part-size",
    "memory_limit_bytes": "--memory-limit",
}
"""The flag of each request field whose flag has another name than the field."""
_TARGETS = "|".join(TargetFormat)


def target_name(text: str) -> str:
    """Check the name of a target and return it.

    Raises:
        BadParameter: No installed format writes this target.
        RequestError: `request.invalid`: several words are needed to name it, which the fix says.
    """
    if text in tuple(TargetFormat):
        return text
    from reshard.installed_formats import target_names

    return target_among(target_names(), text)


def target_among(names: Sequence[str], text: str) -> str:
    """The one of these targets that a text names; says so if the text is another name of it.

    Raises:
        BadParameter: It names none of them.
        RequestError: `request.invalid`: several words are needed to name it, which the fix says.
    """
    word = text.strip().lower()
    if word not in names and (fix := TARGET_FIXES.get(word)) is not None:
        raise RequestError("request.invalid", f"--to {word} is no target", fix=fix)
    value = chosen(text, names, TARGET_NAMES)
    if value != text.strip().lower():
        sys.stderr.write(f"--to {printable(text, max_chars=64)}: taken as {value}\n")
    return value


MemoryLimitFlag = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory for buffers and metadata, such as 1GiB (the default).",
        rich_help_panel=RESOURCES,
    ),
]


@dataclass(frozen=True, kw_only=True)
class CheckpointFlags:
    """The options that say which checkpoint of a place is read, and how where its files leave several ways."""

    tag: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Checkpoint tag; default: what `latest` (or `latest_universal`) names.",
            rich_help_panel=SOURCE,
        ),
    ] = None
    model_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="Model to read, if the state dict holds several, such as unet.", rich_help_panel=SOURCE
        ),
    ] = None
    optimizer_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Optimizer to read, if there are several.", rich_help_panel=SOURCE),
    ] = None
    scheduler_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Scheduler of that optimizer, if there are several.", rich_help_panel=SOURCE),
    ] = None
    param_order: Annotated[
        str | None,
        typer.Option(
            metavar="ORDER",
            help="Order of parameters that files only number: `model`, `groups` (the model's within each group), or a "
            "file with their names.",
            rich_help_panel=SOURCE,
        ),
    ] = None
    buffers: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Buffers that files do not tell from frozen parameters: `none`, or NAME,NAME with `*` for any text.",
            rich_help_panel=SOURCE,
        ),
    ] = None

    def spec(self, url: str) -> SourceSpec:
        """Make the wire model of a source.

        Raises:
            RequestError: `request.invalid`.
        """
        from pydantic import ValidationError

        from reshard.models import SourceSpec
        from reshard.validation import invalid

        said = {f.name: getattr(self, f.name) for f in fields(SourceFlags) if hasattr(self, f.name)}
        said["param_order"] = read_order(self.param_order)
        try:
            return SourceSpec(url=url, **said)
        except ValidationError as error:
            raise invalid(error, CALLED) from None

    def words(self) -> str:
        """The flags that were given, as they are typed behind a command; empty if none was."""
        said = ((f.name, getattr(self, f.name, None)) for f in fields(SourceFlags))
        return "".join(f" --{n.replace('_', '-')} {shlex.quote(v)}" for n, v in said if v is not None)


@dataclass(frozen=True, kw_only=True)
class SourceFlags(CheckpointFlags):
    """The options of a source: its checkpoint, and the credentials to read it with."""

    profile: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Storage profile (see RESHARD_PROFILES).", rich_help_panel=SOURCE),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ConversionFlags(SourceFlags):
    """The options of a conversion on the command line, one for each field."""

    rules: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Rules (YAML) for a tensor-parallel SRC that does not say how it is cut.",
            rich_help_panel=SOURCE,
        ),
    ] = None
    family: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Built-in set of rules: gpt-megatron, llama-megatron, bloom.", rich_help_panel=SOURCE
        ),
    ] = None
    base: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Weights of the base model, if SRC was saved without frozen parameters.",
            rich_help_panel=SOURCE,
        ),
    ] = None
    to: Annotated[
        str,
        typer.Option(
            "--to",
            parser=target_name,
            metavar=_TARGETS,
            help="Format to write; `universal` fits any number of ranks, `zero` one layout, the others hold weights.",
            rich_help_panel=TARGET,
        ),
    ]
    dtype: Annotated[
        WeightDtype | None,
        choice(
            WeightDtype,
            also=DTYPE_NAMES,
            help="Type of weights; default: masters and all else as stored; --to zero: as in SRC.",
            rich_help_panel=TARGET,
        ),
    ] = None
    max_shard_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Largest weights file, such as 5GB.", rich_help_panel=TARGET)
    ] = None
    exclude_frozen: Annotated[
        bool, typer.Option("--exclude-frozen", help="Leave out frozen parameters.", rich_help_panel=TARGET)
    ] = False
    names: Annotated[
        NameScheme | None,
        choice(
            NameScheme, help="Names of a model with or without pipeline; default: as in SRC.", rich_help_panel=TARGET
        ),
    ] = None
    weight_decay_groups: Annotated[
        WeightDecayGroups,
        choice(
            WeightDecayGroups,
            help="Megatron-DeepSpeed's param groups: as it makes them at DST's stage, or as in SRC.",
            rich_help_panel=TARGET,
        ),
    ] = WeightDecayGroups.STAGE
    model_files: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Copy config.json, tokenizer and generation files of DIR beside the weights.",
            rich_help_panel=TARGET,
        ),
    ] = None
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace DST. Its old contents are lost, even if the run fails.",
            rich_help_panel=TARGET,
        ),
    ] = False
    pointer: Annotated[
        bool | None,
        typer.Option(
            "--pointer/--no-pointer",
            help="Write `latest` beside DST; default: where its parent is a save directory.",
            rich_help_panel=TARGET,
        ),
    ] = None
    target_profile: Annotated[
        str | None, typer.Option(metavar="NAME", help="Storage profile for DST.", rich_help_panel=TARGET)
    ] = None
    dp: Annotated[int | None, typer.Option(min=1, help="Data-parallel ranks.", rich_help_panel=LAYOUT)] = None
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.", rich_help_panel=LAYOUT)] = 1
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.", rich_help_panel=LAYOUT)] = 1
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks.", rich_help_panel=LAYOUT)] = 1
    zero_stage: Annotated[
        ZeroStage | None, choice(ZeroStage, help="ZeRO stage; default: as in SRC.", rich_help_panel=LAYOUT)
    ] = None
    partition_method: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="Pipeline stages: uniform, parameters, type:REGEX, or each stage's first layer: 0,3,6.",
            rich_help_panel=LAYOUT,
        ),
    ] = None
    pipeline_layers: Annotated[
        int | None,
        typer.Option(min=1, help="Number of layers, for --partition-method uniform.", rich_help_panel=LAYOUT),
    ] = None
    vocab_divisor: Annotated[
        int | None,
        typer.Option(min=1, help="Pad the vocabulary to a multiple of this times --tp.", rich_help_panel=LAYOUT),
    ] = None
    round_robin_gradients: Annotated[
        bool | None,
        typer.Option(
            "--round-robin-gradients/--no-round-robin-gradients",
            help="As in the ds_config of the target run; default: as in SRC.",
            rich_help_panel=LAYOUT,
        ),
    ] = None
    parameter_alignment: Annotated[
        bool | None,
        typer.Option(
            "--parameter-alignment/--no-parameter-alignment",
            help="As in the ds_config of the target run; default: as in SRC.",
            rich_help_panel=LAYOUT,
        ),
    ] = None
    sub_group_size: Annotated[
        int | None,
        typer.Option(min=1, help="As in the ds_config of the target run; default: as in SRC.", rich_help_panel=LAYOUT),
    ] = None
    rng: Annotated[
        RngPolicy,
        choice(
            RngPolicy, help="Random states: `keep` gives rank r those of source rank r mod N.", rich_help_panel=LAYOUT
        ),
    ] = RngPolicy.KEEP
    merge_adapter: Annotated[
        bool,
        typer.Option(
            "--merge-adapter",
            help="Merge a LoRA adapter into the weights, with the names of the base model.",
            rich_help_panel=ADAPTERS,
        ),
    ] = False
    adapter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Adapter to write or to merge, if SRC has several.", rich_help_panel=ADAPTERS
        ),
    ] = None
    lora_alpha: Annotated[
        float | None,
        typer.Option(min=0.0, help="Scale of an adapter that has no adapter_config.json.", rich_help_panel=ADAPTERS),
    ] = None
    verify: Annotated[
        VerifyLevel,
        choice(VerifyLevel, help="`full` also reads all of SRC and of the output.", rich_help_panel=CHECKING),
    ] = VerifyLevel.DEFAULT
    on_overflow: Annotated[
        OverflowPolicy,
        choice(
            OverflowPolicy,
            help="Elements too large for --dtype: infinity, largest number, or stop.",
            rich_help_panel=CHECKING,
        ),
    ] = OverflowPolicy.INF
    replicas: Annotated[
        ReplicaPolicy,
        choice(
            ReplicaPolicy,
            help="If copies that must be equal differ: stop, or take the first.",
            rich_help_panel=CHECKING,
        ),
    ] = ReplicaPolicy.ERROR
    opaque: Annotated[
        OpaquePolicy,
        choice(
            OpaquePolicy,
            help="Policy for objects of classes that are not on the allow-list.",
            rich_help_panel=CHECKING,
        ),
    ] = OpaquePolicy.REFUSE
    memory_limit: MemoryLimitFlag = None
    part_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Size of a unit of work and of a multipart part, such as 64MiB (the default).",
            rich_help_panel=RESOURCES,
        ),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            help="Units in parallel; default: one per core, more for object stores.",
            rich_help_panel=RESOURCES,
        ),
    ] = None
    server_copy: Annotated[
        ServerCopyPolicy,
        choice(
            ServerCopyPolicy,
            help="`never`: no server-side copies; read and send every byte.",
            rich_help_panel=RESOURCES,
        ),
    ] = ServerCopyPolicy.AUTO

    options_of_formats: Annotated[str | None, typer.Option("--options-of-formats", hidden=True)] = None
    """The options of formats of other packages, as JSON. `ConversionCommand` collects their flags in this field."""

    def request(self, source: str, target: str) -> ConvertRequest:
        """Make the wire model from the flags.

        Raises:
            RequestError: `request.invalid`.
        """
        from pydantic import ValidationError

        from reshard.models import ConvertRequest
        from reshard.nested_options import nested
        from reshard.validation import invalid

        of_source = {f.name for f in fields(SourceFlags)}
        said: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in of_source}
        spec = self.spec(source)
        said["rules"] = read_rules(self.rules) if self.rules else None
        for flag, field in SIZE_FIELDS.items():
            if (text := said.pop(flag)) is not None:
                said[field] = parse_size(text)
        said |= json.loads(said.pop("options_of_formats") or "{}")
        try:
            return ConvertRequest.model_validate(nested(said | {"source": spec, "target": target}))
        except ValidationError as error:
            raise invalid(error, CALLED) from None


def takes_conversion(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of `ConversionFlags` in place of its parameter `flags`."""
    return _with_options(command, {"flags": (ConversionFlags, "")})


def takes_source(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of `SourceFlags` in place of its parameter `flags`."""
    return _with_options(command, {"flags": (SourceFlags, "")})


def takes_checkpoint(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of `CheckpointFlags` in place of its parameter `flags`."""
    return _with_options(command, {"flags": (CheckpointFlags, "")})


def takes_two_sources(command: Callable[..., None]) -> Callable[..., None]:
    """The command with `--tag-a`, `--tag-b` and the like in place of its parameters `flags_a` and `flags_b`."""
    return _with_options(command, {"flags_a": (SourceFlags, "a"), "flags_b": (SourceFlags, "b")})


def _with_options(command: Callable[..., None], wanted: Mapping[str, tuple[type[Any], str]]) -> Callable[..., None]:
    """The command with an option for each field of the classes of flags, in place of the parameters of these names."""
    own = inspect.signature(command, eval_str=True)
    options = {name: dict(_options(kind, side)) for name, (kind, side) in wanted.items()}
    first = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    last = [p for n, p in own.parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY and n not in wanted]
    parameters = [*first, *(p for found in options.values() for p in found.values()), *last]

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        made = {
            name: kind(**{field: kwargs.pop(p.name) for field, p in options[name].items()})
            for name, (kind, _) in wanted.items()
        }
        command(*args, **made, **kwargs)

    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _options(kind: type[Any], side: str) -> Iterator[tuple[str, inspect.Parameter]]:
    """The option of each field, by the field's name; those of one of two sources have its letter behind the name."""
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        annotation, name = hints[field.name], field.name
        if side:
            base, option = get_args(annotation)
            option = copy.copy(option)
            option.help, name = f"{side.upper()}: {option.help}", f"{field.name}_{side}"
            annotation = Annotated[base, option]
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        yield (
            field.name,
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation),
        )
