"""The shard map: which bytes of which file hold which elements of which logical tensor.

A *piece* says that the elements `[begin, end)` of a tensor lie in a file from a byte offset on. Elements are counted in
the row-major order of the global shape. Pieces are columns of integers, not objects: a checkpoint of 20,000 parameters
on 64 ranks has four million of them.

The constructor of `ShardMap` proves that pieces cover every stored tensor exactly once. Some tensors are *derived* from
others of the map (`tensors.views`): views prove their own coverage, and all others have the shape of an operand.
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
from reshard_engine.tensors.views import MAX_BOXES, STORED, Box, Derived, Mean, Origin, View, composed

Column = npt.NDArray[np.int64]
Narrow = npt.NDArray[np.int32]
"""Columns of tensor and file numbers. They are 32 bits wide, because 4,096 ranks may have 18 million pieces."""
_Int = TypeVar("_Int", np.int32, np.int64)
MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A logical tensor of a checkpoint, with its global shape. It never holds data."""

    fqn: str
    state: str
    """`fp32` (master), an optimizer state (`exp_avg`, ...), `weight` (model dtype) or `value` (anything else)."""
    dtype: Dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Size of the packed data in bytes."""
        return self.numel * self.dtype.itemsize_bytes


@dataclass(frozen=True, slots=True)
class Strides:
    """The strides, in elements, of a piece that is not packed in row-major order."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pieces:
    """The rows of the map for one interval of one tensor, in order and clipped to the interval."""

    begin: Column
    end: Column
    file: Narrow
    offset: Column
    """Byte offset of the clipped piece or, for a strided piece, of the tensor's first element."""
    strides: Narrow
    """Index into `ShardMap.strides`, or -1 if the piece is packed."""

    def rows(self, rows: npt.NDArray[np.bool_]) -> Pieces:
        """The pieces that a mask selects."""
        return Pieces(self.begin[rows], self.end[rows], self.file[rows], self.offset[rows], self.strides[rows])


@dataclass(frozen=True, slots=True)
class Piece:
    """One packed row of the map."""

    tensor: int
    begin: int
    end: int
    file: int
    offset: int

    def holds(self, tensor: int, begin: int, end: int) -> bool:
        """True if the piece has all of these elements."""
        return tensor == self.tensor and self.begin <= begin and end <= self.end


@dataclass(frozen=True)
class ShardMap:
    """All tensors of a checkpoint, and the places of their elements in files."""

    tensors: tuple[LogicalTensor, ...]
    tensor: Narrow
    begin: Column
    end: Column
    file: Narrow
    offset: Column
    strides_of: Narrow
    """Index into `strides`, or -1 if the piece is packed."""
    strides: tuple[Strides, ...] = ()
    derived: Mapping[int, Derived] = field(default_factory=dict[int, Derived])
    """Tensors that are made of others, by number. All other tensors are stored."""
    _first: Column = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Sort the pieces and prove coverage.

        Raises:
            SourceError: `checkpoint.coverage`, which lists tensors that are not covered exactly once.
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
        bad[[*self.derived]] = False
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
            fix="a file is missing, damaged or from another run: compare the list of files with the writer's",
        )

    def pieces(self, tensor: int, begin: int, end: int) -> Pieces:
        """The pieces that hold the elements `[begin, end)` of a tensor, clipped to it. Computed tensors have none."""
        if isinstance(view := self.derived.get(tensor), View):
            return self._pieces_of_view(tensor, view, begin, end)
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
        """The packed piece that holds all of the elements `[begin, end)`; None if no single piece holds them all."""
        low, high = int(self._first[tensor]), int(self._first[tensor + 1])
        row = low + int(np.searchsorted(self.end[low:high], begin, side="right"))
        if row == high or int(self.strides_of[row]) >= 0:
            return None
        found = Piece(tensor, int(self.begin[row]), int(self.end[row]), int(self.file[row]), int(self.offset[row]))
        return found if found.holds(tensor, begin, end) else None

    def rows_of(self, tensors: Column) -> tuple[Column, Column]:
        """All rows of the map for these tensors, which must be stored, and the owner of each row.

        Owners are indices into `tensors`.
        """
        first = self._first[tensors]
        count = self._first[tensors + 1] - first
        owner = np.repeat(np.arange(len(tensors), dtype=np.int64), count)
        return np.arange(len(owner), dtype=np.int64) + (first - (np.cumsum(count) - count))[owner], owner

    def _pieces_of_view(self, tensor: int, view: View, begin: int, end: int) -> Pieces:
        """The pieces of a view: each run is cut at the pieces of the tensor that holds the run."""
        runs = view.runs(begin, end)
        # Rows are sorted by tensor and begin, and the rows of one tensor have no gaps. So a binary search in the rows
        # of the run's tensor finds the first and the last row of a run.
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

    def origin(self, tensor: int) -> Origin:
        """The origin of a tensor's elements."""
        return self.derived.get(tensor, STORED)

    def is_computed(self, tensor: int) -> bool:
        """True if a tensor must be computed: it is neither stored nor a view of stored tensors only."""
        origin = self.derived.get(tensor)
        if isinstance(origin, View):
            return any(box.tensor in self.derived for box in origin.boxes)
        return origin is not None

    def with_derived(self, added: Sequence[tuple[LogicalTensor, Derived]]) -> ShardMap:
        """This map with more tensors, which are made of tensors of this map. Their numbers follow the last one."""
        first = len(self.tensors)
        derived = dict(self.derived)
        for number, (_, one) in enumerate(added, first):
            derived[number] = composed(one, self.derived) if isinstance(one, View) else one
        return replace(self, tensors=(*self.tensors, *(t for t, _ in added)), derived=derived)

    @property
    def piece_count(self) -> int:
        """Number of rows of the map."""
        return len(self.tensor)

    def read_bytes_of(self, tensors: Sequence[int]) -> int:
        """Total bytes of these tensors."""
        return sum(self.tensors[i].size_bytes for i in tensors)


