"""Casts of floating tensors: round to nearest, ties to even, bit for bit the same on every device.

The numpy kernel is the reference. With a CUDA device `device` does the same work there, where that is sooner.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from reshard.errors import RequestError, SourceError
from reshard_engine.execute.casts.losses import special
from reshard_engine.execute.casts.rows import Buffer, Kind, Rows, copy_rows, starts_of
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
"""Mean length from which stretches are cast one by one: shorter ones cost more as calls than as copies."""
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


class CastKernel(Protocol):
    """Casts packed elements."""

    def cast(self, data: Buffer, source: Dtype, target: Dtype) -> Buffer:
        """The elements in the target's type, little-endian."""
        ...

    def cast_into(self, data: Buffer, source: Dtype, target: Dtype, out: Buffer) -> int:
        """Put the elements in the target's type into memory; returns how many results are zero, infinite or NaN."""
        ...

    def cast_rows(self, rows: Rows, source: Buffer, target: Buffer, kind: Kind) -> int:
        """Cast rows of one memory into another; returns how many results are zero, infinite or NaN."""
        ...

    def staging(self, length_bytes: int) -> Buffer:
        """Memory to read a batch into, this thread's until it asks again."""
        ...

    def take_warnings(self) -> list[str]:
        """What a user should know since the last call."""
        ...


class NumpyCast:
    """The reference kernel."""

    def __init__(self) -> None:
        """Threads share it."""
        self._scratch = Scratch()

    def cast(self, data: Buffer, source: Dtype, target: Dtype) -> Buffer:
        """The elements in the target's type, little-endian."""
        result = np.empty(len(data) // source.itemsize_bytes * target.itemsize_bytes, dtype=np.uint8)
        self.cast_into(data, source, target, result)
        return result

    def cast_into(self, data: Buffer, source: Dtype, target: Dtype, out: Buffer) -> int:
        """Put the elements in the target's type into memory; returns how many results are zero, infinite or NaN."""
        if source.name not in _FLOATS:
            raise SourceError("tensor.unsupported", f"cannot cast from {source.name}")
        if target.name not in _FLOATS or target.name == "float64":
            raise RequestError("request.unsatisfiable", f"cannot cast to {target.name}")
        wide, narrow = source.itemsize_bytes, target.itemsize_bytes
        scratch, found = self._scratch.at_least(len(data) // wide), 0
        # numpy views of wider elements want aligned memory; tiles are as aligned as what they are cut from.
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

    def cast_rows(self, rows: Rows, source: Buffer, target: Buffer, kind: Kind) -> int:
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

    def staging(self, length_bytes: int) -> Buffer:
        """New memory: measured, it costs no more than memory that is kept."""
        return np.empty(length_bytes, dtype=np.uint8)

    def take_warnings(self) -> list[str]:
        """Nothing: it does what it is asked for."""
        return []


def _copied(data: Buffer, memory: Buffer) -> Buffer:
    copy = memory[: len(data)]
    copy[:] = data
    return copy


def _cast_tile(tile: Buffer, source: Dtype, target: Dtype, out: Buffer, scratch: Scratch) -> bool:
    """Cast one tile; returns whether the result holds a zero, an infinity or a NaN; none counts in a wider type."""
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
