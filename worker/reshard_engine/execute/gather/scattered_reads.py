"""Stretches: runs of source bytes and the places in memory where they go, as columns; read together, put in place.

A unit of small tensors has tens of thousands of stretches, a unit of large ones a few: the first are moved by index,
all at once, the second by copies. Nothing here works on one stretch at a time where there are many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from reshard_engine.containers.source_file import SourceFile
from reshard_engine.execute.casts.cast import CastKernel
from reshard_engine.execute.casts.losses import Losses, losses_of, may_lose
from reshard_engine.execute.casts.rows import Buffer, Column, Kind, Rows, copy_rows
from reshard_engine.execute.gather.concurrent_reads import Flights
from reshard_engine.plan.budget import READ_BATCH_BYTES
from reshard_engine.tensors.dtypes import Dtype

GAP_BYTES = 64 << 10
"""Unwanted bytes between two stretches that are still cheaper to read than to skip."""


@dataclass(frozen=True, slots=True)
class Stretches:
    """Packed runs of elements in source files. `length` counts bytes of the source, `at` bytes of the memory."""

    file: Column
    offset: Column
    length: Column
    at: Column
    tensor: Column
    kind: Column
    """Index into the kinds of the `Mover`."""

    def __len__(self) -> int:
        return len(self.file)

    def rows(self, rows: slice | Column) -> Stretches:
        """Some of them."""
        return Stretches(
            self.file[rows], self.offset[rows], self.length[rows], self.at[rows], self.tensor[rows], self.kind[rows]
        )

    @staticmethod
    def joined(parts: Sequence[Stretches]) -> Stretches:
        """All of several."""
        if len(parts) == 1:
            return parts[0]
        return Stretches(
            np.concatenate([p.file for p in parts]),
            np.concatenate([p.offset for p in parts]),
            np.concatenate([p.length for p in parts]),
            np.concatenate([p.at for p in parts]),
            np.concatenate([p.tensor for p in parts]),
            np.concatenate([p.kind for p in parts]),
        )


@dataclass
class Mover:
    """Reads stretches and puts them into memory; counts what it read and what casts lost."""

    files: Sequence[SourceFile]
    kernel: CastKernel
    saturate: bool = False
    """Whether finite elements that become infinite are to be the largest number of their sign."""
    pool: Executor | None = None
    """Where reads run beside one another, if each waits for a network; else they are made one after another."""
    read_bytes: int = 0
    losses: dict[int, Losses] = field(default_factory=dict[int, Losses])
    """What casts lost, per tensor."""
    _kinds: list[Kind] = field(default_factory=list[Kind])
    _numbers: dict[Kind, int] = field(default_factory=dict[Kind, int])

    def kind(self, source: Dtype, target: Dtype, *, counted: bool = True) -> int:
        """The number of a kind."""
        wanted = Kind(source, target, counted)
        if wanted not in self._numbers:
            self._numbers[wanted] = len(self._kinds)
            self._kinds.append(wanted)
        return self._numbers[wanted]

    def read(self, file: int, offset: int, target: Buffer) -> None:
        """Read one run of bytes to where it goes."""
        self.files[file].read_into(offset, target.data)
        self.read_bytes += len(target)

    def move(self, stretches: Stretches, memory: Buffer) -> None:
        """Read all stretches in file order, near ones together, and put each where it belongs."""
        batches = self._batches(self._bounded(stretches))
        if self.pool is None:
            for batch in batches:
                self._move_batch(batch, memory)
            return
        with Flights(self.pool, READ_BATCH_BYTES) as flights:
            for batch in batches:
                self._send(flights, batch, memory)

    def _bounded(self, stretches: Stretches) -> Stretches:
        """Stretches cut so that none that is staged is larger than a read batch."""
        long = stretches.length > READ_BATCH_BYTES
        if not long.any():
            return stretches
        parts = [stretches.rows(np.flatnonzero(~long))]
        for row in _positions(long):
            kind = self._kinds[int(stretches.kind[row])]
            if not kind.casts and self.pool is None:
                parts.append(stretches.rows(slice(row, row + 1)))
                continue
            starts = np.arange(0, int(stretches.length[row]), READ_BATCH_BYTES, dtype=np.int64)
            count = len(starts)
            parts.append(
                Stretches(
                    np.repeat(stretches.file[row], count),
                    stretches.offset[row] + starts,
                    np.minimum(int(stretches.length[row]) - starts, READ_BATCH_BYTES),
                    stretches.at[row] + starts // kind.source.itemsize_bytes * kind.target.itemsize_bytes,
                    np.repeat(stretches.tensor[row], count),
                    np.repeat(stretches.kind[row], count),
                )
            )
        return Stretches.joined(parts)

    def _batches(self, stretches: Stretches) -> Iterator[Stretches]:
        """Runs of near stretches of one file, in file order, none longer than a read batch unless it is one alone."""
        if len(stretches) < 2:
            if len(stretches):
                yield stretches
            return
        ordered = stretches.rows(np.lexsort((stretches.offset, stretches.file)))
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

    def _move_batch(self, batch: Stretches, memory: Buffer) -> None:
        file, start = int(batch.file[0]), int(batch.offset[0])
        if self._is_straight(batch):
            at = int(batch.at[0])
            self.read(file, start, memory[at : at + int(batch.length[0])])
            return
        staging = self.kernel.staging(_extent(batch))
        self.read(file, start, staging)
        self._place_all(batch, staging, memory)

    def _send(self, flights: Flights, batch: Stretches, memory: Buffer) -> None:
        """The same, with the read on its way beside others."""
        file, start = self.files[int(batch.file[0])], int(batch.offset[0])
        length, straight = _extent(batch), self._is_straight(batch)
        at = int(batch.at[0])
        place = memory[at : at + length] if straight else np.empty(length, dtype=np.uint8)

        def land() -> None:
            self.read_bytes += length
            if not straight:
                self._place_all(batch, place, memory)

        flights.send(partial(file.read_into, start, place.data), land, staged_bytes=0 if straight else length)

    def _is_straight(self, batch: Stretches) -> bool:
        """Whether the bytes go to one place as they are."""
        return len(batch) == 1 and not self._kinds[int(batch.kind[0])].casts

    def _place_all(self, batch: Stretches, staging: Buffer, memory: Buffer) -> None:
        start = int(batch.offset[0])
        kinds: list[int] = sorted(set(batch.kind.tolist()))
        for number in kinds:
            some = batch if len(kinds) == 1 else batch.rows(np.flatnonzero(batch.kind == number))
            self._place(some, staging, start, self._kinds[number], memory)

    def _place(self, some: Stretches, staging: Buffer, start: int, kind: Kind, memory: Buffer) -> None:
        if not kind.casts:
            copy_rows(staging, some.offset - start, memory, some.at, some.length)
            return
        rows = Rows(some.offset - start, some.length, some.at)
        if self.kernel.cast_rows(rows, staging, memory, kind) and may_lose(kind.source, kind.target):
            self._look_at(some.tensor, rows, staging, memory, kind)

    def _look_at(self, tensors: Column, rows: Rows, staging: Buffer, memory: Buffer, kind: Kind) -> None:
        narrow = rows.length // kind.source.itemsize_bytes * kind.target.itemsize_bytes
        columns = tensors, rows.begin, rows.length, rows.at, narrow
        for tensor, low, length, at, count in zip(*(c.tolist() for c in columns), strict=True):
            place = memory[at : at + count]
            before, after = _aligned(staging[low : low + length]), _aligned(place)
            lost = losses_of(before, after, kind.source, kind.target, saturate=self.saturate)
            if lost.overflowed and after is not place:
                place[:] = after
            if lost and kind.counted:
                self.losses[tensor] = self.losses.get(tensor, Losses()) + lost

    def place_one(self, tensor: int, data: Buffer, target: Buffer, kind: Kind) -> None:
        """Put the elements of one stretch that are in memory already."""
        if not kind.casts:
            target[:] = data
            return
        one, zero = np.array([len(data)], dtype=np.int64), np.zeros(1, dtype=np.int64)
        stretch = Stretches(zero, zero, one, zero, np.array([tensor], dtype=np.int64), zero)
        self._place(stretch, data, 0, kind, target)


def _extent(batch: Stretches) -> int:
    """Bytes from the first stretch's beginning to the last end."""
    return int((batch.offset + batch.length).max()) - int(batch.offset[0])


def _positions(marks: npt.NDArray[np.bool_]) -> list[int]:
    return np.flatnonzero(marks).tolist()


def _aligned(data: Buffer) -> Buffer:
    """The bytes where elements of any type may begin: numpy's views of wider elements want that."""
    return data.copy() if data.ctypes.data % 8 else data
