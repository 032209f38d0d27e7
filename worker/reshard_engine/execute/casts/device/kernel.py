"""The kernel of a process that may use a device: it measures, chooses, and falls back to the CPU if the device fails.

torch is imported when the first batch goes to the device, so a conversion that casts little never waits for the import.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from reshard_engine.execute.casts.cast import NumpyCast
from reshard_engine.execute.casts.device.cost import CostModel, Pair
from reshard_engine.execute.casts.losses import may_lose
from reshard_engine.execute.casts.rows import ByteArray, Kind, Rows
from reshard_engine.tensors.dtypes import Dtype

if TYPE_CHECKING:
    from reshard_engine.execute.casts.device.lanes import Stations

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
                from reshard_engine.execute.casts.device.lanes import Stations  # imports torch

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
