"""Casts on a device: the kernel measures, chooses and falls back to the CPU; lanes are streams with pinned memory.

torch is imported when the first batch goes to the device, so a conversion that casts little never waits for the import.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reshard.errors import IntegrityError
from reshard_engine.execute.casts.cast import NumpyCast, may_lose
from reshard_engine.execute.casts.rows import INDEXED_BYTES, ByteArray, Kind, Rows, copy_rows, starts_of
from reshard_engine.plan.budget import READ_BATCH_BYTES
from reshard_engine.tensors.dtypes import Dtype

# The choice where a batch is cast: CPU and device are timed once per process and pair of types; the faster wins.

Pair = tuple[Dtype, Dtype]
_REPEATS = 3
_PARTS = 8
"""Ratio of the large sample's size to the small sample's."""


@dataclass(frozen=True, slots=True)
class Line:
    """A model of time: a fixed cost and a rate."""

    fixed_s: float
    bytes_per_s: float

    def seconds(self, size_bytes: int) -> float:
        """The time for so many source bytes, in seconds."""
        return self.fixed_s + size_bytes / self.bytes_per_s

    @staticmethod
    def through(small: tuple[int, float], large: tuple[int, float]) -> Line:
        """The line through two measured points (bytes, seconds); its fixed cost and its rate are never negative."""
        slope = (large[1] - small[1]) / (large[0] - small[0])
        if slope <= 0:  # noise: the larger one was not slower
            return Line(0.0, large[0] / large[1])
        return Line(max(0.0, large[1] - slope * large[0]), 1 / slope)


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured lines of one pair of types on this machine."""

    cpu: Line
    device: Line


class CostModel:
    """Decides by measurements. Concurrent units share the device, so bytes that already wait for it count too."""

    def __init__(self, time_cpu: Callable[[Pair, int], float], time_device: Callable[[Pair, int], float]) -> None:
        """Both functions cast a sample of the given number of source bytes and return the seconds that it took."""
        self._time = time_cpu, time_device
        self._lock, self._measuring = threading.Lock(), threading.Lock()
        self._queued_bytes = 0
        self.measured: dict[Pair, Measured] = {}

    def prefers_device(self, pair: Pair, size_bytes: int) -> bool:
        """True if the device would cast a batch faster than the CPU; False while another thread measures."""
        known = self.measured.get(pair)
        if known is None:
            if not self._measuring.acquire(blocking=False):
                return False
            try:
                known = self.measured[pair] = self._measure(pair, size_bytes)
            finally:
                self._measuring.release()
        return known.device.seconds(size_bytes + self._queued_bytes) < known.cpu.seconds(size_bytes)

    def queued(self, size_bytes: int) -> None:
        """Add to the bytes that wait for the device; a negative number subtracts."""
        with self._lock:
            self._queued_bytes += size_bytes

    def _measure(self, pair: Pair, size_bytes: int) -> Measured:
        """Measure with two samples: one of the size of the batch, and one of an eighth of it."""
        large = max(1 << 20, min(size_bytes, 16 << 20)) // 64 * 64
        small = large // _PARTS
        lines: list[Line] = []
        for timed in self._time:
            timed(pair, large)  # the first one pays for pages, contexts and compiled kernels
            points = [(n, statistics.median(timed(pair, n) for _ in range(_REPEATS))) for n in (small, large)]
            lines.append(Line.through(points[0], points[1]))
        return Measured(lines[0], lines[1])


SLICE_BYTES = 4 << 20
"""Source bytes of one slice: so many that launching a dozen kernels takes little time beside the transfer."""
LEAST_BYTES = 128 << 10
"""Least bytes of a cast on a device. Smaller casts stay on the CPU: the transfer would cost more."""
WARM_UP_BYTES = 2 << 30
"""Bytes that the CPU casts before a device is used. For less, loading torch takes longer than the device saves."""
MOST_STATIONS = 8
_SLICE_GRAIN = 64 << 10
_MOST_FAILURES = 3
"""Number of failures in a row after which the device is not used any more."""


class BusyError(Exception):
    """All stations are taken by other threads, so nothing can be measured now."""


