"""One upload for each file and plan: two attempts at a conversion that began at once write the same upload."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Sequence

import pytest

from reshard.errors import StorageError
from reshard_engine.execute.journal import ChunkRecord, UnitRecord
from reshard_engine.execute.sinks.object_store import ObjectSink
from reshard_engine.plan.model import Chunk, Plan, PlannedFile, Unit
from reshard_engine.storage.protocol import PartInfo
from reshard_engine.tensors.layout import KnownFiles
from reshard_engine.testing.stores import MemoryStore

SIZE = 64
CHUNKS = (Chunk(0, 0, SIZE), Chunk(0, SIZE, SIZE))
UNITS = tuple(Unit(n, (chunk,), commit=False) for n, chunk in enumerate(CHUNKS))
PLAN = Plan({}, {}, (PlannedFile("large.bin", 2 * SIZE, False, ""),), UNITS, SIZE, 0, 2 * SIZE, None, 0)


class OtherEtags(MemoryStore):
    """A store whose parts get another ETag at each sending, as Amazon S3 does under SSE-KMS."""

    def __init__(self) -> None:
        super().__init__(min_part_bytes=1)
        self._parts: dict[tuple[str, int], PartInfo] = {}

    def put_part(
        self, path: str, upload_id: str, number: int, data: memoryview, *, crc32: int | None = None
    ) -> PartInfo:
        super().put_part(path, upload_id, number, data, crc32=crc32)
        part = PartInfo(number, len(data), uuid.uuid4().hex, crc32)
        self._parts[upload_id, number] = part
        return part

    def list_parts(self, path: str, upload_id: str) -> list[PartInfo] | None:
        listed = super().list_parts(path, upload_id)
        return None if listed is None else [self._parts[upload_id, part.number] for part in listed]

    def complete_multipart(self, path: str, upload_id: str, parts: Sequence[PartInfo]) -> None:
        if any(part != self._parts[upload_id, part.number] for part in parts):
            raise StorageError("storage.protocol", "InvalidPart")
        own = {p.number: p for p in super().list_parts(path, upload_id) or ()}
        super().complete_multipart(path, upload_id, [own[part.number] for part in parts])


def begun(store: MemoryStore) -> ObjectSink:
    sink = ObjectSink(store, "bucket/out", known=KnownFiles())
    sink.begin(PLAN, overwrite=False)
    return sink


def written(sink: ObjectSink) -> dict[int, UnitRecord]:
    data = memoryview(bytes(SIZE))
    crc = zlib.crc32(data)
    records = {
        unit.index: UnitRecord(unit.index, (ChunkRecord(unit.chunks[0], crc, sink.write(unit.chunks[0], data, crc)),))
        for unit in UNITS
    }
    for record in records.values():
        sink.record(record)
    return records


def test_two_attempts_write_one_upload() -> None:
    store = MemoryStore(min_part_bytes=1)
    first, second = begun(store), begun(store)
    written(first)
    written(second)
    assert len(store.list_uploads("bucket/")) == 1
    assert first.uploads == second.uploads


def test_the_loser_s_parts_do_not_make_the_winner_s_fail() -> None:
    store = OtherEtags()
    first, second = begun(store), begun(store)
    records = written(first)
    written(second)
    first.seal(records)
    first.publish(records)
    first.commit(b"{}", None)
    info = store.stat("bucket/out/large.bin")
    assert info is not None
    assert info.size_bytes == 2 * SIZE
    assert store.list_uploads("bucket/") == []


def test_an_upload_that_is_gone_is_named_anew() -> None:
    store = MemoryStore(min_part_bytes=1)
    written(begun(store))
    ((path, upload_id),) = store.list_uploads("bucket/")
    store.abort_multipart(path, upload_id)
    again = begun(store)
    records = written(again)
    assert again.uploads[0] != upload_id
    again.seal(records)
    later = begun(store)
    assert dict(later.uploads) == dict(again.uploads)


def test_an_upload_is_not_created_twice_when_its_name_cannot_be_written() -> None:
    class NoNames(MemoryStore):
        def put(self, path: str, *args: object, **options: object) -> object:
            if "/upload-" in path:
                raise StorageError("storage.unavailable", "injected")
            return super().put(path, *args, **options)  # type: ignore[arg-type]

    store = NoNames(min_part_bytes=1)
    sink = begun(store)
    with pytest.raises(StorageError, match="injected"):
        written(sink)
    assert len(store.list_uploads("bucket/")) == 1, "the journal does not name it; the next attempt aborts it"
    begun(store)
    assert store.list_uploads("bucket/") == []
