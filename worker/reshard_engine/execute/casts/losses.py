"""Losses of a cast: counts of elements that became infinite or zero, and of those that were already NaN or infinite."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reshard_engine.execute.casts.rows import ByteArray
from reshard_engine.tensors.dtypes import Dtype

_BITS = {8: np.uint64, 4: np.uint32, 2: np.uint16}
_INFINITY = {"float64": 0x7FF << 52, "float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}


@dataclass(frozen=True, slots=True)
class Losses:
    """Counts of elements that a cast lost, and of elements that were special before it."""

    overflowed: int = 0
    """Elements that are finite, but infinite in the narrower type (with saturation: its largest number)."""
    underflowed: int = 0
    """Elements that are not zero, but zero in the narrower type."""
    nan: int = 0
    infinite: int = 0
    """Elements that were infinite before the cast."""

    def __add__(self, other: Losses) -> Losses:
        """The sum of both, field by field."""
        return Losses(
            self.overflowed + other.overflowed,
            self.underflowed + other.underflowed,
            self.nan + other.nan,
            self.infinite + other.infinite,
        )

    def __bool__(self) -> bool:
        """True if any count is not zero."""
        return self != _NOTHING

    def columns(self) -> list[int]:
        """The counts in the order of the fields."""
        return [self.overflowed, self.underflowed, self.nan, self.infinite]


_NOTHING = Losses()


def may_lose(source: Dtype, target: Dtype) -> bool:
    """True if a cast can lose anything. Widening to float32 cannot."""
    return target.name != "float32" or source.name == "float64"


def losses_of(before: ByteArray, after: ByteArray, source: Dtype, target: Dtype, *, saturate: bool = False) -> Losses:
    """The losses of a cast. With `saturate`, elements of `after` that overflowed are replaced.

    Args:
        before: The elements, in memory that is aligned for their type.
        after: Their casts, also in aligned memory.
        source: The type of the elements.
        target: The type of the casts.
        saturate: True to turn finite elements that became infinite into the largest finite number of their sign.
    """
    if not may_lose(source, target):
        return _NOTHING
    old, new = _magnitude(before, source), _magnitude(after, target)
    old_limit, new_limit = _infinity(source), _infinity(target)
    overflowed = (old < old_limit) & (new == new_limit)
    count = int(np.count_nonzero(overflowed))
    if saturate and count:
        # The bits of the largest finite number are those of infinity minus one; the sign stays.
        after.view(_BITS[target.itemsize_bytes])[overflowed] -= 1
    return Losses(
        count,
        int(np.count_nonzero((old != 0) & (new == 0))),
        int(np.count_nonzero(old > old_limit)),
        int(np.count_nonzero(old == old_limit)),
    )


def _magnitude(data: ByteArray, dtype: Dtype) -> npt.NDArray[np.unsignedinteger]:
    """The bits without the sign. They are ordered like the magnitudes of the numbers."""
    size = dtype.itemsize_bytes
    bits = data.view(_BITS[size])
    return bits & np.array((1 << size * 8 - 1) - 1, dtype=_BITS[size])


def _infinity(dtype: Dtype) -> npt.NDArray[np.unsignedinteger]:
    return np.array(_INFINITY[dtype.name], dtype=_BITS[dtype.itemsize_bytes])


def are_nan(data: ByteArray, dtype: Dtype) -> npt.NDArray[np.bool_]:
    """A mask that is True for each element of a floating type that is NaN."""
    return _magnitude(data, dtype) > _infinity(dtype)


def special(data: ByteArray, dtype: Dtype) -> int:
    """The number of elements that are zero, infinite or NaN. A cast to this type can have lost no other elements."""
    bits = _magnitude(data, dtype)
    return int(np.count_nonzero((bits == 0) | (bits >= _infinity(dtype))))
