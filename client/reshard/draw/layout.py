"""The picture of a layout as SVG: which rank holds what, source and target side by side, and one tensor on its way.

The command line, notebooks, the dashboard and the documents all call `render`. It needs nothing but a `LayoutPicture`,
and draws 4,096 ranks as it draws 4: ranges of ranks share a row, and the picture says how many.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from reshard.draw import marks, marks as svg
from reshard.draw.marks import MARGIN, Sheet
from reshard.errors import RequestError, counted, format_size, printable

if TYPE_CHECKING:
    from reshard.models.reports import FileShare, LayoutPicture, Region, TensorPicture


# Groups the files of a layout into few rows: one for each rank while there are few, else one for a range of ranks.

MAX_ROWS = 16
"""The most rows of one kind of ranks. The two sides of a picture then fit on a screen."""
MANY_ROWS, FEW_ROWS = 20, 4
"""Where a side has more rows than the first number, each kind but the largest has at most the second."""
REST = "other bytes"
"""The name of the bytes of a file that belong to no tensor: metadata, names, counters."""
_NUMBER = re.compile(r"(\d+)")
_AXIS = re.compile(r"([a-z]+) (\d+)")


@dataclass(frozen=True, slots=True)
class Row:
    """Some files of a layout: those of one rank, of a range of ranks, or files that belong to no single rank."""

    label: str
    owners: int
    """Number of ranks; of files, if they belong to no single rank."""
    ranked: bool
    files: int
    bytes_by_state: Mapping[str, int]
    """Bytes by tensor state, and the rest of the files as `REST`."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts of the row."""
        return sum(self.bytes_by_state.values())


def natural(text: str) -> tuple[tuple[int, str], ...]:
    """A key that sorts `rank 2` before `rank 10`."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER.split(text))


def rows_of(picture: LayoutPicture, *, most: int = MAX_ROWS) -> tuple[Row, ...]:
    """The rows of a layout: ranks first, in their order, then files that belong to no single rank.

    Args:
        picture: The layout.
        most: The most rows of ranks, and also of other files.
    """
    by_rank: dict[str, list[FileShare]] = {}
    loose: list[FileShare] = []
    for share in picture.files:
        by_rank.setdefault(share.rank, []).append(share) if share.rank else loose.append(share)
    by_place = _places(loose, most)
    kinds = [*_kinds(by_rank), *([sorted(by_place, key=natural)] if by_place else [])]
    files = by_rank | by_place
    limits = _limits([sum(f.size_bytes for name in kind for f in files[name]) for kind in kinds], kinds, most)
    shown = shown_axes(picture)
    return tuple(
        _row(names, [f for name in names for f in files[name]], shown)
        for kind, limit in zip(kinds, limits, strict=True)
        for names in bucketed(kind, limit)
    )


def _places(loose: Sequence[FileShare], most: int) -> dict[str, list[FileShare]]:
    """Files that belong to no single rank: each by itself while they are few, else by directory."""
    if len(loose) <= most:
        return {f.file: [f] for f in loose}
    found: dict[str, list[FileShare]] = {}
    for share in loose:
        # A universal checkpoint has a directory for each parameter.
        folder = share.file.rpartition("/")[0]
        found.setdefault(f"{folder}/" if folder else share.file, []).append(share)
    return found


def _limits(sizes: Sequence[int], kinds: Sequence[Sequence[str]], most: int) -> list[int]:
    """The most rows of each kind: few for the smaller kinds if there were too many rows else."""
    if sum(min(len(kind), most) for kind in kinds) <= MANY_ROWS:
        return [most] * len(kinds)
    return [most if size == max(sizes) else min(most, FEW_ROWS) for size in sizes]


def rank_count(picture: LayoutPicture) -> int:
    """Number of different ranks that own files: of the kind of which there are most."""
    return max((len(kind) for kind in _kinds({f.rank for f in picture.files if f.rank})), default=0)


def bucketed(names: Sequence[str], most: int) -> list[Sequence[str]]:
    """Consecutive names in at most `most` groups of equal size; the last one may be smaller."""
    size = max(1, -(-len(names) // most))
    return [names[at : at + size] for at in range(0, len(names), size)]


def range_label(names: Sequence[str]) -> str:
    """One label for several: `dp 0-127 tp 0` if they differ in numbers only, else the first and how many more."""
    if len(names) == 1:
        return names[0]
    parts = [_NUMBER.split(name) for name in names]
    if any(part[::2] != parts[0][::2] for part in parts):
        return f"{names[0]} and {len(names) - 1:,} more"
    words = list(parts[0])
    for at in range(1, len(words), 2):
        # Their texts, because a file may be called model-00001-of-00004.
        found = sorted({part[at] for part in parts}, key=int)
        words[at] = found[0] if len(found) == 1 else f"{found[0]}-{found[-1]}"
    return "".join(words)


def _row(names: Sequence[str], files: Sequence[FileShare], shown: frozenset[str]) -> Row:
    held: dict[str, int] = {}
    for share in files:
        # Bytes that tensors share count for each of them, so a file may hold less than its parts.
        rest = max(0, share.size_bytes - sum(share.bytes_by_state.values()))
        for state, size in (*share.bytes_by_state.items(), (REST, rest)):
            held[state] = held.get(state, 0) + size
    ordered = {state: held[state] for state in sorted(held, key=lambda s: (s == REST, s)) if held[state]}
    ranked = bool(files[0].rank)
    label = range_label([short_label(name, shown) for name in names] if ranked else names)
    return Row(label, len(names), ranked, len(files), ordered)


def _kinds(labels: Iterable[str]) -> list[list[str]]:
    """Ranks by the axes that their labels name, each kind in its order: `dp 0 tp 0` is another kind than `layer 3`."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for label in sorted(labels, key=natural):
        kinds.setdefault(tuple(axis for axis, _ in _AXIS.findall(label)), []).append(label)
    return list(kinds.values())


