"""A member of an epoch that claims runs: it takes over those of dead owners, splits its own, and writes segments.

It knows nothing of what an item of a run is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic

from reshard.errors import ReshardError
from reshard_engine.distributed.epoch import EpochView, RunClaim, claim_name, is_of_checks
from reshard_engine.distributed.epoch_member import EpochLostError, EpochMember
from reshard_engine.distributed.held_run import HeldRun
from reshard_engine.distributed.members import Beat, Clock, Counters, Members, Timing
from reshard_engine.distributed.runs import ItemT, Run, RunWaves, in_order, is_share_of
from reshard_engine.distributed.segments import Record, SegmentGoneError, read_texts, to_segment
from reshard_engine.storage.texts import TextStore

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


class RunMember(EpochMember):
    """The part of a worker that claims runs. `tick` is called every few hundred milliseconds from another thread."""

    reading_threads = 8
    """Number of segments that are read at once."""

    def __init__(
        self,
        store: TextStore,
        clock: Clock,
        members: Members,
        name: str,
        *,
        timing: Timing,
        position: tuple[int, int] = (0, 1),
        sync: Callable[[], None] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare a worker; nothing is read or written yet.

        Args:
            store: Where the workers of this plan meet.
            clock: The worker's clock.
            members: The heartbeats that this worker watches.
            name: The worker's own name (see `new_worker`).
            timing: The periods of the protocol.
            position: Its number and the number of workers, so that workers begin at different runs.
            sync: Makes the data of finished units durable. It is called before their records are written.
            check: Raises if the caller wants the worker to stop.
        """
        super().__init__(store, clock, members, name, timing=timing, check=check)
        self._position = position
        self._sync = sync
        self._held: dict[tuple[str, int], HeldRun[Any]] = {}
        self._current: HeldRun[Any] | None = None
        self._own: set[str] = set()
        """Segments that this worker wrote in this epoch."""
        self._done_bytes = self._done_units = 0
        self._flushed_at = clock.monotonic()
        self._flush_is_due = False
        self._flushing = threading.Lock()
        self._runs = self._takeovers = self._splits = 0

    def _begin(self) -> None:
        """Forget the runs of the last epoch."""
        self._held, self._current = {}, None
        self._own = set()

    def _now(self, count: int) -> Beat:
        """The heartbeat: the run that is executed now, and what this worker has finished."""
        run = self._current.run.name if self._current else ""
        return Beat(f"{self._position[0]}/{self._position[1]}", count, self._done_bytes, self._done_units, run)

    @property
    def counters(self) -> Counters:
        """The numbers of what this worker did so far."""
        return Counters(self._runs, self._takeovers, self._splits, self._lost, self._done_units, self._done_bytes)

    def tick(self) -> None:
        """Do what is due: a heartbeat, segments, a look at the others, and a split for one that waits."""
        if not self._ticking.acquire(blocking=False):
            return
        try:
            now = self._clock.monotonic()
            if self._left or self._ended is not None:
                return
            if now - self._beat_at >= self._timing.beat_s:
                self.beat()
            if self._flush_is_due or now - self._flushed_at >= self._timing.flush_s:
                self.flush()
            if now - self._looked_at >= self._timing.slow_poll_s:
                self._offer(self.look())
        except EpochLostError:
            pass
        except ReshardError as error:
            # A store that is away for a while ends no lease of its own: the executor meets the same error.
            if not error.retryable and self._ended is None:
                self._ended = error
        finally:
            self._ticking.release()

    # -- runs -----------------------------------------------------------------------------------------

    def taken(
        self, wanted: Wanted[ItemT], done: Mapping[int, Container[int]]
    ) -> Generator[tuple[HeldRun[ItemT], ItemT]]:
        """The items that this worker executes, with the runs that hold them, one run after another.

        Args:
            wanted: The runs to choose from.
            done: The items that have records, by wave.

        Raises:
            EpochLostError: The epoch is not the newest one.
            ReshardError: The conversion cannot succeed, or the store failed.
        """
        while (held := self._next_run(wanted)) is not None:
            self._current = held
            while (item := held.next_unit(done[held.run.wave])) is not None:
                yield held, item
            self._end_run(held)

    def _end_run(self, held: HeldRun[Any]) -> None:
        """All items of a run are begun."""
        if (at := held.unconfirmed) is not None:
            self._write_split(held, at)  # the store was away when it was written first
        self._current = None

    def _next_run(self, wanted: Wanted[ItemT]) -> HeldRun[ItemT] | None:
        """Claim a run; None if all are done, if none is free and the worker does not linger, or if an item failed."""
        turns, announced = 0, False
        try:
            while not wanted.failed():
                self.check()
                held = self._claim_one(wanted)
                if held is not None:
                    return held
                self.flush()
                view = self.look()
                runs = self.epoch.runs(wanted.planned, view)
                if all(view.is_done(r.name) for r in runs):
                    return None
                if self._free(wanted.waves, runs, view):
                    continue
                if not wanted.lingers:
                    return None
                if not announced:
                    self._store.put(self.epoch.name(f"idle-{self._name}"), self._name.encode())
                    announced = True
                self.wait(turns)
                turns += 1
            return None
        finally:
            if announced:
                with suppress(ReshardError):
                    self._store.delete([self.epoch.name(f"idle-{self._name}")])

    def _free(self, waves: RunWaves[Any], runs: Sequence[Run], view: EpochView) -> list[Run]:
        """The runs that can begin and that nobody has claimed; if there are none, those whose owner is dead."""
        can_begin = waves.ready(runs, view.is_done)
        unclaimed = [r for r in runs if view.fences.get(r.name, 0) == 0 and can_begin(r)]
        if unclaimed:
            return unclaimed  # no claim need be read
        begun = [r for r in runs if view.fences.get(r.name, 0) and not view.is_done(r.name)]
        self.epoch.read_claims([(r.name, view.fences[r.name]) for r in begun], threads=self.reading_threads)
        return [r for r in begun if self._is_free(r, view)]

    def _is_free(self, run: Run, view: EpochView) -> bool:
        """True if a run is not done, and nobody who is alive has claimed it."""
        fence = view.fences.get(run.name, 0)
        if fence == 0 or (run.name, fence) in self._held or view.is_done(run.name):
            return fence == 0
        owner = self._owner(run.name, fence)
        # A claim of this worker that it does not hold is one whose acknowledgement was lost.
        return owner == self._name or not self._members.is_alive(owner)

    def _ordered(self, wanted: Wanted[Any]) -> list[Run]:
        """The free runs, the best one first."""
        free = self._free(wanted.waves, self.epoch.runs(wanted.planned, self._view), self._view)
        return in_order(free, wanted.waves, *self._position, own=wanted.own)

    def _claim_one(self, wanted: Wanted[ItemT]) -> HeldRun[ItemT] | None:
        conflicts, planned = 0, wanted.planned
        view, ordered = self._view, self._ordered(wanted)
        is_old = self._clock.monotonic() - self._looked_at > self._timing.poll_s
        if ordered and is_old and not is_share_of(ordered[0], wanted.waves, *self._position):
            # Other workers go for the same runs now, and a lost claim takes longer than a listing.
            view = self.look()
            ordered = self._ordered(wanted)
        for run in ordered:
            fence = view.fences.get(run.name, 0) + 1
            splits: tuple[int, ...] = ()
            if fence > 1:
                view = self.look()
                if view.fences.get(run.name, 0) != fence - 1 or not self._is_free(run, view):
                    continue
                splits = self.epoch.splits_of(run.name, view)
                run = next(r for r in self.epoch.runs(planned, view) if r.name == run.name)  # noqa: PLW2901
            self._written.append(self.epoch.name(claim_name(run.name, fence)))
            if not self.epoch.take(run.name, fence, RunClaim(self._name, splits)):
                self._know(run.name, fence)
                conflicts += 1
                if conflicts == _MOST_CONFLICTS:
                    return None
                continue
            self._know(run.name, fence)
            self._runs += 1
            held = self._held[run.name, fence] = HeldRun(run, fence, wanted.waves)
            logger.info("run %s is this worker's now, with fence %d", run.name, fence, extra={"run": run.name})
            if fence > 1:
                self._takeovers += 1
                wanted.absorb([name for of, name in self.look().segments.get(run.name, []) if of < fence])
            return held
        return None

    def _know(self, run: str, fence: int) -> None:
        self._fences[run] = self._view.fences[run] = max(fence, self._view.fences.get(run, 0))

    def _offer(self, view: EpochView) -> None:
        """Split the present run if a worker waits and no run is free."""
        held = self._current
        if held is None or not any(w != self._name and self._members.is_alive(w) for w in view.idle):
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
        name = self.epoch.name(f"split-{held.run.name}-{held.fence:04}-{at}")
        self._written.append(name)
        self._store.put(name, self._name.encode())
        self._splits += held.confirm()

    # -- records --------------------------------------------------------------------------------------

    def put_check(self, held: HeldRun[ItemT], index: int, record: Record) -> None:
        """Take the record of a finished check. It is written with others, soon or at the end of its run.

        Raises:
            EpochLostError: The epoch is not the newest one.
        """
        if isinstance(self._ended, EpochLostError):
            raise self._ended
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
            self._flushed_at = self._clock.monotonic()
            try:
                if self._sync is not None and any(not is_of_checks(s.held.run.name) for s in segments):
                    self._sync()
                while segments:
                    segment = segments[0]
                    held, end = segment.held, "-end" if segment.is_last else ""
                    name = f"segment-{held.run.name}-{held.fence:04}-{segment.number}{end}"
                    self._written.append(self.epoch.name(name))
                    self._store.put(self.epoch.name(name), to_segment(segment.records))
                    self._own.add(self.epoch.name(name))
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
            EpochLostError: The epoch has ended, and the segments are gone.
        """
        try:
            return read_texts(self._store, names, threads=self.reading_threads)
        except SegmentGoneError:
            self.look()  # says so if the epoch has ended
            raise
