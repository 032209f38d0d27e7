"""Tensors that are made of others: of boxes of them, or of what is computed from them.

A checkpoint of a tensor-parallel run stores slices. The logical tensor is a *view* whose boxes lie in these slices. The
part that a rank of a target holds is a view of the logical tensor. Both views are composed into one view of the stored
slices, so there is never more than one step from a view to stored tensors.

There are few boxes, but there may be millions of runs (elements that are contiguous on both sides). Runs are computed
as columns, only for the elements that a unit asks for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

import numpy as np
import numpy.typing as npt

from reshard.choices import Quantization
from reshard_engine.tensors.dtypes import Dtype

Column = npt.NDArray[np.int64]
MAX_BOXES = 1 << 13
"""Most boxes of one view. A cut into a few sections over 4,096 ranks has fewer."""


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a view, and the box of another tensor that fills it. Both lie in row-major grids of elements."""

    tensor: int
    """Number of the tensor that holds the elements."""
    grid: tuple[int, ...]
    """The shape of that tensor, or a finer shape with as many elements."""
    source: tuple[int, ...]
    """The begin of the box in that tensor."""
    offset: tuple[int, ...]
    """The begin of the box in the view."""
    lengths: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.lengths)


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of contiguous elements of a view and their sources, in the order of the view."""

    begin: Column
    """First element in the view."""
    tensor: Column
    source: Column
    """First element in the source tensor."""
    length: Column


@dataclass(frozen=True)
class View:
    """A tensor made of boxes. The constructor proves that the boxes tile it."""

    grid: tuple[int, ...]
    """The shape of the view, or a finer shape with as many elements."""
    boxes: tuple[Box, ...]

    def __post_init__(self) -> None:
        """Prove that every element lies in exactly one box.

        Raises:
            ValueError: The boxes leave elements out, overlap, or leave the tensor.
        """
        boxes = [b for b in self.boxes if b.numel]
        object.__setattr__(self, "boxes", tuple(boxes))
        if len(boxes) > MAX_BOXES:
            raise ValueError(f"{len(boxes)} boxes, the limit is {MAX_BOXES}")
        for box in boxes:
            if not len(box.grid) == len(box.source) == len(box.offset) == len(box.lengths) == len(self.grid):
                raise ValueError("a box has another number of dimensions than its tensor")
            inside = all(0 <= o <= n - k for o, n, k in zip(box.offset, self.grid, box.lengths, strict=True))
            if not inside or not all(
                0 <= s <= n - k for s, n, k in zip(box.source, box.grid, box.lengths, strict=True)
            ):
                raise ValueError("a box leaves its tensor")
        held, numel = sum(b.numel for b in boxes), prod(self.grid)
        if held != numel:
            raise ValueError(f"the boxes hold {held} elements of {numel}")
        if boxes and self.grid:
            low = np.array([b.offset for b in boxes], dtype=np.int64)
            high = low + np.array([b.lengths for b in boxes], dtype=np.int64)
            for row in range(len(boxes) - 1):
                if bool(((low[row + 1 :] < high[row]) & (high[row + 1 :] > low[row])).all(axis=1).any()):
                    raise ValueError("two boxes overlap")

    def runs(self, begin: int, end: int) -> Runs:
        """The runs that hold the elements `[begin, end)` in row-major order, clipped to them."""
        columns = [_box_runs(box, self.grid, begin, end) for box in self.boxes]
        merged = [np.concatenate([c[i] for c in columns]) if columns else np.zeros(0, np.int64) for i in range(4)]
        order = np.argsort(merged[0], kind="stable")
        return Runs(*(column[order] for column in merged))


def _strides(grid: Sequence[int]) -> list[int]:
    strides: list[int] = []
    step = 1
    for length in reversed(grid):
        strides.append(step)
        step *= length
    return strides[::-1]


def _box_runs(box: Box, grid: tuple[int, ...], begin: int, end: int) -> tuple[Column, Column, Column, Column]:
    """(begin in the view, tensor, begin in the tensor, length) of the runs of one box in `[begin, end)`."""
    source_strides, here = _strides(box.grid), _strides(grid)
    first = sum(o * s for o, s in zip(box.offset, here, strict=True))
    source = sum(o * s for o, s in zip(box.source, source_strides, strict=True))
    # Join dimensions, from the last one on, while a step in a dimension equals the length joined so far on both sides.
    length, dim = 1, len(grid)
    while dim and (box.lengths[dim - 1] == 1 or (here[dim - 1] == length and source_strides[dim - 1] == length)):
        length *= box.lengths[dim - 1]
        dim -= 1
    starts, sources = np.array([first], dtype=np.int64), np.array([source], dtype=np.int64)
    for d in range(dim):
        # Take only steps that can reach the interval: a tall tensor has thousands of steps, an item only a few.
        least, most = (int(starts.min()), int(starts.max())) if len(starts) else (0, 0)
        reach = range(max(0, (begin - most) // here[d]), min(box.lengths[d], -(-(end - least) // here[d])))
        steps = np.arange(reach.start, reach.stop, dtype=np.int64)
        starts = (starts[:, None] + steps * here[d]).reshape(-1)
        sources = (sources[:, None] + steps * source_strides[d]).reshape(-1)
        # All inner dimensions lie within one step of this one, so starts that miss the interval are dropped now.
        keep = (starts < end) & (starts + here[d] > begin)
        starts, sources = starts[keep], sources[keep]
    low, high = np.maximum(starts, begin), np.minimum(starts + length, end)
    keep = low < high
    shift = (low - starts)[keep]
    count = int(keep.sum())
    return low[keep], np.full(count, box.tensor, dtype=np.int64), sources[keep] + shift, (high - low)[keep]


def composed(view: View, inner: Mapping[int, object]) -> View:
    """The view with each box that lies in another view replaced by boxes of that view's own tensors.

    Raises:
        ValueError: A box refers to an inner view by a grid that is not the inner view's own.
    """
    boxes: list[Box] = []
    for outer in view.boxes:
        through = inner.get(outer.tensor)
        if not isinstance(through, View):
            boxes.append(outer)
            continue
        if outer.grid != through.grid:
            raise ValueError(f"a box sees {through.grid} as {outer.grid}")
        for box in through.boxes:
            low = [max(a, b) for a, b in zip(outer.source, box.offset, strict=True)]
            high = [
                min(a + n, b + m)
                for a, n, b, m in zip(outer.source, outer.lengths, box.offset, box.lengths, strict=True)
            ]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            boxes.append(
                Box(
                    tensor=box.tensor,
                    grid=box.grid,
                    source=tuple(s + x - o for s, x, o in zip(box.source, low, box.offset, strict=True)),
                    offset=tuple(o + x - s for o, x, s in zip(outer.offset, low, outer.source, strict=True)),
                    lengths=tuple(b - a for a, b in zip(low, high, strict=True)),
                )
            )
    return View(view.grid, tuple(boxes))


# The origin of a logical tensor's elements: files hold them, or they are made from other tensors of the map.
#
# `ShardMap.origin` returns one member of the closed union `Origin` for every tensor. Callers match all members.


@dataclass(frozen=True, slots=True)
class Stored:
    """Files hold the elements; pieces of the shard map say where."""


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of copies that differ after training; see `gather.mean_of`."""

    copies: tuple[int, ...]
    """Tensors of equal shape and element type, in rank order."""