def shown_axes(picture: LayoutPicture) -> frozenset[str]:
    """The axes along which a layout has more than one rank."""
    seen: dict[str, set[str]] = {}
    for label in {share.rank for share in picture.files}:
        for axis, number in _AXIS.findall(label):
            seen.setdefault(axis, set()).add(number)
    return frozenset(axis for axis, numbers in seen.items() if len(numbers) > 1)


def short_label(label: str, shown: frozenset[str]) -> str:
    """The label of a rank without axes of one rank; the whole label if nothing else is left of it."""
    axes = _AXIS.findall(label)
    if " ".join(f"{axis} {number}" for axis, number in axes) != label:
        return label
    return " ".join(f"{axis} {number}" for axis, number in axes if axis in shown) or label


# The files of source and target as bars by rank, on one scale, with the legend of the tensor states.

_GAP, _ROW, _BAR = 40.0, 20.0, 14.0
_SIZE_TEXT = 66.0
"""Width of the column of sizes, such as `1.02 MiB`."""
_MOST_LABEL = 0.42
"""The share of a side that labels may take."""


@dataclass(frozen=True, slots=True)
class _Side:
    name: str
    picture: LayoutPicture
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class _Scale:
    """The columns of a side: labels, bars, sizes."""

    x: float
    width: float
    label: float
    pixels_per_byte: float
    colours: Mapping[str, str]


