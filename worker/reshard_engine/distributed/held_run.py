"""A run that this worker has claimed: the items that it has begun, and the records that are not written yet."""

from __future__ import annotations

import threading
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, Generic

from reshard_engine.distributed.epoch import is_of_checks
from reshard_engine.distributed.runs import ItemT, Run, RunWaves
from reshard_engine.distributed.segments import Record
from reshard_engine.spans import begin_span


@dataclass(frozen=True, slots=True)
class Segment:
    """The records that go into the next segment of a run."""

    held: HeldRun[Any]
    records: tuple[Record, ...]
    is_last: bool
    """True if the run is complete with these records."""
    number: int


class HeldRun(Generic[ItemT]):
    """The items of one claimed run. Any thread may call it."""

    def __init__(self, run: Run, fence: int, waves: RunWaves[ItemT]) -> None:
        """`fence` is that of the claim."""
        self.run = run
        self.fence = fence
        self._units = waves.units[run.wave]
        self._cuts = waves.cuts[run.wave]
        self._next = run.first
        self._end = run.end
        self._open: set[int] = set()
        """Items that were begun and have no record yet."""
        self._records: list[Record] = []
        self._splitting: int | None = None
        self._segments = 0
        self.done = False
        """True if the last segment is written."""
        self._lock = threading.Lock()
        self._end_span = begin_span("check" if is_of_checks(run.name) else "run", run=run.name, fence=fence)
        self._done_units = self._done_bytes = 0

    def next_unit(self, done: Container[int]) -> ItemT | None:
        """Begin the next item that is not in `done`; None if all are begun."""
        with self._lock:
            while self._next < self._end:
                unit = self._units[self._next]
                self._next += 1
                if unit.index not in done:
                    self._open.add(unit.index)
                    return unit
        return None

    def add(self, index: int, record: Record, *, length_bytes: int = 0) -> bool:
        """Take the record of an item of this run; True if it completes the run."""
        with self._lock:
            self._done_units += 1
            self._done_bytes += length_bytes
            self._open.discard(index)
            self._records.append(record)
            return self._is_complete()

    def split(self) -> int | None:
        """Give up about the second half of the items that are not begun; returns the first of them, or None.

        Units that need CRCs of one another stay together: a worker that lacks one would wait for it without end.
        The run is not complete until `confirm` is called, because another worker must know of its part first.
        """
        with self._lock:
            if self._splitting is None:
                middle = self._end - max(1, (self._end - self._next) // 2)
                places = range(max(self._next, self.run.first + 1), self._end)
                at = min((p for p in places if self._cuts[p]), key=lambda p: abs(p - middle), default=None)
                if at is None:
                    return None
                self._end = self._splitting = at
            return self._splitting

    @property
    def unconfirmed(self) -> int | None:
        """The first unit of a part that was given up, if that may not be written down yet."""
        with self._lock:
            return self._splitting

    def confirm(self) -> bool:
        """Take note that the split is written down; False if that was known."""
        with self._lock:
            known, self._splitting = self._splitting is None, None
            return not known

    def segment(self) -> Segment | None:
        """Take the records that no segment holds yet; None if there is nothing to write."""
        with self._lock:
            complete = self._is_complete()
            if self.done or not (self._records or complete):
                return None
            records, self._records = tuple(self._records), []
            return Segment(self, records, complete, self._segments + 1)

    def written(self, segment: Segment) -> None:
        """Take note that a segment is written."""
        with self._lock:
            self._segments = segment.number
            self.done |= segment.is_last
        if segment.is_last:
            self._end_span(units=self._done_units, bytes=self._done_bytes)

    def put_back(self, segment: Segment) -> None:
        """Take the records of a segment that could not be written back."""
        with self._lock:
            self._records[:0] = segment.records

    def _is_complete(self) -> bool:
        return self._next >= self._end and not self._open and self._splitting is None
