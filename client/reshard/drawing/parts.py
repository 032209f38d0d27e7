"""The movement of one tensor between two layouts: which part of the source becomes which part of the target.

Parts are rectangles of the tensor seen as a matrix. Parts of one group of ranks that touch are joined first, so that a
tensor that 4,096 ranks share is a few rectangles.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.drawing.rows import MAX_ROWS, bucketed, natural, range_label, short_label
from reshard.errors import counted

if TYPE_CHECKING:
    from reshard.pictures import LayoutPicture, Region, TensorPicture

MAX_PAIRS = 200_000
"""The most pairs of parts that are compared. More would take seconds, and no drawing could show them."""


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle of a tensor, and the number of the group of ranks or files that holds it."""

    group: int
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def elements(self) -> int:
        """Number of elements of the part."""
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


@dataclass(frozen=True, slots=True)
class Side:
    """The groups that hold a tensor, by number, and the parts that each holds."""

    labels: tuple[str, ...]
    counted: str
    """The number of those that hold parts, in words: `4,096 ranks in 16 groups`, or files that belong to no rank."""
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Flow:
    """Elements that one group of the source gives to one group of the target."""

    source: int
    target: int
    elements: int


def side_of(tensor: TensorPicture, shown: frozenset[str], *, most: int = MAX_ROWS) -> Side:
    """The parts of a tensor by group: each rank, or each file that belongs to no single rank, while they are few.

    Args:
        tensor: The tensor.
        shown: The axes that labels of ranks name (`rows.shown_axes`).
        most: The most groups.
    """
    owners = sorted({_owner(region) for region in tensor.regions}, key=natural)
    groups = bucketed(owners, most)
    number = {name: at for at, names in enumerate(groups) for name in names}
    parts = [Part(number[_owner(r)], r.rows, r.columns) for r in tensor.regions]
    labels = tuple(range_label([short_label(name, shown) for name in names]) for names in groups)
    kind = "rank" if all(r.rank for r in tensor.regions) else "file"
    words = counted(len(owners), kind) + (f" in {len(groups)} groups" if len(owners) > len(groups) else "")
    return Side(labels, words, tuple(_joined(parts)))


def named(picture: LayoutPicture, tensor: str | None) -> list[TensorPicture]:
    """The tensors of a picture that `NAME` or `NAME/STATE` means; without a name all of them."""
    return [t for t in picture.tensors if tensor is None or tensor in (t.fqn, f"{t.fqn}/{t.state}")]


def unlike(tensors: Sequence[TensorPicture]) -> list[TensorPicture]:
    """The tensors without those that lie as one before them does; its `state` then names both."""
    found: dict[object, list[TensorPicture]] = {}
    for tensor in tensors:
        found.setdefault((tensor.fqn, tensor.dtype, tensor.shape, tensor.cut, tensor.regions), []).append(tensor)
    return [alike[0].model_copy(update={"state": ", ".join(t.state for t in alike)}) for alike in found.values()]


def first_moving(tensors: Sequence[TensorPicture], target: LayoutPicture) -> list[TensorPicture]:
    """The first tensor that a target holds, masters before other states; the first of all if it holds none."""
    ordered = sorted(tensors, key=lambda t: t.state != "fp32")
    return ([t for t in ordered if counterpart(t, target) is not None] or ordered)[:1]


def counterpart(tensor: TensorPicture, picture: LayoutPicture) -> TensorPicture | None:
    """The tensor of another layout that the elements of this one go to.

    It has the same name and state; or the same name, with weights in place of masters; or it is the only one, under a
    name that the conversion gave it.
    """
    alike = [t for t in picture.tensors if t.fqn == tensor.fqn]
    weights = {"fp32", "weight"}
    for found in alike:
        if found.state == tensor.state:
            return found
    for found in alike:
        if {found.state, tensor.state} == weights:
            return found
    return picture.tensors[0] if len(picture.tensors) == 1 and not alike else None


def flows(source: Side, target: Side) -> tuple[Flow, ...] | None:
    """The elements that each group of the source gives to each of the target; None if the parts are too many."""
    cut = overlaps(source, target)
    if cut is None:
        return None
    moved: dict[tuple[int, int], int] = {}
    for part, giver in cut:
        key = giver, part.group
        moved[key] = moved.get(key, 0) + part.elements
    return tuple(Flow(s, t, n) for (s, t), n in sorted(moved.items()))


def overlaps(source: Side, target: Side) -> list[tuple[Part, int]] | None:
    """Each part of the target cut by the parts of the source: (the cut, the group of the source).

    None if the parts are too many to be drawn.
    """
    if len(source.parts) * len(target.parts) > MAX_PAIRS:
        return None
    found: list[tuple[Part, int]] = []
    for taken in target.parts:
        for given in source.parts:
            rows = max(taken.rows[0], given.rows[0]), min(taken.rows[1], given.rows[1])
            columns = max(taken.columns[0], given.columns[0]), min(taken.columns[1], given.columns[1])
            if rows[0] < rows[1] and columns[0] < columns[1]:
                found.append((Part(taken.group, rows, columns), given.group))
    return found


def _owner(region: Region) -> str:
    return region.rank or region.file


def _joined(parts: Sequence[Part]) -> list[Part]:
    """The parts with those of one group joined that make a rectangle together."""
    found = list(parts)
    while True:
        across = _chained(sorted(found, key=lambda p: (p.group, p.rows, p.columns)), "columns")
        down = _chained(sorted(across, key=lambda p: (p.group, p.columns, p.rows)), "rows")
        if len(down) == len(found):
            return sorted(down, key=lambda p: (p.rows, p.columns))
        found = down


def _chained(parts: Iterable[Part], along: str) -> list[Part]:
    done: list[Part] = []
    for part in parts:
        last = done[-1] if done else None
        if last is None or last.group != part.group:
            done.append(part)
        elif along == "columns" and last.rows == part.rows and last.columns[1] == part.columns[0]:
            done[-1] = Part(part.group, part.rows, (last.columns[0], part.columns[1]))
        elif along == "rows" and last.columns == part.columns and last.rows[1] == part.rows[0]:
            done[-1] = Part(part.group, (last.rows[0], part.rows[1]), part.columns)
        else:
            done.append(part)
    return done
