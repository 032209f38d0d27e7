"""Views: logical tensors put together from boxes of other tensors, and cut into them.

A checkpoint of a tensor-parallel run stores slices; the logical tensor is a *view* whose boxes lie in them. What a rank
of a target holds is a view of the logical tensor. Composing the two gives boxes of the stored slices: so there is
never more than one step from a view to what files hold.

Boxes are few; runs (stretches that are contiguous on both sides) may be millions, and are computed only for the
elements that a unit asks for, in columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.int64]
MAX_BOXES = 1 << 13
"""Of one view; a cut into a few sections over 4,096 ranks stays below."""


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a view, and the box of another tensor that fills it. Both count elements of row-major grids."""

    tensor: int
    """Number of the tensor that holds it."""
    grid: tuple[int, ...]
    """That tensor's shape, or a finer one of as many elements."""
    source: tuple[int, ...]
    """Where the box begins in it."""
    offset: tuple[int, ...]
    """Where the box begins in the view."""
    lengths: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.lengths)


@dataclass(frozen=True, slots=True)
class Runs:
    """Contiguous stretches of a view and where they come from, in the order of the view."""

    begin: Column
    """First element in the view."""
    tensor: Column
    source: Column
    """First element in that tensor."""
    length: Column


@dataclass(frozen=True)
class View:
    """A tensor made of boxes. Constructing one proves that they tile it."""

    grid: tuple[int, ...]
    """Its shape, or a finer one of as many elements."""
    boxes: tuple[Box, ...]

    def __post_init__(self) -> None:
        """Prove that every element is in exactly one box.

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
        """The stretches that hold the elements `[begin, end)` in row-major order, clipped to them."""
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
    """(begin in the view, tensor, begin in the tensor, length) of one box's stretches in `[begin, end)`."""
    there, here = _strides(box.grid), _strides(grid)
    first = sum(o * s for o, s in zip(box.offset, here, strict=True))
    source = sum(o * s for o, s in zip(box.source, there, strict=True))
    # Dimensions from the last one on, for as long as a step in one is the end of what is inside it, on both sides.
    length, dim = 1, len(grid)
    while dim and (box.lengths[dim - 1] == 1 or (here[dim - 1] == length and there[dim - 1] == length)):
        length *= box.lengths[dim - 1]
        dim -= 1
    starts, sources = np.array([first], dtype=np.int64), np.array([source], dtype=np.int64)
    for d in range(dim):
        # Only steps that can reach the interval: a tall tensor has thousands of them, a window few.
        least, most = (int(starts.min()), int(starts.max())) if len(starts) else (0, 0)
        reach = range(max(0, (begin - most) // here[d]), min(box.lengths[d], -(-(end - least) // here[d])))
        steps = np.arange(reach.start, reach.stop, dtype=np.int64)
        starts = (starts[:, None] + steps * here[d]).reshape(-1)
        sources = (sources[:, None] + steps * there[d]).reshape(-1)
        # Everything below lies within one step of this dimension: what cannot reach the interval goes early.
        keep = (starts < end) & (starts + here[d] > begin)
        starts, sources = starts[keep], sources[keep]
    low, high = np.maximum(starts, begin), np.minimum(starts + length, end)
    keep = low < high
    shift = (low - starts)[keep]
    count = int(keep.sum())
    return low[keep], np.full(count, box.tensor, dtype=np.int64), sources[keep] + shift, (high - low)[keep]


def composed(view: View, inner: Mapping[int, View]) -> View:
    """The view over what the views in `inner` are made of.

    Raises:
        ValueError: A box takes a view's elements by another grid than that view's own.
    """
    boxes: list[Box] = []
    for outer in view.boxes:
        through = inner.get(outer.tensor)
        if through is None:
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
