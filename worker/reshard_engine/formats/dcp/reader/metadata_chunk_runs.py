"""Reads runs of chunks: the objects in the list of a tensor's chunks.

Source: torch 2.13.0 `distributed/checkpoint/metadata.py` (`ChunkStorageMetadata`, with offsets and sizes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reshard_engine.formats.dcp.reader import metadata_names as names
from reshard_engine.formats.dcp.reader.metadata import Column
from reshard_engine.formats.dcp.reader.metadata_cursor import Cursor, Window
from reshard_engine.formats.dcp.reader.metadata_runs import OPENED, record_count, record_starts


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Chunks that follow one another in a list."""

    end: int
    """The position behind the last record in the window."""
    memoised: int
    """How many values went into the memo."""
    offsets: Column
    sizes: Column

    def __len__(self) -> int:
        return len(self.offsets)

    def text(self, number: int) -> str | None:
        """The text that has this number among the memoised values: there is none."""
        return None


def chunk_run(window: Window, gets: Mapping[str, bytes]) -> ChunkRun | None:
    """The regular chunks with which a window begins; None if there is none.

    Args:
        window: A part of the stream from the position of a record on.
        gets: The opcodes that fetch classes and names of attributes from the memo.
    """
    if not gets.keys() >= {names.CHUNK, names.SIZE, "offsets", "sizes"}:
        return None
    head = gets[names.CHUNK] + OPENED + gets["offsets"] + gets[names.SIZE]
    starts = record_starts(window, head)
    if starts is None:
        return None
    cursor = Cursor(window, starts + len(head))
    everywhere = cursor.regular.copy()
    offsets = cursor.size(everywhere)
    cursor.skip(gets["sizes"] + gets[names.SIZE])
    sizes = cursor.size(everywhere)
    cursor.skip(b"ub")
    dims = int(offsets.dims[0])
    cursor.regular &= (offsets.dims == dims) & (sizes.dims == dims)
    count = record_count(cursor, starts, window, b"e(")
    if count == 0:
        return None
    memoised = count * (2 + 2 * (3 if dims else 2))
    return ChunkRun(
        int(cursor.at[count - 1]), memoised, offsets.numbers[:count, :dims].copy(), sizes.numbers[:count, :dims].copy()
    )