class ShardMapBuilder:
    """The builder of a shard map. It collects tensors and pieces; `build` makes the map."""

    def __init__(self) -> None:
        """Begin without tensors."""
        self.tensors: list[LogicalTensor] = []
        self._columns: tuple[list[Narrow], list[Column], list[Column], list[Narrow], list[Column], list[Narrow]]
        self._columns = ([], [], [], [], [], [])
        self._strides: list[Strides] = []
        self._strided: set[int] = set()
        self._derived: dict[int, Derived] = {}

    def tensor(self, fqn: str, state: str, dtype: Dtype, shape: tuple[int, ...]) -> int:
        """Register a tensor and return its index."""
        self.tensors.append(LogicalTensor(fqn, state, dtype, shape))
        return len(self.tensors) - 1

    def pieces(self, tensor: Column, begin: Column, end: Column, *, file: Column, offset: Column) -> None:
        """Add packed pieces. Empty pieces are dropped."""
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
        """Add one piece that holds a whole tensor. `stride`, in elements, is given if the tensor is not packed."""
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
        """Register a tensor that is a view of others, all of one element type; returns its number.

        Raises:
            ValueError: A part lies strided in its file, which views do not support; or the types of parts differ.
        """
        composite = composed(view, self._derived)
        holders = {box.tensor for box in composite.boxes}
        if holders & self._strided:
            raise ValueError("a part lies strided in its file")
        dtypes = {self.tensors[t].dtype for t in holders}
        if len(dtypes) > 1:
            raise ValueError(f"parts of the types {', '.join(sorted(d.name for d in dtypes))}")
        dtype = dtypes.pop() if dtypes else self.tensors[0].dtype
        number = self.tensor(fqn, state, dtype, shape)
        self._derived[number] = composite
        return number

    def mean(self, fqn: str, state: str, copies: Sequence[int], dtype: Dtype) -> int:
        """Register a tensor that is the mean of others, computed in their element type; returns its number.

        Raises:
            ValueError: The copies differ in shape or type, or their type cannot be averaged.
        """
        stored = [self.tensors[t] for t in copies]
        shapes, dtypes = {t.shape for t in stored}, {t.dtype for t in stored}
        if len(shapes) != 1 or len(dtypes) != 1:
            raise ValueError(f"copies of {len(shapes)} shapes and {len(dtypes)} element types")
        if not all(d.floating and d.itemsize_bytes > 1 for d in (dtype, *dtypes)):
            raise ValueError(f"no mean of {stored[0].dtype.name} as {dtype.name}")
        number = self.tensor(fqn, state, dtype, stored[0].shape)
        self._derived[number] = Mean(tuple(copies))
        return number

    def build(self) -> ShardMap:
        """Make the map, which proves its coverage.

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
            derived=dict(self._derived),
        )


def _joined(parts: list[npt.NDArray[_Int]], kind: type[_Int]) -> npt.NDArray[_Int]:
    """One column made of several parts. The list is emptied: a second set of all columns would be the memory peak."""
    whole = np.concatenate(parts) if parts else np.zeros(0, dtype=kind)
    parts.clear()
    return whole


def packed_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements, as a contiguous tensor of torch has them (lengths of 0 count as 1)."""
    stride: list[int] = []
    step = 1
    for length in reversed(shape):
        stride.append(step)
        step *= max(length, 1)
    return tuple(reversed(stride))


