"""A claim under watch while the database comes and goes. The database is the mocked edge, and so is the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.exc import DataError, OperationalError

from reshard.choices import JobKind, TargetFormat
from reshard.models.jobs import ConvertRequest, Progress
from reshard.options import SourceSpec
from reshard_jobs.limits import SERVICE
from reshard_jobs.queue.leases import JobClaim, LeaseStatus
from reshard_jobs.settings import JobSettings
from reshard_worker.settings import WorkerSettings
from reshard_worker.supervisor import LeaseHeartbeat

CLAIM = JobClaim(
    job_id="job",
    owner="me",
    attempt=1,
    kind=JobKind.CONVERT,
    request=ConvertRequest(source=SourceSpec(url="/a"), target="/b", to=TargetFormat.UNIVERSAL),
    limits=SERVICE,
    cleanup=False,
)
SETTINGS = WorkerSettings(jobs=JobSettings(lease_s=0.4, heartbeat_s=0.1), cancel_poll_s=0.05, progress_s=0.15)


class Edge:
    """Leases whose database can be away."""

    lease_s = 0.4

    def __init__(self) -> None:
        self.away = False
        self.cancel = False
        self.beats: list[Progress | None] = []
        self.peeks = 0

    def heartbeat(self, claim: JobClaim, progress: Progress | None = None) -> LeaseStatus:
        self._answer(claim)
        self.beats.append(progress)
        return LeaseStatus(held=True, cancel_requested=self.cancel)

    def peek(self, claim: JobClaim) -> LeaseStatus:
        self._answer(claim)
        self.peeks += 1
        return LeaseStatus(held=True, cancel_requested=self.cancel)

    def _answer(self, claim: JobClaim) -> None:
        assert claim is CLAIM
        if self.away:
            raise OperationalError("SELECT", {}, Exception("away"))


class Clock:
    """The clock of the watch, in the place of the module `time`: it goes on where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.later: list[tuple[float, Callable[[], None]]] = []
        """What happens at a time."""

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self.later and self.later[0][0] <= self.now:
            self.later.pop(0)[1]()

    def tick_for(self, watch: LeaseHeartbeat, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            watch.tick()
            self.sleep(0.01)


@pytest.fixture
def edge() -> Edge:
    return Edge()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("reshard_worker.supervisor.time", clock)
    return clock


def watch_of(edge: Any) -> LeaseHeartbeat:
    return LeaseHeartbeat(edge, CLAIM, SETTINGS)


def test_beats_and_looks_are_paced(edge: Edge, clock: Clock) -> None:
    watch = watch_of(edge)
    clock.tick_for(watch, 0.55)
    assert 3 <= len(edge.beats) <= 6
    assert edge.peeks >= 3
    edge.cancel = True
    clock.tick_for(watch, 0.12)
    assert watch.pulse == LeaseStatus(held=True, cancel_requested=True)


def test_progress_is_throttled_but_a_new_phase_is_not(edge: Edge, clock: Clock) -> None:
    watch = watch_of(edge)
    for done in range(40):
        watch.note(Progress(phase="running", bytes_done=done))
        watch.tick()
        clock.now += 0.01
    recorded = [progress for progress in edge.beats if progress is not None]
    # The first of a phase at once, and then one in 0.15 s of 0.4 s; a heartbeat, each 0.1 s, carries what is new, too.
    assert 2 <= len(recorded) <= 5
    watch.note(Progress(phase="verifying"))
    watch.tick()
    assert edge.beats[-1] == Progress(phase="verifying")


def test_a_short_outage_is_survived_and_a_long_one_is_not(edge: Edge, clock: Clock) -> None:
    watch = watch_of(edge)
    edge.away = True
    clock.tick_for(watch, 0.25)
    assert watch.pulse.held
    edge.away = False
    clock.tick_for(watch, 0.15)
    assert edge.beats
    edge.away = True
    clock.tick_for(watch, 0.7)
    assert not watch.pulse.held
    assert watch.in_doubt


def test_a_claim_in_doubt_is_settled_by_the_answer_of_the_database(
    edge: Edge, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = watch_of(edge)
    edge.away = True
    clock.tick_for(watch, 0.7)
    clock.later.append((clock.now + 0.6, lambda: setattr(edge, "away", False)))
    assert watch.regain().held
    assert not watch.in_doubt
    edge.away = True
    clock.tick_for(watch, 0.7)
    lost = LeaseStatus(held=False, cancel_requested=False)
    monkeypatch.setattr(edge, "heartbeat", lambda *_: lost)
    assert watch.regain() == lost
    assert not watch.in_doubt


def test_an_end_is_recorded_however_long_the_database_was_away(clock: Clock) -> None:
    watch = watch_of(Edge())
    until = clock.now + 3 * Edge.lease_s

    def write() -> bool:
        if clock.now < until:
            raise OperationalError("UPDATE", {}, Exception("away"))
        return True

    assert watch.persist(write)

    def refused() -> bool:
        raise DataError("UPDATE", {}, Exception("out of range"))

    assert not watch.persist(refused), "a statement that never succeeds is not repeated for ever"


def test_what_is_to_be_recorded_waits_for_the_database(edge: Edge, clock: Clock) -> None:
    watch = watch_of(edge)
    tries: list[float] = []

    def write() -> bool:
        tries.append(clock.now)
        if len(tries) == 1:
            raise OperationalError("UPDATE", {}, Exception("away"))
        return True

    assert watch.persist(write)
    assert len(tries) == 2

    def never() -> bool:
        raise OperationalError("UPDATE", {}, Exception("away"))

    assert not watch.persist(never, waits=False)
