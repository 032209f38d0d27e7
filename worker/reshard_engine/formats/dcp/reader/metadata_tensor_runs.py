"""Reads runs of tensors: entries of the dict `state_dict_metadata`, each with the list of its chunks.

Source: torch 2.13.0 `distributed/checkpoint/metadata.py` (`TensorStorageMetadata`: properties, size, chunks;
`TensorProperties.__getstate__`, a tuple of five).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from reshard_engine.formats.dcp.reader import metadata_names as names
from reshard_engine.formats.dcp.reader.metadata import Column
from reshard_engine.formats.dcp.reader.metadata_chunk_runs import ChunkRecords, chunk_records
from reshard_engine.formats.dcp.reader.metadata_cursor import Cursor, Flags, Sizes, Texts, Window
from reshard_engine.formats.dcp.reader.metadata_runs import OPENED, record_positions
from reshard_engine.pickles.nodes import Global, Node, PObject, PTuple

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
