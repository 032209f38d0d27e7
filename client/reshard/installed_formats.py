"""Formats that other packages register, and the options of all formats as requests nest them.

An entry point names an `InstalledFormat`: the facts of a format that the client, the command line and the API's schema
need. It holds no code of the format; the engine imports the format's class when a conversion needs it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib import metadata
from typing import Annotated, Any, cast, get_args

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    create_model,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue

from reshard.choices import TargetFormat
from reshard.errors import RequestError, printable
from reshard.option import Option, warn_of_former
from reshard.options import (
    ConversionOptions,
    DeepSpeedOptions,
    FormatOptions,
    Options,
    RunLayout,
    SourceSpec,
    former_place,
)
from reshard.targets import TARGETS, Target
from reshard.wire_model import WireModel

ENTRY_POINT_GROUP = "reshard.formats"
BUILT_IN = (
    "deepspeed",
    "fsdp_ranks",
    "megatron",
    "full_state_dict",
    "torch_checkpointing",
    "weights",
    "peft",
    "torch_files",
)
"""The names of the formats that reshard brings."""
OWN_ENTRY_POINTS = frozenset({"dcp"})
"""The names of those formats that reshard brings by an entry point, as other packages do."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


@dataclass(frozen=True)
class InstalledFormat:
    """One format of another package."""

    name: str
    """The format's name: lower-case letters, digits and `_`. Requests nest the options of the format under it."""
    implementation: str
    """`package.module:Class` of a `reshard_engine.formats.format.Format`; the engine imports it."""
    targets: Mapping[str, str | Target] = field(default_factory=dict[str, str | Target])
    """The targets that the format can write, by the name that `--to` takes: each with a line of help, or its record."""
    options: type[FormatOptions] | None = None
    """The options that the format adds to a conversion. Each is a flag of the command line and a field of requests."""


@cache
def installed_formats() -> tuple[InstalledFormat, ...]:
    """The formats of other packages, in the order of their names.

    Raises:
        RequestError: `request.bad_format`: a format cannot be loaded, or takes a name that another format has.
    """
    found: list[InstalledFormat] = []
    for entry in sorted(metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda e: e.name):
        package = entry.dist.name if entry.dist is not None else entry.value
        try:
            loaded = entry.load()
        except (ImportError, AttributeError) as error:
            raise refused_format(entry.name, package, printable(str(error))) from error
        if not isinstance(loaded, InstalledFormat):
            raise refused_format(
                entry.name, package, f"{entry.value} is not a reshard.installed_formats.InstalledFormat"
            )
        if (problem := _problem(loaded, found)) is not None:
            raise refused_format(entry.name, package, problem)
        found.append(loaded)
    return tuple(found)


def known_targets() -> dict[str, Target]:
    """The records of all targets that this installation knows, by name: reshard's own, then those of packages."""
    brought = (pair for f in installed_formats() for pair in f.targets.items())
    return {t.name: t for t in TARGETS} | {name: _record(name, record) for name, record in brought}


def takes_card(name: object) -> bool:
    """True for a target that can have a model card, and that the Hugging Face hub takes: weights and adapters."""
    target = known_targets().get(str(name))
    return target is not None and "card" in target.options


def _record(name: str, record: str | Target) -> Target:
    return record if isinstance(record, Target) else Target(name=name, label=record, contains=record)


def target_names() -> tuple[str, ...]:
    """The names of all targets that this installation knows."""
    return tuple(known_targets())


def plain_kind(info: FieldInfo) -> type | None:
    """The type of an option's values (None left out) if the command line can take it: bool, int, float, str or StrEnum.

    The result is None for any other type.
    """
    kinds = [k for k in (get_args(info.annotation) or (info.annotation,)) if k is not type(None)]
    kind: Any = kinds[0] if len(kinds) == 1 else None
    return kind if kind in (bool, int, float, str) or (isinstance(kind, type) and issubclass(kind, StrEnum)) else None


def former_names(field: str, info: FieldInfo) -> tuple[str, ...]:
    """Former names of a field, which requests, flags and keyword arguments may still have."""
    alias = info.validation_alias
    names = alias.choices if isinstance(alias, AliasChoices) else ()
    return tuple(str(name) for name in names if name != field)


def _problem(new: InstalledFormat, others: list[InstalledFormat]) -> str | None:
    """The reason why a format conflicts with the others; None if it does not."""
    if not all(map(_NAME.fullmatch, (new.name, *new.targets))):
        return "its name and those of its targets are lower-case letters, digits and _"
    if new.name in (*BUILT_IN, *(f.name for f in others)):
        return f"another format is called {new.name}"
    targets = {*(t.name for t in TARGETS), *(name for f in others for name in f.targets)}
    if odd := [n for n, record in new.targets.items() if isinstance(record, Target) and record.name != n]:
        return f"the record of its target {odd[0]} has another name"
    if taken := sorted(targets & {*new.targets}):
        return f"another format writes the target {taken[0]}"
    ours = (SourceSpec, ConversionOptions, RunLayout, *(f.default_factory for f in Options.model_fields.values()))
    names = {name for model in (*ours, *(f.options for f in others)) for name in _names_in(model)}
    records = [record for record in new.targets.values() if isinstance(record, Target)]
    if odd := [o for r in records for o in (*r.options, *r.needs) if o not in names | _names_in(new.options)]:
        return f"the record of its target names the option {odd[0]}, which there is not"
    if new.options is None:
        return None
    if odd := [n for n, f in new.options.model_fields.items() if plain_kind(f) is None]:
        return f"its option {odd[0]} is neither text nor a number, a choice or a truth value"
    if required := [n for n, f in new.options.model_fields.items() if f.is_required()]:
        return f"its option {required[0]} has no default"
    if taken := sorted((names | _OTHER_NAMES) & {*new.options.model_fields}):
        return f"another option is called {taken[0]}"
    return None


