"""Casts of floating tensors: round to nearest, ties to even, bit for bit the same on every device.

The numpy kernel is the reference. On a machine with a CUDA device, the package `device` casts there if that is faster.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from reshard.errors import RequestError, SourceError
from reshard_engine.execute.casts.losses import special
from reshard_engine.execute.casts.rows import ByteArray, Kind, Rows, copy_rows, starts_of
from reshard_engine.execute.casts.tiles import (
    INF32,
    TILE_ELEMS,
    Scratch,
    holds_special,
    narrow_to_bfloat16,
    narrow_to_float16,
    widen_bfloat16,
    widen_float16,
)
from reshard_engine.tensors.dtypes import Dtype

CAST_BYTES = 32 << 10
"""Mean row length from which rows are cast one by one. Shorter rows are packed first: a copy costs less than a call."""
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


class CastKernel(Protocol):
    """The protocol of kernels, which cast packed elements."""

    def cast(self, data: ByteArray, source: Dtype, target: Dtype) -> ByteArray:
        """The elements in the target's type, little-endian."""
        ...

    def cast_into(self, data: ByteArray, source: Dtype, target: Dtype, out: ByteArray) -> int:
        """Put the elements in the target's type into memory; returns how many results are zero, infinite or NaN."""
        ...

    def cast_rows(self, rows: Rows, source: ByteArray, target: ByteArray, kind: Kind) -> int:
        """Cast rows of one memory into another; returns how many results are zero, infinite or NaN."""
        ...

    def staging(self, length_bytes: int) -> ByteArray:
        """Memory to read a batch into. It belongs to this thread until the thread asks again."""
        ...

    def take_warnings(self) -> list[str]:
        """The warnings for the user since the last call."""
        ...


class NumpyCast:
    """The reference kernel."""

    def __init__(self) -> None:
        """Make a kernel that several threads may share."""
        self._scratch = Scratch()

    def cast(self, data: ByteArray, source: Dtype, target: Dtype) -> ByteArray:
        """The elements in the target's type, little-endian."""
        result = np.empty(len(data) // source.itemsize_bytes * target.itemsize_bytes, dtype=np.uint8)
        self.cast_into(data, source, target, result)
        return result

    def cast_into(self, data: ByteArray, source: Dtype, target: Dtype, out: ByteArray) -> int:
        """Put the elements in the target's type into memory; returns how many results are zero, infinite or NaN."""
        if source.name not in _FLOATS:
            raise SourceError(
                "tensor.unsupported",
                f"cannot cast from {source.name}",
                fix="leave --dtype out: elements of this type are written as they are",
            )
        if target.name not in _FLOATS or target.name == "float64":
            raise RequestError(
                "request.unsatisfiable", f"cannot cast to {target.name}", fix="use --dtype fp32, fp16 or bf16"
            )
        wide, narrow = source.itemsize_bytes, target.itemsize_bytes
        scratch, found = self._scratch.at_least(len(data) // wide), 0
        # numpy's views of wider elements need aligned memory. Tiles have the alignment of the whole memory.
        odd_source, odd_target = data.ctypes.data % wide, out.ctypes.data % narrow
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for first in range(0, len(data) // wide, TILE_ELEMS):
                tile = data[first * wide : (first + TILE_ELEMS) * wide]
                result = out[first * narrow : (first + TILE_ELEMS) * narrow]
                tile = _copied(tile, scratch.source) if odd_source else tile
                place = scratch.target[: len(result)] if odd_target else result
                if _cast_tile(tile, source, target, place, scratch):
                    found += special(place, target)
                if place is not result:
                    result[:] = place
        return found

    def cast_rows(self, rows: Rows, source: ByteArray, target: ByteArray, kind: Kind) -> int:
        """Cast rows of one memory into another; returns how many results are zero, infinite or NaN."""
        wide, narrow = kind.source.itemsize_bytes, kind.target.itemsize_bytes
        begin, length, at = rows.begin, rows.length, rows.at
        total, shorter = int(length.sum()), length // wide * narrow
        if len(length) == 1 or total >= len(length) * CAST_BYTES:
            each = zip(begin.tolist(), length.tolist(), at.tolist(), shorter.tolist(), strict=True)
            return sum(
                self.cast_into(source[low : low + count], kind.source, kind.target, target[to : to + less])
                for low, count, to, less in each
            )
        packed, result = np.empty(total, dtype=np.uint8), np.empty(total // wide * narrow, dtype=np.uint8)
        copy_rows(source, begin, packed, starts_of(length), length)
        found = self.cast_into(packed, kind.source, kind.target, result)
        copy_rows(result, starts_of(shorter), target, at, shorter)
        return found

    def staging(self, length_bytes: int) -> ByteArray:
        """New memory. By measurement it costs no more than memory that is kept between calls."""
        return np.empty(length_bytes, dtype=np.uint8)

    def take_warnings(self) -> list[str]:
        """An empty list: the reference kernel has no warnings."""
        return []


def _copied(data: ByteArray, memory: ByteArray) -> ByteArray:
    copy = memory[: len(data)]
    copy[:] = data
    return copy


def _cast_tile(tile: ByteArray, source: Dtype, target: Dtype, out: ByteArray, scratch: Scratch) -> bool:
    """Cast one tile; returns True if the result holds a zero, an infinity or a NaN. Widening casts return False."""
    count = len(tile) // source.itemsize_bytes
    direct = target.name == "float32"
    values = out.view(np.float32) if direct else scratch.values[:count]
    if source.name == "float32":
        values = tile.view(np.float32)
        if direct:
            out[:] = tile
    elif source.name == "float64":
        np.copyto(values, tile.view(np.float64), casting="same_kind")
        if direct:
            return holds_special(values.view(np.uint32), INF32)
    elif source.name == "bfloat16":
        widen_bfloat16(tile.view(np.uint16), values.view(np.uint32))
    else:
        widen_float16(tile.view(np.uint16), values.view(np.uint32))
    if direct:
        return False
    if target.name == "bfloat16":
        return narrow_to_bfloat16(values, out.view(np.uint16))
    return narrow_to_float16(values, out.view(np.uint16), scratch)