def index_at(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of the element at a place in row-major order. All lengths are positive."""
    found: list[int] = []
    for length in reversed(shape):
        place, inner = divmod(place, length)
        found.append(inner)
    return tuple(reversed(found))


def is_packed(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """True if a tensor's elements lie packed in row-major order. Strides of dimensions of length 1 do not matter."""
    return 0 in shape or all(n == 1 or s == p for n, s, p in zip(shape, stride, packed_stride(shape), strict=True))


# Boxes of a tensor as pieces and views of the shard map.
#
# Boxes that are runs of elements, such as rows, become pieces of the tensor. Other boxes, such as those of a mesh with
# two axes, become tensors of their own, of which the whole tensor is a view.

_BOXES_FIX = "a file is missing, or is of another save: compare the directory with that of the writer"


@dataclass(frozen=True, slots=True)
class Boxes:
    """The boxes of one tensor, packed in row-major order in files, as columns."""

    boxes: Column
    """`[count, 2, dims]`: offsets and sizes in the global tensor, in elements."""
    file: Column
    offset: Column
    """Byte offset of each box's first element in its file."""


def add_boxes(builder: ShardMapBuilder, tensor: LogicalTensor, held: Boxes) -> int:
    """Register a tensor that these boxes make up; returns its number.

    Raises:
        SourceError: `checkpoint.coverage`, `checkpoint.too_large` for more boxes than a view may have. The shard map
            proves the coverage of boxes that are runs.
    """
    begin, end, runs = _intervals(held.boxes, tensor.shape)
    if not runs.all():
        return _add_view(builder, tensor, held)
    number = builder.tensor(tensor.fqn, tensor.state, tensor.dtype, tensor.shape)
    numbers = np.full(len(begin), number, dtype=np.int64)
    builder.pieces(numbers, begin, end, file=held.file, offset=held.offset)
    return number


def _add_view(builder: ShardMapBuilder, tensor: LogicalTensor, held: Boxes) -> int:
    count = len(held.file)
    if count > MAX_BOXES:
        raise SourceError(
            "checkpoint.too_large",
            f"{printable(tensor.fqn)} has {count} chunks that are not runs of rows, the limit is {MAX_BOXES}",
        )
    boxes: list[Box] = []
    for at in range(count):
        offset, lengths = map(tuple, held.boxes[at].tolist())
        part = builder.tensor(tensor.fqn, tensor.state, tensor.dtype, lengths)
        builder.whole(part, file=int(held.file[at]), offset=int(held.offset[at]))
        boxes.append(Box(part, lengths, (0,) * len(lengths), offset, lengths))
    try:
        return builder.view(tensor.fqn, tensor.state, View(tensor.shape, tuple(boxes)), tensor.shape)
    except ValueError as error:
        raise SourceError(
            "checkpoint.coverage",
            f"chunks of {printable(tensor.fqn)}/{tensor.state} {tensor.shape} do not cover it exactly once: {error}",
            fix=_BOXES_FIX,
        ) from error


def _intervals(boxes: Column, shape: tuple[int, ...]) -> tuple[Column, Column, npt.NDArray[np.bool_]]:
    """First element and end of each box in row-major order, and True for each box that is one run of elements."""
    offsets, sizes = boxes[:, 0], boxes[:, 1]
    dims = len(shape)
    strides = np.array([prod(shape[d + 1 :]) for d in range(dims)], dtype=np.int64)
    begin: Column = offsets @ strides
    end: Column = begin + np.multiply.reduce(sizes, axis=1)
    whole, single = sizes == np.array(shape, dtype=np.int64), sizes == 1
    runs: npt.NDArray[np.bool_] = np.full(len(boxes), not dims)
    for dim in range(dims):
        runs |= single[:, :dim].all(axis=1) & whole[:, dim + 1 :].all(axis=1)
    return begin, end, runs