def _names_in(model: Any) -> set[str]:
    """The names of the options of a model, and those of their flags."""
    fields: Mapping[str, FieldInfo] = getattr(model, "model_fields", {})
    return {*fields, *(m.name for info in fields.values() for m in info.metadata if isinstance(m, Option))}


_OTHER_NAMES = frozenset({
    "to", "source", "target", "layout", "options", "label", "max_attempts", "wait", "idempotency_key", "id",
    "job_id", "wait_timeout", "max_workers", "priority", "workers", "worker", "dry_run", "json", "as_json", "quiet",
    "url", "help",
})  # fmt: skip
"""Names that requests and commands have taken for what is not an option of a conversion."""


def refused_format(name: str, package: str, reason: str) -> RequestError:
    """The error for a format of another package that cannot be used."""
    return RequestError(
        "request.bad_format",
        f"the format {printable(name)} of the package {printable(package)} cannot be used: {reason}",
        fix=f"install a version of {printable(package)} that fits this reshard, or remove it: pip uninstall {package}",
    )


# The type of a target's name in requests: a target of reshard, or of a format of another package.


class _TargetNames:
    """Makes the API's schema list every target that the service can write."""

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """A string of a closed list."""
        return {"type": "string", "enum": list(target_names())}


def known_target(name: str) -> str:
    """The member of `TargetFormat` with this name; the name itself if it belongs to another package's format."""
    return TargetFormat.__members__.get(name.upper(), name)


TargetName = Annotated[str, Field(max_length=64), AfterValidator(known_target), _TargetNames]
"""The name of a target. A name that this machine does not know stays a plain string; the engine refuses it."""


# Options as requests nest them: those of reshard's own formats, and of formats that other packages bring.

_OF_FORMATS = "OptionsOfFormats"


