"""Sessions: what an old one left is never taken for the new one's, and is collected."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from reshard.errors import StorageError
from reshard_engine.distributed.members import Members, Timing
from reshard_engine.distributed.runs import CrcParts, Run, Waves
from reshard_engine.distributed.session import RunClaim, SessionLostError
from reshard_engine.distributed.worker import DistributedWorker
from reshard_engine.execute.journal import UnitRecord
from reshard_engine.plan.model import Chunk, Unit
from reshard_engine.storage import local_writes, texts
from reshard_engine.storage.texts import FileTexts, ObjectTexts
from reshard_engine.testing.stores import Fault, FaultyStore, MemoryStore, Steps

TIMING = Timing(lease_s=10.0, poll_s=0.1)
UNITS = tuple(Unit(n, (Chunk(0, 8 * n, 8),), commit=False) for n in range(4))
RUNS = (Run(0, 0, 2), Run(0, 2, 4))
WAVES = Waves((UNITS, ()), (RUNS, ()), ((True,) * 4, ()), CrcParts((), ()))


class HandClock:
    """A clock that only sleepers move."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def a_worker(store: ObjectTexts, name: str, ended: str = "") -> DistributedWorker:
    clock = HandClock()
    members = Members(store, clock, TIMING, ended=lambda worker: worker == ended)
    return DistributedWorker(store, clock, members, name, timing=TIMING)


def begin(store: ObjectTexts, name: str, ended: str = "") -> DistributedWorker:
    """A worker that begins a session, makes it ready, and claims a run. It knows that `ended` is dead."""
    worker = a_worker(store, name, ended)
    assert worker.member.enter()
    worker.make_ready({}, {}, ())
    unit = next(worker.units(WAVES, {}, lambda _: None))
    assert unit in UNITS
    return worker


class ShortClock(HandClock):
    """A clock that ends before a second lease does: whoever still waits then would wait for ever."""

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        assert self.now < 2 * TIMING.lease_s, "waits for ever"


@pytest.mark.parametrize("fence", [1, 2])
def test_a_claim_that_its_worker_never_wrote_ends_after_a_lease(tmp_path: Path, fence: int) -> None:
    """A file system without hard links: the worker was killed between the creation of the file and its text."""
    store, clock = FileTexts(str(tmp_path / "workers")), ShortClock()
    worker = DistributedWorker(store, clock, Members(store, clock, TIMING), "abc-1-000000000001", timing=TIMING)
    assert worker.member.enter()
    worker.make_ready({}, {}, ())
    if fence == 2:
        former = RunClaim("abc-9-000000000009")
        store.put("000001/claim-0.0-0001", former.to_text())
        store.put("000001/split-0.0-0001-1", b"")
    (tmp_path / "workers" / "000001" / f"claim-0.0-{fence:04}").touch()
    units = worker.units(WAVES, {}, lambda _: None)
    found = [next(units).index for _ in range(4)]
    assert sorted(found) == [0, 1, 2, 3], "each unit once"
    assert clock.now > TIMING.lease_s, "not before its lease: it may only be slow"
    assert store.read(f"000001/claim-0.0-{fence + 1:04}") is not None


def test_a_commit_claim_that_its_worker_never_wrote_ends_after_a_lease(tmp_path: Path) -> None:
    store, clock = FileTexts(str(tmp_path / "workers")), HandClock()
    worker = DistributedWorker(store, clock, Members(store, clock, TIMING), "abc-1-000000000001", timing=TIMING)
    assert worker.member.enter()
    worker.make_ready({}, {}, ())
    (tmp_path / "workers" / "000001" / "claim-commit-0001").touch()
    assert not worker.elect()
    clock.sleep(TIMING.lease_s + 1)
    assert worker.elect()


def test_a_text_that_cannot_be_written_leaves_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    store = FileTexts(str(tmp_path))
    monkeypatch.setattr("os.link", no_links)
    writers = [local_writes.write_all, full]

    def write(descriptor: int, text: bytes) -> None:
        writers.pop(0)(descriptor, text)

    monkeypatch.setattr(texts, "write_all", write)
    with pytest.raises(StorageError):
        store.create("claim", b"text")
    assert store.names() == {}


def test_an_session_takes_no_number_of_which_texts_are_left() -> None:
    """The removal of a journal begins with the texts of its sessions, and may be cut short."""
    store = ObjectTexts(MemoryStore(), "bucket/journal/workers")
    store.put("000001/claim-0.0-0001", b"{}")
    store.put("000001/segment-0.0-0001-1-end", b"\n")
    worker = begin(store, "abc-1-000000000001")
    assert worker.member.session.number == 2
    assert [name for name in store.names() if name.startswith("000001/")] == []


def test_a_second_session_collects_the_first() -> None:
    store = ObjectTexts(MemoryStore(), "bucket/journal/workers")
    first = "abc-1-000000000001"
    dead = begin(store, first)
    dead.offer_upload(0, "upload of the first session")
    assert {n for n in store.names() if n.startswith("000001/")} >= {"000001/ready", "000001/upload-0"}
    second = begin(store, "abc-2-000000000002", first)
    assert second.member.session.number == 2
    assert [n for n in store.names() if n == "epoch-000001" or n.startswith("000001/")] == []


