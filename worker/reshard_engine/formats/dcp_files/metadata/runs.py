"""Reads runs of equal records of `.metadata` as columns: tensors, their chunks, their places, and plan items.

Source: torch 2.13.0 `distributed/checkpoint/metadata.py` (`TensorStorageMetadata`: properties, size, chunks;
`TensorProperties.__getstate__`, a tuple of five).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from reshard_engine.formats.dcp_files.metadata import model as names
from reshard_engine.formats.dcp_files.metadata.cursor import (
    MAX_DIMS,
    OPENED,
    Cursor,
    Flags,
    Sizes,
    Texts,
    Window,
    positions,
    record_count,
    record_positions,
    record_starts,
)
from reshard_engine.formats.dcp_files.metadata.model import MAX_NUMBER, NO_OFFSET, Column, Narrow
from reshard_engine.pickles.nodes import Global, Node, PObject, PTuple

# Reads runs of chunks: the objects in the list of a tensor's chunks.
#
# Source: torch 2.13.0 `distributed/checkpoint/metadata.py` (`ChunkStorageMetadata`, with offsets and sizes).


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


# Reads runs of tensors: the entries of the dict `state_dict_metadata`.

_NEEDED = frozenset({names.TENSOR, names.SIZE, "properties", "size", "chunks"})


@dataclass(frozen=True, slots=True)
class RegularTensor:
    """A tensor of a run, in the place of its node."""

    properties: PObject
    shape: tuple[int, ...]
    offsets: Column
    sizes: Column


@dataclass(frozen=True, slots=True)
class TensorRun:
    """Tensors that follow one another in the dict, from the value of the first one on."""

    end: int
    memoised: int
    tensors: list[RegularTensor]
    keys: list[str]
    """The keys of all tensors but the first one, which comes before the run."""
    numbers: list[int]
    """The number of each of these keys among the memoised values, or -1 for one that was fetched."""

    def __len__(self) -> int:
        return sum(1 + len(tensor.offsets) for tensor in self.tensors)

    def text(self, number: int) -> str | None:
        """No text but the keys is fetched again, and those are put into the memo."""
        return None


@dataclass(frozen=True, slots=True)
class _Heads:
    """All of the tensors but their chunks."""

    state: tuple[Column, ...]
    """What is fetched for element type, layout and memory format, and the two flags between."""
    shape: Sizes
    first: Column
    last: Column
    """The chunks of each tensor, as positions in the columns of chunks."""
    key: Texts
    """The key of the next tensor."""
    end: Column
    """The end of each tensor."""
    good: Flags
    """True for tensors that are regular."""
    linked: Flags
    """True for tensors behind which another one follows."""


class TensorReader:
    """Reads runs of tensors of one stream."""

    def __init__(self, value_of: Callable[[int], Node], text_of: Callable[[int], str | None]) -> None:
        """Read a stream.

        Args:
            value_of: The value that has a number in the memo; None for containers of containers, and for none.
            text_of: The text that has this number in the memo, if it is one.
        """
        self._value_of = value_of
        self._text_of = text_of
        self._properties: dict[tuple[int, ...], PObject] = {}
        self.wants_more = False
        """True if the run that was read last ended with its window."""

    def run(self, window: Window, gets: Mapping[str, bytes]) -> TensorRun | None:
        """The regular tensors with which a window begins; None if there is none.

        Args:
            window: A part of the stream from the position of a tensor on.
            gets: The opcodes that fetch classes and names of attributes from the memo.
        """
        self.wants_more = False
        kinds = [name for name in names.PROPERTIES if name in gets]
        if not gets.keys() >= _NEEDED or len(kinds) != 1:
            return None
        head = gets[names.TENSOR] + OPENED + gets["properties"] + gets[kinds[0]] + b")\x81\x94("
        starts = record_positions(window, head)
        chunks = None if starts is None else chunk_records(window, gets)
        if starts is None or chunks is None:
            return None
        heads = _heads(Cursor(window, starts + len(head)), starts, chunks, gets)
        count = _whole(heads, starts, chunks, window)
        self.wants_more = count == len(starts) or int(heads.last[count]) == len(chunks.starts) - 1
        states = zip(*(column[:count].tolist() for column in heads.state), strict=True)
        properties = [self._of_state(kinds[0], state) for state in states]
        keys = self._keys(window, heads.key, count - 1)
        count = min(len(keys) + 1, properties.index(None) if None in properties else count)
        if count == 0:
            return None
        return self._joined(count, heads, chunks, [p for p in properties[:count] if p is not None], keys[: count - 1])

    def _joined(
        self, count: int, heads: _Heads, chunks: ChunkRecords, properties: list[PObject], keys: list[str]
    ) -> TensorRun:
        tensors: list[RegularTensor] = []
        dims = heads.shape.dims[:count].tolist()
        shapes = heads.shape.numbers[:count].tolist()
        for row, (first, last) in enumerate(
            zip(heads.first[:count].tolist(), heads.last[:count].tolist(), strict=True)
        ):
            # Copies: the columns of the window are wider.
            boxes = [part.numbers[first : last + 1, : dims[row]].copy() for part in (chunks.offsets, chunks.sizes)]
            tensors.append(RegularTensor(properties[row], tuple(shapes[row][: dims[row]]), *boxes))
        full = heads.shape.dims[:count] > 0
        memoised = 5 + np.where(full, 3, 2) + (heads.last - heads.first + 1)[:count] * np.where(full, 8, 6)
        written = heads.key.written[: count - 1]
        before = np.cumsum(memoised)[:-1] + np.cumsum(written) - written
        numbers = np.where(written, before, -1).tolist()
        return TensorRun(int(heads.end[count - 1]), int(memoised.sum() + written.sum()), tensors, keys, numbers)

    def _of_state(self, kind: str, state: tuple[int, ...]) -> PObject | None:
        """Properties with this state; None if it has values that are neither names nor small objects."""
        if state not in self._properties:
            dtype, layout, requires_grad, memory_format, pin_memory = state
            parts = [self._value_of(number) for number in (dtype, layout, memory_format)]
            if not all(type(part) in (Global, PObject) for part in parts):
                return None
            values = PTuple((parts[0], parts[1], bool(requires_grad), parts[2], bool(pin_memory)))
            cls = Global(*kind.rsplit(".", 1))
            self._properties[state] = PObject("newobj", cls, PTuple(), state=values, has_state=True)
        return self._properties[state]

    def _keys(self, window: Window, texts: Texts, count: int) -> list[str]:
        """The keys behind the first tensors, up to one that is not known to be a text."""
        found: list[str] = []
        columns = (texts.written, texts.start, texts.end, texts.memo)
        for written, start, end, number in zip(*(column[: max(count, 0)].tolist() for column in columns), strict=True):
            text = _decoded(window.data[start:end]) if written else self._text_of(number)
            if text is None:
                break
            found.append(text)
        return found


def _decoded(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None


def _heads(cursor: Cursor, starts: Column, chunks: ChunkRecords, gets: Mapping[str, bytes]) -> _Heads:
    """Move over the tensors, from their properties on, and over the next key."""
    everywhere = cursor.regular.copy()
    dtype, layout = cursor.fetched(everywhere), cursor.fetched(everywhere)
    requires_grad = cursor.flag(everywhere)
    memory_format = cursor.fetched(everywhere)
    pin_memory = cursor.flag(everywhere)
    cursor.skip(b"t\x94b" + gets["size"] + gets[names.SIZE])
    shape = cursor.size(everywhere)
    cursor.skip(gets["chunks"] + b"]\x94")
    marked = cursor.meets(b"(")
    cursor.skip(b"(", marked)
    first, last = chunks.of_lists(cursor, shape.dims)
    cursor.at = chunks.ends[last]
    cursor.regular &= marked | (first == last)
    cursor.skip(b"e", marked)
    cursor.skip(b"a", ~marked)
    cursor.skip(b"ub")
    good, end = cursor.regular.copy(), cursor.at
    batch = cursor.meets(b"u(")
    cursor.skip(b"u(", batch)
    key = cursor.text()
    linked = cursor.regular & np.append(cursor.at[:-1] == starts[1:], [False])
    state = dtype, layout, requires_grad.astype(np.int64), memory_format, pin_memory.astype(np.int64)
    return _Heads(state, shape, first, last, key, end, good, linked)


def _whole(heads: _Heads, starts: Column, chunks: ChunkRecords, window: Window) -> int:
    """The number of regular tensors that follow one another, and whose opcodes no end of a frame divides."""
    follows = heads.good.copy()
    follows[1:] &= heads.linked[:-1]
    count = len(follows) if follows.all() else int(np.argmin(follows))
    for cut in window.cuts:
        row = int(np.searchsorted(starts, cut, side="right")) - 1
        if row >= count or (row == count - 1 and cut >= heads.end[row]):
            break
        chunk = min(int(np.searchsorted(chunks.starts, cut, side="right")) - 1, int(heads.last[row]))
        # Whatever lies before it in the tensor has been read: look from there on.
        known = int(starts[row])
        if chunk >= heads.first[row]:
            known = int(chunks.ends[chunk] if cut >= chunks.ends[chunk] else chunks.starts[chunk])
        if not window.divides(known, cut):
            return row
    return count


# Reads runs of places: the entries of the dict `storage_data`.
#
# Source: torch 2.13.0 `distributed/checkpoint/metadata.py` (`MetadataIndex.__init__` sets fqn, index and offset in this
# order), `distributed/checkpoint/filesystem.py` (`_StorageInfo`: relative_path, offset, length, transform_descriptors).

_NEEDED_OF_PLACES = frozenset(
    {names.INDEX, names.PLACE, names.SIZE, "fqn", "index", "offset", "relative_path", "length"}
)


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
        if not gets.keys() >= _NEEDED_OF_PLACES:
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


def _index(cursor: Cursor, gets: Mapping[str, bytes]) -> tuple[Texts, Flags, Sizes]:
    """Move over the fields of a `MetadataIndex`, from the name on: the name, and the corner where there is one."""
    fqn = cursor.text()
    cursor.skip(gets["index"])
    cursor.skip_number_or_none()
    opened = gets["offset"] + gets[names.SIZE]
    sharded = cursor.meets(opened)
    cursor.skip(opened, sharded)
    return fqn, sharded, cursor.size(sharded)


def _fields(cursor: Cursor, gets: Mapping[str, bytes]) -> _Fields:
    """Move over the entries, from the name on."""
    fqn, sharded, corner = _index(cursor, gets)
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


# Reads runs of plan items, which Megatron stores in the attribute `all_local_plans`, and of which nothing is kept.
#
# The plans of all ranks are half of such a file or more. No reader needs them, but the memo goes on behind them.
#
# Source: megatron-core 0.16.1 `dist_checkpointing/strategies/state_dict_saver.py` (`all_local_plans`); torch 2.13.0
# `distributed/checkpoint/planner.py` (`WriteItem`: index, type, bytes_io_data, tensor_data; `TensorWriteData`: chunk,
# properties, size), verified by running both.

_NEEDED_OF_PLANS = frozenset(
    {names.ITEM, names.ITEM_DATA, names.INDEX, names.SIZE, "fqn", "index", "offset", "type", "tensor_data", "chunk"}
    | {"properties", "size"}
)


@dataclass(frozen=True, slots=True)
class PlanRun:
    """Items that follow one another in a list. They are checked as opcodes, and not kept."""

    end: int
    memoised: int
    count: int

    def __len__(self) -> int:
        return self.count

    def text(self, number: int) -> str | None:
        """No text of an item is fetched by anything that a reader needs."""
        return None


def plan_run(window: Window, base: int, gets: Mapping[str, bytes], is_shallow: Callable[[int], bool]) -> PlanRun | None:
    """The regular items with which a window begins; None if there is none.

    Args:
        window: A part of the stream from the position of a record on.
        base: The number of the next value in the memo.
        gets: The opcodes that fetch classes and names of attributes from the memo.
        is_shallow: True for the number of a value in the memo that can be fetched without a look at its depth.
    """
    if not gets.keys() >= _NEEDED_OF_PLANS:
        return None
    head = gets[names.ITEM] + OPENED + gets["index"] + gets[names.INDEX] + OPENED + gets["fqn"]
    starts = record_starts(window, head)
    if starts is None:
        return None
    cursor = Cursor(window, starts + len(head))
    memoised, fetched = _items(cursor, gets)
    count = record_count(cursor, starts, window, b"e(")
    before = base + np.cumsum(memoised) - memoised
    for numbers, where in fetched:
        count = min(count, _known(numbers[:count], where[:count], before[:count], is_shallow))
    if count == 0:
        return None
    return PlanRun(int(cursor.at[count - 1]), int(memoised[:count].sum()), count)


def _known(numbers: Column, where: Flags, before: Column, is_shallow: Callable[[int], bool]) -> int:
    """The number of first records that fetch only values that are in the memo before them, and not deep."""
    if not len(numbers):
        return 0
    each, inverse = np.unique(numbers, return_inverse=True)
    base = int(before[0])
    # Values of this run are no deeper than those of any other.
    shallow = np.array([n >= base or is_shallow(n) for n in each.tolist()], np.bool_)[inverse]
    good = ~where | (shallow & (numbers < before))
    return len(good) if good.all() else int(np.argmin(good))


def _items(cursor: Cursor, gets: Mapping[str, bytes]) -> tuple[Column, list[tuple[Column, Flags]]]:
    """Move over the items, from the name on: how many values each puts into the memo, and what it fetches."""
    everywhere = cursor.regular.copy()
    fqn, sharded, corner = _index(cursor, gets)
    cursor.skip(b"ub" + gets["type"])
    fetched = [(fqn.memo, ~fqn.written), (cursor.fetched(everywhere), everywhere)]
    if "bytes_io_data" in gets:
        nothing = gets["bytes_io_data"] + b"N"
        cursor.skip(nothing, cursor.meets(nothing))
    cursor.skip(gets["tensor_data"] + gets[names.ITEM_DATA] + OPENED + gets["chunk"])
    fetched.append((cursor.fetched(everywhere), everywhere))
    cursor.skip(gets["properties"])
    made = _properties(cursor, gets.get(names.PROPERTY), fetched)
    cursor.skip(gets["size"])
    written = cursor.meets(gets[names.SIZE])
    cursor.skip(gets[names.SIZE], written)
    shape = cursor.size(written)
    fetched.append((cursor.fetched(~written), ~written))
    cursor.skip(b"ubub")
    memoised = 6 + fqn.written + 2 * made
    for size, where in ((corner, sharded), (shape, written)):
        memoised += where * np.where(size.dims > 0, 3, 2)
    return memoised, fetched


def _properties(cursor: Cursor, cls: bytes | None, fetched: list[tuple[Column, Flags]]) -> Flags:
    """Move over the properties of a tensor, which are fetched or made: true where they are made."""
    made = np.zeros(len(cursor.at), np.bool_)
    if cls is not None:
        opened = cls + b")\x81\x94("
        made = cursor.meets(opened)
        cursor.skip(opened, made)
    # Element type and layout, or the properties themselves.
    fetched.append((cursor.fetched(np.ones(len(made), np.bool_)), np.ones(len(made), np.bool_)))
    fetched.append((cursor.fetched(made), made))
    cursor.flag(made)
    fetched.append((cursor.fetched(made), made))
    cursor.flag(made)
    cursor.skip(b"t\x94b", made)
    return made
