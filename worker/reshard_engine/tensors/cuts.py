"""Tensor-parallel cuts of a parameter: pure geometry, for any number of ranks.

A parameter is replicated, or cut along one dimension. The dimension may consist of sections (query, key and value; gate
and up). Each section is cut on its own, and a rank holds its parts of all sections, one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from reshard_engine.tensors.views import Box, View


class CutError(ValueError):
    """The error for a parameter that cannot be cut as asked; the text gives the reason with numbers."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A rule by which a parameter of a known shape is cut over tensor-parallel ranks."""

    dim: int | None = None
    """Dimension of the grid that is cut; None for a parameter that every rank holds whole."""
    sections: tuple[int, ...] = ()
    """Lengths of the sections along that dimension. Each is cut on its own; empty for a single section."""
    grid: tuple[int, ...] | None = None
    """A finer shape in which the parameter is cut; None for the parameter's own shape."""
    averaged: bool = False
    """True if the ranks' copies of a whole parameter may differ; the parameter is then their mean."""
    vocabulary: int | None = None
    """Number of rows that hold data. Padding rows follow them, so that the ranks' parts fill the dimension."""
    units: int | None = None
    """Number of indivisible units (attention heads) along the dimension: equally many per rank, or `near_even`."""
    near_even: bool = False
    """True if a length that does not divide is cut nevertheless: the first ranks hold one element (or unit) more."""
    widths: tuple[tuple[int, ...], ...] = ()
    """The lengths per section and rank of a run that cut unevenly, valid for that run's number of ranks only."""

    def even(self) -> Cut:
        """This cut without `widths`, for another number of ranks."""
        return replace(self, widths=())

    def data_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape without padding of a parameter that may be a padded vocabulary."""
        return shape if self.vocabulary is None or not shape else (min(self.vocabulary, shape[0]), *shape[1:])

    def shape_in(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The grid for a parameter of this shape."""
        return self.grid if self.grid is not None else shape


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of one section, along the cut dimension."""

    start: int
    """The begin of the part in the whole parameter."""
    local: int
    """The begin of the part in the rank's own tensor."""
    width: int


def parts(cut: Cut, length: int, ranks: int, rank: int) -> list[Part]:
    """The parts that a rank holds along the cut dimension. `length` is the whole length of that dimension.

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
    """(elements before the part, elements of the part) of a rank in a section."""
    if not cut.near_even:
        if section % ranks:
            raise CutError(f"{section} does not divide by {ranks}")
        return rank * (section // ranks), section // ranks
    units = cut.units if cut.units is not None and section % cut.units == 0 else section
    size, more = divmod(units, ranks)
    unit = section // units if units else 0
    return (rank * size + min(rank, more)) * unit, (size + (rank < more)) * unit


def require_units(cut: Cut, ranks: int) -> None:
    """Refuse a cut that leaves a rank without a unit, or that cuts through a unit although the cut is even.

    Raises:
        CutError: The units cannot be divided over so many ranks.
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
    """The whole parameter as a view of the ranks' parts, in rank order. Of replicated copies, the first is taken.

    `shape` includes the padding rows of a vocabulary.

    Raises:
        CutError: The parts do not fit the shape.
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
        CutError: The parameter cannot be cut over so many ranks.
    """
    require_units(cut, ranks)
    grid = cut.shape_in(shape)
    boxes = tuple(Box(tensor, grid, whole, local, lengths) for whole, local, lengths in _boxes(cut, shape, ranks, rank))
    return View(local_grid(cut, shape, ranks, rank), boxes)


def whole_shape(cut: Cut, locals_: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of the parameter whose ranks hold parts of these shapes.

    Raises:
        CutError: The shapes differ in a dimension that is not cut.
    """
    first = locals_[0]
    if cut.dim is None:
        if any(s != first for s in locals_):
            raise CutError(f"copies of shapes {sorted(set(locals_))}")
        return first
    if cut.grid is not None:
        # The grid gives the number of elements of the whole parameter, and so its first dimension.
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
