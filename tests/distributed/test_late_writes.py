"""A worker that goes on after the conversion ended leaves nothing behind in an object store."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace

import pytest

from reshard.errors import RequestError
from reshard.models.jobs import Leftover
from reshard_engine.execute.journal import NamedUpload, UnitRecord
from reshard_engine.execute.sinks.control_objects import ControlObjects
from reshard_engine.execute.sinks.leftovers import Leftovers
from reshard_engine.execute.sinks.object_store import ObjectSink
from reshard_engine.plan.model import Chunk, Plan, PlannedFile, Unit
from reshard_engine.tensors.layout import KnownFiles
from reshard_engine.testing.stores import MemoryStore

SIZE = 64
FIRST, SECOND, SMALL = Chunk(0, 0, SIZE), Chunk(0, SIZE, SIZE), Chunk(1, 0, SIZE)
FILES = (PlannedFile("large.bin", 2 * SIZE, False, ""), PlannedFile("small.bin", SIZE, False, ""))
UNITS = tuple(Unit(n, (chunk,), commit=False) for n, chunk in enumerate((FIRST, SECOND, SMALL)))
PLAN = Plan({}, {}, FILES, UNITS, SIZE, 0, 3 * SIZE, None, 0)


class NobodyElse:
    """The journal of a worker that is the first to need an upload."""

    is_over = False

    def upload(self, file: int) -> str | None:
        return None

    def offer_upload(self, file: int, upload_id: str) -> str:
        return upload_id

    def uploads(self) -> Mapping[int, str]:
        return {}

    def put_record(self, record: UnitRecord) -> None:
        raise AssertionError(record)


def leftovers(store: MemoryStore) -> list[Leftover]:
    control = ControlObjects(store, "bucket/out")
    return Leftovers(store, "bucket/out", control, KnownFiles()).found(idle_s=0.0)


def a_sink(store: MemoryStore) -> ObjectSink:
    return ObjectSink(store, "bucket/out", known=KnownFiles())


def write(sink: ObjectSink, chunk: Chunk) -> None:
    data = memoryview(bytes(chunk.length_bytes))
    sink.write(chunk, data, zlib.crc32(data))


def late_worker(store: MemoryStore) -> ObjectSink:
    """A worker that joined before the conversion ended, and that wrote a part and an object after it."""
    a_sink(store).begin(PLAN, overwrite=False, shared=True)
    late = a_sink(store)
    late.join(PLAN, NobodyElse(), overwrite=False, uploads={})
    a_sink(store).discard_all()
    write(late, FIRST)
    write(late, SMALL)
    return late


def test_a_worker_that_was_late_removes_its_upload_and_its_objects() -> None:
    store = MemoryStore(min_part_bytes=1)
    late = late_worker(store)
    assert store.list_uploads("bucket/"), "the worker began no upload"
    late.close()
    assert store.list_uploads("bucket/") == []
    assert list(store.list_tree("bucket")) == []


def test_a_worker_that_leaves_early_keeps_what_the_others_need() -> None:
    store = MemoryStore(min_part_bytes=1)
    a_sink(store).begin(PLAN, overwrite=False, shared=True)
    leaving = a_sink(store)
    leaving.join(PLAN, NobodyElse(), overwrite=False, uploads={})
    write(leaving, FIRST)
    write(leaving, SMALL)
    leaving.close()
    assert len(store.list_uploads("bucket/")) == 1
    assert "bucket/out/small.bin" in {i.path for i in store.list_tree("bucket")}


def test_a_worker_that_was_late_by_less_than_the_end_takes_removes_its_upload() -> None:
    store = MemoryStore(min_part_bytes=1)
    a_sink(store).begin(PLAN, overwrite=False, shared=True)
    late, journal = a_sink(store), NobodyElse()
    late.join(PLAN, journal, overwrite=False, uploads={})
    write(late, FIRST)
    journal.is_over = True  # the committer has removed the journal, and not yet the claim
    late.close()
    assert store.list_uploads("bucket/") == []


def test_clean_removes_what_a_late_worker_left_that_was_killed() -> None:
    store = MemoryStore(min_part_bytes=1)
    late = late_worker(store)
    journal = late.meeting_place(PLAN)
    ((_, upload_id),) = store.list_uploads("bucket/")
    assert journal.create("000001/upload-0", NamedUpload(upload_id).to_text())
    assert {f.kind for f in leftovers(store)} == {"journal", "upload"}
    a_sink(store).discard_all()
    assert store.list_uploads("bucket/") == []
    assert leftovers(store) == []


def test_a_plan_that_saw_no_claim_does_not_replace_the_one_of_another() -> None:
    """Two conversions of other plans begin at once: both find the target free, and one claims it."""
    store = MemoryStore()
    other = replace(PLAN, write_bytes=PLAN.write_bytes + 1)
    assert other.digest != PLAN.digest
    assert not ControlObjects(store, "bucket/out").claim(PLAN).clearing
    with pytest.raises(RequestError) as caught:
        ControlObjects(store, "bucket/out").claim(other)
    assert caught.value.code == "request.target_busy"
    assert ControlObjects(store, "bucket/out").is_claimed_by(PLAN.digest)
