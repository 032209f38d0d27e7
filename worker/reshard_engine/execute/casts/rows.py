"""Rows: runs of bytes in one memory and where they go in another, as columns; copied together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reshard_engine.tensors.dtypes import Dtype

INDEXED_BYTES = 2 << 10
"""Mean length below which stretches are moved by index: a copy of its own costs about as much as this many bytes."""
MATRIX_ROWS = 8
"""Mean number of rows from which equal steps are worth a copy of their own."""
_LEAST_ROWS = 3
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
    if (matrices := _matrices(begin, at, length)) is not None:
        for low, high in matrices:
            if high - low < _LEAST_ROWS:
                _copy_each(source, begin[low:high], target, at[low:high], length[low:high])
            else:
                count = int(length[low])
                _matrix(target, at[low:high], count)[:] = _matrix(source, begin[low:high], count)
        return
    total = int(length.sum())
    if total >= len(length) * INDEXED_BYTES:
        _copy_each(source, begin, target, at, length)
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


def _copy_each(source: Buffer, begin: Column, target: Buffer, at: Column, length: Column) -> None:
    for low, to, count in zip(begin.tolist(), at.tolist(), length.tolist(), strict=True):
        target[to : to + count] = source[low : low + count]


def _matrices(begin: Column, at: Column, length: Column) -> list[tuple[int, int]] | None:
    """Rows `[low, high)` of one length at equal steps on both sides, as slices of a matrix lie; None if they are few.

    What is in between comes as groups of less than three rows, which may be anyhow.
    """
    count = len(length)
    if count < MATRIX_ROWS:
        return None
    here, there = np.diff(begin), np.diff(at)
    fit = (length[1:] == length[:-1]) & (here >= length[:-1]) & (there >= length[:-1])
    goes_on = fit[1:] & fit[:-1] & (here[1:] == here[:-1]) & (there[1:] == there[:-1])
    stops = np.flatnonzero(~goes_on) + 1  # steps unlike the one before: the row that each starts from ends a group
    if (len(stops) + 1) * MATRIX_ROWS > count:
        return None
    groups: list[tuple[int, int]] = []
    first = 0
    for row in stops.tolist():
        if row > first:
            groups.append((first, row + 1))
            first = row + 1
    return [*groups, (first, count)] if first < count else groups


def _matrix(memory: Buffer, begin: Column, length: int) -> npt.NDArray[np.uint8]:
    """Rows at equal steps as one array; numpy proves that it lies within the memory."""
    first, step = int(begin[0]), int(begin[1] - begin[0])
    return np.ndarray((len(begin), length), np.uint8, buffer=memory.data, offset=first, strides=(step, 1))
