"""What a cast loses: elements that became infinite or zero, and those that were no numbers before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reshard_engine.execute.casts.rows import Buffer
from reshard_engine.tensors.dtypes import Dtype

_BITS = {8: np.uint64, 4: np.uint32, 2: np.uint16}
_INFINITY = {"float64": 0x7FF << 52, "float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}


@dataclass(frozen=True, slots=True)
class Losses:
    """Counts of elements."""

    overflowed: int = 0
    """Finite, and infinite in the narrower type; with saturation, the largest number of it."""
    underflowed: int = 0
    """Not zero, and zero in the narrower type."""
    nan: int = 0
    infinite: int = 0
    """Infinite before the cast."""

    def __add__(self, other: Losses) -> Losses:
        """Both together."""
        return Losses(
            self.overflowed + other.overflowed,
            self.underflowed + other.underflowed,
            self.nan + other.nan,
            self.infinite + other.infinite,
        )

    def __bool__(self) -> bool:
        """Whether there is anything to report."""
        return self != _NOTHING

    def columns(self) -> list[int]:
        """The counts in the order of the fields."""
        return [self.overflowed, self.underflowed, self.nan, self.infinite]


_NOTHING = Losses()


def may_lose(source: Dtype, target: Dtype) -> bool:
    """Whether a cast can lose anything: widening to float32 cannot."""
    return target.name != "float32" or source.name == "float64"


def losses_of(before: Buffer, after: Buffer, source: Dtype, target: Dtype, *, saturate: bool = False) -> Losses:
    """What the cast of some elements lost; with `saturate`, put right what overflowed.

    Args:
        before: The elements, where their type may begin in memory.
        after: Their casts, likewise.
        source: Their type.
        target: The type of the casts.
        saturate: Whether finite elements that became infinite become the largest finite number of their sign.
    """
    if not may_lose(source, target):
        return _NOTHING
    old, new = _magnitude(before, source), _magnitude(after, target)
    old_limit, new_limit = _infinity(source), _infinity(target)
    overflowed = (old < old_limit) & (new == new_limit)
    count = int(np.count_nonzero(overflowed))
    if saturate and count:
        # One less in bits than infinity, whose sign stays.
        after.view(_BITS[target.itemsize_bytes])[overflowed] -= 1
    return Losses(
        count,
        int(np.count_nonzero((old != 0) & (new == 0))),
        int(np.count_nonzero(old > old_limit)),
        int(np.count_nonzero(old == old_limit)),
    )


def _magnitude(data: Buffer, dtype: Dtype) -> npt.NDArray[np.unsignedinteger]:
    """Bits without their sign, which are ordered as the numbers are."""
    size = dtype.itemsize_bytes
    bits = data.view(_BITS[size])
    return bits & np.array((1 << size * 8 - 1) - 1, dtype=_BITS[size])


def _infinity(dtype: Dtype) -> npt.NDArray[np.unsignedinteger]:
    return np.array(_INFINITY[dtype.name], dtype=_BITS[dtype.itemsize_bytes])


def are_nan(data: Buffer, dtype: Dtype) -> npt.NDArray[np.bool_]:
    """Which elements of a floating type are no numbers."""
    return _magnitude(data, dtype) > _infinity(dtype)


def special(data: Buffer, dtype: Dtype) -> int:
    """How many elements are zero, infinite or NaN: nothing else can have lost anything in a cast to this type."""
    bits = _magnitude(data, dtype)
    return int(np.count_nonzero((bits == 0) | (bits >= _infinity(dtype))))
