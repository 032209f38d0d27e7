"""The layout of a checkpoint as lines of text, as a self-contained SVG, or as an HTML page with that SVG.

Names come from checkpoints, so all text is escaped, including characters that XML or a line of text may not hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import prod
from typing import TYPE_CHECKING

from reshard.cli.sizes import format_size
from reshard.errors import printable

if TYPE_CHECKING:
    from reshard.pictures import FileShare, LayoutPicture, Region, TensorPicture

MAX_LINES = 64
MAX_BARS = 1_024
"""Largest number of files that are drawn; a universal checkpoint has several files for each parameter."""
MAX_NAME_CHARS = 1_024
_WIDTH, _ROW, _LEFT, _TOP = 900, 22, 330, 34
_HEIGHT = 320
_LABEL_CHARS = 42
"""Characters of 12-pixel monospace text that fit into the margin."""


def _plain(text: str) -> str:
    return printable(text, max_chars=MAX_NAME_CHARS)


def _markup(text: str) -> str:
    return escape(_plain(text))


def picture_lines(picture: LayoutPicture, *, limit: int = MAX_LINES) -> Iterator[str]:
    """A compact table: the parts of each tensor, or the contents of each file."""
    for tensor in picture.tensors:
        yield _title(tensor)
        if tensor.cut:
            yield f"  {_plain(tensor.cut)}"
        for region in tensor.regions[:limit]:
            rows, columns = region.rows, region.columns
            where = f"rows {rows[0]}:{rows[1]}  columns {columns[0]}:{columns[1]}"
            yield f"  {where:<44} {_plain(region.rank):<22} {_plain(region.file)}"
        more = len(tensor.regions) - limit + tensor.left_out
        if more > 0:
            yield f"  ... and {more} more"
    if picture.tensors:
        return
    for share in picture.files[:limit]:
        held = ", ".join(f"{_plain(state)} {format_size(size)}" for state, size in share.bytes_by_state.items())
        size_text = format_size(share.size_bytes)
        yield f"{_plain(share.rank):<24} {size_text:>10}  {_plain(share.file)}  {held}".rstrip()
    if len(picture.files) > limit:
        yield f"... and {len(picture.files) - limit} more"


def _title(tensor: TensorPicture) -> str:
    return f"{_plain(tensor.fqn)}/{_plain(tensor.state)} {tensor.dtype} {list(tensor.shape)}"


def _colour(number: int, *, light: int = 62) -> str:
    # 137.508 degrees is the golden angle: the colours of neighbours differ for any number of files.
    return f"hsl({number * 137.508 % 360:.1f} 62% {light}%)"


def svg_of(picture: LayoutPicture) -> str:
    """The picture: each tensor as a matrix coloured by file; without tensors, each file as a bar coloured by state."""
    parts, height = _matrices(picture) if picture.tensors else _bars(picture)
    size = f'width="{_LEFT + _WIDTH + 20}" height="{height + 20}"'
    view = f'viewBox="0 0 {_LEFT + _WIDTH + 20} {height + 20}"'
    style = 'font-family="ui-monospace, monospace" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} {style}>\n' + "\n".join(parts) + "\n</svg>\n"


def _matrices(picture: LayoutPicture) -> tuple[list[str], int]:
    """The drawing of tensors, and its height in pixels."""
    parts: list[str] = []
    height = 0
    ranks = {r.file: r.rank for t in picture.tensors for r in t.regions}
    files = {file: number for number, file in enumerate(ranks)}
    for tensor in picture.tensors:
        parts += _matrix(tensor, files, top=height + _TOP)
        height += _TOP + _HEIGHT + 16
    names = [(f"{file}  {ranks[file]}".rstrip(), _colour(n)) for file, n in files.items()]
    parts += _legend(names, top=height + 20)
    return parts, height + 20 + 18 * len(files)


def _bars(picture: LayoutPicture) -> tuple[list[str], int]:
    """The drawing of files, and its height in pixels."""
    parts: list[str] = []
    height = 0
    shown = picture.files[:MAX_BARS]
    states = {s: i for i, s in enumerate(dict.fromkeys(s for f in shown for s in f.bytes_by_state))}
    # Bytes that tensors share count for each of them, so the sum may be larger than the file.
    most = max((max(f.size_bytes, sum(f.bytes_by_state.values())) for f in shown), default=1) or 1
    for share in shown:
        parts += _bar(share, states, most, top=height + 8)
        height += _ROW
    if (more := len(picture.files) - len(shown)) > 0:
        parts.append(f'<text x="8" y="{height + 22}">... and {more} more files</text>')
        height += _ROW
    parts += _legend([(state, _colour(n)) for state, n in states.items()], top=height + 24)
    return parts, height + 24 + 18 * len(states)


def _matrix(tensor: TensorPicture, files: dict[str, int], *, top: int) -> Iterator[str]:
    rows = max(tensor.shape[0] if tensor.shape else 1, 1)
    columns = max(prod(tensor.shape[1:]), 1)
    missing = f"  ({tensor.left_out} parts are not drawn)" if tensor.left_out else ""
    yield f'<text x="8" y="{top - 12}">{escape(_title(tensor))}  {_markup(tensor.cut)}{missing}</text>'
    for region in tensor.regions:
        x, width = _scaled(region.columns, columns, _WIDTH)
        y, height = _scaled(region.rows, rows, _HEIGHT)
        box = f'x="{_LEFT + x:.2f}" y="{top + y:.2f}" width="{width:.2f}" height="{height:.2f}"'
        fill = f'fill="{_colour(files[region.file])}" stroke="white" stroke-width="0.5"'
        yield f"<rect {box} {fill}><title>{_markup(_tip(region))}</title></rect>"
    yield f'<text x="8" y="{top + 14}">{rows} rows</text><text x="8" y="{top + 32}">{columns} columns</text>'


def _tip(region: Region) -> str:
    rows, columns = region.rows, region.columns
    return f"{region.file} ({region.rank}): rows {rows[0]}:{rows[1]}, columns {columns[0]}:{columns[1]}"


def _scaled(span: tuple[int, int], whole: int, pixels: int) -> tuple[float, float]:
    return span[0] / whole * pixels, (span[1] - span[0]) / whole * pixels


def _bar(share: FileShare, states: dict[str, int], most: int, *, top: int) -> Iterator[str]:
    label = _plain(share.rank or share.file)
    # Paths differ at their ends.
    label = label if len(label) <= _LABEL_CHARS else f"...{label[3 - _LABEL_CHARS :]}"
    yield f'<text x="8" y="{top + 14}">{escape(label)}</text>'
    x = float(_LEFT)
    for state, size in share.bytes_by_state.items():
        width = size / most * _WIDTH
        box = f'x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_ROW - 4}"'
        tip = _markup(f"{share.file}: {state} {format_size(size)}")
        yield f'<rect {box} fill="{_colour(states[state])}"><title>{tip}</title></rect>'
        x += width


def _legend(colours: Sequence[tuple[str, str]], *, top: int) -> Iterator[str]:
    for place, (name, colour) in enumerate(colours):
        y = top + 18 * place
        yield f'<rect x="8" y="{y - 10}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="26" y="{y}">{_markup(name)}</text>'


def html_of(picture: LayoutPicture) -> str:
    """A page with the picture and the table."""
    title = _markup(f"{picture.url}: {picture.format}, {', '.join(f'{k} {v}' for k, v in picture.world.items())}")
    table = escape("\n".join(picture_lines(picture, limit=4_096)))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>\n'
        f"<body><h1>{title}</h1>\n{svg_of(picture)}<pre>{table}</pre></body></html>\n"
    )
