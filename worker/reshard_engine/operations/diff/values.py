"""Comparison of blocks of elements: by bits, and by distance where bits differ."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from reshard_engine.tensors.dtypes import Dtype

Bytes = npt.NDArray[np.uint8]
_WIDE = {"float64": np.float64, "float32": np.float32, "float16": np.float16}
_PLAIN = {
    "int64": np.int64,
    "int32": np.int32,
    "int16": np.int16,
    "int8": np.int8,
    "uint8": np.uint8,
    "bool": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
}
_COMPLEX = {"complex64": np.complex64, "complex128": np.complex128}


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """The differences between some elements of two tensors. Element numbers count in row-major order."""

    count: int
    """Elements whose bits differ."""
    nonfinite: int
    """Differing elements that are infinite or NaN on a side, and so have no distance."""
    max_abs: float | None
    """The largest distance of finite elements; None if the type has no distance, or no finite elements differ."""
    max_rel: float | None
    """The largest distance divided by the larger magnitude of the two elements."""
    first: int
    first_a: str
    first_b: str

    def joined(self, later: ValueDifference) -> ValueDifference:
        """The sum of two differences, where `later` is of elements further on."""
        return replace(
            self,
            count=self.count + later.count,
            nonfinite=self.nonfinite + later.nonfinite,
            max_abs=_larger(self.max_abs, later.max_abs),
            max_rel=_larger(self.max_rel, later.max_rel),
        )


def _larger(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else max(a, b)


def compare_elements(a: Bytes, b: Bytes, dtype: Dtype, *, first: int) -> ValueDifference | None:
    """The difference between two packed runs of elements of one type; None if their bits are equal.

    Args:
        a: Little-endian bytes of one side.
        b: As many of the other one.
        dtype: Element type of both.
        first: Number of the first element, for `ValueDifference.first`.
    """
    size = dtype.itemsize_bytes
    # Compare eight bytes at a time: nearly all blocks are equal, and need no more than this.
    cut = len(a) // 8 * 8
    if np.array_equal(a[:cut].view(np.uint64), b[:cut].view(np.uint64)) and np.array_equal(a[cut:], b[cut:]):
        return None
    rows_a, rows_b = a.reshape(-1, size), b.reshape(-1, size)
    places = np.flatnonzero((rows_a != rows_b).any(axis=1))
    left, right = _numbers(rows_a[places], dtype), _numbers(rows_b[places], dtype)
    at = int(places[0])
    text_a, text_b = _text(rows_a[at], left), _text(rows_b[at], right)
    if text_a == text_b:
        # Payloads of NaNs, and numbers that print alike: only the bits tell them apart.
        text_a, text_b = (f"{t} (0x{bytes(r[at])[::-1].hex()})" for t, r in ((text_a, rows_a), (text_b, rows_b)))
    nonfinite, max_abs, max_rel = 0, None, None
    if left is not None and right is not None:
        finite = np.isfinite(left) & np.isfinite(right)
        nonfinite = int(len(finite) - finite.sum())
        max_abs, max_rel = _distances(left[finite], right[finite])
    return ValueDifference(len(places), nonfinite, max_abs, max_rel, first + at, text_a, text_b)


def _distances(
    left: npt.NDArray[np.float64 | np.complex128], right: npt.NDArray[np.float64 | np.complex128]
) -> tuple[float | None, float | None]:
    if not len(left):
        return None, None
    with np.errstate(over="ignore"):  # two large float64 of different sign
        distance = np.abs(left - right)
        size = np.maximum(np.abs(left), np.abs(right))
    relative = np.divide(distance, size, out=np.zeros(len(size), dtype=np.float64), where=size > 0)
    return float(distance.max()), float(relative.max())


def _numbers(rows: Bytes, dtype: Dtype) -> npt.NDArray[np.float64 | np.complex128] | None:
    """The elements as wide numbers; None for types that numpy does not know."""
    flat = np.ascontiguousarray(rows).reshape(-1)
    if dtype.name == "bfloat16":
        return (flat.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype.name in _COMPLEX:
        return flat.view(_COMPLEX[dtype.name]).astype(np.complex128)
    plain = _WIDE.get(dtype.name) or _PLAIN.get(dtype.name)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return None if plain is None else flat.view(plain).astype(np.float64)


def _text(row: Bytes, numbers: npt.NDArray[np.float64 | np.complex128] | None) -> str:
    return f"0x{bytes(row)[::-1].hex()}" if numbers is None else f"{numbers[0]:.9g}"