def test_an_session_whose_first_heartbeat_failed_is_removed() -> None:
    """Seed 2567 of the simulation: the conversion had ended, so no other worker came to remove it."""
    memory = MemoryStore()
    steps = Steps({3: Fault.ERROR_BEFORE})
    worker = a_worker(ObjectTexts(FaultyStore(memory, steps), "bucket/journal/workers"), "abc-1-000000000001")
    with pytest.raises(StorageError):
        worker.member.enter()
    failed = steps.done[2]
    assert (failed.name, failed.path) == ("put", "bucket/journal/workers/beats/abc-1-000000000001")
    store = ObjectTexts(memory, "bucket/journal/workers")
    assert list(store.names()) == ["epoch-000001"]
    worker.member.leave()
    assert list(store.names()) == []


def test_a_worker_that_enters_no_session_removes_none() -> None:
    """Seed 16048 of the simulation: another worker had begun a session with the number that this one gave up."""
    script = {3: Fault.ERROR_BEFORE}
    memory, steps = MemoryStore(), Steps(script)
    worker = a_worker(ObjectTexts(FaultyStore(memory, steps), "bucket/journal/workers"), "abc-1-000000000001")
    with pytest.raises(StorageError):
        worker.member.enter()
    worker.member.leave()
    store = ObjectTexts(memory, "bucket/journal/workers")
    other = begin(store, "abc-2-000000000002")
    assert other.member.session.number == 1
    before = list(store.names())
    script[len(steps.done) + 1] = Fault.ERROR_BEFORE
    with pytest.raises(StorageError):
        worker.member.enter()
    worker.member.leave()
    assert list(store.names()) == before


def test_a_segment_that_was_written_too_late_is_removed_although_its_acknowledgement_was_lost() -> None:
    """Seed 2801 of the simulation: the worker did not look at the session again after the failed call."""
    script = {0: Fault.ERROR_BEFORE}  # operations count from 1
    memory, steps = MemoryStore(), Steps(script)
    worker = begin(ObjectTexts(FaultyStore(memory, steps), "bucket/journal/workers"), "abc-1-000000000001")
    worker.put_record(UnitRecord(0, ()))
    store = ObjectTexts(memory, "bucket/journal/workers")
    store.delete(list(store.names()))  # another worker has ended the conversion
    script |= {len(steps.done) + 1: Fault.ERROR_AFTER, len(steps.done) + 2: Fault.ERROR_BEFORE}
    worker.member.leave()
    written = [o.path for o in steps.done if "/segment-" in o.path and o.name == "put"]
    assert written == ["bucket/journal/workers/000001/segment-0.0-0001-1"]
    assert list(store.names()) == []


def test_the_end_that_a_lost_owner_wrote_does_not_end_the_run() -> None:
    """It may have given a part away after it had lost the run: only records under the newest fence cover it."""
    store = ObjectTexts(MemoryStore(), "bucket/journal/workers")
    worker = begin(store, "abc-1-000000000001")
    view = worker.member.session.view(
        ["000001/claim-0.0-0001", "000001/segment-0.0-0001-1-end", "000001/claim-0.0-0002"]
    )
    assert not view.is_done("0.0")
    view = worker.member.session.view(["000001/claim-0.0-0002", "000001/segment-0.0-0002-1-end"])
    assert view.is_done("0.0")


def test_a_split_by_an_owner_that_has_lost_the_run_does_not_count() -> None:
    store = ObjectTexts(MemoryStore(), "bucket/journal/workers")
    worker = begin(store, "abc-1-000000000001")
    assert worker.member.session.take("0.0", 7, RunClaim("abc-2-000000000002", splits=()))
    late = worker.member.session.view(["000001/claim-0.0-0007", "000001/split-0.0-0006-1"])
    assert worker.member.session.runs(RUNS, late) == list(RUNS)
    own = worker.member.session.view(["000001/claim-0.0-0007", "000001/split-0.0-0007-1"])
    assert Run(0, 1, 2) in worker.member.session.runs(RUNS, own)


def test_a_worker_of_an_old_session_stops() -> None:
    """So it commits nothing, and aborts nothing."""
    store = ObjectTexts(MemoryStore(), "bucket/journal/workers")
    stale = begin(store, "abc-1-000000000001")
    begin(store, "abc-2-000000000002", "abc-1-000000000001")
    with pytest.raises(SessionLostError):
        stale.elect()
    with pytest.raises(SessionLostError):
        stale.member.check()


def test_one_upload_is_used_for_a_file_whoever_begins_it() -> None:
    store = ObjectTexts(MemoryStore(), "bucket/journal/workers")
    first = begin(store, "abc-1-000000000001")
    second = a_worker(store, "abc-2-000000000002")
    assert not second.member.enter()
    assert first.offer_upload(0, "one") == "one"
    assert second.offer_upload(0, "other") == "one"
    assert first.uploads() == second.uploads() == {0: "one"}
