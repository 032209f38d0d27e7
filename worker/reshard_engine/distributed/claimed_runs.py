"""Runs that a worker claims: it takes over those of dead owners, splits its own, and writes segments.

Nothing here knows what an item of a run is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic

from reshard.errors import ReshardError
from reshard.models.jobs import WorkShare
from reshard_engine.distributed.members import Beat
from reshard_engine.distributed.runs import ItemT, Run, RunWaves, in_order, is_share_of
from reshard_engine.distributed.segments import Record, SegmentGoneError, read_texts, to_segment
from reshard_engine.distributed.session import (
    RunClaim,
    SessionLostError,
    SessionMember,
    SessionView,
    claim_name,
    is_of_checks,
)
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


logger = logging.getLogger(__name__)

_MOST_CONFLICTS = 3
"""Number of claims that other workers were faster with, after which this one looks again."""


@dataclass(frozen=True)
class Wanted(Generic[ItemT]):
    """The runs that a worker looks for."""

    waves: RunWaves[ItemT]
    planned: Sequence[Run]
    absorb: Callable[[Sequence[str]], None]
    """Takes the names of the segments that earlier owners of a run wrote."""
    failed: Callable[[], bool] = lambda: False
    """True if an item of this worker failed, after which it takes no more."""
    lingers: bool = True
    """True to wait until all runs are done, because an owner may die; False to leave when no run is free."""
    own: Mapping[int, Container[int]] | None = None
    """Items that another worker should have, if there is one, by wave."""


class RunTaker:
    """Claims runs as a member of a session. `tick` is called every few hundred milliseconds from another thread."""

    reading_threads = 8
    """Number of segments that are read at once."""

    def __init__(
        self,
        member: SessionMember,
        *,
        position: tuple[int, int],
        sync: Callable[[], None] | None,
        on_forget: Callable[[], None],
    ) -> None:
        """See `DistributedWorker`; `on_forget` is called when another session begins."""
        self.member = member
        member.activity = self
        self._position = position
        self.sync = sync
        self._on_forget = on_forget
        self._held: dict[tuple[str, int], HeldRun[Any]] = {}
        self.current: HeldRun[Any] | None = None
        """The run that is executed now."""
        self.own: set[str] = set()
        """Segments that this worker wrote in this session."""
        self.done_bytes = self.done_units = 0
        self._flushed_at = member.clock.monotonic()
        self._flush_is_due = False
        self._flushing = threading.Lock()
        self._runs = self._takeovers = self._splits = 0

    def forget(self) -> None:
        """Forget the runs of the last session."""
        self._held, self.current, self.own = {}, None, set()
        self._on_forget()

    def heartbeat(self, count: int) -> Beat:
        """The heartbeat: the run that is executed now, and what this worker has finished."""
        run = self.current.run.name if self.current else ""
        return Beat(f"{self._position[0]}/{self._position[1]}", count, self.done_bytes, self.done_units, run)

    @property
    def share(self) -> WorkShare:
        """The part of this worker so far."""
        return WorkShare(
            runs=self._runs,
            takeovers=self._takeovers,
            splits=self._splits,
            epochs_lost=self.member.lost,
            units=self.done_units,
            write_bytes=self.done_bytes,
        )

    def tick(self) -> None:
        """Do what is due: a heartbeat, segments, a look at the others, and a split for one that waits."""
        if not self.member.ticking.acquire(blocking=False):
            return
        try:
            now = self.member.clock.monotonic()
            if self.member.left or self.member.ended is not None:
                return
            if now - self.member.beat_at >= self.member.timing.beat_s:
                self.member.beat()
            if self._flush_is_due or now - self._flushed_at >= self.member.timing.flush_s:
                self.flush()
            if now - self.member.looked_at >= self.member.timing.slow_poll_s:
                self._offer(self.member.look())
        except SessionLostError:
            pass
        except ReshardError as error:
            # A store that is away for a while ends no lease of its own: the executor meets the same error.
            if not error.retryable and self.member.ended is None:
                self.member.ended = error
        finally:
            self.member.ticking.release()

    # -- runs -----------------------------------------------------------------------------------------

    def taken(
        self, wanted: Wanted[ItemT], done: Mapping[int, Container[int]]
    ) -> Generator[tuple[HeldRun[ItemT], ItemT]]:
        """The items that this worker executes, with the runs that hold them, one run after another.

        Args:
            wanted: The runs to choose from.
            done: The items that have records, by wave.

        Raises:
            SessionLostError: The session is not the newest one.
            ReshardError: The conversion cannot succeed, or the store failed.
        """
        while (held := self.next_run(wanted)) is not None:
            for item in self.items(held, done[held.run.wave]):
                yield held, item

    def items(self, held: HeldRun[ItemT], done: Container[int]) -> Generator[ItemT]:
        """The items of a run that this worker executes now, except those that have records."""
        self.current = held
        while (item := held.next_unit(done)) is not None:
            yield item
        if (at := held.unconfirmed) is not None:
            self._write_split(held, at)  # the store was away when it was written first
        self.current = None

    def next_run(self, wanted: Wanted[ItemT]) -> HeldRun[ItemT] | None:
        """Claim a run; None if all are done, if none is free and the worker does not linger, or if an item failed."""
        turns, announced, idle = 0, False, self.member.session.name(f"idle-{self.member.name}")
        try:
            while not wanted.failed():
                self.member.check()
                held = self._claim_one(wanted)
                if held is not None:
                    return held
                self.flush()
                view = self.member.look()
                runs = self.member.session.runs(wanted.planned, view)
                if all(view.is_done(r.name) for r in runs):
                    return None
                if self._free(wanted.waves, runs, view):
                    continue
                if not wanted.lingers:
                    return None
                if not announced:
                    self.member.store.put(
                        self.member.session.name(f"idle-{self.member.name}"), self.member.name.encode()
                    )
                    announced = True
                self.member.wait(turns)
                turns += 1
            return None
        finally:
            if announced:
                with suppress(ReshardError):
                    self.member.store.delete([idle])

    def _free(self, waves: RunWaves[Any], runs: Sequence[Run], view: SessionView) -> list[Run]:
        """The runs that can begin and that nobody has claimed; if there are none, those whose owner is dead."""
        can_begin = waves.ready(runs, view.is_done)
        unclaimed = [r for r in runs if view.fences.get(r.name, 0) == 0 and can_begin(r)]
        if unclaimed:
            return unclaimed  # no claim need be read
        begun = [r for r in runs if view.fences.get(r.name, 0) and not view.is_done(r.name)]
        self.member.session.read_claims([(r.name, view.fences[r.name]) for r in begun], threads=self.reading_threads)
        return [r for r in begun if self._is_free(r, view)]

    def _is_free(self, run: Run, view: SessionView) -> bool:
        """True if a run is not done, and nobody who is alive has claimed it."""
        fence = view.fences.get(run.name, 0)
        if fence == 0 or (run.name, fence) in self._held or view.is_done(run.name):
            return fence == 0
        owner = self.member.owner_of(run.name, fence)
        # A claim of this worker that it does not hold is one whose acknowledgement was lost.
        return owner == self.member.name or not self.member.members.is_alive(owner)

    def _ordered(self, wanted: Wanted[Any]) -> list[Run]:
        """The free runs, the best one first."""
        free = self._free(wanted.waves, self.member.session.runs(wanted.planned, self.member.view), self.member.view)
        return in_order(free, wanted.waves, *self._position, own=wanted.own)

    def _claim_one(self, wanted: Wanted[ItemT]) -> HeldRun[ItemT] | None:
        conflicts, planned = 0, wanted.planned
        view, ordered = self.member.view, self._ordered(wanted)
        is_old = self.member.clock.monotonic() - self.member.looked_at > self.member.timing.poll_s
        if ordered and is_old and not is_share_of(ordered[0], wanted.waves, *self._position):
            # Other workers go for the same runs now, and a lost claim takes longer than a listing.
            view = self.member.look()
            ordered = self._ordered(wanted)
        for run in ordered:
            fence = view.fences.get(run.name, 0) + 1
            splits: tuple[int, ...] = ()
            if fence > 1:
                view = self.member.look()
                if view.fences.get(run.name, 0) != fence - 1 or not self._is_free(run, view):
                    continue
                splits = self.member.session.splits_of(run.name, view)
                run = next(r for r in self.member.session.runs(planned, view) if r.name == run.name)  # noqa: PLW2901
            self.member.written.append(self.member.session.name(claim_name(run.name, fence)))
            if not self.member.session.take(run.name, fence, RunClaim(self.member.name, splits)):
                self.member.know(run.name, fence)
                conflicts += 1
                if conflicts == _MOST_CONFLICTS:
                    return None
                continue
            self.member.know(run.name, fence)
            self._runs += 1
            held = self._held[run.name, fence] = HeldRun(run, fence, wanted.waves)
            logger.info("run %s is this worker's now, with fence %d", run.name, fence, extra={"run": run.name})
            if fence > 1:
                self._takeovers += 1
                wanted.absorb([name for of, name in self.member.look().segments.get(run.name, []) if of < fence])
            return held
        return None

    def _offer(self, view: SessionView) -> None:
        """Split the present run if a worker waits and no run is free."""
        held = self.current
        if held is None or not any(w != self.member.name and self.member.members.is_alive(w) for w in view.idle):
            return
        children = [name for name in view.splits if name == held.run.name]
        if children and any(
            view.fences.get(f"{held.run.wave}.{at}", 0) == 0
            for fence, at in view.splits[held.run.name]
            if fence == held.fence
        ):
            return  # the last part that was given up has not been claimed yet
        at = held.split()
        if at is not None:
            self._write_split(held, at)

    def _write_split(self, held: HeldRun[Any], at: int) -> None:
        name = self.member.session.name(f"split-{held.run.name}-{held.fence:04}-{at}")
        self.member.written.append(name)
        self.member.store.put(name, self.member.name.encode())
        self._splits += held.confirm()

    # -- records --------------------------------------------------------------------------------------

    def put_check(self, held: HeldRun[ItemT], index: int, record: Record) -> None:
        """Take the record of a finished check. It is written with others, soon or at the end of its run.

        Raises:
            SessionLostError: The session is not the newest one.
        """
        if isinstance(self.member.ended, SessionLostError):
            raise self.member.ended
        if held.add(index, record):
            self.flush()

    def flush_soon(self) -> None:
        """Let the next tick write the records of finished items, so that the caller need not wait for the store."""
        self._flush_is_due = True

    def flush(self) -> None:
        """Write the records of finished items, those of units after their data is durable."""
        if not self._flushing.acquire(blocking=False):
            return
        self._flush_is_due = False
        try:
            segments = [s for held in list(self._held.values()) if (s := held.segment()) is not None]
            self._flushed_at = self.member.clock.monotonic()
            try:
                if self.sync is not None and any(not is_of_checks(s.held.run.name) for s in segments):
                    self.sync()
                while segments:
                    segment = segments[0]
                    held, end = segment.held, "-end" if segment.is_last else ""
                    name = f"segment-{held.run.name}-{held.fence:04}-{segment.number}{end}"
                    self.member.written.append(self.member.session.name(name))
                    self.member.store.put(self.member.session.name(name), to_segment(segment.records))
                    self.own.add(self.member.session.name(name))
                    held.written(segment)
                    segments.pop(0)
            finally:
                for segment in segments:
                    segment.held.put_back(segment)
        finally:
            self._flushing.release()

    def texts_of(self, names: Sequence[str]) -> list[bytes]:
        """The texts of segments.

        Raises:
            SessionLostError: The session has ended, and the segments are gone.
        """
        try:
            return read_texts(self.member.store, names, threads=self.reading_threads)
        except SegmentGoneError:
            self.member.look()  # says so if the session has ended
            raise
