"""The base of all wire models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

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
            raise PydanticCustomError("int_type" if whole else "float_type", "this is no number")
        return value


@cache
def _is_number(model: type[BaseModel], name: str) -> bool:
    """True for a field that holds a number or null, and nothing else."""
    found = _types_of(model.model_fields[name].annotation)
    return bool(found) and found <= {int, float, type(None)} and found != {type(None)}


def _types_of(annotation: Any) -> set[Any]:
    arguments = get_args(annotation)
    # What follows the type within `Annotated` is no type.
    within = arguments[:1] if hasattr(annotation, "__metadata__") else arguments
    return set[Any]().union(*map(_types_of, within)) if within else {annotation}


_RENDERER = "reshard.notebook:rendered"
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

    It is no part of the result: equal results stay equal, however they were made.
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
        """What a notebook is to draw beside the model."""
        return self._drawn.subject

    def drawn_from(self, subject: WireModel) -> Self:
        """Remember what a notebook is to draw beside the model; returns the model itself."""
        self._drawn = Drawn(subject)
        return self