class OfInstalledFormats:
    """Makes pydantic validate and describe `Options` including the formats of other packages."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """The schema of `options_model`, made when a model that nests the options is first used."""
        return handler(Annotated[options_model(), BeforeValidator(_of_installed)])


def _of_installed(value: Any) -> Any:
    """A plain `Options` as a mapping, to be validated with the formats of other packages; other values unchanged."""
    plain = isinstance(value, Options) and not isinstance(value, options_model())
    return {n: _plain(v) for n, v in value} if plain else value


@cache
def options_model() -> type[Options]:
    """`Options` with a field for each format that another package brings."""
    others: dict[str, Any] = {
        f.name: (f.options, Field(default_factory=f.options)) for f in installed_formats() if f.options is not None
    }
    if not others:
        return Options
    return create_model(_OF_FORMATS, __base__=Options, __module__=__name__, __doc__=Options.__doc__, **others)


def __getattr__(name: str) -> Any:
    """The model that `options_model` makes, by its name: pickles of requests look for it in this module."""
    if name == _OF_FORMATS:
        return options_model()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def default_options() -> Options:
    """The options of a request that gives none."""
    return options_model()()


def option_fields() -> dict[str, tuple[tuple[str, ...], FieldInfo]]:
    """The options that are nested in requests, by name: the sizes of the layout, and the options of all formats.

    Each has the place of its model within a request: `("layout",)`, `("options", "deepspeed")`. No two have one name.
    """
    found: dict[str, tuple[tuple[str, ...], FieldInfo]] = {
        name: (("layout",), info) for name, info in RunLayout.model_fields.items()
    }
    for format_name, nested_model in options_model().model_fields.items():
        model = cast("type[FormatOptions]", nested_model.annotation)
        found |= {name: (("options", format_name), info) for name, info in model.model_fields.items()}
    return found


@cache
def _moved() -> dict[tuple[str, str], tuple[str, ...]]:
    """The places of options that requests of 0.1.0 have among those of a format, with their present places."""
    models = (((), ConversionOptions), (("layout",), RunLayout))
    return {
        place: (*within, name)
        for within, model in models
        for name, info in model.model_fields.items()
        if (place := former_place(info)) is not None
    }


def present_places(fields: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields of a request, with options at their present places; and a text for each that was at that of 0.1.0.

    Malformed values stay, so that validation refuses them.

    Raises:
        ValueError: A value is given at both places.
    """
    found = dict(fields)
    options = _plain(found.get("options"))
    if not isinstance(options, Mapping):
        return found, ()
    kept: dict[str, Any] = dict(cast("Mapping[str, Any]", options))
    moved: list[str] = []
    for (format_name, former), (*within, name) in _moved().items():
        values: Any = kept.get(format_name)
        if not isinstance(values, Mapping) or former not in values:
            continue
        holder: Any = _plain(found.get("layout", {})) if within else found
        if not isinstance(holder, Mapping):
            continue
        present, value = ".".join((*within, name)), cast("Mapping[str, Any]", values)[former]
        if name in holder:
            raise ValueError(f"options.{format_name}.{former} is the former place of {present}, and both are given")
        kept[format_name] = {n: v for n, v in cast("Mapping[str, Any]", values).items() if n != former}
        if within:
            found["layout"] = {**holder, name: value}
        else:
            found[name] = value
        moved.append(f"options.{format_name}.{former} is now {present}")
    return ({**found, "options": kept} if moved else found), tuple(moved)


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request, from arguments of a function: nested options are moved to their places.

    `layout` is the layout of the run as one value. Malformed values stay, so that validation refuses them.

    Raises:
        RequestError: `request.invalid`: an option is given twice, with two values.
    """
    try:
        return _nested(fields)
    except ValueError as error:
        raise RequestError("request.invalid", str(error), fix="give it once, such as `dp=8` alone") from None


def _nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    places = _places_by_keyword()
    layout = fields.get("layout")
    layout = layout.model_dump(exclude_unset=True) if isinstance(layout, WireModel) else layout
    found = {n: v for n, v in fields.items() if n not in places and n != "layout"}
    if isinstance(layout, Mapping):
        for called, value in cast("Mapping[str, Any]", layout).items():
            other = (called,) if called in ConversionOptions.model_fields else ("layout", called)
            place = places[called][0] if called in places else other
            if place[0] != "layout":
                _warn_moved(f"layout.{called} is now {'.'.join(place)}")
            found = _put(found, place, value)
    elif layout is not None:
        found["layout"] = layout
    for called, value in fields.items():
        if called in places and value is not None:
            place, info = places[called]
            # Requests and their digests have only what was chosen, and a default was not.
            found = _put(found, place, value, only_beside=value == info.get_default())
    present, moved = present_places(found)
    for text in moved:
        _warn_moved(text)
    return present


@cache
def former_layout() -> type[RunLayout]:
    """`NativeLayout` of 0.1.0: the sizes of the layout, and options of DeepSpeed and of the conversion beside them."""
    others = ("zero_stage", "partition_method", "pipeline_layers", "round_robin_gradients", "parameter_alignment")
    fields = {n: DeepSpeedOptions.model_fields[n] for n in (*others, "sub_group_size")}
    fields |= {n: ConversionOptions.model_fields[n] for n in ("vocab_divisor", "rng")}
    named: dict[str, Any] = {name: (info.annotation, info) for name, info in fields.items()}
    return create_model("NativeLayout", __base__=RunLayout, __module__=__name__, **named)


def options_of(given: Mapping[str, Any]) -> Options:
    """The options of formats with these values, by the names of their keyword arguments; None is as if left out."""
    return options_model().model_validate(nested(given).get("options", {}))


def _places_by_keyword() -> dict[str, tuple[tuple[str, ...], FieldInfo]]:
    """The place and the field of every nested option, by its name and by its former names."""
    found = {name: ((*within, name), info) for name, (within, info) in option_fields().items()}
    for name, (place, info) in tuple(found.items()):
        former = former_place(info)
        found |= dict.fromkeys((*former_names(name, info), *(() if former is None else former[1:])), (place, info))
    return found


def _put(
    fields: Mapping[str, Any], place: Sequence[str], value: Any, *, only_beside: bool = False, whole: str = ""
) -> dict[str, Any]:
    """The fields with a value set; without it where its place is within a malformed value.

    Args:
        fields: The fields.
        place: The names that lead to the value.
        value: The value.
        only_beside: True to set nothing, and only to compare the value with that of the fields.
        whole: The names that lead to `fields`, for the error.

    Raises:
        ValueError: The fields have another value there.
    """
    name, *below = place
    here = f"{whole}.{name}" if whole else name
    if not below:
        if fields.get(name) not in (None, value):
            raise ValueError(f"{here} is given twice, as {printable(str(fields[name]))} and {printable(str(value))}")
        return dict(fields) if only_beside else {**fields, name: value}
    inner = _plain(fields.get(name))
    if (inner is not None and not isinstance(inner, Mapping)) or (inner is None and only_beside):
        return dict(fields)
    put = _put(cast("Mapping[str, Any]", inner or {}), below, value, only_beside=only_beside, whole=here)
    return {**fields, name: put}


def _warn_moved(text: str) -> None:
    warn_of_former(f"{text}; the former place works for this release")


def _plain(value: Any) -> Any:
    """The fields of a model that were set, as a mapping; other values unchanged."""
    return value.model_dump(exclude_defaults=True) if isinstance(value, WireModel) else value
