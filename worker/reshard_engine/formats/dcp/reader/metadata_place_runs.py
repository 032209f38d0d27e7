"""Reads runs of places: the entries of the dict `storage_data`.

Source: torch 2.13.0 `distributed/checkpoint/metadata.py` (`MetadataIndex.__init__` sets fqn, index and offset in this
order), `distributed/checkpoint/filesystem.py` (`_StorageInfo`: relative_path, offset, length, transform_descriptors).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from reshard_engine.formats.dcp.reader import metadata_names as names
from reshard_engine.formats.dcp.reader.metadata import Column, Narrow
from reshard_engine.formats.dcp.reader.metadata_columns import NO_OFFSET
from reshard_engine.formats.dcp.reader.metadata_cursor import MAX_DIMS, Cursor, Flags, Sizes, Texts, Window
from reshard_engine.formats.dcp.reader.metadata_nodes import MAX_NUMBER
from reshard_engine.formats.dcp.reader.metadata_runs import OPENED, record_count, record_starts

_NEEDED = frozenset({names.INDEX, names.PLACE, names.SIZE, "fqn", "index", "offset", "relative_path", "length"})


@dataclass
class Words:
    """Texts of a stream, each once, by number."""

    numbers: dict[bytes, int] = field(default_factory=dict[bytes, int])
    texts: list[str] = field(default_factory=list[str])

    def number(self, raw: bytes) -> int:
        """The number of a text; -1 if it is not UTF-8."""
        known = self.numbers.get(raw)
        if known is None:
            try:
                self.texts.append(raw.decode("utf-8", "surrogatepass"))
            except UnicodeDecodeError:
                return -1
            known = self.numbers[raw] = len(self.numbers)
        return known


@dataclass(frozen=True, slots=True)
class PlaceRun:
    """Entries that follow one another in `storage_data`."""

    end: int
    memoised: int
    words: Words
    name: Narrow
    """The names of the entries in `words`."""
    dims: npt.NDArray[np.int16]
    offsets: Column
    """The offsets of all entries, one behind the other."""
    path: Narrow
    """The paths of the files in `words`."""
    offset: Column
    length: Column
    transform: Narrow
    """The transform of each entry in `words`, or -1."""
    memo: npt.NDArray[np.uint32]
    """The number of each entry's first value among the memoised ones."""
    written: Flags
    """True for each entry whose name was written out, as its third value."""
    path_written: Flags
    """True for each entry whose path was written out, as its last value but for a transform."""

    def __len__(self) -> int:
        return len(self.name)

    def text(self, number: int) -> str | None:
        """The name or path that has this number among the memoised values, if it is one."""
        row = int(np.searchsorted(self.memo, number, side="right")) - 1
        if self.written[row] and number - int(self.memo[row]) == 2:
            return self.words.texts[int(self.name[row])]
        after = int(self.memo[row + 1]) if row + 1 < len(self.memo) else self.memoised
        last = after - (3 if self.transform[row] >= 0 else 1)
        return self.words.texts[int(self.path[row])] if self.path_written[row] and number == last else None


