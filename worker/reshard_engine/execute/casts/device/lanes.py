"""Lanes: streams to a device, each with pinned memory for both directions. Two lanes take turns.

While the device computes the slice of one lane, the host fills and sends the memory of the other lane.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from reshard.errors import IntegrityError
from reshard_engine.execute.casts.cast import NumpyCast
from reshard_engine.execute.casts.device.program import run
from reshard_engine.execute.casts.device.sums import ROW_BYTES, padded_bytes, position_sum
from reshard_engine.execute.casts.rows import INDEXED_BYTES, ByteArray, Rows, copy_rows, starts_of
from reshard_engine.plan.budget import READ_BATCH_BYTES
from reshard_engine.tensors.dtypes import Dtype

LANES = 2
LANE_FACTOR = 32
"""Device memory that a lane takes per byte of its slice, at most. The worst case: 16-bit elements are gathered by index
and widened. `tests/property/test_device_casts.py` compares this number with a trace of all allocations."""
_SAMPLE_ELEMS = 128
_CPU_FIX = "cast on the CPU: unset RESHARD_DEVICE; if it happens again there, please report it"
_MAX_ROWS = 1 << 16
_LEAST_SLICE_BYTES = 64 << 10
Facts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Job:
    """A slice that was sent to the device."""

    staged: torch.Tensor
    """The bytes that were sent: whole rows of `sums`."""
    rows: Rows
    """The rows within `staged`, in bytes; `at` is their place in the target."""
    sums: int
    count: int
    kinds: tuple[Dtype, Dtype]
    gathers: bool


class _NoStream(contextlib.nullcontext[None]):
    """The stream of a device without streams: each operation is complete when its call returns."""

    def synchronize(self) -> None:
        """Do nothing: every operation is already complete."""


@dataclass(frozen=True, slots=True)
class Source:
    """The memory that holds a batch."""

    memory: ByteArray
    pinned: torch.Tensor
    """The same memory and the bytes behind it, if it is pinned; else an empty tensor."""


def _pinned(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(count, dtype=dtype, pin_memory=device.type == "cuda")


class _Staging(threading.local):
    """The pinned memory into which a thread reads its batches."""

    tensor: torch.Tensor | None = None


class _Lane:
    """One stream, with the pinned memory for its slices and their results."""

    def __init__(self, device: torch.device, slice_bytes: int) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else _NoStream()
        self._in = _pinned(2 * slice_bytes + ROW_BYTES, torch.uint8, device)
        # An element of two bytes may become one of four.
        self._out = _pinned(2 * slice_bytes + ROW_BYTES, torch.uint8, device)
        self._columns = _pinned(2 * _MAX_ROWS, torch.int32, device)
        self._facts = _pinned(4, torch.int64, device)
        self._reference = NumpyCast()
        self.job: _Job | None = None

    def submit(self, source: Source, rows: Rows, kinds: tuple[Dtype, Dtype], slice_bytes: int) -> None:
        """Send rows of the source to the device: directly if the source is pinned, else from this lane's memory."""
        size, total, single = kinds[0].itemsize_bytes, int(rows.length.sum()), len(rows.length) == 1
        low, high = int(rows.begin.min()) // 8 * 8, int((rows.begin + rows.length).max())
        gathers = total < len(rows.length) * INDEXED_BYTES and high - low <= 2 * slice_bytes
        aligned = not (rows.begin % size).any()
        padded = padded_bytes(high - low)
        if aligned and (gathers or single) and low + padded <= len(source.pinned):
            staged, begin = source.pinned[low : low + padded], rows.begin - low
        else:
            if aligned and gathers:
                held, begin = high - low, rows.begin - low
                self._in.numpy()[:held] = source.memory[low:high]
            else:
                gathers, held, begin = False, total, starts_of(rows.length)
                copy_rows(source.memory, rows.begin, self._in.numpy(), begin, rows.length)
            staged = self._in[: padded_bytes(held)]
            staged.numpy()[held:] = 0
        sums, moved = position_sum(staged.numpy()), Rows(begin, rows.length, rows.at)
        self.job = _Job(staged, moved, sums, total // size, kinds, gathers)
        self._send(self.job)

    def _send(self, job: _Job) -> None:
        size, count = job.kinds[0].itemsize_bytes, len(job.rows.length)
        if job.gathers:
            columns = self._columns.numpy()
            columns[:count], columns[count : 2 * count] = job.rows.begin // size, job.rows.length // size
        result_bytes = padded_bytes(job.count * job.kinds[1].itemsize_bytes)
        with self._on_stream():
            data = job.staged.to(self._device, non_blocking=True)
            rows: torch.Tensor | int = int(job.rows.begin[0]) // size
            if job.gathers:
                rows = self._columns[: 2 * count].to(self._device, non_blocking=True).view(2, -1)
            outcome = run(data, rows, job.count, job.kinds, result_bytes)
            self._out[:result_bytes].copy_(outcome.data, non_blocking=True)
            self._facts.copy_(outcome.facts, non_blocking=True)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._cuda else self._stream

    def finish(self, target: ByteArray) -> Facts:
        """Wait for the slice, check it and put the results in place.

        Raises:
            IntegrityError: `integrity.mismatch` if bytes changed during a transfer, or if the device casts wrongly.
        """
        job, self.job = self.job, None
        assert job is not None
        self._stream.synchronize()
        facts: Facts = self._facts.numpy().copy()
        wide, narrow = (k.itemsize_bytes for k in job.kinds)
        result = self._out.numpy()[: padded_bytes(job.count * narrow)]
        if int(facts[0]) != job.sums:
            raise IntegrityError(
                "integrity.mismatch", f"{self._device} received other bytes than were sent", fix=_CPU_FIX
            )
        if int(facts[1]) != position_sum(result):
            raise IntegrityError(
                "integrity.mismatch", f"other bytes came back from {self._device} than it computed", fix=_CPU_FIX
            )
        self._check_sample(job, result)
        length = job.rows.length // wide * narrow
        copy_rows(result, starts_of(length), target, job.rows.at, length)
        return facts

    def _check_sample(self, job: _Job, result: ByteArray) -> None:
        """Cast some elements again with the reference: a faulty device computes many elements wrongly."""
        wide, narrow = (k.itemsize_bytes for k in job.kinds)
        number = np.unique(np.linspace(0, job.count - 1, _SAMPLE_ELEMS).astype(np.int64))
        starts = starts_of(job.rows.length) // wide
        row = np.searchsorted(starts, number, side="right") - 1
        place = job.rows.begin[row] // wide + number - starts[row]
        staged = job.staged.numpy()
        before = staged[: len(staged) // wide * wide].reshape(-1, wide)[place]
        expected = self._reference.cast(before.reshape(-1), *job.kinds)
        if result.reshape(-1, narrow)[number].tobytes() != expected.tobytes():
            raise IntegrityError(
                "integrity.mismatch", f"{self._device} casts differently from the reference", fix=_CPU_FIX
            )

    def drain(self) -> None:
        """Wait for the slice in flight and drop it."""
        self._stream.synchronize()
        self.job = None


class Station:
    """A set of lanes that one thread uses at a time."""

    def __init__(self, device: torch.device, slice_bytes: int) -> None:
        """Allocate the pinned memory of the lanes."""
        self.slice_bytes = slice_bytes
        self._lanes = [_Lane(device, slice_bytes) for _ in range(LANES)]

    def cast(
        self, rows: Rows, source: Source, target: ByteArray, kinds: tuple[Dtype, Dtype], slice_bytes: int
    ) -> Facts:
        """Cast rows from one memory to another; returns the facts of all slices, added up (see `program.Outcome`).

        Args:
            rows: The rows, in bytes.
            source: The memory that holds them.
            target: The memory for the results.
            kinds: The source type and the target type.
            slice_bytes: Bytes of a slice: at most the station's own number, or less if the device ran out of memory.
        """
        found = np.zeros(4, dtype=np.int64)
        try:
            for turn, some in enumerate(slices(rows, kinds, slice_bytes)):
                lane = self._lanes[turn % LANES]
                if lane.job is not None:
                    found += lane.finish(target)
                lane.submit(source, some, kinds, slice_bytes)
            for lane in self._lanes:
                if lane.job is not None:
                    found += lane.finish(target)
        finally:
            for lane in self._lanes:
                lane.drain()
        return found


def slices(rows: Rows, kinds: tuple[Dtype, Dtype], slice_bytes: int) -> Iterator[Rows]:
    """The rows in groups of at most `slice_bytes`; longer rows are cut."""
    wide, narrow = (k.itemsize_bytes for k in kinds)
    parts = -(-rows.length // slice_bytes)
    if int(parts.max()) > 1:
        owner = np.repeat(np.arange(len(parts)), parts)
        shift = (np.arange(len(owner)) - starts_of(parts)[owner]) * slice_bytes
        rows = Rows(
            rows.begin[owner] + shift,
            np.minimum(rows.length[owner] - shift, slice_bytes),
            rows.at[owner] + shift // wide * narrow,
        )
    ends, first = np.cumsum(rows.length), 0
    while first < len(ends):
        limit = int(ends[first] - rows.length[first]) + slice_bytes
        last = min(int(np.searchsorted(ends, limit, side="right")), first + _MAX_ROWS)
        yield Rows(rows.begin[first:last], rows.length[first:last], rows.at[first:last])
        first = last


class Stations:
    """As many stations as fit into the memory. A thread that finds no free station casts on the CPU."""

    def __init__(self, name: str, memory_bytes: int | None, *, most: int, slice_bytes: int) -> None:
        """Find the device and divide its memory: `memory_bytes`, or a quarter of the free memory if that is None.

        Raises:
            RuntimeError: There is no such device, or its memory is too small for slices of a useful size.
        """
        self.device = torch.device(name)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(f"torch sees no device {name}")
        budget = memory_bytes if memory_bytes is not None else self._free_bytes() // 4
        self.slice_bytes = min(slice_bytes, budget // (LANES * LANE_FACTOR) // ROW_BYTES * ROW_BYTES)
        if self.slice_bytes < min(slice_bytes, _LEAST_SLICE_BYTES):
            raise RuntimeError(f"{budget} bytes on {name} are not enough for a slice")
        self.count = max(1, min(most, budget // (LANES * LANE_FACTOR * self.slice_bytes)))
        self._staging = _Staging()
        self._free: list[Station] = []
        self._made = 0
        self._lock = threading.Lock()

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 4 << 30

    def staging(self, length_bytes: int) -> ByteArray:
        """Pinned memory for a batch, valid until this thread asks again; not pinned if it is more than a batch."""
        if length_bytes > READ_BATCH_BYTES:
            return np.empty(length_bytes, dtype=np.uint8)
        if self._staging.tensor is None:
            self._staging.tensor = _pinned(READ_BATCH_BYTES + ROW_BYTES, torch.uint8, self.device)
        return self._staging.tensor[:length_bytes].numpy()

    def source(self, memory: ByteArray) -> Source:
        """A memory as a `Source` for lanes."""
        pinned = self._staging.tensor
        if pinned is not None and 0 <= (first := memory.ctypes.data - pinned.data_ptr()) < len(pinned):
            return Source(memory, pinned[first:] if first % 8 == 0 else pinned[:0])
        return Source(memory, torch.empty(0, dtype=torch.uint8))

    def taken(self) -> Station | None:
        """Take a station that no other thread has; None if all are taken."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._made >= self.count:
                return None
            self._made += 1
        try:
            return Station(self.device, self.slice_bytes)
        except BaseException:
            with self._lock:
                self._made -= 1
            raise

    def put_back(self, station: Station) -> None:
        """Mark a station as free."""
        with self._lock:
            self._free.append(station)

    def empty_cache(self) -> None:
        """Return the device memory that torch caches."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