def draw_bars(sheet: Sheet, source: LayoutPicture, target: LayoutPicture | None) -> None:
    """Draw the files of each side by rank, then the legend."""
    sides = [_Side("Source" if target is not None else "Layout", source, rows_of(source))]
    sides += [] if target is None else [_Side("Target", target, rows_of(target))]
    all_rows = [row for side in sides for row in side.rows]
    states = [*sorted({s for row in all_rows for s in row.bytes_by_state if s != REST}), REST]
    colours = svg.state_colours(states, REST)
    longest = max((row.size_bytes for row in all_rows), default=0) or 1
    beside = target is not None and not sheet.stacked
    width = (sheet.inner - _GAP) / 2 if beside else sheet.inner
    # Both sides have the same room for labels, so that bars of equal length are of equal size.
    label = min(max((len(row.label) for row in all_rows), default=4) * 7.2 + 14, width * _MOST_LABEL)
    top, bottom = sheet.y, sheet.y
    for at, side in enumerate(sides):
        sheet.y = top if beside else bottom + (24 if at else 0)
        x = MARGIN + (width + _GAP) * at if beside else MARGIN
        _draw_side(sheet, side, _Scale(x, width, label, (width - label - _SIZE_TEXT) / longest, colours))
        bottom = max(bottom, sheet.y)
    if beside:
        sheet.add(svg.arrow(sheet.width / 2 - 10, top + 14, 20))
    sheet.y = bottom + 8
    held = {state for row in all_rows for state in row.bytes_by_state}
    _draw_legend(sheet, {s: c for s, c in colours.items() if s in held}, longest, sides=len(sides))


def _draw_side(sheet: Sheet, side: _Side, scale: _Scale) -> None:
    picture, x, width = side.picture, scale.x, scale.width
    world = " ".join(f"{axis} {size}" for axis, size in picture.world.items())
    size = format_size(sum(share.size_bytes for share in picture.files))
    facts = [picture.format, *([world] if world else []), counted(len(picture.files), "file"), size]
    said = f"{side.name}: {', '.join(facts)}."
    url = svg.fitted(picture.url, width - 64, 12, mono=True, end=True)
    sheet.add(
        svg.text(x, sheet.y, side.name, size=14, weight="600"),
        svg.text(x + 64, sheet.y, url, mono=True),
        svg.text(x, sheet.y + 19, svg.fitted(" · ".join(facts), width), ink="muted"),
    )
    sheet.y += 32
    if note := _shared_rows(side):
        sheet.add(svg.text(x, sheet.y + 6, note, ink="muted"))
        said += f" {note}."
        sheet.y += 16
    sheet.told.append(said)
    for row in side.rows:
        sheet.add(_bar(row, sheet.y, scale))
        sheet.y += _ROW


def _shared_rows(side: _Side) -> str:
    """The number of ranks or files that share rows; an empty text if each has a row of its own."""
    if all(row.owners == 1 for row in side.rows):
        return ""
    ranks = rank_count(side.picture)
    only_ranks = ranks == sum(row.owners for row in side.rows)
    many = counted(ranks, "rank") if only_ranks else counted(len(side.picture.files), "file")
    return f"{many} in {counted(len(side.rows), 'row')}"


def _bar(row: Row, y: float, scale: _Scale) -> str:
    at = scale.x + scale.label
    label = svg.fitted(row.label, scale.label - 8, 11.5, mono=True, end=not row.ranked)
    drawn = svg.text(scale.x, y + 11, label, size=11.5, mono=True)
    for state, size in row.bytes_by_state.items():
        drawn += svg.box(at, y, (size * scale.pixels_per_byte, _BAR), scale.colours[state])
        at += size * scale.pixels_per_byte
    end = scale.x + scale.width
    drawn += svg.text(end, y + 11, format_size(row.size_bytes), size=11.5, ink="muted", anchor="end")
    held = ", ".join(f"{state} {format_size(size)}" for state, size in row.bytes_by_state.items())
    ranks = f" ({row.owners:,} ranks)" if row.ranked and row.owners > 1 else ""
    tip = (scale.x + scale.label + 4, y + 11, scale.width - scale.label - 8)
    return svg.part(drawn, f"{row.label}{ranks}: {counted(row.files, 'file')}, {held}", tip)


