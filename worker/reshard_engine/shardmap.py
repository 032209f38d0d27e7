"""The shard map: which bytes of which file hold which elements of which logical tensor.

A *piece* says that the elements `[begin, end)` of a tensor, counted in the row-major order of its
global shape, lie in a file from a byte offset on. Pieces are columns of integers, not objects: a
checkpoint of 20,000 parameters on 64 ranks has four million of them.

A `ShardMap` that exists covers every tensor exactly once: the constructor proves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import numpy.typing as npt

from reshard.errors import SourceError, printable
from reshard_engine.dtypes import Dtype

Column = npt.NDArray[np.int64]
MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A logical tensor of a checkpoint, in global shape. Never holds data."""

    fqn: str
    state: str
    """`fp32` (master), an optimizer state (`exp_avg`, ...), `weight` (model dtype) or `value` (anything else)."""
    dtype: Dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the data, packed."""
        return self.numel * self.dtype.itemsize_bytes


@dataclass(frozen=True, slots=True)
class Strides:
    """How one piece lies in its file if not packed in row-major order; counted in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Rows of the map for one interval of one tensor, clipped to it, in order."""

    begin: Column
    end: Column
    file: Column
    offset: Column
    """Byte offset of the clipped piece; for strided pieces, of the tensor's first element."""
    strides: Column
    """Index into `ShardMap.strides`, or -1 where the piece is packed."""


@dataclass(frozen=True)
class ShardMap:
    """All tensors of a checkpoint and where their elements are."""

    tensors: tuple[StoredTensor, ...]
    tensor: Column
    begin: Column
    end: Column
    file: Column
    offset: Column
    strides_of: Column
    strides: tuple[Strides, ...] = ()
    _first: Column = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Sort the pieces and prove coverage.

        Raises:
            SourceError: `checkpoint.coverage` with every tensor that is not covered exactly once.
        """
        order = np.lexsort((self.begin, self.tensor))
        for name in ("tensor", "begin", "end", "file", "offset", "strides_of"):
            object.__setattr__(self, name, getattr(self, name)[order])
        first = np.searchsorted(self.tensor, np.arange(len(self.tensors) + 1))
        object.__setattr__(self, "_first", first.astype(np.int64))
        self._prove_coverage()

    def _prove_coverage(self) -> None:
        numel = np.array([t.numel for t in self.tensors], dtype=np.int64)
        count = np.diff(self._first)
        bad = (count == 0) & (numel > 0)
        if len(self.tensor):
            starts = self._first[:-1][count > 0]
            ends = self._first[1:][count > 0] - 1
            previous_end = np.concatenate(([0], self.end[:-1]))
            previous_end[starts] = 0
            gap = self.begin != previous_end
            np.logical_or.at(bad, self.tensor[gap], True)
            owners = self.tensor[ends]
            np.logical_or.at(bad, owners[self.end[ends] != numel[owners]], True)
        if not bad.any():
            return
        names = [self.tensors[int(i)] for i in np.flatnonzero(bad)[:MAX_PROBLEMS].tolist()]
        listed = ", ".join(f"{printable(t.fqn)}/{t.state} {t.shape}" for t in names)
        raise SourceError(
            "checkpoint.coverage",
            f"{int(bad.sum())} tensors are not covered exactly once by the files: {listed}",
            fix="a file is missing, damaged or of another run; compare the file list with the writer's",
        )

    def pieces(self, tensor: int, begin: int, end: int) -> Pieces:
        """The pieces that hold the elements `[begin, end)` of a tensor, clipped to that interval."""
        low, high = int(self._first[tensor]), int(self._first[tensor + 1])
        first = low + int(np.searchsorted(self.end[low:high], begin, side="right"))
        last = low + int(np.searchsorted(self.begin[low:high], end, side="left"))
        rows = slice(first, last)
        clipped = np.maximum(self.begin[rows], begin)
        itemsize = self.tensors[tensor].dtype.itemsize_bytes
        strided = self.strides_of[rows] >= 0
        shift = np.where(strided, 0, (clipped - self.begin[rows]) * itemsize)
        return Pieces(
            clipped, np.minimum(self.end[rows], end), self.file[rows], self.offset[rows] + shift, self.strides_of[rows]
        )

    @property
    def piece_count(self) -> int:
        """Rows of the map."""
        return len(self.tensor)

    def read_bytes_of(self, tensors: Sequence[int]) -> int:
        """Bytes that the pieces of these tensors hold together."""
        return sum(self.tensors[i].size_bytes for i in tensors)


class ShardMapBuilder:
    """Collects tensors and pieces; `build` makes the map."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.tensors: list[StoredTensor] = []
        self._columns: list[tuple[Column, Column, Column, Column, Column, Column]] = []
        self._strides: list[Strides] = []

    def tensor(self, fqn: str, state: str, dtype: Dtype, shape: tuple[int, ...]) -> int:
        """Register a tensor and return its index."""
        self.tensors.append(StoredTensor(fqn, state, dtype, shape))
        return len(self.tensors) - 1

    def pieces(self, tensor: Column, begin: Column, end: Column, *, file: Column, offset: Column) -> None:
        """Add packed pieces; empty ones are dropped."""
        full = end > begin
        packed = np.full(int(full.sum()), -1, dtype=np.int64)
        self._columns.append((tensor[full], begin[full], end[full], file[full], offset[full], packed))

    def whole(self, tensor: int, *, file: int, offset: int, stride: tuple[int, ...] | None = None) -> None:
        """Add one piece that holds a whole tensor; `stride` in elements where it is not packed."""
        stored = self.tensors[tensor]
        if stored.numel == 0:
            return
        index = -1
        if stride is not None and not is_packed(stored.shape, stride):
            index = len(self._strides)
            self._strides.append(Strides(stored.shape, stride))
        row = (tensor, 0, stored.numel, file, offset, index)
        columns = [np.array([v], dtype=np.int64) for v in row]
        self._columns.append((columns[0], columns[1], columns[2], columns[3], columns[4], columns[5]))

    def build(self) -> ShardMap:
        """The proven map.

        Raises:
            SourceError: `checkpoint.coverage`.
        """
        empty = np.zeros(0, dtype=np.int64)
        merged = [np.concatenate([c[i] for c in self._columns] or [empty]) for i in range(6)]
        return ShardMap(tuple(self.tensors), *merged, strides=tuple(self._strides))


def packed_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements, as torch gives a contiguous tensor (lengths of 0 count as 1)."""
    stride: list[int] = []
    step = 1
    for length in reversed(shape):
        stride.append(step)
        step *= max(length, 1)
    return tuple(reversed(stride))


def is_packed(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a tensor's elements lie packed in row-major order (strides of length-1 dims do not matter)."""
    return 0 in shape or all(n == 1 or s == p for n, s, p in zip(shape, stride, packed_stride(shape), strict=True))