class DeviceCast:
    """Casts on a device if that is faster, with the same bits as the reference."""

    def __init__(
        self,
        device: str,
        *,
        always: bool = True,
        memory_bytes: int | None = None,
        slice_bytes: int = SLICE_BYTES,
        least_bytes: int = LEAST_BYTES,
        warm_up_bytes: int = 0,
        model: CostModel | None = None,
    ) -> None:
        """Make the kernel; nothing is imported or measured yet.

        Args:
            device: torch's name of the device; "cpu" runs the device's program on the CPU.
            always: True to use the device without measuring.
            memory_bytes: Device memory that may be used; None for a quarter of the free memory.
            slice_bytes: Source bytes of one slice.
            least_bytes: Least bytes of a cast on the device; smaller casts stay on the CPU.
            warm_up_bytes: Bytes that are cast on the CPU before the device is used.
            model: The cost model that decides; None for one that measures.
        """
        self._name, self._always, self._memory_bytes = device, always, memory_bytes
        self._slice_bytes, self._least_bytes, self._warm_up_bytes = slice_bytes, least_bytes, warm_up_bytes
        self._reference = NumpyCast()
        self._model = model or CostModel(self._time_cpu, self._time_device)
        self._stations: Stations | None = None
        self._lock = threading.Lock()
        self._off = ""
        self._failures = 0
        self._unread = 0
        self._count = {"device_bytes": 0, "cpu_bytes": 0, "device_nonfinite": 0, "out_of_memory": 0, "fallbacks": 0}

    def cast(self, data: ByteArray, source: Dtype, target: Dtype) -> ByteArray:
        """The elements in the target's type, little-endian."""
        result = np.empty(len(data) // source.itemsize_bytes * target.itemsize_bytes, dtype=np.uint8)
        self.cast_into(data, source, target, result)
        return result

    def cast_into(self, data: ByteArray, source: Dtype, target: Dtype, out: ByteArray) -> int:
        """Put the elements in the target's type into memory; returns how many results are zero, infinite or NaN."""
        zero = np.zeros(1, dtype=np.int64)
        return self.cast_rows(Rows(zero, np.array([len(data)], dtype=np.int64), zero), data, out, Kind(source, target))

    def staging(self, length_bytes: int) -> ByteArray:
        """Memory to read a batch into, valid until this thread asks again. It is pinned once the device is in use."""
        if self._stations is None or self._off or length_bytes < self._least_bytes:
            return np.empty(length_bytes, dtype=np.uint8)
        return self._stations.staging(length_bytes)

    def cast_rows(self, rows: Rows, source: ByteArray, target: ByteArray, kind: Kind) -> int:
        """Cast rows of one memory into another; returns how many results are zero, infinite or NaN.

        Raises:
            IntegrityError: `integrity.mismatch` if the device or the way to it damages bytes.
        """
        total, pair = int(rows.length.sum()), (kind.source, kind.target)
        if self._wants(pair, total):
            special = self._on_device(rows, source, target, kind, total)
            if special is not None:
                return special if may_lose(*pair) else 0
        with self._lock:
            self._count["cpu_bytes"] += total
        return self._reference.cast_rows(rows, source, target, kind)

    def start(self) -> Stations:
        """The stations of the device, which are made at the first call.

        Raises:
            ImportError: There is no torch.
            RuntimeError: There is no such device, or its memory is too small.
        """
        with self._lock:
            if self._stations is None:
                self._stations = Stations(
                    self._name, self._memory_bytes, most=MOST_STATIONS, slice_bytes=self._slice_bytes
                )
            return self._stations

    def report(self) -> dict[str, Any]:
        """A report for people and for docs/performance.md: all measurements, and the bytes cast on each side."""
        pairs = {
            f"{source.name} to {target.name}": {
                where: {"fixed_us": round(line.fixed_s * 1e6, 1), "gb_per_s": round(line.bytes_per_s / 1e9, 2)}
                for where, line in (("cpu", known.cpu), ("device", known.device))
            }
            for (source, target), known in self._model.measured.items()
        }
        return {"device": self._name, "off": self._off, "measured": pairs, **self._count}

    def take_warnings(self) -> list[str]:
        """A warning about batches that the CPU cast in place of the device since the last call, with equal results."""
        with self._lock:
            unread, self._unread = self._unread, 0
        if not unread:
            return []
        why = self._off or "it was out of memory"
        return [f"{unread} batches were cast on the CPU instead of {self._name}: {why}"]

    def _wants(self, pair: Pair, size_bytes: int) -> bool:
        if size_bytes < self._least_bytes or self._off:
            return False
        if self._count["cpu_bytes"] < self._warm_up_bytes:
            return False
        if self._always:
            return True
        try:
            return self._model.prefers_device(pair, size_bytes)
        except BusyError:
            return False
        except (ImportError, RuntimeError) as error:
            self._turn_off(str(error))
            return False

    def _on_device(self, rows: Rows, source: ByteArray, target: ByteArray, kind: Kind, size_bytes: int) -> int | None:
        """Cast rows on the device, as `cast_rows` does; None if the device cannot."""
        self._model.queued(size_bytes)
        try:
            for _ in range(2):
                try:
                    return self._attempt(rows, source, target, kind, size_bytes)
                except RuntimeError as error:
                    if not _out_of_memory(error):
                        self._turn_off(str(error).partition("\n")[0])
                        return None
                    self._make_room()
        finally:
            self._model.queued(-size_bytes)
        with self._lock:
            self._failures += 1
            self._unread += 1
            self._count["fallbacks"] += 1
        if self._failures >= _MOST_FAILURES:
            self._turn_off("it was out of memory again and again")
        return None

    def _attempt(self, rows: Rows, source: ByteArray, target: ByteArray, kind: Kind, size_bytes: int) -> int | None:
        stations = self.start()
        station = stations.taken()
        if station is None:
            return None
        try:
            kinds = kind.source, kind.target
            facts = station.cast(
                rows, stations.source(source), target, kinds, min(self._slice_bytes, station.slice_bytes)
            )
        finally:
            stations.put_back(station)
        with self._lock:
            self._failures = 0
            self._count["device_bytes"] += size_bytes
            self._count["device_nonfinite"] += int(facts[3])
        return int(facts[2])

    def _make_room(self) -> None:
        with self._lock:
            self._count["out_of_memory"] += 1
            self._slice_bytes = max(self._slice_bytes // 2 // _SLICE_GRAIN * _SLICE_GRAIN, _SLICE_GRAIN)
        if self._stations is not None:
            self._stations.empty_cache()

    def _turn_off(self, why: str) -> None:
        with self._lock:
            if not self._off:
                self._off = why
                self._unread += 1
                self._count["fallbacks"] += 1

    def _time_cpu(self, pair: Pair, size_bytes: int) -> float:
        data, out = _sample(pair, size_bytes)
        begin = time.perf_counter()
        self._reference.cast_into(data, *pair, out)
        return time.perf_counter() - begin

    def _time_device(self, pair: Pair, size_bytes: int) -> float:
        data, out = _sample(pair, size_bytes)
        zero = np.zeros(1, dtype=np.int64)
        stations = self.start()
        station = stations.taken()
        if station is None:
            raise BusyError
        try:
            begin = time.perf_counter()
            station.cast(
                Rows(zero, np.array([len(data)], dtype=np.int64), zero),
                stations.source(data),
                out,
                pair,
                min(self._slice_bytes, station.slice_bytes),
            )
            return time.perf_counter() - begin
        finally:
            stations.put_back(station)


def _sample(pair: Pair, size_bytes: int) -> tuple[ByteArray, ByteArray]:
    """A sample of elements, all 1.5 in any type, and memory for their casts."""
    source, target = pair
    pattern = {"float64": 0x3FF8 << 48, "float32": 0x3FC0 << 16, "bfloat16": 0x3FC0, "float16": 0x3E00}[source.name]
    count = size_bytes // source.itemsize_bytes
    data = np.full(count, pattern, dtype=f"u{source.itemsize_bytes}").view(np.uint8)
    return data, np.zeros(count * target.itemsize_bytes, dtype=np.uint8)


def _out_of_memory(error: RuntimeError) -> bool:
    import torch  # it is already imported: it raised the error

    return isinstance(error, torch.cuda.OutOfMemoryError)


def device_facts() -> tuple[str, int, int] | None:
    """Name, free bytes and all bytes of the first GPU; None if torch cannot use it.

    Raises:
        ModuleNotFoundError: torch is not installed.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return torch.cuda.get_device_name(), free_bytes, total_bytes


# The sum that checks transfers to a device and back. It is cheap on both sides and depends on the order of rows.
#
# The words of eight bytes of each row are added up. The row sums are multiplied by different odd numbers and added up.
# All arithmetic is modulo 2**64. A changed row sum changes the result, because odd numbers have inverses; exchanged
# rows change it too. The sum finds accidental errors of a transfer. The digests of written bytes (`TensorDigests`) are
# computed on the host, from the bytes that arrived there.

ROW_BYTES = 2 << 10
ROW_WORDS = ROW_BYTES // 8


def padded_bytes(length_bytes: int) -> int:
    """The length in bytes, rounded up to whole rows."""
    return -(-length_bytes // ROW_BYTES) * ROW_BYTES


def position_sum(data: npt.NDArray[np.uint8]) -> int:
    """The sum of whole rows, as a signed number like torch's int64."""
    rows = np.add.reduce(data.view(np.int64).reshape(-1, ROW_WORDS), axis=1)
    rows *= np.arange(1, 2 * len(rows), 2, dtype=np.int64)
    return int(np.add.reduce(rows))


# The program that a device runs on a batch: gather, cast, count special elements, and sum, in one round trip.
#
# It consists of plain torch operations, so the CPU runs the same program as a GPU. They pass over the device's memory
# several times, but on a GPU that memory is many times as fast as the transfer. The device itself casts numbers (round
# to nearest, ties to even). Devices differ in the payloads of NaNs, so NaNs are cast by integer arithmetic as in the
# reference.

_INF32, _ABS32 = 0x7F800000, 0x7FFFFFFF
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results that go back to the host."""

    data: Tensor
    """The elements as bytes, in whole rows of `ROW_BYTES`."""
    facts: Tensor
    """Four numbers: the sum of the received bytes, the sum of the result, the number of results that are zero, infinite
    or NaN, and the number of source elements that are not finite."""


def run(data: Tensor, rows: Tensor | int, count: int, kinds: tuple[Dtype, Dtype], padded: int) -> Outcome:
    """Gather, cast, count and sum one slice.

    Args:
        data: The received bytes, in whole rows of `ROW_BYTES`.
        rows: Begins and lengths of runs, in elements, as two rows of int32; or the begin of the only run.
        count: Number of elements of all runs.
        kinds: The source type and the target type.
        padded: Length of the result in bytes, in whole rows of `ROW_BYTES`.
    """
    source, target = kinds
    before = data.view(_INTEGERS[source.itemsize_bytes])
    single = isinstance(rows, int)
    before = before[rows : rows + count] if single else before.index_select(0, _places(rows, count))
    after = _narrowed(_widened(before, source), target)
    result = torch.zeros(padded, dtype=torch.uint8, device=data.device)
    result.view(after.dtype)[:count] = after
    values, cast = before.view(getattr(torch, source.name)), after.view(getattr(torch, target.name))
    special = count - torch.count_nonzero(torch.isfinite(cast) & (cast != 0))
    odd = count - torch.count_nonzero(torch.isfinite(values))
    return Outcome(result, torch.stack([_position_sum(data), _position_sum(result), special, odd]))


def _places(rows: Tensor, count: int) -> Tensor:
    begin, length = rows[0], rows[1]
    first = torch.cumsum(length, 0, dtype=torch.int32) - length
    places = torch.repeat_interleave(begin - first, length, output_size=count)
    places += torch.arange(count, dtype=torch.int32, device=rows.device)
    return places


def _widened(bits: Tensor, source: Dtype) -> Tensor:
    """The elements as bits of float32."""
    if source.name == "float32":
        return bits
    if source.name == "bfloat16":
        return bits.to(torch.int32) << 16
    wide = bits.view(getattr(torch, source.name)).to(torch.float32).view(torch.int32)
    if source.name == "float16":
        extended = bits.to(torch.int32)
        nan = (extended & 0x7FFF) > 0x7C00
        kept = (extended >> 31 << 31) | _INF32 | (extended & 0x3FF) << 13
    else:
        nan = (bits & ((1 << 63) - 1)) > (0x7FF << 52)
        # CPUs keep the upper part of the payload and set the quiet bit.
        kept = (bits >> 63).to(torch.int32) << 31 | _INF32 | 1 << 22 | ((bits >> 29) & 0x7FFFFF).to(torch.int32)
    return torch.where(nan, kept, wide)


def _narrowed(bits: Tensor, target: Dtype) -> Tensor:
    """Bits of float32 as bits of the target."""
    if target.name == "float32":
        return bits
    result = bits.view(torch.float32).to(getattr(torch, target.name)).view(torch.int16)
    nan = (bits & _ABS32) > _INF32
    if target.name == "bfloat16":
        return torch.where(nan, (bits >> 16 | 0x40).to(torch.int16), result)
    kept = (bits >> 31 << 15) | 0x7C00 | (bits >> 13 & 0x3FF).clamp(min=1)
    return torch.where(nan, kept.to(torch.int16), result)


def _position_sum(data: Tensor) -> Tensor:
    rows = data.view(torch.int64).view(-1, ROW_WORDS).sum(1)
    return (rows * torch.arange(1, 2 * len(rows), 2, dtype=torch.int64, device=data.device)).sum()


# Lanes: streams to a device, each with pinned memory for both directions. Two lanes take turns.
#
# While the device computes the slice of one lane, the host fills and sends the memory of the other lane.

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
    """The bytes that were sent: whole rows of `ROW_BYTES`."""
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
        """Cast rows from one memory to another; returns the facts of all slices, added up (see `Outcome`).

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