def _draw_legend(sheet: Sheet, colours: Mapping[str, str], longest: int, *, sides: int) -> None:
    x, right = MARGIN, sheet.width - MARGIN
    sheet.add(svg.line(x, sheet.y, right, sheet.y))
    sheet.y += 22
    for state, colour in colours.items():
        name = svg.fitted(state, 220)
        wide = len(name) * 7.2 + 36
        if x + wide > right:
            x, sheet.y = MARGIN, sheet.y + 19
        sheet.add(svg.box(x, sheet.y - 10, (12, 12), colour), svg.text(x + 18, sheet.y, name))
        x += wide
    note = f"The longest bar is {format_size(longest)}" + ("; both sides have one scale." if sides > 1 else ".")
    if x + len(note) * 6.6 > right:
        sheet.y += 19
        sheet.add(svg.text(MARGIN, sheet.y, note, ink="muted"))
    else:
        sheet.add(svg.text(right, sheet.y, note, ink="muted", anchor="end"))
    sheet.y += 14


# The movement of one tensor between two layouts: which part of the source becomes which part of the target.
#
# Parts are rectangles of the tensor seen as a matrix. Parts of one group of ranks that touch are joined first, so that
# a tensor that 4,096 ranks share is a few rectangles.

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
        shown: The axes that labels of ranks name (`shown_axes`).
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


# One tensor of a layout as a matrix and, beside a target, how its parts become those of the target.

_LEAST_HEIGHT, _MOST_HEIGHT, _STACKED_HEIGHT = 120.0, 330.0, 140.0
_NODE = 12.0
"""Width of the blocks at which the bands begin and end."""
_SPACE = 16.0


@dataclass(frozen=True, slots=True)
class _Frame:
    """A rectangle of the sheet."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor on one side, with its parts."""

    picture: TensorPicture
    side: Side


def draw_movement(sheet: Sheet, tensor: TensorPicture, source: LayoutPicture, target: LayoutPicture | None) -> None:
    """Draw a tensor's parts and, with a target, how they become those of the target."""
    other = None if target is None else counterpart(tensor, target)
    _draw_head(sheet, tensor, other, beside=target is not None)
    given = _Tensor(tensor, side_of(tensor, shown_axes(source)))
    taken = None if other is None or target is None else _Tensor(other, side_of(other, shown_axes(target)))
    moved = None if taken is None else flows(given.side, taken.side)
    sheet.y += 26
    _name_columns(sheet, given.side, None if taken is None else taken.side)
    groups = max(len(given.side.labels), 0 if taken is None else len(taken.side.labels))
    height = min(_MOST_HEIGHT, max(_LEAST_HEIGHT, 22.0 * groups))
    frame = _draw_matrices(sheet, given, taken, height)
    tip = (MARGIN, frame.y + height + 17, sheet.inner)
    if taken is None:
        _draw_holders(sheet, given.side, frame, tip)
    else:
        _draw_bands(sheet, (given.side, taken.side), moved or (), frame, tip)
    sheet.y = frame.y + height + 26
    _tell(sheet, given, taken, moved)


def _draw_head(sheet: Sheet, tensor: TensorPicture, other: TensorPicture | None, *, beside: bool) -> None:
    sheet.y += 26
    facts = f"{tensor.dtype} {list(tensor.shape)}, {format_size(prod(tensor.shape) * _itemsize(tensor.dtype))}"
    room = sheet.inner - (0 if sheet.stacked else 330)
    sheet.add(svg.text(MARGIN, sheet.y, svg.fitted(_name(tensor), room, 15, end=True), size=14, weight="600"))
    if sheet.stacked:
        _draw_line(sheet, facts)
    else:
        sheet.add(svg.text(sheet.width - MARGIN, sheet.y, facts, ink="muted", anchor="end"))
    for side, shown in (("source", tensor), ("target", other)):
        left = (
            f"{counted(shown.left_out, 'part is not drawn', 'parts are not drawn')}"
            if shown is not None and shown.left_out
            else ""
        )
        if words := "; ".join(filter(None, ("" if shown is None else shown.cut, left))):
            _draw_line(sheet, f"{side}: {words}" if beside else words)
    if beside and other is None:
        _draw_line(sheet, "The target does not hold it under this name.")


