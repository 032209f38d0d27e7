"""The layout of a checkpoint as lines, and as a picture: an SVG that needs nothing else, or a page around it.

Names come from checkpoints: everything that is written is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from reshard.cli.sizes import format_size
from reshard.pictures import FileShare, LayoutPicture, Region, TensorPicture

MAX_LINES = 64
_WIDTH, _ROW, _LEFT, _TOP = 900, 22, 330, 34
_HEIGHT = 320


def picture_lines(picture: LayoutPicture, *, limit: int = MAX_LINES) -> Iterator[str]:
    """A compact table: of each tensor its parts, or of each file what it holds."""
    for tensor in picture.tensors:
        yield f"{tensor.fqn}/{tensor.state} {tensor.dtype} {list(tensor.shape)}"
        if tensor.cut:
            yield f"  {tensor.cut}"
        for region in tensor.regions[:limit]:
            rows, columns = region.rows, region.columns
            where = f"rows {rows[0]}:{rows[1]}  columns {columns[0]}:{columns[1]}"
            yield f"  {where:<44} {region.rank:<22} {region.file}"
        more = len(tensor.regions) - limit + tensor.left_out
        if more > 0:
            yield f"  ... and {more} more"
    if picture.tensors:
        return
    for share in picture.files[:limit]:
        held = ", ".join(f"{state} {format_size(size)}" for state, size in share.bytes_by_state.items())
        yield f"{share.rank:<24} {format_size(share.size_bytes):>10}  {share.file}  {held}".rstrip()
    if len(picture.files) > limit:
        yield f"... and {len(picture.files) - limit} more"


def _colour(number: int, *, light: int = 62) -> str:
    # The golden angle: neighbours never look alike, however many there are.
    return f"hsl({number * 137.508 % 360:.1f} 62% {light}%)"


def svg_of(picture: LayoutPicture) -> str:
    """The picture: each tensor as a matrix coloured by file; without tensors, each file as a bar coloured by state."""
    parts: list[str] = []
    height = 0
    if picture.tensors:
        files = {f: i for i, f in enumerate(dict.fromkeys(r.file for t in picture.tensors for r in t.regions))}
        for tensor in picture.tensors:
            parts += _matrix(tensor, files, top=height + _TOP)
            height += _TOP + _HEIGHT + 16
        parts += _legend({file: _colour(n) for file, n in files.items()}, top=height + 20)
        height += 20 + 18 * len(files)
    else:
        states = {s: i for i, s in enumerate(dict.fromkeys(s for f in picture.files for s in f.bytes_by_state))}
        most = max((f.size_bytes for f in picture.files), default=1) or 1
        for share in picture.files:
            parts += _bar(share, states, most, top=height + 8)
            height += _ROW
        parts += _legend({state: _colour(n) for state, n in states.items()}, top=height + 24)
        height += 24 + 18 * len(states)
    size = f'width="{_LEFT + _WIDTH + 20}" height="{height + 20}"'
    view = f'viewBox="0 0 {_LEFT + _WIDTH + 20} {height + 20}"'
    style = 'font-family="ui-monospace, monospace" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} {style}>\n' + "\n".join(parts) + "\n</svg>\n"


def _matrix(tensor: TensorPicture, files: dict[str, int], *, top: int) -> Iterator[str]:
    rows = max(tensor.shape[0] if tensor.shape else 1, 1)
    columns = max((r.columns[1] for r in tensor.regions), default=1)
    title = f"{tensor.fqn}/{tensor.state} {tensor.dtype} {list(tensor.shape)}"
    yield f'<text x="8" y="{top - 12}">{escape(title)}  {escape(tensor.cut)}</text>'
    for region in tensor.regions:
        x, width = _scaled(region.columns, columns, _WIDTH)
        y, height = _scaled(region.rows, rows, _HEIGHT)
        box = f'x="{_LEFT + x:.2f}" y="{top + y:.2f}" width="{width:.2f}" height="{height:.2f}"'
        fill = f'fill="{_colour(files[region.file])}" stroke="white" stroke-width="0.5"'
        yield f"<rect {box} {fill}><title>{escape(_tip(region))}</title></rect>"
    yield f'<text x="8" y="{top + 14}">{rows} rows</text><text x="8" y="{top + 32}">{columns} columns</text>'


def _tip(region: Region) -> str:
    rows, columns = region.rows, region.columns
    return f"{region.file} ({region.rank}): rows {rows[0]}:{rows[1]}, columns {columns[0]}:{columns[1]}"


def _scaled(span: tuple[int, int], whole: int, pixels: int) -> tuple[float, float]:
    return span[0] / whole * pixels, (span[1] - span[0]) / whole * pixels


def _bar(share: FileShare, states: dict[str, int], most: int, *, top: int) -> Iterator[str]:
    yield f'<text x="8" y="{top + 14}">{escape(share.rank or share.file)}</text>'
    x = float(_LEFT)
    for state, size in share.bytes_by_state.items():
        width = size / most * _WIDTH
        box = f'x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_ROW - 4}"'
        tip = escape(f"{share.file}: {state} {format_size(size)}")
        yield f'<rect {box} fill="{_colour(states[state])}"><title>{tip}</title></rect>'
        x += width


def _legend(colours: dict[str, str], *, top: int) -> Iterator[str]:
    for place, (name, colour) in enumerate(colours.items()):
        y = top + 18 * place
        yield f'<rect x="8" y="{y - 10}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="26" y="{y}">{escape(name)}</text>'


def html_of(picture: LayoutPicture) -> str:
    """A page with the picture and the table."""
    title = escape(f"{picture.url}: {picture.format}, {', '.join(f'{k} {v}' for k, v in picture.world.items())}")
    table = escape("\n".join(picture_lines(picture, limit=4_096)))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>\n'
        f"<body><h1>{title}</h1>\n{svg_of(picture)}<pre>{table}</pre></body></html>\n"
    )
