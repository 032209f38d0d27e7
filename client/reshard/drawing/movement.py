"""One tensor of a layout as a matrix and, beside a target, how its parts become those of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from reshard.drawing import marks as svg
from reshard.drawing.parts import Flow, Part, Side, counterpart, flows, overlaps, side_of
from reshard.drawing.rows import MAX_ROWS, shown_axes
from reshard.drawing.sheet import MARGIN, Sheet
from reshard.errors import counted, format_size

if TYPE_CHECKING:
    from reshard.pictures import LayoutPicture, TensorPicture

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
