"""The workers of a conversion: their names, their clocks, their heartbeats, and which of them are alive.

Each worker writes a text of its own every few seconds. It counts as dead when its text has not changed for a lease by
the observer's clock, when it removed the text (it left), or when it is a process of this host that has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from reshard.shared_work import Lease, process_ended
from reshard_engine.storage.texts import JsonText, TextStore

BEATS = "beats/"


class Clock(Protocol):
    """The worker's own clock, such as the module `time`. No two clocks are ever compared."""

    def monotonic(self) -> float:
        """Seconds since some moment."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Wait."""
        ...


@dataclass(frozen=True, slots=True)
class Timing:
    """The periods of the protocol in seconds."""

    beat_s: float = 5.0
    """Between two heartbeats of a worker."""
    lease_s: float = 30.0
    """After so long without a heartbeat a worker counts as dead. On network file systems, attributes are cached for up
    to 60 s (NFS `acregmax`), so the lease is longer there."""
    poll_s: float = 0.5
    """Between two looks of a worker that waits for others, at first; the pause grows to `slow_poll_s`."""
    slow_poll_s: float = 2.0
    flush_s: float = 2.0
    """Longest time for which a finished unit waits for its record to be written."""

    def pause_s(self, turns: int) -> float:
        """The pause of a worker that has already looked so many times in vain."""
        return min(self.slow_poll_s, self.poll_s * 1.5 ** min(turns, 20))


@dataclass(frozen=True, slots=True)
class Beat(JsonText):
    """The text of a heartbeat: what a worker does now."""

    label: str
    """The worker's number of how many, for people, such as `3/8`; or empty."""
    count: int
    """Number of heartbeats so far, so that each text differs from the one before."""
    done_bytes: int
    done_units: int
    run: str
    """Name of the run that it executes; empty while it waits."""


class Members:
    """Watches the heartbeats of all workers by this worker's clock."""

    def __init__(
        self,
        store: TextStore,
        clock: Clock,
        timing: Timing,
        *,
        ended: Callable[[str], bool] = process_ended,
    ) -> None:
        """`ended` tells if a worker is known to have ended, without waiting for its lease."""
        self._store = store
        self._clock = clock
        self._lease_s = timing.lease_s
        self._ended = ended
        self._leases: dict[str, Lease] = {}
        self.present: set[str] = set()
        """The workers that have a heartbeat, dead or alive."""

    def _lease(self, worker: str) -> Lease:
        """The lease of a worker, which begins when the worker is first mentioned."""
        return self._leases.setdefault(worker, Lease(self._lease_s, self._clock.monotonic))

    def look(self, names: Mapping[str, str]) -> None:
        """Take note of a listing."""
        there = {name[len(BEATS) :]: version for name, version in names.items() if name.startswith(BEATS)}
        for worker, version in there.items():
            self._lease(worker).saw(version)
        self.present = set(there)

    def is_alive(self, worker: str) -> bool:
        """True if a worker's lease has not ended. A worker that has not begun to beat has one lease to do so."""
        if self._ended(worker):
            return False
        lease = self._lease(worker)
        return not lease.is_over and (worker in self.present or lease.version is None)

    def others(self, but: str) -> dict[str, Beat]:
        """The last heartbeats of the other workers, dead or alive, by worker."""
        found = {w: Beat.from_text(self._store.read(f"{BEATS}{w}")) for w in sorted(self.present) if w != but}
        return {w: beat for w, beat in found.items() if beat is not None}