@dataclass(frozen=True, slots=True)
class LoraMerge:
    """A weight with its LoRA adapter merged: base plus scale times left times right; see `gather.merged_rows`."""

    base: int
    left: int
    """`[rows, rank]`, or `[rank, rows]` where `transposed`."""
    right: int
    """`[rank, columns]`, or `[columns, rank]` where `transposed`."""
    scale: float
    transposed: bool
    magnitude: int | None
    """The tensor of DoRA's magnitudes; None without DoRA."""


@dataclass(frozen=True, slots=True)
class LoraBias:
    """A bias with the bias of its LoRA adapter merged: `base` plus `scale` times `other`."""

    base: int
    other: int
    scale: float


@dataclass(frozen=True, slots=True)
class NewRows:
    """A matrix with some rows taken from another matrix: the trained tokens of an embedding."""

    base: int
    source: int
    """The new rows, `[len(rows), columns]`."""
    rows: tuple[int, ...]
    """For each row of `source`, the row of `base` that it replaces. No row occurs twice."""


@dataclass(frozen=True, slots=True)
class Splice:
    """A run of elements of a spliced tensor, and where it is taken from."""

    length: int
    tensor: int | None
    """Number of the tensor that holds the run, in its own row-major order; None for a run of zeros."""
    source: int = 0
    """The first element in that tensor."""


@dataclass(frozen=True)
class Spliced:
    """A tensor whose elements, in row-major order, are runs of other tensors one after another, whatever their shapes.

    Other tensors may have another floating-point type, whose numbers the type of this one holds exactly.
    """

    splices: tuple[Splice, ...]

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The end of each run in this tensor."""
        return tuple(accumulate(s.length for s in self.splices))

    def within(self, begin: int, end: int) -> Iterator[tuple[int, Splice]]:
        """The runs of the elements `[begin, end)`, clipped to them, each with its first element in this tensor."""
        for number in range(bisect_right(self.ends, begin), len(self.splices)):
            one, last = self.splices[number], self.ends[number]
            low, high = max(begin, last - one.length), min(end, last)
            if low >= end:
                return
            if low < high:
                yield low, Splice(high - low, one.tensor, one.source + low - (last - one.length))


@dataclass(frozen=True, slots=True)
class Transposed:
    """The transpose of a matrix: a view of single elements would have more runs than elements of any use."""

    base: int
    """`[columns, rows]`, of the same element type."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix in eight bits, or the matrix of its scales. See `casts.cast.Scaled`."""

    base: int
    kind: Quantization
    scale: Dtype
    """Type of the scales."""
    scales: bool
    """True for the matrix of scales."""


BLOCK_ROWS = 128
"""Rows of a matrix that are quantized at once. Blocks with one scale in FP8 have as many rows and columns."""
Merged = LoraMerge | LoraBias | NewRows
"""Weights and biases with a merged adapter."""
Derived = View | Mean | Transposed | Merged | Spliced | Quantized
"""Tensors without bytes of their own in files. A view refers to stored and computed tensors, never to views."""
Origin = Stored | Derived
STORED = Stored()


def operands(merged: Merged) -> tuple[int, ...]:
    """The numbers of the tensors from which a merged weight is computed."""
    match merged:
        case LoraMerge(base, left, right, magnitude=magnitude):
            return (base, left, right) if magnitude is None else (base, left, right, magnitude)
        case LoraBias(base, other):
            return base, other
        case NewRows(base, source):
            return base, source


def plan_facts(merged: Merged) -> list[object]:
    """Everything beside the operands' contents that decides the bytes of a merged weight, for the plan's digest."""
    match merged:
        case LoraMerge():
            return [merged.base, merged.left, merged.right, merged.scale, merged.transposed]
        case LoraBias():
            return ["shift", merged.base, merged.other, merged.scale]
        case NewRows():
            return ["rows", merged.base, merged.source, list(merged.rows)]
