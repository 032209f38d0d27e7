"""The progress of a run, which the caller gets a few times a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from reshard.models import Progress
from reshard_engine.plan.model import Plan

_PERIOD_S = 0.2


class ProgressReport:
    """Counts the bytes and units of a run. Any thread may call it."""

    def __init__(self, plan: Plan, on_progress: Callable[[Progress], None] | None, done: tuple[int, int]) -> None:
        """`done` is the number of bytes and of units that an earlier attempt finished."""
        self._plan = plan
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._done_bytes, self._done_units = done
        self.resumed_bytes = done[0]
        self._started_at = time.monotonic()
        self._reported_at = 0.0

    def add(self, phase: str, length_bytes: int, *, units: int = 0) -> None:
        """Count finished bytes and units. Bytes count before their unit ends, because a large unit takes seconds."""
        with self._lock:
            self._done_bytes += length_bytes
            self._done_units += units
        self.report(phase)

    def report(self, phase: str, *, force: bool = False) -> None:
        """Report the progress to the caller, unless the last report is less than `_PERIOD_S` old."""
        if self._on_progress is None:
            return
        with self._lock:
            now = time.monotonic()
            if not force and now - self._reported_at < _PERIOD_S:
                return
            self._reported_at = now
            total = self._plan.write_bytes
            rate = (self._done_bytes - self.resumed_bytes) / max(now - self._started_at, 1e-6)
            self._on_progress(
                Progress(
                    phase=phase,  # pyright: ignore[reportArgumentType]
                    bytes_done=self._done_bytes,
                    bytes_total=total,
                    bytes_kept=self.resumed_bytes,
                    units_done=self._done_units,
                    units_total=len(self._plan.units),
                    rate_bytes_per_s=rate,
                    eta_s=(total - self._done_bytes) / rate if rate > 0 else None,
                )
            )
