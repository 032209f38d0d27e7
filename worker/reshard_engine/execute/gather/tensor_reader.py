"""The reader of elements of logical tensors, stored or derived. It counts read bytes and cast losses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import assert_never

import numpy as np

from reshard.errors import IntegrityError, printable
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.execute.casts.cast import CastKernel
from reshard_engine.execute.casts.placing import Placer, ReadCounts
from reshard_engine.execute.casts.rows import ByteArray, Column, Kind
from reshard_engine.execute.gather.computed import ComputedElements
from reshard_engine.execute.gather.extents import ExtentReader, Extents
from reshard_engine.execute.gather.read_item import ReadItem
from reshard_engine.execute.gather.strided import STRIDED_ELEMS, read_strided
from reshard_engine.tensors.derived import LoraBias, LoraMerge, Mean, Merged, NewRows
from reshard_engine.tensors.dtypes import Dtype
from reshard_engine.tensors.shard_map import Piece, Pieces
from reshard_engine.tensors.views import View

STRAIGHT_BYTES = 128 << 10
"""Least bytes in one piece that are read by a separate read. Shorter runs are read together with their neighbours."""


class TensorReader:
    """Reads elements of a checkpoint's tensors."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        kernel: CastKernel,
        *,
        saturate: bool = False,
        pool: Executor | None = None,
        counts: ReadCounts | None = None,
    ) -> None:
        """Make a reader; nothing is read yet.

        Args:
            checkpoint: The source of all elements.
            kernel: The kernel that casts them.
            saturate: True to turn finite elements that would become infinite into the largest number of their sign.
            pool: The pool for concurrent reads, if any.
            counts: The object that counts read bytes and losses; None for a new one.
        """
        self.counts = ReadCounts() if counts is None else counts
        self._files = checkpoint.files
        self._map = checkpoint.shard_map
        self._placer = Placer(kernel, self.counts.losses, saturate=saturate)
        self._extents = ExtentReader(checkpoint.files, self._placer, self.counts, pool)
        self._computed = ComputedElements(checkpoint.shard_map, kernel, self.elements)
        self._piece: Piece | None = None
        self._numbers: dict[Kind, int] = {}

    def elements(self, tensor: int, dtype: Dtype, begin: int, end: int, *, counted: bool = True) -> ByteArray:
        """The elements `[begin, end)` of a tensor, in row-major order, as `dtype`."""
        memory = np.empty((end - begin) * dtype.itemsize_bytes, dtype=np.uint8)
        self.read([ReadItem(tensor, dtype, begin, end, 0, counted)], memory)
        return memory

    def elements_into(self, tensor: int, dtype: Dtype, begin: int, memory: ByteArray) -> None:
        """Fill memory with the elements of a tensor from `begin` on, in row-major order, as `dtype`."""
        self.read([ReadItem(tensor, dtype, begin, begin + len(memory) // dtype.itemsize_bytes, 0)], memory)

    def read(self, items: Iterable[ReadItem], memory: ByteArray) -> None:
        """Read all items. Elements that files hold are read together.

        Raises:
            SourceError: `source.changed`, or an error of the storage.
        """
        found: list[Extents] = []
        whole: list[ReadItem] = []
        tensors, derived = self._map.tensors, self._map.derived
        for item in items:
            if item.begin == item.end:
                continue
            if item.tensor in derived:
                found += self._extents_of_derived(item, memory)
            elif self._read_straight(item, memory):
                continue
            elif item.end - item.begin < tensors[item.tensor].numel:
                found += self._extents_of(item, memory)
            else:
                whole.append(item)
        if len(whole) == 1:
            found += self._extents_of(whole[0], memory)
        elif whole:
            found += self._extents_of_whole(whole, memory)
        if found:
            self._extents.read(Extents.joined(found), memory)

    def _extents_of_derived(self, item: ReadItem, memory: ByteArray) -> list[Extents]:
        """The extents of elements of a derived tensor. Elements that no file holds are computed at once instead."""
        origin = self._map.derived[item.tensor]
        match origin:
            case View() if self._map.is_computed(item.tensor):
                self.read(_items_of_view(item, origin), memory)
            case View():
                return self._extents_of(item, memory)
            case Mean() | LoraMerge() | LoraBias() | NewRows():
                self._compute(item, origin, memory)
            case _:
                assert_never(origin)
        return []

    def _compute(self, item: ReadItem, origin: Mean | Merged, memory: ByteArray) -> None:
        kind, size = self._kind(item), item.dtype.itemsize_bytes
        for low, data in self._computed.blocks(item, origin):
            at = item.at + (low - item.begin) * size
            end = at + len(data) // kind.source.itemsize_bytes * size
            self._placer.place_one(item.tensor, data, memory[at:end], kind)

    def _number(self, kind: Kind) -> int:
        number = self._numbers.setdefault(kind, len(self._numbers))
        if number == len(self._placer.kinds):
            self._placer.kinds.append(kind)
        return number

    def _kind(self, item: ReadItem) -> Kind:
        return Kind(self._map.tensors[item.tensor].dtype, item.dtype, item.counted)

    def _read_straight(self, item: ReadItem, memory: ByteArray) -> bool:
        """Read elements that lie in one piece and are not cast (most items of large tensors); False for other items."""
        stored = self._map.tensors[item.tensor].dtype
        length = (item.end - item.begin) * stored.itemsize_bytes
        if self._extents.pool is not None or stored is not item.dtype or length < STRAIGHT_BYTES:
            return False
        if self._piece is None or not self._piece.holds(item.tensor, item.begin, item.end):
            self._piece = self._map.piece_holding(item.tensor, item.begin, item.end)
            if self._piece is None:
                return False
        offset = self._piece.offset + (item.begin - self._piece.begin) * stored.itemsize_bytes
        self._extents.read_one(self._piece.file, offset, memory[item.at : item.at + length])
        return True

    def _extents_of(self, item: ReadItem, memory: ByteArray) -> list[Extents]:
        """The extents of some elements of one tensor. Elements of strided pieces are read at once instead."""
        stored = self._map.tensors[item.tensor]
        pieces = self._map.pieces(item.tensor, item.begin, item.end)
        if int((pieces.end - pieces.begin).sum()) != item.end - item.begin:
            raise IntegrityError("integrity.mismatch", f"no file holds some elements of {printable(stored.fqn)}")
        if self._map.strides:
            for row in np.flatnonzero(pieces.strides >= 0).tolist():
                self._read_strided(item, pieces, row, memory)
            pieces = pieces.rows(pieces.strides < 0)
        if not len(pieces.begin):
            return []
        at = item.at + (pieces.begin - item.begin) * item.dtype.itemsize_bytes
        length = (pieces.end - pieces.begin) * stored.dtype.itemsize_bytes
        tensor, kind = _filled(len(at), item.tensor), _filled(len(at), self._number(self._kind(item)))
        return [Extents(pieces.file.astype(np.int64), pieces.offset, length, at, tensor, kind)]

    def _extents_of_whole(self, items: Sequence[ReadItem], memory: ByteArray) -> list[Extents]:
        """The extents of many whole tensors, found by column operations instead of one by one."""
        tensors = np.array([i.tensor for i in items], dtype=np.int64)
        rows, owner = self._map.rows_of(tensors)
        if self._map.strides and bool((self._map.strides_of[rows] >= 0).any()):
            return [e for item in items for e in self._extents_of(item, memory)]
        stored = [self._map.tensors[i.tensor].dtype for i in items]
        kinds = [self._number(Kind(s, i.dtype, i.counted)) for s, i in zip(stored, items, strict=True)]
        size, narrow, at, kind = (
            np.array(values, dtype=np.int64)[owner]
            for values in (
                [s.itemsize_bytes for s in stored],
                [i.dtype.itemsize_bytes for i in items],
                [i.at for i in items],
                kinds,
            )
        )
        begin, end = self._map.begin[rows], self._map.end[rows]
        file = self._map.file[rows].astype(np.int64)
        return [Extents(file, self._map.offset[rows], (end - begin) * size, at + begin * narrow, tensors[owner], kind)]

    def _read_strided(self, item: ReadItem, pieces: Pieces, row: int, memory: ByteArray) -> None:
        """Read elements of a strided piece in parts, so that no second copy of a whole chunk is in memory."""
        kind, size = self._kind(item), item.dtype.itemsize_bytes
        file, offset = self._files[int(pieces.file[row])], int(pieces.offset[row])
        layout, itemsize = self._map.strides[int(pieces.strides[row])], kind.source.itemsize_bytes
        begin, end = int(pieces.begin[row]), int(pieces.end[row])
        for low in range(begin, end, STRIDED_ELEMS):
            stop = min(low + STRIDED_ELEMS, end)
            data = read_strided(file, offset, layout, itemsize, elements=(low, stop))
            self.counts.read_bytes += len(data)
            target = memory[item.at + (low - item.begin) * size : item.at + (stop - item.begin) * size]
            self._placer.place_one(item.tensor, data, target, kind)


def _items_of_view(item: ReadItem, view: View) -> Iterator[ReadItem]:
    """The items that read the elements of a view from the tensors that it consists of."""
    runs, size = view.runs(item.begin, item.end), item.dtype.itemsize_bytes
    columns = (c.tolist() for c in (runs.begin, runs.tensor, runs.source, runs.length))
    for begin, holder, source, length in zip(*columns, strict=True):
        at = item.at + (begin - item.begin) * size
        yield ReadItem(holder, item.dtype, source, source + length, at, item.counted)


def _filled(count: int, value: int) -> Column:
    return np.full(count, value, dtype=np.int64)