def _draw_line(sheet: Sheet, words: str) -> None:
    sheet.y += 18
    sheet.add(svg.text(MARGIN, sheet.y, svg.fitted(words, sheet.inner), ink="muted"))


def _name_columns(sheet: Sheet, given: Side, taken: Side | None) -> None:
    words = f"{'held' if taken is None else 'given'} by {given.counted}"
    sheet.add(svg.text(MARGIN, sheet.y, words, ink="muted"))
    if taken is not None and sheet.stacked:
        middle = MARGIN + (sheet.inner + _SPACE) / 2
        sheet.add(svg.text(middle, sheet.y, f"taken by {taken.counted}", ink="muted"))
    elif taken is not None:
        words = f"taken by {taken.counted}; coloured by who gives"
        sheet.add(svg.text(sheet.width - MARGIN, sheet.y, words, ink="muted", anchor="end"))
    sheet.y += 10


def _draw_matrices(sheet: Sheet, given: _Tensor, taken: _Tensor | None, height: float) -> _Frame:
    """Draw the matrices at the sides, or above on a narrow sheet; returns the room that is left for the bands."""
    inner, y = sheet.inner, sheet.y
    if sheet.stacked:
        tall = min(height, _STACKED_HEIGHT)
        width = inner if taken is None else (inner - _SPACE) / 2
        frame = _Frame(MARGIN, y + tall + 26, inner, height)
    else:
        tall, width = height, min(210.0, inner * 0.21)
        used = (width + _SPACE) * (1 if taken is None else 2)
        frame = _Frame(MARGIN + width + _SPACE, y, inner - used, height)
    tip = (MARGIN, y + tall + 17, inner)
    _draw_given(sheet, given, _Frame(MARGIN, y, width, tall), tip)
    if taken is not None:
        _draw_taken(sheet, given.side, taken, _Frame(MARGIN + inner - width, y, width, tall), tip)
    return frame


def _draw_given(sheet: Sheet, given: _Tensor, frame: _Frame, tip: tuple[float, float, float]) -> None:
    for part in given.side.parts:
        x, y, size = _placed(part, given.picture, frame)
        name = f"{given.side.labels[part.group]} holds {_where(part)}"
        sheet.add(svg.part(svg.box(x, y, size, svg.group_colour(part.group)), name, tip, focus=False))


def _draw_taken(sheet: Sheet, given: Side, taken: _Tensor, frame: _Frame, tip: tuple[float, float, float]) -> None:
    """Draw the target's matrix: its colours say who gives the elements, its outlines who takes them."""
    sheet.add(svg.box(frame.x, frame.y, (frame.width, frame.height), svg.REST_COLOUR))
    for part, giver in overlaps(given, taken.side) or ():
        x, y, size = _placed(part, taken.picture, frame)
        sheet.add(svg.box(x, y, size, svg.group_colour(giver), edge=0.25))
    for part in taken.side.parts:
        x, y, size = _placed(part, taken.picture, frame)
        name = f"{taken.side.labels[part.group]} takes {_where(part)}"
        sheet.add(svg.part(svg.outline(x, y, size), name, tip, focus=False))


def _draw_holders(sheet: Sheet, held: Side, frame: _Frame, tip: tuple[float, float, float]) -> None:
    """Draw the names of those that hold the parts, each with a block of its share."""
    column = _Column(held, frame)
    for group, name in enumerate(held.labels):
        told = f"{name} holds {counted(column.elements[group], 'element')}"
        label = (frame.x + _NODE + 6, frame.width - _NODE - 6, "")
        sheet.add(_node(column, group, (frame.x, label), svg.group_colour(group), (name, told, tip)))


