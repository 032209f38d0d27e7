"""Reads runs of chunks: the objects in the list of a tensor's chunks.

Source: torch 2.13.0 `distributed/checkpoint/metadata.py` (`ChunkStorageMetadata`, with offsets and sizes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from reshard_engine.formats.dcp.reader import metadata_names as names
from reshard_engine.formats.dcp.reader.metadata import Column
from reshard_engine.formats.dcp.reader.metadata_cursor import Cursor, Flags, Sizes, Window
from reshard_engine.formats.dcp.reader.metadata_runs import OPENED, positions, record_count, record_starts


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


@dataclass(frozen=True, slots=True)
class ChunkRecords:
    """Everything in a window that looks like a chunk."""

    starts: Column
    ends: Column
    regular: Flags
    """True for records that are chunks."""
    linked: Flags
    """True for records behind which the next one follows, in the same list."""
    offsets: Sizes
    sizes: Sizes

    def of_lists(self, cursor: Cursor, dims: Column) -> tuple[Column, Column]:
        """The first and the last chunk of lists; lists with other chunks are marked as not regular.

        Args:
            cursor: At the first chunk of each list.
            dims: The number of dimensions of each list's tensor.
        """
        most = len(self.starts) - 1
        first = np.minimum(np.searchsorted(self.starts, cursor.at), most)
        breaks = np.flatnonzero(~self.linked)
        last = breaks[np.searchsorted(breaks, first)]
        bad = np.concatenate([[0], np.cumsum(~self.regular)])
        changes = np.concatenate([[0], np.cumsum(self.offsets.dims[1:] != self.offsets.dims[:-1])])
        cursor.regular &= self.starts[first] == cursor.at
        cursor.regular &= bad[last + 1] == bad[first]
        cursor.regular &= (changes[last] == changes[first]) & (self.offsets.dims[first] == dims)
        return first, last


def chunk_records(window: Window, gets: Mapping[str, bytes]) -> ChunkRecords | None:
    """All records of a window that may be chunks; None if there is none."""
    if not gets.keys() >= {names.CHUNK, names.SIZE, "offsets", "sizes"}:
        return None
    head = gets[names.CHUNK] + OPENED + gets["offsets"] + gets[names.SIZE]
    starts = positions(window, head)
    if len(starts) == 0:
        return None
    cursor = Cursor(window, starts + len(head))
    offsets, sizes = _boxes(cursor, gets)
    cursor.regular &= offsets.dims == sizes.dims
    follows = cursor.at[:-1] + 2 * cursor.meets(b"e(")[:-1] == starts[1:]
    return ChunkRecords(starts, cursor.at, cursor.regular, np.append(follows, [False]), offsets, sizes)


def _boxes(cursor: Cursor, gets: Mapping[str, bytes]) -> tuple[Sizes, Sizes]:
    """Move over the chunks, from the call of the first size on."""
    everywhere = np.ones(len(cursor.at), np.bool_)
    offsets = cursor.size(everywhere)
    cursor.skip(gets["sizes"] + gets[names.SIZE])
    sizes = cursor.size(everywhere)
    cursor.skip(b"ub")
    return offsets, sizes


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
    offsets, sizes = _boxes(cursor, gets)
    dims = int(offsets.dims[0])
    cursor.regular &= (offsets.dims == dims) & (sizes.dims == dims)
    count = record_count(cursor, starts, window, b"e(")
    if count == 0:
        return None
    memoised = count * (2 + 2 * (3 if dims else 2))
    return ChunkRun(
        int(cursor.at[count - 1]), memoised, offsets.numbers[:count, :dims].copy(), sizes.numbers[:count, :dims].copy()
    )
