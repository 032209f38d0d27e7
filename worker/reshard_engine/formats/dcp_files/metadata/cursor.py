"""Reads many equal records of a pickle at once: a cursor in each of them, moved over the same opcodes together.

Nothing is taken on trust. A record in which a cursor meets anything else than the opcodes that were asked for is marked
as not regular, and whoever reads the records leaves it to an interpreter of single opcodes.

Source: CPython 3.11 `Lib/pickletools.py` (opcodes and their arguments), `Modules/_pickle.c` (`save_long`: the shortest
opcode; `store_tuple_elements` and `save_tuple`: marks from four elements on; `memo_put`: every text is memoised).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from reshard_engine.formats.dcp_files.metadata import model as names
from reshard_engine.formats.dcp_files.metadata.model import MAX_NUMBER, Column

Flags = npt.NDArray[np.bool_]
MAX_DIMS = 8
"""Of regular records. Tensors of more dimensions are left to the interpreter."""
_SHORT_TEXT, _GET, _LONG_GET, _MEMOIZE = 0x8C, 0x68, 0x6A, 0x94
_LONG1, _NONE, _MARK, _TUPLE = 0x8A, 0x4E, 0x28, 0x74
_WIDTH = np.zeros(256, np.int64)
_MASK = np.zeros(256, np.uint64)
_LIMIT = np.zeros(256, np.uint64)
for _opcode, _bytes, _bits in ((0x4B, 2, 8), (0x4D, 3, 16), (0x4A, 5, 31)):
    _WIDTH[_opcode], _MASK[_opcode] = _bytes, (1 << (8 * (_bytes - 1))) - 1
    _LIMIT[_opcode] = (1 << _bits) - 1
_IS_NUMBER = _WIDTH > 0
_IS_NUMBER[_LONG1] = True
_SLACK = 288
"""More bytes than the longest text of a record has."""
_STEP = {0x4B: 2, 0x4D: 3, 0x4A: 5, _GET: 2, _LONG_GET: 5}
_TUPLE_OPS = np.array([0x29, 0x85, 0x86, 0x87] + [_TUPLE] * (MAX_DIMS - 3), np.uint8)
"""The opcode that ends a tuple, by its number of elements."""


@dataclass(frozen=True, slots=True)
class Texts:
    """A text in each record: written out, or fetched from the memo."""

    written: Flags
    start: Column
    """The position of a written text."""
    end: Column
    memo: Column
    """The number of a fetched text in the memo."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """A tuple of numbers in each record."""

    dims: Column
    numbers: Column
    """`[records, MAX_DIMS]`; numbers behind the last dimension are zero."""


class Window:
    """A part of a stream without its frames, for reading at many positions at once."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """Join the contents of frames that follow one another."""
        self.length = sum(map(len, pieces))
        # A cursor that has lost its way may stand behind the end: it reads zeros there.
        self.data = b"".join([*pieces, bytes(_SLACK)])
        self.cuts = list(accumulate(map(len, pieces[:-1])))
        """The positions between frames. No opcode may lie across them."""
        self._bytes = np.frombuffer(self.data, np.uint8)
        self._words = np.ndarray((len(self.data) - 7,), "<u8", self.data, strides=(1,))

    def byte(self, at: Column) -> npt.NDArray[np.uint8]:
        """The byte at each position."""
        return self._bytes[at]

    def word(self, at: Column) -> npt.NDArray[np.uint64]:
        """The eight bytes from each position on, as a little-endian number."""
        return self._words[at]

    def meets(self, opcodes: bytes, at: Column) -> Flags:
        """True for each position from which on these bytes lie."""
        length = len(opcodes)
        # As texts of one length: zeros that numpy leaves out at their ends are equal then too.
        texts = np.ndarray((len(self.data) - length + 1,), f"S{length}", self.data, strides=(1,))
        return texts[at] == opcodes

    def divides(self, start: int, cut: int) -> bool:
        """True if the position `cut` lies between two opcodes of the record that begins at `start`."""
        at, data = start, self.data
        while at < cut:
            opcode = data[at]
            at += 2 + data[at + 1] if opcode in (_SHORT_TEXT, _LONG1) else _STEP.get(opcode, 1)
        return at == cut


class Cursor:
    """A position in each of many records."""

    def __init__(self, window: Window, starts: Column) -> None:
        self._window = window
        self._last = window.length
        self.at = starts.copy()
        self.regular: Flags = np.ones(len(starts), np.bool_)

    def _move(self, after: Column) -> None:
        self.at = np.minimum(after, self._last)

    def meets(self, opcodes: bytes) -> Flags:
        """True for each record that goes on with these bytes."""
        return self._window.meets(opcodes, self.at)

    def skip(self, opcodes: bytes, where: Flags | None = None) -> None:
        """Move over these bytes, which every record (of some) must have."""
        found = self.meets(opcodes)
        if where is None:
            self.regular &= found
            self._move(self.at + len(opcodes))
        else:
            self.regular &= found | ~where
            self._move(self.at + where * len(opcodes))

    def number(self, where: Flags | None = None) -> Column:
        """Move over an integer from 0 to `MAX_NUMBER - 1`, and return it."""
        opcode = self._window.byte(self.at)
        raw = self._window.word(self.at + 1)
        value, width = raw & _MASK[opcode], _WIDTH[opcode]
        good = (width > 0) & (value <= _LIMIT[opcode])
        long = opcode == _LONG1
        if long.any():
            count = (raw & np.uint64(0xFF)).astype(np.int64)
            fits = long & (count >= 1) & (count <= 8)
            shift = (64 - 8 * np.where(fits, count, 8)).astype(np.uint64)
            body = self._window.word(self.at + 2) & (np.uint64(0xFFFF_FFFF_FFFF_FFFF) >> shift)
            # Two's complement of so many bytes: the highest bit is the sign.
            good |= fits & ((body << shift) < np.uint64(1 << 63)) & (body < np.uint64(MAX_NUMBER))
            value, width = np.where(long, body, value), np.where(long, 2 + count, width)
        if where is not None:
            value, width, good = value * where, width * where, good | ~where
        self.regular &= good
        self._move(self.at + width)
        return value.astype(np.int64)

    def skip_number_or_none(self) -> None:
        """Move over an integer or None."""
        none = self._window.byte(self.at) == _NONE
        self.at += none
        self.number(~none)

    def text(self, where: Flags | None = None) -> Texts:
        """Move over a text of less than 256 bytes that goes into the memo, or over one from the memo."""
        opcode = self._window.byte(self.at)
        raw = self._window.word(self.at + 1)
        low = (raw & np.uint64(0xFF)).astype(np.int64)
        written, short = opcode == _SHORT_TEXT, opcode == _GET
        memo = np.where(short, low, (raw & np.uint64(0xFFFF_FFFF)).astype(np.int64))
        start = self.at + 2
        end = start + low
        good = (written & (self._window.byte(end) == _MEMOIZE)) | short | (opcode == _LONG_GET)
        after = np.where(written, end + 1, self.at + np.where(short, 2, 5))
        if where is not None:
            good, after = good | ~where, np.where(where, after, self.at)
        self.regular &= good
        self._move(after)
        return Texts(written, start, end, memo)

    def fetched(self, where: Flags) -> Column:
        """Move over a value from the memo, and return its number there."""
        opcode = self._window.byte(self.at)
        raw = self._window.word(self.at + 1)
        short = opcode == _GET
        self.regular &= short | (opcode == _LONG_GET) | ~where
        self._move(self.at + where * np.where(short, 2, 5))
        return np.where(short, raw & np.uint64(0xFF), raw & np.uint64(0xFFFF_FFFF)).astype(np.int64)

    def flag(self, where: Flags) -> Flags:
        """Move over True or False, and return it."""
        opcode = self._window.byte(self.at)
        self.regular &= (opcode == 0x88) | (opcode == 0x89) | ~where
        self._move(self.at + where)
        return opcode == 0x88

    def size(self, where: Flags) -> Sizes:
        """Move over the arguments of `torch.Size` and its call."""
        marked = where & (self._window.byte(self.at) == _MARK)
        self.at += marked
        dims = np.zeros(len(self.at), np.int64)
        numbers = np.zeros((len(self.at), MAX_DIMS), np.int64)
        for axis in range(MAX_DIMS):
            more = where & (dims == axis) & _IS_NUMBER[self._window.byte(self.at)]
            if not more.any():
                break
            numbers[:, axis] = self.number(more)
            dims += more
        ends = (self._window.byte(self.at) == _TUPLE_OPS[dims]) & (marked == (dims > 3))
        self.regular &= ends | ~where
        self.at += where
        # The empty tuple is not memoised.
        self.skip(b"\x94", where & (dims > 0))
        self.skip(b"\x85\x94R\x94", where)
        return Sizes(dims, numbers)


# Finds runs of equal records in the pickle of a `.metadata`: those of chunks, of places and of plans.
#
# Five million chunks are ten million objects; as nodes they would take thirty gigabytes. A run of them becomes columns.
# Records are regular if they are byte for byte what the pickler writes for torch's dataclasses once their names are in
# the memo; all others are left to the interpreter. The memo of such a stream only grows, so equal bytes mean the same.
#
# Source: CPython 3.11 `Modules/_pickle.c` (`save_reduce`, `batch_list_exact`, `batch_dict_exact`).

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
