"""Ranges that the store copies itself: the bytes are those of a conversion without, and nothing is proven less."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from house.requests import asked
from house.sources import zero_source
from reshard.choices import ServerCopyPolicy, TargetFormat
from reshard.engine import load_engine
from reshard.errors import IntegrityError, SourceError
from reshard.models.jobs import ConvertRequest, ConvertResult
from reshard.options import RunLayout, SourceSpec
from reshard_engine.integrity.checksums import combine, without_prefix, without_suffix
from reshard_engine.integrity.manifest import Manifest, parse_manifest
from reshard_engine.operations.conversion import Conversion
from reshard_engine.plan.model import Plan
from reshard_engine.plan.planner import part_numbers
from reshard_engine.storage.locations import serving
from reshard_engine.storage.protocol import ObjectInfo, PartInfo
from reshard_engine.testing.stores import Fault, FaultyStore, Killed, MemoryStore, Steps

PARAMETERS = [("embed.weight", (100, 40)), ("bias", (7,)), ("head.weight", (64, 63))]
LEAST = 1 << 10
SOURCE, ENGINE = "mem://data/run", load_engine()


save = zero_source(PARAMETERS, stage=2, ranks=4)
"""A ZeRO-2 checkpoint on four ranks; a rank's record has 8 KiB."""


@pytest.fixture
def store(save: Path) -> MemoryStore:
    store = MemoryStore(min_part_bytes=LEAST)
    store.load(save, "data/run")
    return store


def request(target: str, **options: Any) -> ConvertRequest:
    wanted: dict[str, Any] = {"layout": RunLayout(dp=2), "part_bytes": 4 * LEAST, **options}
    return asked(source=SourceSpec(url=SOURCE), target=f"mem://out/{target}", to=TargetFormat.ZERO, **wanted)


def convert(store: Any, target: str, **options: Any) -> ConvertResult:
    with serving("mem", store):
        return ENGINE.convert(request(target, **options))


def plan_of(store: Any, **options: Any) -> Plan:
    with serving("mem", store):
        return Conversion.prepare(request("planned", **options)).plan


def files(store: MemoryStore, target: str) -> dict[str, bytes]:
    found = {p.removeprefix(f"out/{target}/"): data for p, data in store.snapshot(f"out/{target}").items()}
    del found["reshard.json"]
    return found


def manifest(store: MemoryStore, target: str) -> Manifest:
    return parse_manifest(store.snapshot(f"out/{target}")[f"out/{target}/reshard.json"])


class Deaf(MemoryStore):
    """Does not copy, or not any more."""

    after = 0
    asked = 0

    def copy_part(
        self, path: str, upload_id: str, number: int, source: ObjectInfo, *, offset: int, length: int
    ) -> PartInfo | None:
        self.asked += 1
        if self.asked > self.after:
            return None
        return super().copy_part(path, upload_id, number, source, offset=offset, length=length)


# -- what the CRC-32 of a range is ---------------------------------------------------------------------


@given(st.binary(max_size=300), st.binary(max_size=300), st.binary(max_size=300), st.integers(0, 1 << 40))
def test_crc_of_a_range_is_solved_from_the_whole(before: bytes, inside: bytes, behind: bytes, far: int) -> None:
    whole = zlib.crc32(before + inside + behind)
    front = without_suffix(whole, zlib.crc32(behind), len(behind))
    assert front == zlib.crc32(before + inside)
    assert without_prefix(front, zlib.crc32(before), len(inside)) == zlib.crc32(inside)
    # Lengths of which nobody has the bytes: what `combine` does is undone.
    a, b = zlib.crc32(before), zlib.crc32(inside)
    assert without_suffix(combine(a, b, far), b, far) == a
    assert without_prefix(combine(a, b, far), a, far) == b


