"""The layout of a checkpoint as lines of text, or as an HTML page with the picture and these lines.

Names come from checkpoints, so all text is escaped, including characters that HTML or a line of text may not hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from reshard.errors import printable
from reshard.layout_svg import render
from reshard.sizes import format_size

if TYPE_CHECKING:
    from reshard.pictures import LayoutPicture, TensorPicture

MAX_LINES = 64
MAX_NAME_CHARS = 1_024
_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem}"
    "h1{font-size:1.2rem;overflow-wrap:anywhere}pre{overflow-x:auto;font-size:.85rem}"
)


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


def html_of(picture: LayoutPicture, beside: LayoutPicture | None = None) -> str:
    """A page with the picture, of one layout or of two side by side, and the table of each."""
    pictures = [picture] if beside is None else [picture, beside]
    title = _markup(" and ".join(f"{p.url} ({p.format})" for p in pictures))
    tables = "".join(f"<pre>{escape(_table(p))}</pre>" for p in pictures)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body><h1>{title}</h1>\n{render(picture, beside)}{tables}</body></html>\n"
    )


def _table(picture: LayoutPicture) -> str:
    return "\n".join(picture_lines(picture, limit=4_096))
