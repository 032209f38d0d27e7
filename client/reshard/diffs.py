"""What a comparison of two checkpoints asks for and what it found."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from reshard.models import SCHEMA_VERSION, WireModel


class DiffOptions(WireModel):
    """What a comparison of two checkpoints looks at."""

    weights_only: bool = False
    """Names, shapes, weights, buffers; no optimizer states, no counters."""
    common: bool = False
    """What only one side has is no difference."""
    rules: str | None = Field(default=None, max_length=1 << 16)
    """How parameters are cut over tensor-parallel ranks where a side does not say: see `ConvertRequest.rules`."""
    family: str | None = Field(default=None, max_length=64)
    ignore: tuple[str, ...] = Field(default=(), max_length=256)
    """Shell patterns of names, or of `NAME/STATE`, that are left out."""
    sample: float | None = Field(default=None, gt=0, le=1)
    """Fraction of the blocks of elements to compare, chosen at random; None compares all."""


class DifferenceKind(StrEnum):
    """What differs between two checkpoints."""

    SHAPE = "shape"
    MISSING = "missing"
    """Only one side has it."""
    UNEXPLAINED = "unexplained"
    """Nothing says how its tensor-parallel parts make a tensor: it is not compared."""
    DTYPE = "dtype"
    """Element types that cannot be compared by rounding the more precise side."""
    ROLE = "role"
    """Trained, frozen or a buffer."""
    TIED = "tied"
    """Other names for one tensor."""
    ELEMENTS = "elements"
    """Elements of a tensor."""
    SCALAR = "scalar"
    """A number per parameter, such as `step`."""
    HYPER_PARAMETER = "hyper-parameter"
    """A value of the parameter's optimizer group, such as `lr`."""
    STATE = "state"
    """Counters, schedulers, client state."""


class Difference(WireModel):
    """One thing that is not the same in two checkpoints."""

    kind: DifferenceKind
    name: str
    """Of the parameter or buffer, or the path of a value in the non-tensor state."""
    state: str = ""
    """`fp32`, `weight`, `exp_avg`, `step`, `lr`, ...; empty where the name says all."""
    a: str | None = None
    """What the first side has; of elements the first one that differs. None: nothing."""
    b: str | None = None
    compared_as: str | None = None
    """Element type that the more precise side was rounded to before comparing; None if neither was."""
    elements: int | None = None
    """Elements that were compared."""
    differing: int | None = None
    """Of these, the ones whose bits differ."""
    nonfinite: int = 0
    """Of these, infinite or no number on a side."""
    max_abs: float | None = None
    max_rel: float | None = None
    """Largest distance as a part of the larger magnitude."""
    first_index: tuple[int, ...] | None = None
    parameters: int = 1
    """How many parameters share this difference, `name` being the first."""


class DiffSide(WireModel):
    """One of two checkpoints that were compared."""

    url: str
    tag: str | None
    format: str
    step: int | None
    zero_stage: int | None
    world: dict[str, int]


class DiffReport(WireModel):
    """Outcome of comparing two checkpoints by logical tensor."""

    schema_version: int = SCHEMA_VERSION
    a: DiffSide
    b: DiffSide
    equal: bool
    tensors: int
    """Pairs of tensors whose elements were compared."""
    identical: int
    """Of these, the ones without a difference."""
    elements: int
    values: int
    """Hyper-parameters, counters and other single values that were compared."""
    read_bytes: int
    sampled: float | None
    differences: tuple[Difference, ...]
    """Worst first."""
    notes: tuple[str, ...] = ()
    """How the sides were compared, where that is not plain; what neither proves nor disproves equality."""
    seconds: float
