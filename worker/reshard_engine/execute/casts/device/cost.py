"""The choice where a batch is cast: CPU and device are timed once per process and pair of types; the faster wins."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass

from reshard_engine.tensors.dtypes import Dtype

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
        for time in self._time:
            time(pair, large)  # the first one pays for pages, contexts and compiled kernels
            points = [(n, statistics.median(time(pair, n) for _ in range(_REPEATS))) for n in (small, large)]
            lines.append(Line.through(points[0], points[1]))
        return Measured(lines[0], lines[1])
