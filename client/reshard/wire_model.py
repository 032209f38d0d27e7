"""The base of all wire models."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Self, get_args

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from reshard.drawn import Drawn

if TYPE_CHECKING:
    from reshard.models import ConvertRequest, SourceSpec

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


class ShownModel(WireModel):
    """Base of the models that a notebook shows as a table and, if it can be drawn, with the picture of the layout."""

    _drawn: Drawn = PrivateAttr(default_factory=Drawn)

    def _repr_html_(self) -> str:
        """The model in a notebook; all texts are escaped."""
        from reshard.notebook import shown

        return shown(self, self._drawn.picture())

    def drawn_from(self, subject: SourceSpec | ConvertRequest) -> Self:
        """Remember what a notebook is to draw beside the model; returns the model itself."""
        self._drawn = Drawn(subject)
        return self
