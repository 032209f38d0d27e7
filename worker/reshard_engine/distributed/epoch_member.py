"""A member of an epoch: it joins or begins one, shows that it is alive, and learns when the epoch has ended."""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from reshard.errors import ReshardError, StorageError, from_problem
from reshard_engine.distributed.epoch import (
    AGREEING,
    Epoch,
    EpochView,
    RunClaim,
    claim_name,
    dead_names,
    epoch_name,
    last_number,
    newest_epoch,
)
from reshard_engine.distributed.members import BEATS, Beat, Clock, Members, Timing
from reshard_engine.storage.texts import TextStore

_TURN_S = 0.01
_LEAVE_TRIES = 3
"""Number of attempts to remove the texts of a worker that leaves: after the end, nobody else would remove them."""


class EpochLostError(Exception):
    """The epoch has ended: the conversion is finished, was removed, or began again in another epoch."""


class EpochMember(ABC):
    """The part of a worker that knows epochs and heartbeats, and no runs."""

    def __init__(
        self,
        store: TextStore,
        clock: Clock,
        members: Members,
        name: str,
        *,
        timing: Timing,
        check: Callable[[], None],
    ) -> None:
        """See `DistributedWorker`."""
        self._store = store
        self._clock = clock
        self._members = members
        self._name = name
        self._timing = timing
        self._check = check
        self.epoch = Epoch(store, 0)
        self._began = self._ready = self._is_over = False
        self._left = True
        self._declared = False
        """True if this worker told the others that the conversion cannot succeed."""
        self.failed_for_all = False
        """True if a worker said so, and others heard it: then no worker tries again."""
        self._view = EpochView()
        self._names: Mapping[str, str] = {}
        self._fences: dict[str, int] = {}
        """The highest fence of each run that this worker knows of, whatever a listing shows."""
        self._written: list[str] = []
        """Texts of this epoch that this worker may have written, and that mean nothing once the epoch has ended."""
        self._ended: EpochLostError | ReshardError | None = None
        self._beats = self._lost = 0
        self._beat_at = self._looked_at = clock.monotonic()
        self._ticking = threading.Lock()

    @abstractmethod
    def _begin(self) -> None:
        """Forget what belongs to the last epoch."""

    @abstractmethod
    def _now(self, count: int) -> Beat:
        """The heartbeat with this number."""

    @abstractmethod
    def flush(self) -> None:
        """Write the records of finished units."""

    # -- entering and leaving -------------------------------------------------------------------------

    def enter(self, *, after: int = 0, begin: bool = True) -> bool:
        """Join the newest epoch, or begin one; True if this worker began it and must make it ready.

        An epoch that is not ready yet can be joined if its coordinator lets others help (see `wait_until_ready`).

        Args:
            after: The number of an epoch that is known to be broken; a newer one is begun if there is none yet.
            begin: False to wait until another worker begins one.

        Raises:
            ReshardError: The epoch failed, and its workers still say so.
        """
        self._forget()
        while True:
            self._check()
            names = self._store.names()
            self._members.look(names)
            newest = newest_epoch(names)
            epoch = Epoch(self._store, newest)
            view = epoch.view(names)
            alive = [w for w in self._members.present if w != self._name and self._members.is_alive(w)]
            coordinator = RunClaim.from_text(self._store.read(epoch_name(newest))) if newest else None
            begun = coordinator is not None and self._members.is_alive(coordinator.worker)
            if newest > after and view.failed and alive:
                raise self._failure(epoch)
            open_ = view.ready or (AGREEING in view.opened and begun)
            if newest > after and open_ and not view.failed and alive:
                if self._join(epoch):
                    return False
            elif newest > after and not view.ready and not view.failed and begun:
                self._clock.sleep(self._timing.poll_s)
            elif not begin:
                self._clock.sleep(self._timing.slow_poll_s)
            elif self._store.create(epoch_name(next_ := last_number(names) + 1), RunClaim(self._name).to_text()) and (
                self._join(Epoch(self._store, next_), began=True)
            ):
                return True

    def _forget(self) -> None:
        """Forget the last epoch.

        If this worker enters no other one, `leave` must not remove texts of it: its number may have begun again.
        """
        self._ended, self._written, self._fences, self._view = None, [], {}, EpochView()
        self._began = self._ready = self._declared = False
        self._begin()

    def _join(self, epoch: Epoch, *, began: bool = False) -> bool:
        """Become a member of an epoch, which this worker may have begun; False if a newer one has begun meanwhile."""
        self._forget()
        self.epoch = epoch
        self._began = began  # known before the heartbeat, which may fail: `leave` removes an epoch without workers
        self._left = self._is_over = self.failed_for_all = False
        self.beat()
        try:
            self.look()
        except EpochLostError:
            return False
        return True

    @property
    def is_ready(self) -> bool:
        """True if the last look found the epoch ready."""
        return self._view.ready

    def wait_until_ready(self) -> None:
        """Wait until the coordinator of this epoch has made it ready.

        Raises:
            EpochLostError: The coordinator is dead, or the epoch is not the newest one.
            ReshardError: The conversion cannot succeed.
        """
        turns = 0
        while not (self.is_ready or self.look().ready):
            self.check()
            coordinator = RunClaim.from_text(self._store.read(epoch_name(self.epoch.number)))
            if coordinator is not None and not self._members.is_alive(coordinator.worker):
                raise EpochLostError
            self.wait(turns)
            turns += 1

    def open_checks(self, name: str, text: bytes) -> None:
        """Let all workers make checks.

        Args:
            name: `AGREEING`, `SEALED` or `PUBLISHED`.
            text: What the checks compare with. Another one replaces that of an earlier worker.
        """
        self._written.append(self.epoch.name(name))
        self._store.put(self.epoch.name(name), text)

    def opened(self, name: str) -> bytes | None:
        """The text that the checks of this name compare with, if the last look found them open."""
        return self._store.read(self.epoch.name(name)) if name in self._view.opened else None

    def leave(self) -> None:
        """Write the records that are not written yet, and give up all claims. Errors are ignored: leases end anyway."""
        while not self._ticking.acquire(blocking=False):
            self._clock.sleep(_TURN_S)  # a heartbeat that is being written would stay for ever
        try:
            self._leave()
        finally:
            self._left = True
            self._ticking.release()

    def _leave(self) -> None:
        if self._ended is None:
            with suppress(ReshardError, EpochLostError):
                self.flush()
            # A worker that fails because the conversion has just ended must know it, to remove what it wrote since.
            # What a flush wrote may be there although the flush failed.
            self._look_at_last()
        doomed = [f"{BEATS}{self._name}", self.epoch.name(f"idle-{self._name}")]
        if isinstance(self._ended, EpochLostError):
            doomed += self._still_there(self._written)
        elif self._began and not self._ready and not self._declared:
            doomed.append(epoch_name(self.epoch.number))
        for _ in range(_LEAVE_TRIES):
            try:
                self._store.delete(doomed)
            except ReshardError:
                self._clock.sleep(self._timing.poll_s)
            else:
                break
        if (self._declared or self._view.failed) and not (self._ready or self._view.ready):
            with suppress(ReshardError):
                self._remove_failed()

    def _look_at_last(self) -> None:
        """Look, although the store may be away for a while. Errors are ignored."""
        for _ in range(_LEAVE_TRIES):
            try:
                self.look()
            except EpochLostError:
                return
            except ReshardError as error:
                if not error.retryable:
                    return
                self._clock.sleep(self._timing.poll_s)
            else:
                return

    def _remove_failed(self) -> None:
        """Remove an epoch that failed before it was ready, which holds nothing of use, if this worker is the last."""
        names = self._store.names()
        self._members.look(names)
        if newest_epoch(names) == self.epoch.number and self.present_count == 1:
            beats = [name for name in names if name.startswith(BEATS)]
            self._store.delete([epoch_name(self.epoch.number), *beats, *dead_names(names, self.epoch.number + 1)])

    def _still_there(self, names: Sequence[str]) -> Sequence[str]:
        """Those of the texts that nobody has removed yet, or all if that cannot be found out."""
        with suppress(ReshardError):
            listed = self._store.names()
            return [name for name in names if name in listed]
        return names

    def fail(self, error: ReshardError) -> None:
        """Tell all workers of the epoch that the conversion cannot succeed."""
        self._written.append(self.epoch.name("failed"))
        self._declared, self.failed_for_all = True, self.saw_others
        with suppress(ReshardError):
            self._store.create(self.epoch.name("failed"), json.dumps(error.to_problem()).encode())

    def _failure(self, epoch: Epoch) -> ReshardError:
        self.failed_for_all = True
        text = self._store.read(epoch.name("failed"))
        try:
            return from_problem(json.loads(text or b""))
        except (ValueError, TypeError, KeyError, AttributeError):
            return StorageError("storage.unavailable", "another worker of this conversion failed")

    def _owner(self, run: str, fence: int) -> str:
        """The worker that claimed a run, or the commit.

        A claim that is not written yet has a name in its place that no worker has: like a worker that has not begun to
        beat, it counts as alive for one lease. Its worker may have ended between the creation of a file and its text.
        """
        claim = self.epoch.claim_on(run, fence)
        return claim.worker if claim is not None else f"not written: {self.epoch.name(claim_name(run, fence))}"

    @property
    def store(self) -> TextStore:
        """The place where the workers meet."""
        return self._store

    def wait(self, turns: int) -> None:
        """Wait for the others, who have all runs: longer each time, up to `slow_poll_s`."""
        self._clock.sleep(self._timing.pause_s(turns))

    @property
    def saw_others(self) -> bool:
        """True if another worker is alive now."""
        return self.present_count > 1

    @property
    def present_count(self) -> int:
        """The number of workers that are alive now, this one included."""
        return 1 + sum(1 for w in list(self._members.present) if w != self._name and self._members.is_alive(w))

    @property
    def is_over(self) -> bool:
        """True if no epoch is left: the conversion is finished or was removed."""
        return self._is_over

    # -- heartbeats -----------------------------------------------------------------------------------

    def beat(self) -> None:
        """Write the heartbeat."""
        self._beats += 1
        self._store.put(f"{BEATS}{self._name}", self._now(self._beats).to_text())
        self._beat_at = self._clock.monotonic()

    def look(self) -> EpochView:
        """List all texts.

        Raises:
            EpochLostError: The epoch is not the newest one.
            ReshardError: Another worker found that the conversion cannot succeed.
        """
        names = self._store.names()
        self._members.look(names)
        self._looked_at = self._clock.monotonic()
        newest = newest_epoch(names)
        self._is_over = newest == 0
        if newest != self.epoch.number:
            self._lost += self._ended is None
            self._ended = EpochLostError()
            raise self._ended
        view = self.epoch.view(names)
        # Another thread may have claimed a run after this listing began.
        for run, fence in list(self._fences.items()):
            view.fences[run] = max(fence, view.fences.get(run, 0))
        self._names, self._view = names, view
        if self._view.failed:
            self._ended = self._failure(self.epoch)
            raise self._ended
        return self._view

    def check(self) -> None:
        """Raise if the caller wants to stop, or if the epoch has ended.

        Raises:
            EpochLostError: The epoch is not the newest one.
            ReshardError: Another worker found that the conversion cannot succeed.
        """
        self._check()
        if self._ended is not None:
            raise self._ended

    def others(self) -> dict[str, Beat]:
        """The last heartbeats of the other workers, by worker."""
        return self._members.others(self._name)
