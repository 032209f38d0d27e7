"""The progress of a conversion that several workers run, as one of them reports it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from reshard.errors import ReshardError
from reshard.models import Progress
from reshard_engine.distributed.members import Beat
from reshard_engine.distributed.worker import DistributedWorker

_OTHERS_S = 1.0
"""Seconds between two looks at the progress of the other workers."""


class JointProgress:
    """The progress of all workers together."""

    def __init__(
        self,
        on_progress: Callable[[Progress], None] | None,
        worker: DistributedWorker,
        least_bytes: int,
        *,
        verifies: bool,
    ) -> None:
        """While more than `least_bytes` are left, other workers are told to join, also to verify if `verifies`."""
        self._least_bytes = least_bytes
        self._verifies = verifies
        self._began_at = time.monotonic()
        self._began_bytes: int | None = None
        self._most_bytes = 0
        self._on_progress = on_progress
        self._worker = worker
        self._others: dict[str, Beat] = {}
        """The last heartbeat of each worker that was seen. What a worker did stays done when it leaves."""
        self._looked_at = time.monotonic()

    @property
    def report(self) -> Callable[[Progress], None] | None:
        """The function that the executor calls with the progress of this worker."""
        return None if self._on_progress is None else self._report

    def _report(self, own: Progress) -> None:
        assert self._on_progress is not None
        now = time.monotonic()
        if now - self._looked_at > _OTHERS_S:
            self._looked_at = now
            with suppress(ReshardError):
                self._others |= self._worker.member.others()
        done_bytes = own.bytes_done + sum(b.done_bytes for b in self._others.values())
        done_units = own.units_done + sum(b.done_units for b in self._others.values())
        if own.phase == "running":
            # Bytes never decrease: a unit counts before it is done, and another worker may run it again.
            self._most_bytes = max(self._most_bytes, min(done_bytes, own.bytes_total))
            done_units = min(done_units, own.units_total)
        else:
            self._most_bytes, done_units = own.bytes_total, own.units_total
        rate = self._rate(own, self._most_bytes, now)
        left = own.bytes_total - self._most_bytes
        self._on_progress(
            own.model_copy(
                update={
                    "bytes_done": self._most_bytes,
                    "units_done": done_units,
                    "rate_bytes_per_s": rate,
                    "eta_s": left / rate if rate > 0 else None,
                    "takes_workers": self._takes_workers(own, left),
                }
            )
        )

    def _takes_workers(self, own: Progress, left: int) -> bool:
        if own.phase == "verifying":
            return self._verifies and own.bytes_total > self._least_bytes
        return own.phase == "running" and left > self._least_bytes

    def _rate(self, own: Progress, done_bytes: int, now: float) -> float:
        """Bytes per second of all workers since this one began; what was done before does not count."""
        if self._began_bytes is None:
            self._began_bytes = done_bytes
        return max(own.rate_bytes_per_s, (done_bytes - self._began_bytes) / max(now - self._began_at, 1e-6))
