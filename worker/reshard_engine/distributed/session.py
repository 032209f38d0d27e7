"""A session of a conversion: the names of its texts, and a worker as its member.

A session is one attempt at a conversion. Its coordinator clears the target and checks what earlier attempts
wrote; then it is ready, and workers claim its runs. A new session begins when all workers of the last one are dead. A
worker that sees a newer session stops. So whatever a worker of a dead session still writes is read by nobody.

A claim on a run carries a fence: the number of owners that the run has had in this session. A takeover creates the
claim with the next fence, and only one worker can create it. The text that begins a session is named `epoch-N`.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from reshard.errors import ReshardError, StorageError, from_problem
from reshard_engine.distributed.members import BEATS, Beat, Clock, Members, Timing
from reshard_engine.distributed.runs import Run
from reshard_engine.execute.journal import NamedUpload
from reshard_engine.storage.texts import JsonText, TextStore

COMMIT = "commit"
"""The name under which the commit is claimed, as if it were a run."""
RESUMED = "resumed"
"""The name of the segments with the records that the coordinator took from earlier attempts."""
AGREEING = "agreeing"
"""The name of the text with which a coordinator that is not ready lets others compare tensors that must agree."""
SEALED = "sealed"
"""The name of the text with which the elected worker opens the checks before the commit files are written."""
PUBLISHED = "published"
"""The name of the text with which the elected worker opens the checks of the commit files."""
FIRST_CHECKS = 2
"""Waves from this number on hold checks and no units."""

_EPOCH = re.compile("epoch-([0-9]{6})")
_INSIDE = re.compile(
    "([0-9]{6})/(?:(?P<flag>ready|failed|agreeing|sealed|published)"
    "|idle-(?P<idle>[0-9a-f-]+)"
    "|upload-(?P<upload>[0-9]+)"
    "|claim-(?P<claim>[0-9.]+|commit)-(?P<claim_fence>[0-9]+)"
    "|split-(?P<split>[0-9.]+)-(?P<split_fence>[0-9]+)-(?P<at>[0-9]+)"
    "|segment-(?P<segment>[0-9.]+|resumed|commit)-(?P<segment_fence>[0-9]+)-[0-9]+(?P<last>-end)?)"
)


def session_name(number: int) -> str:
    """The name of the text that begins a session."""
    return f"epoch-{number:06}"


def claim_name(run: str, fence: int) -> str:
    """The name of a claim within its session."""
    return f"claim-{run}-{fence:04}"


def is_of_checks(run: str) -> bool:
    """True if the run with this name holds checks."""
    wave = run.partition(".")[0]
    return wave.isdecimal() and int(wave) >= FIRST_CHECKS


def newest_session(names: Iterable[str]) -> int:
    """The number of the newest session in a listing; 0 if there is none."""
    return max((int(found[1]) for name in names if (found := _EPOCH.fullmatch(name))), default=0)


def last_number(names: Iterable[str]) -> int:
    """The highest number of a session of which a text is left; 0 if there is none.

    The text that begins a session is removed first, so a removal that was cut short leaves others.
    """
    found = (_EPOCH.fullmatch(name) or _INSIDE.fullmatch(name) for name in names)
    return max((int(match[1]) for match in found if match), default=0)


@dataclass(frozen=True, slots=True)
class RunClaim(JsonText):
    """The text of a claim on a run, or on the commit."""

    worker: str
    splits: tuple[int, ...] = ()
    """The units at which owners with lower fences split the run, as this owner found them. Later splits by them do not
    count: a paused owner may go on after its run was taken over."""


@dataclass
class SessionView:
    """The names of one session, as one listing shows them."""

    ready: bool = False
    failed: bool = False
    opened: set[str] = field(default_factory=set[str])
    """The checks that are open: `AGREEING`, `SEALED`, `PUBLISHED`."""
    idle: set[str] = field(default_factory=set[str])
    """Workers that wait for a run."""
    uploads: dict[int, str] = field(default_factory=dict[int, str])
    """Names of the texts that hold upload ids, by file number."""
    fences: dict[str, int] = field(default_factory=dict[str, int])
    """The highest fence of each claimed run."""
    splits: dict[str, list[tuple[int, int]]] = field(default_factory=dict[str, list[tuple[int, int]]])
    """(fence, first unit of the part that was split off), by run."""
    segments: dict[str, list[tuple[int, str]]] = field(default_factory=dict[str, list[tuple[int, str]]])
    """(fence, name), by run."""
    ended: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    """(run, fence) of the runs whose owner wrote its last segment."""

    def segments_of_units(self) -> list[str]:
        """The names of all segments but those of checks."""
        return [name for run, of in self.segments.items() if not is_of_checks(run) for _, name in of]

    def is_done(self, run: str) -> bool:
        """True if the owner with the highest fence has written the records of the whole run."""
        return (run, self.fences.get(run, 0)) in self.ended


class Session:
    """One session of a conversion, seen by one worker."""

    def __init__(self, store: TextStore, number: int) -> None:
        """Give access to the session with this number."""
        self.number = number
        self._store = store
        self._claims: dict[tuple[str, int], RunClaim] = {}

    def name(self, rest: str) -> str:
        """The whole name of a text of the session."""
        return f"{self.number:06}/{rest}"

    def view(self, names: Iterable[str]) -> SessionView:
        """The session in a listing. Names that mean nothing are ignored."""
        view = SessionView()
        for name in names:
            found = _INSIDE.fullmatch(name)
            if found is None or int(found[1]) != self.number:
                continue
            if found["flag"]:
                view.ready |= found["flag"] == "ready"
                view.failed |= found["flag"] == "failed"
                view.opened |= {found["flag"]} - {"ready", "failed"}
            elif found["idle"]:
                view.idle.add(found["idle"])
            elif found["upload"]:
                view.uploads[int(found["upload"])] = name
            elif found["claim"]:
                run, fence = found["claim"], int(found["claim_fence"])
                view.fences[run] = max(fence, view.fences.get(run, 0))
            elif found["split"]:
                view.splits.setdefault(found["split"], []).append((int(found["split_fence"]), int(found["at"])))
            else:
                run, fence = found["segment"], int(found["segment_fence"])
                view.segments.setdefault(run, []).append((fence, name))
                if found["last"]:
                    view.ended.add((run, fence))
        return view

    def claim_on(self, run: str, fence: int) -> RunClaim | None:
        """The claim on a run with this fence. It never changes, so it is read once."""
        if fence and (run, fence) not in self._claims:
            claim = RunClaim.from_text(self._store.read(self.name(claim_name(run, fence))))
            if claim is None:
                return None
            self._claims[run, fence] = claim
        return self._claims.get((run, fence))

    def upload(self, name: str) -> str | None:
        """The id in the text that names an upload; None if there is none."""
        named = NamedUpload.from_text(self._store.read(name))
        return None if named is None else named.id

    def uploads(self, view: SessionView) -> dict[int, str]:
        """The ids of the uploads that the workers began, by file number."""
        found = {file: self.upload(name) for file, name in view.uploads.items()}
        return {file: upload_id for file, upload_id in found.items() if upload_id is not None}

    def read_claims(self, claims: Iterable[tuple[str, int]], *, threads: int) -> None:
        """Read claims, given as (run, fence), that are not known yet, several at once."""
        wanted = [claim for claim in claims if claim not in self._claims]
        if threads == 1 or len(wanted) < 2:
            for run, fence in wanted:
                self.claim_on(run, fence)
            return
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(self.claim_on, *zip(*wanted, strict=True)))

    def known_claim(self, run: str, fence: int) -> RunClaim | None:
        """The claim on a run with this fence, if this worker has read or written it."""
        return self._claims.get((run, fence))

    def take(self, run: str, fence: int, claim: RunClaim) -> bool:
        """Claim a run with a fence; False if another worker was faster."""
        taken = self._store.create(self.name(claim_name(run, fence)), claim.to_text())
        if taken:
            self._claims[run, fence] = claim
        return taken

    def splits_of(self, run: str, view: SessionView) -> tuple[int, ...]:
        """The units at which a run is split: as its owner found it, and by this owner."""
        fence = view.fences.get(run, 0)
        # The first owner finds no splits, so its claim need not be read. One that has not written its claim has split
        # nothing, so the run is as the owner before it left it.
        while (claim := self.claim_on(run, fence) if fence > 1 else RunClaim("")) is None:
            fence -= 1
        return tuple(sorted({*claim.splits, *(at for of, at in view.splits.get(run, ()) if of == fence)}))

    def runs(self, planned: Sequence[Run], view: SessionView) -> list[Run]:
        """The runs as they are now: the planned ones, and the parts that were split off."""
        found: list[Run] = []
        pending = list(reversed(planned))
        while pending:
            run = pending.pop()
            inside = [at for at in self.splits_of(run.name, view) if run.first < at < run.end]
            bounds = [run.first, *inside, run.end]
            found.append(Run(run.wave, run.first, bounds[1]))
            pending.extend(Run(run.wave, low, high) for low, high in pairwise(bounds[1:]))
        return found


def dead_names(names: Mapping[str, str], number: int) -> list[str]:
    """The names of all sessions before this one. The texts that begin the sessions come last."""
    inside = [name for name in names if (found := _INSIDE.fullmatch(name)) and int(found[1]) < number]
    return inside + [name for name in names if (found := _EPOCH.fullmatch(name)) and int(found[1]) < number]


_TURN_S = 0.01
_LEAVE_TRIES = 3
"""Number of attempts to remove the texts of a worker that leaves: after the end, nobody else would remove them."""


class SessionLostError(Exception):
    """The session has ended: the conversion is finished, was removed, or began again in another session."""


class Activity(Protocol):
    """The work that a member of a session does in it."""

    def forget(self) -> None:
        """Forget what belongs to the last session."""
        ...

    def heartbeat(self, count: int) -> Beat:
        """The heartbeat with this number."""
        ...

    def flush(self) -> None:
        """Write the records of finished items."""
        ...


class SessionMember:
    """A worker as far as it knows sessions and heartbeats, and no runs."""

    activity: Activity
    """What the worker does in a session. It is set before the worker enters one."""

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
        self.store = store
        self.clock = clock
        self.members = members
        self.name = name
        self.timing = timing
        self._check = check
        self.session = Session(store, 0)
        self._began = self.made_ready = False
        self.is_over = False
        """True if no session is left: the conversion is finished or was removed."""
        self.left = True
        self._declared = False
        """True if this worker told the others that the conversion cannot succeed."""
        self.failed_for_all = False
        """True if a worker said so, and others heard it: then no worker tries again."""
        self.view = SessionView()
        self.names: Mapping[str, str] = {}
        self.fences: dict[str, int] = {}
        """The highest fence of each run that this worker knows of, whatever a listing shows."""
        self.written: list[str] = []
        """Texts of this session that this worker may have written, and that mean nothing once the session has ended."""
        self.ended: SessionLostError | ReshardError | None = None
        self._beats = self.lost = 0
        self.beat_at = self.looked_at = clock.monotonic()
        self.ticking = threading.Lock()

    # -- entering and leaving -------------------------------------------------------------------------

    def enter(self, *, after: int = 0, begin: bool = True) -> bool:
        """Join the newest session, or begin one; True if this worker began it and must make it ready.

        A session that is not ready yet can be joined if its coordinator lets others help (see `wait_until_ready`).

        Args:
            after: The number of a session that is known to be broken; a newer one is begun if there is none yet.
            begin: False to wait until another worker begins one.

        Raises:
            ReshardError: The session failed, and its workers still say so.
        """
        self._forget()
        while True:
            self._check()
            names = self.store.names()
            self.members.look(names)
            newest = newest_session(names)
            session = Session(self.store, newest)
            view = session.view(names)
            alive = [w for w in self.members.present if w != self.name and self.members.is_alive(w)]
            coordinator = RunClaim.from_text(self.store.read(session_name(newest))) if newest else None
            begun = coordinator is not None and self.members.is_alive(coordinator.worker)
            if newest > after and view.failed and alive:
                raise self._failure(session)
            open_ = view.ready or (AGREEING in view.opened and begun)
            if newest > after and open_ and not view.failed and alive:
                if self._join(session):
                    return False
            elif newest > after and not view.ready and not view.failed and begun:
                self.clock.sleep(self.timing.poll_s)
            elif not begin:
                self.clock.sleep(self.timing.slow_poll_s)
            elif self.store.create(session_name(next_ := last_number(names) + 1), RunClaim(self.name).to_text()) and (
                self._join(Session(self.store, next_), began=True)
            ):
                return True

    def _forget(self) -> None:
        """Forget the last session.

        If this worker enters no other one, `leave` must not remove texts of it: its number may have begun again.
        """
        self.ended, self.written, self.fences, self.view = None, [], {}, SessionView()
        self._began = self.made_ready = self._declared = False
        self.activity.forget()

    def _join(self, session: Session, *, began: bool = False) -> bool:
        """Become a member of a session, which this worker may have begun; False if a newer one has begun meanwhile."""
        self._forget()
        self.session = session
        self._began = began  # known before the heartbeat, which may fail: `leave` removes a session without workers
        self.left = self.is_over = self.failed_for_all = False
        self.beat()
        try:
            self.look()
        except SessionLostError:
            return False
        return True

    def wait_until_ready(self) -> None:
        """Wait until the coordinator of this session has made it ready.

        Raises:
            SessionLostError: The coordinator is dead, or the session is not the newest one.
            ReshardError: The conversion cannot succeed.
        """
        turns = 0
        while not (self.view.ready or self.look().ready):
            self.check()
            coordinator = RunClaim.from_text(self.store.read(session_name(self.session.number)))
            if coordinator is not None and not self.members.is_alive(coordinator.worker):
                raise SessionLostError
            self.wait(turns)
            turns += 1

    def open_checks(self, name: str, text: bytes) -> None:
        """Let all workers make checks.

        Args:
            name: `AGREEING`, `SEALED` or `PUBLISHED`.
            text: What the checks compare with. Another one replaces that of an earlier worker.
        """
        self.written.append(self.session.name(name))
        self.store.put(self.session.name(name), text)

    def opened(self, name: str) -> bytes | None:
        """The text that the checks of this name compare with, if the last look found them open."""
        return self.store.read(self.session.name(name)) if name in self.view.opened else None

    def leave(self) -> None:
        """Write the records that are not written yet, and give up all claims. Errors are ignored: leases end anyway."""
        while not self.ticking.acquire(blocking=False):
            self.clock.sleep(_TURN_S)  # a heartbeat that is being written would stay for ever
        try:
            self._leave()
        finally:
            self.left = True
            self.ticking.release()

    def _leave(self) -> None:
        if self.ended is None:
            with suppress(ReshardError, SessionLostError):
                self.activity.flush()
            # A worker that fails because the conversion has just ended must know it, to remove what it wrote since.
            # What a flush wrote may be there although the flush failed.
            self._look_at_last()
        doomed = [f"{BEATS}{self.name}", self.session.name(f"idle-{self.name}")]
        if isinstance(self.ended, SessionLostError):
            doomed += self._still_there(self.written)
        elif self._began and not self.made_ready and not self._declared:
            doomed.append(session_name(self.session.number))
        for _ in range(_LEAVE_TRIES):
            try:
                self.store.delete(doomed)
            except ReshardError:
                self.clock.sleep(self.timing.poll_s)
            else:
                break
        if (self._declared or self.view.failed) and not (self.made_ready or self.view.ready):
            with suppress(ReshardError):
                self._remove_failed()

    def _look_at_last(self) -> None:
        """Look, although the store may be away for a while. Errors are ignored."""
        for _ in range(_LEAVE_TRIES):
            try:
                self.look()
            except SessionLostError:
                return
            except ReshardError as error:
                if not error.retryable:
                    return
                self.clock.sleep(self.timing.poll_s)
            else:
                return

    def _remove_failed(self) -> None:
        """Remove a session that failed before it was ready, which holds nothing of use, if this worker is the last."""
        names = self.store.names()
        self.members.look(names)
        if newest_session(names) == self.session.number and self.present_count == 1:
            beats = [name for name in names if name.startswith(BEATS)]
            self.store.delete([session_name(self.session.number), *beats, *dead_names(names, self.session.number + 1)])

    def _still_there(self, names: Sequence[str]) -> Sequence[str]:
        """Those of the texts that nobody has removed yet, or all if that cannot be found out."""
        with suppress(ReshardError):
            listed = self.store.names()
            return [name for name in names if name in listed]
        return names

    def fail(self, error: ReshardError) -> None:
        """Tell all workers of the session that the conversion cannot succeed."""
        self.written.append(self.session.name("failed"))
        self._declared, self.failed_for_all = True, self.saw_others
        with suppress(ReshardError):
            self.store.create(self.session.name("failed"), json.dumps(error.to_problem()).encode())

    def _failure(self, session: Session) -> ReshardError:
        self.failed_for_all = True
        text = self.store.read(session.name("failed"))
        try:
            return from_problem(json.loads(text or b""))
        except (ValueError, TypeError, KeyError, AttributeError):
            return StorageError("storage.unavailable", "another worker of this conversion failed")

    def owner_of(self, run: str, fence: int) -> str:
        """The worker that claimed a run, or the commit.

        A claim that is not written yet has a name in its place that no worker has: like a worker that has not begun to
        beat, it counts as alive for one lease. Its worker may have ended between the creation of a file and its text.
        """
        claim = self.session.claim_on(run, fence)
        return claim.worker if claim is not None else f"not written: {self.session.name(claim_name(run, fence))}"

    def know(self, run: str, fence: int) -> None:
        """Take note of a claim with this fence."""
        self.fences[run] = self.view.fences[run] = max(fence, self.view.fences.get(run, 0))

    def wait(self, turns: int) -> None:
        """Wait for the others, who have all runs: longer each time, up to `slow_poll_s`."""
        self.clock.sleep(self.timing.pause_s(turns))

    @property
    def saw_others(self) -> bool:
        """True if another worker is alive now."""
        return self.present_count > 1

    @property
    def present_count(self) -> int:
        """The number of workers that are alive now, this one included."""
        return 1 + sum(1 for w in list(self.members.present) if w != self.name and self.members.is_alive(w))

    # -- heartbeats -----------------------------------------------------------------------------------

    def beat(self) -> None:
        """Write the heartbeat."""
        self._beats += 1
        self.store.put(f"{BEATS}{self.name}", self.activity.heartbeat(self._beats).to_text())
        self.beat_at = self.clock.monotonic()

    def look(self) -> SessionView:
        """List all texts.

        Raises:
            SessionLostError: The session is not the newest one.
            ReshardError: Another worker found that the conversion cannot succeed.
        """
        names = self.store.names()
        self.members.look(names)
        self.looked_at = self.clock.monotonic()
        newest = newest_session(names)
        self.is_over = newest == 0
        if newest != self.session.number:
            self.lost += self.ended is None
            self.ended = SessionLostError()
            raise self.ended
        view = self.session.view(names)
        # Another thread may have claimed a run after this listing began.
        for run, fence in list(self.fences.items()):
            view.fences[run] = max(fence, view.fences.get(run, 0))
        self.names, self.view = names, view
        if self.view.failed:
            self.ended = self._failure(self.session)
            raise self.ended
        return self.view

    def check(self) -> None:
        """Raise if the caller wants to stop, or if the session has ended.

        Raises:
            SessionLostError: The session is not the newest one.
            ReshardError: Another worker found that the conversion cannot succeed.
        """
        self._check()
        if self.ended is not None:
            raise self.ended

    def others(self) -> dict[str, Beat]:
        """The last heartbeats of the other workers, by worker."""
        return self.members.others(self.name)
