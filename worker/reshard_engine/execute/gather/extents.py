"""Extents: packed runs of source bytes and their places in memory, as columns. Neighbours are read together.

A unit of small tensors has tens of thousands of extents, which are put in place together, by index. A unit of large
tensors has a few extents, which are copied one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from reshard_engine.containers.source_file import SourceFile
from reshard_engine.execute.casts.placing import PlacedRows, Placer, ReadCounts
from reshard_engine.execute.casts.rows import ByteArray, Column, Rows
from reshard_engine.execute.gather.concurrent_reads import ConcurrentReads
from reshard_engine.plan.budget import READ_BATCH_BYTES

GAP_BYTES = 64 << 10
"""Largest gap between two extents for which reading the gap is cheaper than a second read."""


@dataclass(frozen=True, slots=True)
class Extents:
    """Packed runs of elements in source files. `length` counts bytes of the source, `at` counts bytes of the memory."""

    file: Column
    offset: Column
    length: Column
    at: Column
    tensor: Column
    kind: Column
    """The number of the row's kind in `Placer.kinds`."""

    def __len__(self) -> int:
        return len(self.file)

    def rows(self, rows: slice | Column) -> Extents:
        """The extents with these indices."""
        return Extents(*(column[rows] for column in self.columns()))

    def columns(self) -> tuple[Column, ...]:
        """The columns in their order."""
        return self.file, self.offset, self.length, self.at, self.tensor, self.kind

    def placed(self) -> PlacedRows:
        """The extents as rows of a memory that holds the file's bytes from the first extent on."""
        return PlacedRows(Rows(self.offset - int(self.offset[0]), self.length, self.at), self.tensor, self.kind)

    @staticmethod
    def joined(several: Sequence[Extents]) -> Extents:
        """The extents of all arguments, in order."""
        if len(several) == 1:
            return several[0]
        return Extents(*map(np.concatenate, zip(*(e.columns() for e in several), strict=True)))


@dataclass(frozen=True, slots=True)
class ExtentReader:
    """Reads extents and has a `Placer` put them in place."""

    files: Sequence[SourceFile]
    placer: Placer
    counts: ReadCounts
    pool: Executor | None
    """The pool for concurrent reads over a network. Without a pool, reads run one after another."""

    def read_one(self, file: int, offset: int, target: ByteArray) -> None:
        """Read one run of bytes directly into its place."""
        self.files[file].read_into(offset, target.data)
        self.counts.read_bytes += len(target)

    def read(self, extents: Extents, memory: ByteArray) -> None:
        """Read all extents in file order, with one read for neighbours, and put each in place."""
        batches = self._batches(self._bounded(extents))
        if self.pool is None:
            for batch in batches:
                self._read_batch(batch, memory)
            return
        with ConcurrentReads(self.pool, READ_BATCH_BYTES) as reads:
            for batch in batches:
                self._start(reads, batch, memory)

    def _bounded(self, extents: Extents) -> Extents:
        """The extents; those that must be staged and are larger than a read batch are cut."""
        long = extents.length > READ_BATCH_BYTES
        if not long.any():
            return extents
        parts = [extents.rows(np.flatnonzero(~long))]
        for row in _positions(long):
            kind = self.placer.kinds[int(extents.kind[row])]
            if kind.source is kind.target and self.pool is None:
                parts.append(extents.rows(slice(row, row + 1)))
                continue
            starts = np.arange(0, int(extents.length[row]), READ_BATCH_BYTES, dtype=np.int64)
            count = len(starts)
            parts.append(
                Extents(
                    np.repeat(extents.file[row], count),
                    extents.offset[row] + starts,
                    np.minimum(int(extents.length[row]) - starts, READ_BATCH_BYTES),
                    extents.at[row] + starts // kind.source.itemsize_bytes * kind.target.itemsize_bytes,
                    np.repeat(extents.tensor[row], count),
                    np.repeat(extents.kind[row], count),
                )
            )
        return Extents.joined(parts)

    def _batches(self, extents: Extents) -> Iterator[Extents]:
        """Groups of neighbouring extents of a file, in file order. A group of several is at most a read batch long."""
        if len(extents) < 2:
            if len(extents):
                yield extents
            return
        ordered = extents.rows(np.lexsort((extents.offset, extents.file)))
        ends = ordered.offset + ordered.length
        far = (ordered.file[1:] != ordered.file[:-1]) | (ordered.offset[1:] - ends[:-1] > GAP_BYTES)
        breaks = [number + 1 for number in _positions(far)]
        for low, high in zip([0, *breaks], [*breaks, len(ordered)], strict=True):
            first = low
            while first < high:
                limit = int(ordered.offset[first]) + READ_BATCH_BYTES
                within = int(np.searchsorted(ordered.offset[first:high], limit))
                past = _positions(ends[first : first + within] > limit)
                last = first + max(1, past[0] if past else within)
                yield ordered.rows(slice(first, last))
                first = last

    def _read_batch(self, batch: Extents, memory: ByteArray) -> None:
        file, start = int(batch.file[0]), int(batch.offset[0])
        if self._is_straight(batch):
            at = int(batch.at[0])
            self.read_one(file, start, memory[at : at + int(batch.length[0])])
            return
        length = _span(batch)
        self.placer.read_and_place(partial(self.files[file].read_into, start), length, batch.placed(), memory)
        self.counts.read_bytes += length

    def _start(self, reads: ConcurrentReads, batch: Extents, memory: ByteArray) -> None:
        """Start the read of a batch, concurrently with other batches."""
        file, start = self.files[int(batch.file[0])], int(batch.offset[0])
        length, straight = _span(batch), self._is_straight(batch)
        at = int(batch.at[0])
        place = memory[at : at + length] if straight else np.empty(length, dtype=np.uint8)

        def finish() -> None:
            self.counts.read_bytes += length
            if not straight:
                self.placer.place(batch.placed(), place, memory)

        reads.start(partial(file.read_into, start, place.data), finish, staged_bytes=0 if straight else length)

    def _is_straight(self, batch: Extents) -> bool:
        """True if a batch is one extent whose bytes are not cast, so that it is read directly into its place."""
        kind = self.placer.kinds[int(batch.kind[0])]
        return len(batch) == 1 and kind.source is kind.target


def _span(batch: Extents) -> int:
    """The number of bytes from the begin of the first extent to the last end."""
    return int((batch.offset + batch.length).max()) - int(batch.offset[0])


def _positions(marks: npt.NDArray[np.bool_]) -> list[int]:
    return np.flatnonzero(marks).tolist()
