"""Rows: runs of bytes in one memory and where they go in another, as columns; copied together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reshard_engine.dtypes import Dtype

INDEXED_BYTES = 2 << 10
"""Mean length below which stretches are moved by index: a copy of its own costs about as much as this many bytes."""
Buffer = npt.NDArray[np.uint8]
Column = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Kind:
    """What happens to the bytes of a stretch on their way."""

    source: Dtype
    target: Dtype
    counted: bool = True
    """Whether what its cast loses counts: an element that two chunks share counts where it begins."""

    @property
    def casts(self) -> bool:
        """Whether the bytes change."""
        return self.source is not self.target


@dataclass(frozen=True, slots=True)
class Rows:
    """Where runs of bytes begin in one memory, how long they are there, and where they go in another."""

    begin: Column
    length: Column
    at: Column


def copy_rows(source: Buffer, begin: Column, target: Buffer, at: Column, length: Column) -> None:
    """Copy `source[begin : begin + length]` to `target[at : at + length]`, for every row."""
    total = int(length.sum())
    if total >= len(length) * INDEXED_BYTES:
        for low, to, count in zip(begin.tolist(), at.tolist(), length.tolist(), strict=True):
            target[to : to + count] = source[low : low + count]
        return
    grain = 4
    marks = int(np.bitwise_or.reduce(begin | at | length))
    while marks % grain:
        grain //= 2
    wide = {4: np.uint32, 2: np.uint16, 1: np.uint8}[grain]
    if (source.ctypes.data | target.ctypes.data) % grain:
        grain, wide = 1, np.uint8
    count = length // grain
    steps = np.arange(total // grain, dtype=np.int64)
    first = starts_of(count)
    into = np.repeat(at // grain - first, count) + steps
    outof = np.repeat(begin // grain - first, count) + steps
    target[: len(target) // grain * grain].view(wide)[into] = source[: len(source) // grain * grain].view(wide)[outof]


def starts_of(lengths: Column) -> Column:
    """Where each row begins if they are packed one behind another."""
    return np.cumsum(lengths) - lengths