# -- planning --------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(part=st.integers(2 * LEAST, 24 * LEAST), dp=st.sampled_from([1, 2, 3, 4, 8]))
def test_cuts_tile_files_within_the_limits_of_parts(save: Path, part: int, dp: int) -> None:
    store = MemoryStore(min_part_bytes=LEAST)
    store.load(save, "data/run")
    plan = plan_of(store, part_bytes=part, layout=RunLayout(dp=dp))
    numbers = part_numbers(plan.units)
    for number, file in enumerate(plan.files):
        chunks = [c for u in plan.units for c in u.chunks if c.file == number]
        assert [numbers[c] for c in chunks] == list(range(1, len(chunks) + 1))
        edges = [c.offset for c in chunks]
        assert edges == [sum(c.length_bytes for c in chunks[:n]) for n in range(len(chunks))]
        assert sum(c.length_bytes for c in chunks) == file.size_bytes
        assert all(LEAST <= c.length_bytes <= plan.chunk_bytes for c in chunks[:-1])
        assert chunks[-1].length_bytes <= plan.chunk_bytes
        for server_copy in (o for o in plan.server_copies if o.file == number):
            # Whole chunks: both ends are edges.
            assert {server_copy.begin, server_copy.end} <= {*edges, file.size_bytes}
    again = plan_of(store, part_bytes=part, layout=RunLayout(dp=dp))
    assert (again.digest, again.to_json()) == (plan.digest, plan.to_json())
    without = plan_of(store, part_bytes=part, layout=RunLayout(dp=dp), server_copy=ServerCopyPolicy.NEVER)
    assert without.content_digest == plan.content_digest
    assert not without.server_copies


def test_nothing_is_copied_between_two_stores(store: MemoryStore, save: Path) -> None:
    request = asked(
        source=SourceSpec(url=str(save)), target="mem://out/t", to=TargetFormat.ZERO, layout=RunLayout(dp=2)
    )
    with serving("mem", store):
        assert not Conversion.prepare(request.model_copy(update={"part_bytes": 4096})).plan.server_copies


# -- conversions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dp", [1, 2, 4, 8])
def test_bytes_are_those_of_a_conversion_without(store: MemoryStore, dp: int) -> None:
    layout = RunLayout(dp=dp)
    copied = convert(store, "with", layout=layout)
    plain = convert(store, "without", layout=layout, server_copy=ServerCopyPolicy.NEVER)
    assert files(store, "with") == files(store, "without")
    assert plain.server_copied_bytes == 0
    assert copied.write_bytes == plain.write_bytes
    if dp <= 4:
        assert copied.server_copied_bytes > plain.write_bytes / 3
        assert copied.read_bytes < plain.read_bytes
    assert manifest(store, "with").content_digest == manifest(store, "without").content_digest


def test_manifest_says_what_was_copied_and_verify_reads_it(store: MemoryStore) -> None:
    convert(store, "t")
    convert(store, "plain", server_copy=ServerCopyPolicy.NEVER)
    found, plain = manifest(store, "t"), manifest(store, "plain")
    assert found.server_copied
    assert b'"server_copied"' not in plain.to_bytes()
    for part in found.server_copied:
        data = store.snapshot()[f"out/t/{found.files[part.file].path}"]
        assert zlib.crc32(data[part.offset : part.offset + part.length]) == part.crc32
        source = store.snapshot()[f"data/run/global_step7/{part.source}"]
        assert source[part.source_offset :][: part.length] == data[part.offset :][: part.length]
    digests = {(t.fqn, t.state, t.dtype): t.xxh3 for t in plain.tensors}
    assert all(t.xxh3 in ("", digests[t.fqn, t.state, t.dtype]) for t in found.tensors)
    assert any(not t.xxh3 for t in found.tensors)
    with serving("mem", store):
        report = ENGINE.verify("mem://out/t")
    assert report.ok
    assert report.tensors == sum(1 for t in found.tensors if t.xxh3)


