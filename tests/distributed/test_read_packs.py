"""Packs of reads: what a mutated, torn, old or hostile one may do is to miss."""

from __future__ import annotations

import random
import struct
import tracemalloc
import zlib

import pytest
import xxhash
from hypothesis import given, settings, strategies as st

from reshard_engine.containers.source_file import CachedFile, SourceFile
from reshard_engine.storage.packed_store import PackedStore, ReadRecorder
from reshard_engine.storage.protocol import ObjectInfo, read_bytes
from reshard_engine.storage.read_pack import (
    MAX_BODY_BYTES,
    Ranges,
    ReadPack,
    body_bytes,
    from_part,
    key_of,
    to_part,
)
from reshard_engine.testing.memory_store import MemoryStore

MAGIC = b"reshard reads 1\n"
RANGES = st.dictionaries(
    st.binary(min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 1 << 50), st.binary(max_size=60)), min_size=1, max_size=5),
    max_size=6,
)


@given(ranges=RANGES)
def test_a_part_holds_what_was_put_into_it(ranges: Ranges) -> None:
    assert from_part(to_part(ranges)) == ranges


@settings(max_examples=200)
@given(ranges=RANGES, data=st.data())
def test_a_mutated_part_is_the_same_or_none(ranges: Ranges, data: st.DataObject) -> None:
    part = bytearray(to_part(ranges))
    match data.draw(st.sampled_from(("flip", "cut", "insert", "zero", "append", "swap"))):
        case "flip":
            for _ in range(data.draw(st.integers(1, 4))):
                part[data.draw(st.integers(0, len(part) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del part[data.draw(st.integers(0, len(part) - 1)) :]
        case "insert":
            at = data.draw(st.integers(0, len(part)))
            part[at:at] = data.draw(st.binary(min_size=1, max_size=8))
        case "zero":
            at = data.draw(st.integers(0, len(part) - 1))
            part[at : at + 16] = bytes(len(part[at : at + 16]))
        case "append":
            part += data.draw(st.binary(min_size=1, max_size=8))
        case _:
            at = data.draw(st.integers(0, len(part) - 1))
            part = part[at:] + part[:at]
    assert from_part(bytes(part)) in (None, ranges)


def sealed(body: bytes, *, length: int | None = None) -> bytes:
    """A part with a right digest, as somebody makes it who means harm."""
    head = struct.pack("<I16s", len(body) if length is None else length, xxhash.xxh3_128_digest(body))
    return MAGIC + head + zlib.compress(body)


@settings(max_examples=200)
@given(ranges=RANGES, data=st.data())
def test_a_body_of_nonsense_is_none_or_ranges_of_its_bytes(ranges: Ranges, data: st.DataObject) -> None:
    body = bytearray(zlib.decompress(to_part(ranges)[len(MAGIC) + 20 :]))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at : at + 4] = data.draw(st.binary(min_size=1, max_size=6))
    found = from_part(sealed(bytes(body)))
    if found is not None:
        pack = ReadPack([found])
        for key, there in found.items():
            for offset, held in there:
                assert held in bytes(body)
                pack.read(key, offset, len(held) + 1)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        struct.pack("<I", 2**32 - 1),
        struct.pack("<II", 1, 2**32 - 1) + bytes(8),
        struct.pack("<III", 0, 2**32 - 1, 0),
        struct.pack("<II", 0, 1) + struct.pack("<HI", 2**16 - 1, 2**32 - 1),
        struct.pack("<II", 0, 1) + struct.pack("<HI", 1, 1) + b"k" + struct.pack("<QI", 0, 5),
        struct.pack("<II", 0, 0) + b"more",
    ],
    ids=["empty", "blobs", "a long blob", "keys", "a long key", "no such blob", "more"],
)
def test_counts_and_lengths_are_not_believed(body: bytes) -> None:
    assert from_part(sealed(body)) is None


def test_a_bomb_is_not_unpacked() -> None:
    bomb = sealed(bytes(64 << 20), length=1 << 20)
    tracemalloc.start()
    try:
        assert from_part(bomb) is None
        assert from_part(sealed(bytes(1 << 20), length=MAX_BODY_BYTES + 1)) is None
        assert body_bytes(sealed(b"", length=2**32 - 1)) == 0
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@given(data=st.data())
def test_a_read_is_joined_from_ranges_or_missed(data: st.DataObject) -> None:
    truth = random.Random(7).randbytes(200)
    cuts = data.draw(st.lists(st.tuples(st.integers(0, 199), st.integers(1, 60)), max_size=12))
    pack = ReadPack([{b"k": [(at, truth[at : at + count])]} for at, count in cuts])
    known = {i for at, count in cuts for i in range(at, min(200, at + count))}
    for _ in range(10):
        at, count = data.draw(st.integers(0, 199)), data.draw(st.integers(1, 60))
        end = min(200, at + count)
        expected = truth[at:end] if known.issuperset(range(at, end)) else None
        assert pack.read(b"k", at, end - at) == expected
    assert pack.read(b"other", 0, 1) is None


