"""Finds runs of equal records in the pickle of a `.metadata`: those of chunks, of places and of plans.

Five million chunks are ten million objects; as nodes they would take thirty gigabytes. A run of them becomes columns.
Records are regular if they are byte for byte what the pickler writes for torch's dataclasses once their names are in
the memo; all others are left to the interpreter. The memo of such a stream only grows, so equal bytes mean the same.

Source: CPython 3.11 `Modules/_pickle.c` (`save_reduce`, `batch_list_exact`, `batch_dict_exact`).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from reshard_engine.formats.dcp.reader import metadata_names as names
from reshard_engine.formats.dcp.reader.metadata import Column
from reshard_engine.formats.dcp.reader.metadata_cursor import Cursor, Window

CLASSES = names.PROPERTIES | {
    names.TENSOR, names.CHUNK, names.INDEX, names.PLACE, names.SIZE, names.ITEM, names.ITEM_DATA,
}  # fmt: skip
ATTRIBUTES = frozenset(
    {"fqn", "index", "offset", "relative_path", "length", "transform_descriptors", "offsets", "sizes"}
    | {"type", "bytes_io_data", "tensor_data", "chunk", "properties", "size", "chunks"}
)
"""Names of attributes that, like the classes, are in the memo before regular records come."""
OPENED = b")\x81\x94}\x94("
"""An object of the class on the stack, its dict of attributes, and the mark before them."""
_GAP_BYTES = 64


class Run(Protocol):
    """Records that follow one another, in the place of their nodes."""

    @property
    def end(self) -> int:
        """The position behind the last record in the window."""
        ...

    @property
    def memoised(self) -> int:
        """Number of values that went into the memo."""
        ...

    def __len__(self) -> int: ...

    def text(self, number: int) -> str | None:
        """The text that has this number among the memoised values, if a record could fetch it."""
        ...


def positions(window: Window, head: bytes) -> Column:
    """The positions at which these bytes lie in a window."""
    # Splitting finds them faster than searching for one after the other.
    lengths = [len(rest) for rest in window.data.split(head)]
    return np.cumsum(np.array(lengths[:-1], np.int64) + len(head)) - len(head)


def record_positions(window: Window, head: bytes) -> Column | None:
    """The positions of what may be records; None if a window does not begin with one."""
    return positions(window, head) if window.data.startswith(head) else None


def record_starts(window: Window, head: bytes) -> Column | None:
    """As `record_positions`, up to a gap that no record fills."""
    starts = record_positions(window, head)
    if starts is not None and len(starts) > 2:
        # Another list begins behind a longer gap. It is not worth reading what follows: a run ends there.
        gaps = np.diff(starts)
        far = gaps > 2 * gaps[0] + _GAP_BYTES
        if far.any():
            return starts[: int(np.argmax(far)) + 1]
    return starts


def record_count(cursor: Cursor, starts: Column, window: Window, batch: bytes) -> int:
    """The number of records that are regular and follow one another, from the first one on.

    Args:
        cursor: Behind the records.
        starts: Their positions.
        window: The part of the stream.
        batch: The opcodes between two batches of a list or dict, which may lie between two records.
    """
    good = cursor.regular.copy()
    good[1:] &= cursor.at[:-1] + len(batch) * cursor.meets(batch)[:-1] == starts[1:]
    count = len(good) if good.all() else int(np.argmin(good))
    for cut, row in zip(window.cuts, (np.searchsorted(starts, window.cuts, side="right") - 1).tolist(), strict=True):
        if row < count and cut < cursor.at[row] and not window.divides(int(starts[row]), cut):
            return row
    return count
