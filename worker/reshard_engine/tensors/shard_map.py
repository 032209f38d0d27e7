"""The shard map: which bytes of which file hold which elements of which logical tensor.

A *piece* says that the elements `[begin, end)` of a tensor, counted in the row-major order of its
global shape, lie in a file from a byte offset on. Pieces are columns of integers, not objects: a
checkpoint of 20,000 parameters on 64 ranks has four million of them.

A `ShardMap` that exists covers every tensor exactly once: the constructor proves it. Some tensors are *views*: boxes of
other tensors of the map, which prove their coverage themselves (`views`); some are *means* of copies (`means`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from reshard.errors import SourceError, printable
from reshard_engine.tensors.dtypes import Dtype
from reshard_engine.tensors.merge_rules import MergeRule
from reshard_engine.tensors.views import View, composed

Column = npt.NDArray[np.int64]
Narrow = npt.NDArray[np.int32]
"""Numbers of tensors and files: a trillion parameters on 4,096 ranks have 18 million pieces, and bytes count."""
_Int = TypeVar("_Int", np.int32, np.int64)
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
    file: Narrow
    offset: Column
    """Byte offset of the clipped piece; for strided pieces, of the tensor's first element."""
    strides: Narrow
    """Index into `ShardMap.strides`, or -1 where the piece is packed."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One packed row of the map."""

    tensor: int
    begin: int
    end: int
    file: int
    offset: int

    def holds(self, tensor: int, begin: int, end: int) -> bool:
        """Whether it has all of these elements."""
        return tensor == self.tensor and self.begin <= begin and end <= self.end


