"""Rows: runs of bytes in one memory and their places in another, as columns of integers. Rows are copied together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reshard_engine.tensors.dtypes import Dtype

INDEXED_BYTES = 2 << 10
"""Mean row length below which rows are copied by index: one separate copy costs about as much as so many bytes."""
MATRIX_ROWS = 8
"""Mean number of rows above which rows at equal steps are copied as one matrix."""
_LEAST_ROWS = 3
ByteArray = npt.NDArray[np.uint8]
Column = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Kind:
    """The cast of a row: its source type and its target type."""

    source: Dtype
    target: Dtype
    counted: bool = True
    """True if cast losses are counted. An element that lies in two chunks is counted only in the first one."""

    @property
    def casts(self) -> bool:
        """True if the two types differ, so that the bytes change."""
        return self.source is not self.target


@dataclass(frozen=True, slots=True)
class Rows:
    """Runs of bytes: where each begins in one memory, its length there, and its place (`at`) in another memory."""

    begin: Column
    length: Column
    at: Column

    def some(self, rows: Column) -> Rows:
        """The rows with these indices."""
        return Rows(self.begin[rows], self.length[rows], self.at[rows])


def copy_rows(source: ByteArray, begin: Column, target: ByteArray, at: Column, length: Column) -> None:
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
    """The offsets of rows that are packed one behind another."""
    return np.cumsum(lengths) - lengths


def _copy_each(source: ByteArray, begin: Column, target: ByteArray, at: Column, length: Column) -> None:
    for low, to, count in zip(begin.tolist(), at.tolist(), length.tolist(), strict=True):
        target[to : to + count] = source[low : low + count]


def _matrices(begin: Column, at: Column, length: Column) -> list[tuple[int, int]] | None:
    """Groups `[low, high)` of rows that have one length and equal steps on both sides, like the rows of a matrix.

    Rows between such groups form groups of less than three rows, whose lengths and steps are arbitrary. The result is
    None if the groups are too small on average.
    """
    count = len(length)
    if count < MATRIX_ROWS:
        return None
    here, target_steps = np.diff(begin), np.diff(at)
    fit = (length[1:] == length[:-1]) & (here >= length[:-1]) & (target_steps >= length[:-1])
    goes_on = fit[1:] & fit[:-1] & (here[1:] == here[:-1]) & (target_steps[1:] == target_steps[:-1])
    stops = np.flatnonzero(~goes_on) + 1  # a step that differs from the one before: the row before it ends a group
    if (len(stops) + 1) * MATRIX_ROWS > count:
        return None
    groups: list[tuple[int, int]] = []
    first = 0
    for row in stops.tolist():
        if row > first:
            groups.append((first, row + 1))
            first = row + 1
    return [*groups, (first, count)] if first < count else groups


def _matrix(memory: ByteArray, begin: Column, length: int) -> npt.NDArray[np.uint8]:
    """Rows at equal steps as one array; numpy checks that the array lies within the memory."""
    first, step = int(begin[0]), int(begin[1] - begin[0])
    return np.ndarray((len(begin), length), np.uint8, buffer=memory.data, offset=first, strides=(step, 1))
