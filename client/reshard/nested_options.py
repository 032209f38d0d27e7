"""Options as requests nest them: those of reshard's own formats, and of formats that other packages bring."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler, create_model
from pydantic.fields import FieldInfo

from reshard.installed_formats import installed_formats
from reshard.options import FormatOptions, Options
from reshard.wire_model import WireModel

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


def option_fields() -> dict[str, tuple[str, FieldInfo]]:
    """All options of formats by name, each with its format's name. No two formats have an option of the same name."""
    return {
        name: (format_name, info)
        for format_name, field in options_model().model_fields.items()
        for name, info in cast("type[FormatOptions]", field.annotation).model_fields.items()
    }


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request, with options of formats that were given unnested moved below `options`.

    `layout` is the layout of a native target as one value. Malformed values stay, so that validation refuses them.
    """
    where = option_fields()
    moved = {n: v for n, v in fields.items() if n in where and v != where[n][1].get_default()}
    rest = {n: v for n, v in fields.items() if n not in where and not (n == "layout" and v is None)}
    layout = _plain(rest.get("layout"))
    options: Any = _plain(rest.get("options")) or {}
    if not isinstance(options, Mapping) or (not moved and not isinstance(layout, Mapping)):
        return rest
    found: dict[str, Any] = {n: _plain(v) for n, v in cast("Mapping[str, Any]", options).items()}
    said: list[tuple[str, Mapping[str, Any]]] = [(where[name][0], {name: value}) for name, value in moved.items()]
    if isinstance(layout, Mapping):
        del rest["layout"]
        said.insert(0, ("deepspeed", cast("Mapping[str, Any]", layout)))
    for format_name, values in said:
        before: Any = found.get(format_name, {})
        found[format_name] = {**before, **values} if isinstance(before, Mapping) else before
    return {**rest, "options": found}


def _plain(value: Any) -> Any:
    """The fields of a model that were set, as a mapping; other values unchanged."""
    return value.model_dump(exclude_defaults=True) if isinstance(value, WireModel) else value
