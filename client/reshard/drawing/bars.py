"""The files of source and target as bars by rank, on one scale, with the legend of the tensor states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.drawing import marks as svg
from reshard.drawing.rows import REST, Row, rank_count, rows_of
from reshard.drawing.sheet import MARGIN, Sheet
from reshard.errors import counted, format_size

if TYPE_CHECKING:
    from reshard.pictures import LayoutPicture

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