def _draw_bands(
    sheet: Sheet,
    sides: tuple[Side, Side],
    moved: Sequence[Flow],
    frame: _Frame,
    tip: tuple[float, float, float],
) -> None:
    """Draw who gives on the left, who takes on the right, and a band for the elements that move between two of them."""
    given, taken = _Column(sides[0], frame), _Column(sides[1], frame)
    room = min(180.0, frame.width * 0.36)
    start, end = frame.x + room, frame.x + frame.width - room
    for flow in moved:
        band = svg.ribbon(
            (start, *given.next(flow.source, flow.elements)),
            (end, *taken.next(flow.target, flow.elements)),
            svg.group_colour(flow.source),
        )
        name = f"{counted(flow.elements, 'element')}: {sides[0].labels[flow.source]} to {sides[1].labels[flow.target]}"
        sheet.add(svg.part(band, name, tip, focus=len(moved) <= 2 * MAX_ROWS))
    for group, name in enumerate(sides[0].labels):
        told = f"{name} gives {counted(given.elements[group], 'element')}"
        label = (start - _NODE - 6, room - _NODE - 6, "end")
        sheet.add(_node(given, group, (start - _NODE, label), svg.group_colour(group), (name, told, tip)))
    for group, name in enumerate(sides[1].labels):
        told = f"{name} takes {counted(taken.elements[group], 'element')}"
        label = (end + _NODE + 6, room - _NODE - 6, "")
        sheet.add(_node(taken, group, (end, label), svg.REST_COLOUR, (name, told, tip)))


def _node(
    column: _Column,
    group: int,
    place: tuple[float, tuple[float, float, str]],
    colour: str,
    names: tuple[str, str, tuple[float, float, float]],
) -> str:
    """A block as high as a group's share, with its name beside it."""
    x, (label, width, anchor) = place
    name, told, tip = names
    top, bottom = column.span(group)
    short = svg.fitted(name, width, 11.5, mono=True, end="/" in name)
    words = svg.text(label, (top + bottom) / 2 + 4, short, size=11.5, mono=True, anchor=anchor)
    return svg.part(svg.box(x, top, (_NODE, bottom - top), colour) + words, told, tip)


def _tell(sheet: Sheet, given: _Tensor, taken: _Tensor | None, moved: Sequence[Flow] | None) -> None:
    name = _name(given.picture)
    if taken is None:
        sheet.told.append(f"{name} is held by {given.side.counted}.")
        return
    sheet.told.append(f"{name} moves from {given.side.counted} to {taken.side.counted}.")
    if moved is None:
        words = "It has too many parts to draw its movement."
        sheet.told.append(words)
        sheet.add(svg.text(MARGIN, sheet.y, words, ink="muted"))
        sheet.y += 18


class _Column:
    """The groups of one side from top to bottom, each as high as its share of the elements."""

    def __init__(self, side: Side, frame: _Frame) -> None:
        self.elements = [0] * len(side.labels)
        for part in side.parts:
            self.elements[part.group] += part.elements
        count = max(1, len(self.elements))
        gap = min(6.0, frame.height * 0.2 / count)
        room = frame.height - gap * (count - 1)
        # Every group can be seen, also one that holds a few elements of millions.
        least = min(6.0, room / count)
        total = sum(self.elements) or 1
        self._heights = [least + (room - least * count) * n / total for n in self.elements]
        self._tops = [frame.y + sum(self._heights[:at]) + gap * at for at in range(len(self.elements))]
        self._used = [0.0] * len(self.elements)

    def span(self, group: int) -> tuple[float, float]:
        """Top and bottom of a group."""
        return self._tops[group], self._tops[group] + self._heights[group]

    def next(self, group: int, elements: int) -> tuple[float, float]:
        """Top and bottom of the next elements of a group, below those that were asked for before."""
        top = self._tops[group] + self._used[group]
        self._used[group] += elements / (self.elements[group] or 1) * self._heights[group]
        return top, self._tops[group] + self._used[group]