# -- the store ---------------------------------------------------------------------------------------------


class CountingStore(MemoryStore):
    """A store that counts its reads."""

    reads = 0

    def read_into(self, info: ObjectInfo, offset: int, buffer: memoryview) -> None:
        self.reads += 1
        super().read_into(info, offset, buffer)


def put(store: MemoryStore, data: bytes) -> ObjectInfo:
    return store.put("bucket/file", data, metadata={}, if_absent=False)


def packed(store: MemoryStore, *read: tuple[int, int], place: str = "p") -> ReadPack:
    """A pack of these ranges of the file, as one process made it and another fetched it."""
    recorder = ReadRecorder()
    seen = PackedStore(store, place, None, recorder)
    info = seen.stat("bucket/file")
    assert info is not None
    for offset, length in read:
        read_bytes(seen, info, offset, length)
    return ReadPack([found for part in recorder.parts() if (found := from_part(part)) is not None])


def test_a_pack_serves_the_version_that_was_read() -> None:
    store = CountingStore()
    put(store, bytes(range(100)))
    pack = packed(store, (10, 20))
    assert store.reads == 1
    joins = PackedStore(store, "p", pack, None)
    info = joins.stat("bucket/file")
    assert info is not None
    assert read_bytes(joins, info, 12, 5) == bytes(range(12, 17))
    assert store.reads == 1
    assert read_bytes(joins, info, 12, 30) == bytes(range(12, 42))
    assert store.reads == 2


def test_a_pack_misses_another_version_of_an_object() -> None:
    """The object was written again, with other bytes of the same length, between the pack and the listing."""
    store = CountingStore()
    put(store, bytes(range(100)))
    pack = packed(store, (10, 20))
    put(store, bytes(reversed(range(100))))
    joins = PackedStore(store, "p", pack, None)
    info = joins.stat("bucket/file")
    assert info is not None
    assert read_bytes(joins, info, 12, 5) == bytes(reversed(range(100)))[12:17]


def test_a_pack_misses_the_same_path_in_another_place() -> None:
    here, there = CountingStore(), CountingStore()
    put(here, b"x" * 50)
    info = put(there, b"x" * 50)
    joins = PackedStore(there, "another profile", packed(here, (0, 50)), None)
    read_bytes(joins, info)
    assert there.reads == 1


@pytest.mark.parametrize("pin", ["", "etag:", "info:12:"])
def test_an_object_without_a_version_has_no_key(pin: str) -> None:
    assert key_of("p", ObjectInfo("bucket/file", 12, pin)) is None


def test_a_recorder_forgets_everything_beyond_its_bound() -> None:
    recorder = ReadRecorder(most_bytes=10_000, part_bytes=4_000)
    chance = random.Random(1)
    for number in range(9):
        recorder.add(b"k", 1_000 * number, chance.randbytes(1_000))
    assert len(recorder.parts()) >= 2
    assert not recorder.too_large
    for number in range(9):
        recorder.add(b"k", 1_000 * number, chance.randbytes(1_000))
    assert recorder.too_large
    assert recorder.parts() == []


def test_equal_ranges_of_many_files_are_kept_once() -> None:
    recorder, pickle = ReadRecorder(most_bytes=1 << 20), random.Random(2).randbytes(100_000)
    for number in range(500):
        recorder.add(b"file-%d" % number, 64, pickle if number % 2 else bytes(bytearray(pickle)))
    (part,) = recorder.parts()
    assert len(part) < 130_000
    found = from_part(part)
    assert found is not None
    assert len(found) == 500
    assert len({id(held) for there in found.values() for _, held in there}) == 1


def test_only_the_bytes_that_were_asked_for_are_recorded() -> None:
    """A reader fetches 64 KiB at once, most of which are tensors: those do not belong into a pack."""
    store = CountingStore()
    info = put(store, random.Random(3).randbytes(1 << 20))
    recorder = ReadRecorder()
    cached = CachedFile(SourceFile(PackedStore(store, "p", None, recorder), "file", (info,)))
    expected = [cached.read(at, 30) for at in (0, 100, 5_000, (1 << 20) - 30)]
    assert store.reads == 2
    (part,) = recorder.parts()
    assert len(part) < 1_000
    ranges = from_part(part)
    assert ranges is not None
    again = CachedFile(SourceFile(PackedStore(store, "p", ReadPack([ranges]), None), "file", (info,)))
    assert again.holds(100, 30)
    assert not again.holds(100, 31)
    assert [again.read(at, 30) for at in (0, 100, 5_000, (1 << 20) - 30)] == expected
    assert store.reads == 2
