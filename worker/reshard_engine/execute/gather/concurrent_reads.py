"""Reads that are on their way together, where each waits for a network."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Self

CALLS_AT_ONCE = 32
"""Calls of one run to its stores, reads and writes together: a megabyte each at 30 ms a call fills 8 Gbit/s."""
READS_OF_A_UNIT = 16


@dataclass(frozen=True, slots=True)
class _Flight:
    """One read, what it takes beside the memory of its unit, and what is done with it when it is there."""

    read: Future[None]
    staged_bytes: int
    land: Callable[[], None]


class Flights:
    """The reads of one gathering. They land in the order in which they left, on the thread that sent them.

    What they hold beside the unit's memory stays within a bound, but for one read alone. Leaving waits for all of
    them, also after a failure: the memory that they write into is used again.
    """

    def __init__(self, pool: Executor, staged_bytes: int) -> None:
        """Nothing is on its way."""
        self._pool = pool
        self._most_bytes = staged_bytes
        self._staged_bytes = 0
        self._flying: deque[_Flight] = deque()

    def send(self, read: Callable[[], None], land: Callable[[], None], *, staged_bytes: int) -> None:
        """Start a read as soon as there is room for it; earlier ones may land meanwhile."""
        while self._flying and (
            self._staged_bytes + staged_bytes > self._most_bytes or len(self._flying) >= READS_OF_A_UNIT
        ):
            self._land_first()
        self._staged_bytes += staged_bytes
        self._flying.append(_Flight(self._pool.submit(read), staged_bytes, land))

    def _land_first(self) -> None:
        flight = self._flying.popleft()
        flight.read.result()
        flight.land()
        self._staged_bytes -= flight.staged_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Land what is left, or, after a failure, wait until nothing writes any more."""
        try:
            while error is None and self._flying:
                self._land_first()
        finally:
            left = [f.read for f in self._flying]
            for read in left:
                read.cancel()
            wait(left)