@dataclass(frozen=True)
class ShardMap:
    """All tensors of a checkpoint and where their elements are."""

    tensors: tuple[StoredTensor, ...]
    tensor: Narrow
    begin: Column
    end: Column
    file: Narrow
    offset: Column
    strides_of: Narrow
    """Index into `strides`, or -1 where the piece is packed."""
    strides: tuple[Strides, ...] = ()
    views: Mapping[int, View] = field(default_factory=dict[int, View])
    """Tensors that are made of others, by number; views of what pieces hold and of means, never of views."""
    means: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """Tensors that are the mean of others of their shape, by number; no bytes of a file are theirs."""
    merges: Mapping[int, MergeRule] = field(default_factory=dict[int, MergeRule])
    """Tensors that are weights with an adapter merged, by number; no bytes of a file are theirs."""
    _first: Column = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Sort the pieces and prove coverage.

        Raises:
            SourceError: `checkpoint.coverage` with every tensor that is not covered exactly once.
        """
        if not self._is_sorted():
            order = np.lexsort((self.begin, self.tensor))
            for name in ("tensor", "begin", "end", "file", "offset", "strides_of"):
                object.__setattr__(self, name, getattr(self, name)[order])
        first = np.searchsorted(self.tensor, np.arange(len(self.tensors) + 1, dtype=np.int32))
        object.__setattr__(self, "_first", first.astype(np.int64))
        self._prove_coverage()

    def _is_sorted(self) -> bool:
        same, later = self.tensor[1:] == self.tensor[:-1], self.tensor[1:] > self.tensor[:-1]
        same &= self.begin[1:] > self.begin[:-1]
        same |= later
        return bool(same.all())

    def _prove_coverage(self) -> None:
        numel = np.array([t.numel for t in self.tensors], dtype=np.int64)
        count = np.diff(self._first)
        bad = (count == 0) & (numel > 0)
        bad[[*self.views, *self.means, *self.merges]] = False
        if len(self.tensor):
            starts = self._first[:-1][count > 0]
            ends = self._first[1:][count > 0] - 1
            gap = np.empty(len(self.begin), dtype=np.bool_)
            np.not_equal(self.begin[1:], self.end[:-1], out=gap[1:])
            gap[starts] = self.begin[starts] != 0
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
        """The pieces that hold the elements `[begin, end)` of a tensor, clipped to that interval; of a mean none."""
        if tensor in self.views:
            return self._pieces_of_view(tensor, begin, end)
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

    def piece_holding(self, tensor: int, begin: int, end: int) -> Piece | None:
        """The packed piece that holds all of the elements `[begin, end)`; None if there is no single one."""
        low, high = int(self._first[tensor]), int(self._first[tensor + 1])
        row = low + int(np.searchsorted(self.end[low:high], begin, side="right"))
        if row == high or int(self.strides_of[row]) >= 0:
            return None
        found = Piece(tensor, int(self.begin[row]), int(self.end[row]), int(self.file[row]), int(self.offset[row]))
        return found if found.holds(tensor, begin, end) else None

    def rows_of(self, tensors: Column) -> tuple[Column, Column]:
        """All rows of the map that hold these tensors, none of them a view or a mean, and whose each is.

        The second column indexes `tensors`.
        """
        first = self._first[tensors]
        count = self._first[tensors + 1] - first
        owner = np.repeat(np.arange(len(tensors), dtype=np.int64), count)
        return np.arange(len(owner), dtype=np.int64) + (first - (np.cumsum(count) - count))[owner], owner

    def _pieces_of_view(self, tensor: int, begin: int, end: int) -> Pieces:
        """Each run of the view cut at the pieces of the tensor that holds it."""
        runs = self.views[tensor].runs(begin, end)
        # Rows are sorted by tensor and begin, and those of one tensor follow one another without gaps: a run's first
        # and last rows are found by position, within its tensor's.
        first, last = np.empty_like(runs.begin), np.empty_like(runs.begin)
        for holder in np.unique(runs.tensor).tolist():
            low, high = int(self._first[holder]), int(self._first[holder + 1])
            mine = runs.tensor == holder
            first[mine] = low + np.searchsorted(self.end[low:high], runs.source[mine], side="right")
            ends = runs.source[mine] + runs.length[mine]
            last[mine] = low + np.searchsorted(self.begin[low:high], ends, side="left")
        count = last - first
        run = np.repeat(np.arange(len(count)), count)
        row = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count) + first[run]
        source = np.maximum(self.begin[row], runs.source[run])
        stop = np.minimum(self.end[row], (runs.source + runs.length)[run])
        itemsize = self.tensors[tensor].dtype.itemsize_bytes
        start = runs.begin[run] + source - runs.source[run]
        offset = self.offset[row] + (source - self.begin[row]) * itemsize
        return Pieces(start, start + stop - source, self.file[row], offset, self.strides_of[row])

    def averages(self, tensor: int) -> bool:
        """Whether a tensor is a mean, or a view of some."""
        view = self.views.get(tensor)
        return tensor in self.means or (view is not None and any(box.tensor in self.means for box in view.boxes))

    def with_views(self, tensors: Sequence[StoredTensor], views: Sequence[View]) -> ShardMap:
        """The map with further tensors, numbered on from its last one, that are views of those it has."""
        first = len(self.tensors)
        added = {first + i: composed(view, self.views) for i, view in enumerate(views)}
        return replace(self, tensors=(*self.tensors, *tensors), views={**self.views, **added})

    def with_merges(self, tensors: Sequence[StoredTensor], merges: Sequence[MergeRule]) -> ShardMap:
        """The map with further tensors, numbered on from its last one, that are merged weights."""
        first = len(self.tensors)
        added = {first + i: merge for i, merge in enumerate(merges)}
        return replace(self, tensors=(*self.tensors, *tensors), merges={**self.merges, **added})

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
        self._columns: tuple[list[Narrow], list[Column], list[Column], list[Narrow], list[Column], list[Narrow]]
        self._columns = ([], [], [], [], [], [])
        self._strides: list[Strides] = []
        self._strided: set[int] = set()
        self._views: dict[int, View] = {}
        self._means: dict[int, tuple[int, ...]] = {}

    def tensor(self, fqn: str, state: str, dtype: Dtype, shape: tuple[int, ...]) -> int:
        """Register a tensor and return its index."""
        self.tensors.append(StoredTensor(fqn, state, dtype, shape))
        return len(self.tensors) - 1

    def pieces(self, tensor: Column, begin: Column, end: Column, *, file: Column, offset: Column) -> None:
        """Add packed pieces; empty ones are dropped."""
        full = end > begin
        packed = np.full(int(full.sum()), -1, dtype=np.int32)
        number, where = tensor[full].astype(np.int32), file[full].astype(np.int32)
        self._add(number, begin[full], end[full], file=where, offset=offset[full], strides=packed)

    def _add(
        self, tensor: Narrow, begin: Column, end: Column, *, file: Narrow, offset: Column, strides: Narrow
    ) -> None:
        tensors, begins, ends, files, offsets, strides_of = self._columns
        tensors.append(tensor)
        begins.append(begin)
        ends.append(end)
        files.append(file)
        offsets.append(offset)
        strides_of.append(strides)

    def whole(self, tensor: int, *, file: int, offset: int, stride: tuple[int, ...] | None = None) -> None:
        """Add one piece that holds a whole tensor; `stride` in elements where it is not packed."""
        stored = self.tensors[tensor]
        if stored.numel == 0:
            return
        index = -1
        if stride is not None and not is_packed(stored.shape, stride):
            index = len(self._strides)
            self._strides.append(Strides(stored.shape, stride))
            self._strided.add(tensor)
        wide = [np.array([v], dtype=np.int64) for v in (0, stored.numel, offset)]
        narrow = [np.array([v], dtype=np.int32) for v in (tensor, file, index)]
        self._add(narrow[0], wide[0], wide[1], file=narrow[1], offset=wide[2], strides=narrow[2])

    def view(self, fqn: str, state: str, view: View, shape: tuple[int, ...]) -> int:
        """Register a tensor that is made of others, all of one element type; returns its number.

        Raises:
            ValueError: A part lies strided in its file: such ones are not put together.
        """
        composite = composed(view, self._views)
        holders = {box.tensor for box in composite.boxes}
        if holders & self._strided:
            raise ValueError("a part lies strided in its file")
        dtypes = {self.tensors[t].dtype for t in holders}
        if len(dtypes) > 1:
            raise ValueError(f"parts of the types {', '.join(sorted(d.name for d in dtypes))}")
        dtype = dtypes.pop() if dtypes else self.tensors[0].dtype
        number = self.tensor(fqn, state, dtype, shape)
        self._views[number] = composite
        return number

    def mean(self, fqn: str, state: str, copies: Sequence[int], dtype: Dtype) -> int:
        """Register a tensor that is the mean of others, taken in their element type; returns its number.

        Raises:
            ValueError: They have several shapes or types, or one that cannot be averaged.
        """
        stored = [self.tensors[t] for t in copies]
        shapes, dtypes = {t.shape for t in stored}, {t.dtype for t in stored}
        if len(shapes) != 1 or len(dtypes) != 1:
            raise ValueError(f"copies of {len(shapes)} shapes and {len(dtypes)} element types")
        if not all(d.floating and d.itemsize_bytes > 1 for d in (dtype, *dtypes)):
            raise ValueError(f"no mean of {stored[0].dtype.name} as {dtype.name}")
        number = self.tensor(fqn, state, dtype, stored[0].shape)
        self._means[number] = tuple(copies)
        return number

    def build(self) -> ShardMap:
        """The proven map.

        Raises:
            SourceError: `checkpoint.coverage`.
        """
        tensors, begins, ends, files, offsets, strides_of = self._columns
        return ShardMap(
            tuple(self.tensors),
            _joined(tensors, np.int32),
            _joined(begins, np.int64),
            _joined(ends, np.int64),
            _joined(files, np.int32),
            _joined(offsets, np.int64),
            _joined(strides_of, np.int32),
            strides=tuple(self._strides),
            views=dict(self._views),
            means=dict(self._means),
        )


def _joined(parts: list[npt.NDArray[_Int]], kind: type[_Int]) -> npt.NDArray[_Int]:
    """One column of several. They are let go: two sets of all columns would be the peak of a plan's memory."""
    whole = np.concatenate(parts) if parts else np.zeros(0, dtype=kind)
    parts.clear()
    return whole


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