class PlaceReader:
    """Reads runs of places of one stream."""

    def __init__(self, text_of: Callable[[int], str | None]) -> None:
        """Read a stream; `text_of` gives the text that has a number in its memo, if it is one."""
        self._text_of = text_of
        self.words = Words()

    def run(self, window: Window, base: int, gets: Mapping[str, bytes]) -> PlaceRun | None:
        """The regular entries with which a window begins; None if there is none.

        Args:
            window: A part of the stream from the position of a record on.
            base: The number of the next value in the memo.
            gets: The opcodes that fetch classes and names of attributes from the memo.
        """
        if not gets.keys() >= _NEEDED:
            return None
        head = gets[names.INDEX] + OPENED + gets["fqn"]
        starts = record_starts(window, head)
        if starts is None:
            return None
        cursor = Cursor(window, starts + len(head))
        fields = _fields(cursor, gets)
        count = record_count(cursor, starts, window, b"u(")
        memoised = 4 + fields.fqn.written + fields.path.written + 2 * fields.packed
        memoised += fields.sharded * np.where(fields.corner.dims > 0, 3, 2)
        memo = base + np.cumsum(memoised) - memoised
        name = self._words(window, fields.fqn, memo + 2, memo[:count])
        path = self._words(window, fields.path, memo + memoised - 1 - 2 * fields.packed, memo[:count])
        known = (name[:count] >= 0) & (path[:count] >= 0)
        count = count if known.all() else int(np.argmin(known))
        if count == 0:
            return None
        packed = fields.packed[:count]
        transform = np.full(count, -1, np.int32)
        transform[packed] = self._written(window, fields.transform, packed)
        dims = fields.corner.dims[:count]
        return PlaceRun(
            int(cursor.at[count - 1]), int(memoised[:count].sum()), self.words, name[:count],
            np.where(fields.sharded[:count], dims, NO_OFFSET).astype(np.int16),
            fields.corner.numbers[:count][np.arange(MAX_DIMS) < dims[:, None]],
            path[:count], fields.offset[:count], fields.length[:count], transform,
            (memo[:count] - base).astype(np.uint32), fields.fqn.written[:count], fields.path.written[:count],
        )  # fmt: skip

    def _words(self, window: Window, texts: Texts, numbers: Column, memo: Column) -> Narrow:
        """The number in `words` of the text in each of the first records, or -1.

        Args:
            window: The part of the stream.
            texts: The texts of all records.
            numbers: The numbers in the memo of those that are written out.
            memo: The number in the memo of the first value of each of the records that count.
        """
        count = len(memo)
        written = texts.written[:count]
        found = np.full(count, -1, np.int32)
        found[written] = self._written(window, texts, written)
        fetched = ~written
        if fetched.any():
            wanted = texts.memo[:count][fetched]
            each, inverse = np.unique(wanted, return_inverse=True)
            here = numbers[:count][written]
            words = [self._fetched(n, here, found[written], int(memo[0])) for n in each.tolist()]
            # A text is in the memo only after the record that writes it.
            found[fetched] = np.where(wanted < memo[fetched], np.array(words, np.int32)[inverse], -1)
        return found

    def _written(self, window: Window, texts: Texts, rows: Flags) -> list[int]:
        """The number in `words` of each text of these rows."""
        count, data, known = len(rows), window.data, self.words.numbers.get
        ends = zip(texts.start[:count][rows].tolist(), texts.end[:count][rows].tolist(), strict=True)
        raws = [data[start:end] for start, end in ends]
        found = [known(raw, -1) for raw in raws]
        if -1 in found:
            found = [self.words.number(raw) for raw in raws]
        return found

    def _fetched(self, number: int, here: Column, words: Narrow, base: int) -> int:
        """The number in `words` of a text of the memo: of an earlier record of this run, or from before it."""
        if number >= base:
            at = int(np.searchsorted(here, number))
            return int(words[at]) if at < len(here) and here[at] == number else -1
        text = self._text_of(number)
        return -1 if text is None else self.words.number(text.encode("utf-8", "surrogatepass"))


@dataclass(frozen=True, slots=True)
class _Fields:
    fqn: Texts
    sharded: Flags
    """True for each entry that has an offset."""
    corner: Sizes
    path: Texts
    offset: Column
    length: Column
    packed: Flags
    """True for each entry that has a transform."""
    transform: Texts


def _fields(cursor: Cursor, gets: Mapping[str, bytes]) -> _Fields:
    """Move over the entries, from the name on."""
    fqn = cursor.text()
    cursor.skip(gets["index"])
    cursor.skip_number_or_none()
    opened = gets["offset"] + gets[names.SIZE]
    sharded = cursor.meets(opened)
    cursor.skip(opened, sharded)
    corner = cursor.size(sharded)
    cursor.skip(b"ub" + gets[names.PLACE] + OPENED + gets["relative_path"])
    path = cursor.text()
    cursor.skip(gets["offset"])
    offset = cursor.number()
    cursor.skip(gets["length"])
    length = cursor.number()
    cursor.regular &= offset + length < MAX_NUMBER
    packed, transform = np.zeros(len(offset), np.bool_), fqn
    if "transform_descriptors" in gets:
        opened = gets["transform_descriptors"] + b"]\x94"
        packed = cursor.meets(opened)
        cursor.skip(opened, packed)
        transform = cursor.text(packed)
        cursor.regular &= transform.written | ~packed
        cursor.skip(b"a", packed)
    cursor.skip(b"ub")
    return _Fields(fqn, sharded, corner, path, offset, length, packed, transform)