def test_verify_finds_a_flipped_byte_in_a_copied_range(store: MemoryStore) -> None:
    convert(store, "t")
    part = manifest(store, "t").server_copied[-1]
    path = f"out/t/{manifest(store, 't').files[part.file].path}"
    data = bytearray(store.snapshot()[path])
    data[part.offset + part.length // 2] ^= 1
    store.put(path, bytes(data), metadata={}, if_absent=False)
    with serving("mem", store):
        report = ENGINE.verify("mem://out/t")
    assert not report.ok
    assert report.problems[0].offset == part.offset


def test_full_verification_reads_what_was_copied_and_digests_it(store: MemoryStore) -> None:
    result = convert(store, "t", verify="full")
    convert(store, "plain", server_copy=ServerCopyPolicy.NEVER)
    assert result.server_copied_bytes
    found, plain = manifest(store, "t"), manifest(store, "plain")
    assert [t.xxh3 for t in found.tensors] == [t.xxh3 for t in plain.tensors]
    assert found.server_copied


@pytest.mark.parametrize("verify", ["default", "full"])
def test_damaged_record_of_the_source_is_found_by_those_who_read_it(store: MemoryStore, verify: str) -> None:
    """The store copies what the source has: its container's CRC-32 goes with it, and says so."""
    name = "data/run/global_step7/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = bytearray(store.snapshot()[name])
    planned = plan_of(store)
    middle = next(o.proof for o in planned.server_copies if o.proof is not None)
    assert middle is not None
    data[middle.offset + middle.length_bytes // 2] ^= 1
    store.put(name, bytes(data), metadata={}, if_absent=False)
    if verify == "full":
        with pytest.raises(SourceError, match="CRC-32"):
            convert(store, "t", verify=verify)
        return
    convert(store, "t")
    with serving("mem", store):
        assert not ENGINE.verify("mem://out/t").ok


class Lying(MemoryStore):
    """Copies other bytes, and tells of them."""

    def copy_part(
        self, path: str, upload_id: str, number: int, source: ObjectInfo, *, offset: int, length: int
    ) -> PartInfo | None:
        data = bytearray(length)
        self.read_into(source, offset, memoryview(data))
        data[length // 2] ^= 1
        part = self.put_part(path, upload_id, number, memoryview(data))
        return PartInfo(number, length, part.etag, zlib.crc32(data))


def test_other_bytes_that_the_store_tells_of_are_refused(save: Path) -> None:
    store = Lying(min_part_bytes=LEAST)
    store.load(save, "data/run")
    with pytest.raises(IntegrityError):
        convert(store, "t")


@pytest.mark.parametrize("after", [0, 1, 3])
def test_store_that_refuses_is_asked_once_and_its_bytes_are_read(save: Path, store: MemoryStore, after: int) -> None:
    deaf = Deaf(min_part_bytes=LEAST)
    deaf.after = after
    deaf.load(save, "data/run")
    result = convert(deaf, "t", threads=1)
    convert(store, "t", server_copy=ServerCopyPolicy.NEVER)
    assert deaf.asked == after + 1
    assert (result.server_copied_bytes == 0) == (after == 0)
    assert files(deaf, "t") == files(store, "t")
    with serving("mem", deaf):
        assert ENGINE.verify("mem://out/t").ok
    if after == 0:
        assert not manifest(deaf, "t").server_copied


def test_killed_at_any_copy_it_resumes(store: MemoryStore) -> None:
    convert(store, "plain", server_copy=ServerCopyPolicy.NEVER)
    steps = Steps()
    assert convert(FaultyStore(store, steps), "counted", threads=1).server_copied_bytes
    copies = [o.number for o in steps.done if o.name == "copy_part"]
    for trial, number in enumerate(copies):
        for fault in (Fault.KILL_BEFORE, Fault.KILL_AFTER):
            target = f"t{trial}{fault.name.lower()}"
            with pytest.raises(Killed):
                convert(FaultyStore(store, Steps({number: fault})), target, threads=1)
            result = convert(store, target)
            assert files(store, target) == files(store, "plain")
            if trial:
                assert result.resumed_bytes


def test_source_that_changes_before_its_copy_is_refused(store: MemoryStore) -> None:
    steps = Steps()
    convert(FaultyStore(store, steps), "counted", threads=1)
    last = [o.number for o in steps.done if o.name == "copy_part"][-1]
    names = list(store.snapshot("data/run/global_step7"))

    def change() -> None:
        for name in names:
            store.put(name, store.snapshot()[name] + b"x", metadata={}, if_absent=False)

    with pytest.raises(SourceError) as caught:
        convert(FaultyStore(store, Steps({last: change})), "t", threads=1)
    assert caught.value.code == "source.changed"
    assert not any(p.endswith("reshard.json") for p in store.snapshot("out/t"))
