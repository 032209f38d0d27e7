"""The base of all wire models, and what is wrong with a request in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from reshard.errors import RequestError, printable

SCHEMA_VERSION = 1
"""The version of the models that a program may keep: results, plans, jobs."""
MOST_BYTES = 1 << 62
"""The largest size in a request. A sum of it and a few others still fits into 64 bits."""


class WireModel(BaseModel):
    """Base of all wire models. They are frozen and refuse unknown fields."""

    # A command uses few of the models. Building each at its first use makes every start 50 ms faster.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class RequestModel(WireModel):
    """Base of models that callers send. Numbers are numbers, as the API's document says: neither `true` nor `"5"`."""

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_other_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool | str) and _is_number(cls, info.field_name or ""):
            # These are the types of pydantic's own errors, which callers of either kind already read.
            whole = int in _types_of(cls.model_fields[info.field_name or ""].annotation)
            raise PydanticCustomError("int_type" if whole else "float_type", "this is not a number")
        return value


@cache
def _is_number(model: type[BaseModel], name: str) -> bool:
    """True for a field that holds a number or null, and nothing else."""
    found = _types_of(model.model_fields[name].annotation)
    return bool(found) and found <= {int, float, type(None)} and found != {type(None)}


def _types_of(annotation: Any) -> set[Any]:
    arguments = get_args(annotation)
    # What follows the type within `Annotated` is not a type.
    within = arguments[:1] if hasattr(annotation, "__metadata__") else arguments
    return set[Any]().union(*map(_types_of, within)) if within else {annotation}


_RENDERER = "reshard.draw.notebook:rendered"
"""The function that makes HTML of a model. It knows every model, so no model imports it: its name leads to it."""


@cache
def _renderer() -> Callable[[RenderedModel], str]:
    return resolve_name(_RENDERER)


class RenderedModel(WireModel):
    """Base of the models that a notebook shows as HTML."""

    def _repr_html_(self) -> str:
        """The model in a notebook; all texts are escaped."""
        return _renderer()(self)


@dataclass(frozen=True, eq=False)
class Drawn:
    """The checkpoint, or the conversion, whose layout a notebook shows beside a result.

    It is not part of the result: equal results stay equal, however they were made.
    """

    subject: WireModel | None = None
    """A `SourceSpec` or a `ConvertRequest`. None if this process cannot read it: a service may."""

    def __eq__(self, other: object) -> bool:
        """Equal to any other, so that it never tells apart two results."""
        return isinstance(other, Drawn)

    def __hash__(self) -> int:
        """The hash of all of them."""
        return hash(Drawn)


class ShownModel(RenderedModel):
    """Base of the models that a notebook shows as a table and, if it can be drawn, with the picture of the layout."""

    _drawn: Drawn = PrivateAttr(default_factory=Drawn)

    @property
    def drawn(self) -> WireModel | None:
        """The subject that a notebook draws beside the model."""
        return self._drawn.subject

    def drawn_from(self, subject: WireModel) -> Self:
        """Remember what a notebook is to draw beside the model; returns the model itself."""
        self._drawn = Drawn(subject)
        return self


# What pydantic finds wrong with a request, worded for users.

_LIMITS = {
    "string_too_short": ("is shorter than {} characters", "min_length"),
    "string_too_long": ("is longer than {} characters", "max_length"),
    "greater_than": ("is not above {}", "gt"),
    "greater_than_equal": ("is below {}", "ge"),
    "less_than": ("is not below {}", "lt"),
    "less_than_equal": ("is above {}", "le"),
}
_KINDS = {
    "missing": "is missing",
    "extra_forbidden": "is not a known field",
    "enum": "is not one of the choices",
    "literal_error": "is not one of the choices",
    "finite_number": "is not a finite number",
    "json_invalid": "is not JSON",
}


def said_of(problem: Mapping[str, Any]) -> str:
    """One problem of a pydantic error, worded for users."""
    kind = str(problem["type"])
    context: Mapping[str, Any] = problem.get("ctx") or {}
    if kind == "string_too_short" and context.get("min_length") == 1:
        return "is empty"
    if kind in _LIMITS:
        text, key = _LIMITS[kind]
        return text.format(context.get(key))
    if kind == "extra_forbidden" and (place := context.get("place")) is not None:
        return f"is not a known field here: its place is {place}"
    if kind == "value_error":  # of a validator of ours, or of a format of another package
        return f"is refused: {printable(str(context.get('error', problem['msg'])))}"
    if kind in ("enum", "literal_error"):
        return f"is none of {context.get('expected')}"
    wanted = kind.removesuffix("_parsing").removesuffix("_type").removesuffix("_from_float")
    nouns = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "text"}
    nouns |= dict.fromkeys(("dict", "model", "model_attributes"), "an object")
    nouns |= dict.fromkeys(("list", "tuple"), "a list")
    return _KINDS.get(kind) or f"is not {nouns.get(wanted, 'a value that is taken')}"


def invalid(error: ValidationError, flags: Mapping[str, str] | None = None, *, keywords: bool = False) -> RequestError:
    """The `RequestError` for a pydantic validation error, worded for users.

    Args:
        error: What pydantic found.
        flags: Flags whose names differ from their fields'; None if the caller names fields, not flags.
        keywords: True if the flags are keyword arguments of a function.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    if flags is not None:
        last = str(first["loc"][-1]) if first["loc"] else ""
        where = flags.get(where) or flags.get(last) or (last if keywords else f"--{last.replace('_', '-')}")
    return RequestError("request.invalid", f"{where} {said_of(first)}")