def _placed(part: Part, tensor: TensorPicture, frame: _Frame) -> tuple[float, float, tuple[float, float]]:
    """(x, y, (width, height)) of a part in the frame of its matrix."""
    # An empty tensor has a place, too.
    across = frame.width / max(prod(tensor.shape[1:]), 1)
    down = frame.height / max(tensor.shape[0] if tensor.shape else 1, 1)
    size = (part.columns[1] - part.columns[0]) * across, (part.rows[1] - part.rows[0]) * down
    return frame.x + part.columns[0] * across, frame.y + part.rows[0] * down, size


def _name(tensor: TensorPicture) -> str:
    return f"{tensor.fqn}/{tensor.state}"


def _where(part: Part) -> str:
    return f"rows {part.rows[0]}:{part.rows[1]}, columns {part.columns[0]}:{part.columns[1]}"


def _itemsize(dtype: str) -> int:
    """Bytes of one element, from the bits in the type's name (`bfloat16`, `float8_e4m3fn`); 1 if it has none."""
    digits = "".join(c for c in dtype.partition("_")[0] if c.isdecimal())
    return max(1, int(digits or 8) // 8)


WIDTH = 1_080
"""The default width in pixels."""
STYLE = marks.STYLE
"""The style sheet of every picture, for a page that keeps styles in a file of its own (`render(..., styled=False)`)."""


def render(
    source: LayoutPicture,
    target: LayoutPicture | None = None,
    tensor: str | None = None,
    *,
    width: int = WIDTH,
    styled: bool = True,
) -> str:
    """Draw a layout, or source and target beside one another.

    Args:
        source: The layout of a checkpoint.
        target: The layout that it is, or was, converted to.
        tensor: `NAME` or `NAME/STATE` of a tensor whose parts, and whose movement, to draw. It must be among the
            tensors of the pictures; by default those of `source` are drawn. Beside a target, one tensor is drawn: the
            first state.
        width: Width in pixels. Below 760 the target is drawn below the source, as for a phone.
        styled: False to leave out the style sheet, for a page that has `STYLE` in a file of its own.

    Returns:
        The text of one `<svg>` element that loads nothing and runs nothing. Names in it are escaped.
    """
    sheet = Sheet(float(width))
    draw_bars(sheet, source, target)
    found = named(source, tensor)
    # Beside a target one state is drawn. By itself, each state that lies elsewhere than the states before.
    for shown in unlike(found) if target is None else first_moving(found, target):
        draw_movement(sheet, shown, source, target)
    title = f"Layout of {source.url}" if target is None else f"From {source.url} to {target.url}"
    told = " ".join(sheet.told)
    return marks.picture(width, sheet.y + 14, "\n".join(sheet.marks), title=title, told=told, styled=styled)


@dataclass(frozen=True)
class Picture:
    """The picture of a checkpoint's layout, or of two side by side. A notebook shows it."""

    source: LayoutPicture
    target: LayoutPicture | None = None
    tensor: str | None = None
    """`NAME` or `NAME/STATE` of the tensor that is drawn; None for the first that `source` lists."""

    def svg(self, *, width: int = WIDTH) -> str:
        """The picture as the text of an SVG; below 760 pixels source and target are one above the other."""
        return render(self.source, self.target, self.tensor, width=width)

    def save(self, path: str | os.PathLike[str], *, width: int = WIDTH) -> None:
        """Write the picture into a file.

        Args:
            path: The file, such as `moves.svg`.
            width: Its width in pixels.

        Raises:
            RequestError: `request.invalid` if the file cannot be written.
        """
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(self.svg(width=width))
        except OSError as error:
            raise RequestError(
                "request.invalid",
                f"{printable(os.fspath(path))}: {error.strerror}",
                fix="name a file in a directory that exists",
            ) from None

    def _repr_html_(self) -> str:
        """The picture in a notebook."""
        return self.svg()
