"""How tensor parallelism cuts a parameter: geometry only, for any number of ranks.

Whole parameters are replicated, or cut along one dimension; a dimension may consist of sections (query, key and value;
gate and up) each of which is cut on its own, and a rank holds its part of every section, one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from reshard_engine.tensors.views import Box, View


class CutError(ValueError):
    """The parameter cannot be cut so; the text says why, with the numbers."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a parameter of a known shape is cut over tensor-parallel ranks."""

    dim: int | None = None
    """Dimension of the grid; None for a parameter that every rank holds whole."""
    sections: tuple[int, ...] = ()
    """Lengths along it, each cut on its own; empty for one section."""
    grid: tuple[int, ...] | None = None
    """A finer shape in which the parameter is cut; None for its own."""
    averaged: bool = False
    """Whether the copies of a parameter that every rank holds whole may differ: their mean counts."""
    vocabulary: int | None = None
    """Rows that are data; ranks hold a multiple of them, filled up with padding behind the last one."""
    units: int | None = None
    """Indivisible units (attention heads) along the dimension: each rank holds some, all as many or `near_even`."""
    near_even: bool = False
    """Whether a length that does not divide is cut all the same: the first ranks hold one (unit) more than others."""
    widths: tuple[tuple[int, ...], ...] = ()
    """Per section and rank the lengths, where a run cut unevenly. Of that run's number of ranks only."""

    def even(self) -> Cut:
        """The same cut for another number of ranks."""
        return replace(self, widths=())

    def shape_in(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The grid for a parameter of this shape."""
        return self.grid if self.grid is not None else shape


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of one section, along the cut dimension."""

    start: int
    """In the whole parameter."""
    local: int
    """In the rank's own."""
    width: int


def parts(cut: Cut, length: int, ranks: int, rank: int) -> list[Part]:
    """What a rank holds along the cut dimension, which is `length` long.

    Raises:
        CutError: The length does not divide.
    """
    found: list[Part] = []
    start = local = 0
    for index, section in enumerate(cut.sections or (length,)):
        if cut.widths:
            widths = cut.widths[index]
            if len(widths) != ranks or sum(widths) != section:
                raise CutError(f"a section of {section} is said to be cut into {list(widths)} over {ranks} ranks")
            found.append(Part(start + sum(widths[:rank]), local, widths[rank]))
        else:
            before, width = _share(cut, section, ranks, rank)
            found.append(Part(start + before, local, width))
        start += section
        local += found[-1].width
    if start != length:
        raise CutError(f"sections of {start} in a dimension of {length}")
    return found


def _share(cut: Cut, section: int, ranks: int, rank: int) -> tuple[int, int]:
    """(elements before, elements) of a rank's part of a section."""
    if not cut.near_even:
        if section % ranks:
            raise CutError(f"{section} does not divide by {ranks}")
        return rank * (section // ranks), section // ranks
    units = cut.units if cut.units is not None and section % cut.units == 0 else section
    size, more = divmod(units, ranks)
    unit = section // units if units else 0
    return (rank * size + min(rank, more)) * unit, (size + (rank < more)) * unit


def require_units(cut: Cut, ranks: int) -> None:
    """Refuse to leave a rank without a unit, or, where all hold the same number, to cut through one.

    Raises:
        CutError: The units do not go over so many ranks.
    """
    if cut.units is None or cut.dim is None:
        return
    if not cut.near_even and cut.units % ranks:
        raise CutError(f"{cut.units} heads do not divide by {ranks}")
    if cut.units < ranks:
        raise CutError(f"{cut.units} heads are fewer than {ranks} ranks")


def local_grid(cut: Cut, shape: tuple[int, ...], ranks: int, rank: int) -> tuple[int, ...]:
    """The grid of a rank's part of a parameter of this shape."""
    grid = cut.shape_in(shape)
    if cut.dim is None:
        return grid
    width = sum(p.width for p in parts(cut, grid[cut.dim], ranks, rank))
    return (*grid[: cut.dim], width, *grid[cut.dim + 1 :])


def _boxes(
    cut: Cut, shape: tuple[int, ...], ranks: int, rank: int
) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """(offset in the whole, offset in the rank's part, lengths) of each box that a rank holds."""
    grid = cut.shape_in(shape)
    zero = (0,) * len(grid)
    if cut.dim is None:
        return [(zero, zero, grid)]
    d = cut.dim
    return [
        (
            (*zero[:d], p.start, *zero[d + 1 :]),
            (*zero[:d], p.local, *zero[d + 1 :]),
            (*grid[:d], p.width, *grid[d + 1 :]),
        )
        for p in parts(cut, grid[d], ranks, rank)
    ]


def joined(cut: Cut, shape: tuple[int, ...], tensors: Sequence[int]) -> View:
    """The whole parameter as a view of its ranks' parts, in rank order; of copies the first counts.

    `shape` includes padding rows of a vocabulary.

    Raises:
        CutError: Parts and shape do not go together.
    """
    ranks = len(tensors)
    boxes: list[Box] = []
    for rank, tensor in enumerate(tensors if cut.dim is not None else tensors[:1]):
        grid = local_grid(cut, shape, ranks, rank)
        boxes += [Box(tensor, grid, local, whole, lengths) for whole, local, lengths in _boxes(cut, shape, ranks, rank)]
    return View(cut.shape_in(shape), tuple(boxes))


def taken(cut: Cut, shape: tuple[int, ...], tensor: int, ranks: int, rank: int) -> View:
    """A rank's part as a view of the whole parameter.

    Raises:
        CutError: The parameter cannot be cut so.
    """
    require_units(cut, ranks)
    grid = cut.shape_in(shape)
    boxes = tuple(Box(tensor, grid, whole, local, lengths) for whole, local, lengths in _boxes(cut, shape, ranks, rank))
    return View(local_grid(cut, shape, ranks, rank), boxes)


def whole_shape(cut: Cut, locals_: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of the parameter whose ranks hold parts of these shapes.

    Raises:
        CutError: The shapes differ where they must not.
    """
    first = locals_[0]
    if cut.dim is None:
        if any(s != first for s in locals_):
            raise CutError(f"copies of shapes {sorted(set(locals_))}")
        return first
    if cut.grid is not None:
        # The finer shape says how long the cut dimension is; the parameter's own first dimension follows.
        total = prod(cut.grid)
        rest = prod(first[1:])
        if rest == 0 or total % rest or sum(prod(s) for s in locals_) != total:
            raise CutError(f"parts of {[list(s) for s in locals_]} for a parameter seen as {list(cut.grid)}")
        return (total // rest, *first[1:])
    if cut.dim >= len(first):
        raise CutError(f"cut along dimension {cut.dim}, and it has {len(first)}")
    others = {(*s[: cut.dim], *s[cut.dim + 1 :]) for s in locals_}
    if len(others) != 1:
        raise CutError(f"parts of shapes {[list(s) for s in locals_]}")
    return (*first[: cut.dim], sum(s[cut.dim] for s in locals_), *first[cut.dim + 1 :])


def rows_of(shape: tuple[int, ...], tensor: int, begin: int, end: int) -> View:
    """Some rows of a tensor: a vocabulary without its padding, or the padding."""
    lengths = (end - begin, *shape[1:])
    zero = (0,) * len(shape)
    return View(lengths, (Box(tensor, shape, (begin, *zero[1:]), zero, lengths),))
