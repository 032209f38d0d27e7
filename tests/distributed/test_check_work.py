"""Results of checks count only if they are whole, understood, and results for the same bytes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from distributed.test_sessions import a_worker, begin
from reshard_engine.distributed.checks import (
    FILES,
    GATHERING,
    SOURCE,
    CheckItem,
    CheckRecord,
    Checks,
    CheckWaves,
    CheckWork,
    check_records,
    cut_checks,
)
from reshard_engine.distributed.runs import in_order
from reshard_engine.distributed.segments import to_segment
from reshard_engine.distributed.session import SEALED
from reshard_engine.integrity.checksums import BLOCK_BYTES
from reshard_engine.integrity.file_check import TargetCheck
from reshard_engine.integrity.manifest import Manifest, ManifestFile, ManifestTensor
from reshard_engine.operations.shared_checks import FullChecks
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import ObjectInfo
from reshard_engine.storage.texts import ObjectTexts
from reshard_engine.testing.stores import MemoryStore


class Numbers(Checks):
    """Checks whose results are numbers."""

    def __init__(self, waves: CheckWaves, tie: str = "these bytes") -> None:
        self.waves = waves
        self.made: list[tuple[int, int]] = []
        self._tie = tie

    def tie_of(self, wave: int) -> str:
        return self._tie

    def perform(self, item: CheckItem) -> Any:
        self.made.append((item.wave, item.index))
        return {"number": 10 * item.wave + item.index}

    def understood(self, wave: int, index: int, result: Any) -> int:
        return int(result["number"])


WAVES = cut_checks({SOURCE: [(n, 1) for n in range(4)], FILES: [(n, 1) for n in range(3)]})
EXPECTED = {SOURCE: {n: 10 * SOURCE + n for n in range(4)}, FILES: {n: 10 * FILES + n for n in range(3)}}


def segment(store: ObjectTexts, first: int, text: bytes) -> None:
    """Another worker, which is alive, claims and writes: it says that its run is done."""
    store.put(f"000001/claim-{SOURCE}.{first}-0001", b'{"worker": "abc-2-000000000002", "splits": []}')
    store.put(f"000001/segment-{SOURCE}.{first}-0001-1-end", text)


def results_beside(text: bytes) -> tuple[Numbers, Mapping[int, Mapping[int, Any]]]:
    """The checks that a worker makes, and all results, where another one wrote this text for the first check."""
    store = ObjectTexts(MemoryStore(), "bucket/journal/workers")
    worker = begin(store, "abc-1-000000000001")
    segment(store, 0, text)
    worker.member.look()
    checks = Numbers(WAVES)
    work = CheckWork(worker, checks)
    work.take_part([((SOURCE, FILES), 2)])
    return checks, {wave: of for wave, of in work.results().items() if of}


def test_a_whole_result_of_another_worker_counts() -> None:
    line = CheckRecord(SOURCE, 0, "these bytes", {"number": 30}).to_line()
    checks, found = results_beside(line + b"\n")
    assert found == EXPECTED
    assert (SOURCE, 0) not in checks.made


@pytest.mark.parametrize(
    "text",
    [
        b"\n",
        CheckRecord(SOURCE, 0, "these bytes", {"number": 666}).to_line()[:-3] + b"7}}\n",
        CheckRecord(SOURCE, 0, "these bytes", {"number": 666}).to_line()[:20] + b"\n",
        CheckRecord(SOURCE, 0, "other bytes", {"number": 666}).to_line() + b"\n",
        CheckRecord(SOURCE, 0, "these bytes", {"nothing": 666}).to_line() + b"\n",
        CheckRecord(SOURCE, 0, "these bytes", [[]]).to_line() + b"\n",
        CheckRecord(SOURCE, 77, "these bytes", {"number": 666}).to_line() + b"\n",
        CheckRecord(99, 0, "these bytes", {"number": 666}).to_line() + b"\n",
        b"%08x %s\n" % (zlib.crc32(b"[" * 99), b"[" * 99),
        b"%08x %s\n" % (zlib.crc32(b"{}"), b"{}"),
    ],
    ids=[
        "none",
        "changed",
        "cut off",
        "other bytes",
        "not understood",
        "no object",
        "no item",
        "no wave",
        "deep",
        "empty",
    ],
)
def test_a_result_that_is_none_is_made_again(text: bytes) -> None:
    """The run counts as done, so nobody claims it: the elected worker makes what is missing."""
    checks, found = results_beside(text)
    assert found == EXPECTED
    assert checks.made.count((SOURCE, 0)) == 1


def test_records_of_units_and_of_checks_are_not_mixed_up() -> None:
    from reshard_engine.execute.journal import UnitRecord

    unit, check = UnitRecord(3, ()), CheckRecord(SOURCE, 3, "tie", {})
    assert list(check_records(to_segment([unit, check]))) == [check]
    assert UnitRecord.from_line(check.to_line()) is None


def test_results_of_dead_workers_hold_for_the_worker_that_takes_over() -> None:
    store = ObjectTexts(MemoryStore(), "bucket/journal/workers")
    begin(store, "abc-1-000000000001")
    dead = a_worker(store, "abc-2-000000000002")
    assert not dead.member.enter()
    line = CheckRecord(SOURCE, 0, "these bytes", {"number": 30}).to_line()
    store.put(f"000001/claim-{SOURCE}.0-0001", b'{"worker": "abc-2-000000000002", "splits": []}')
    store.put(f"000001/segment-{SOURCE}.0-0001-1", line + b"\n")
    heir = a_worker(store, "abc-3-000000000003", ended="abc-2-000000000002")
    assert not heir.member.enter()
    checks = Numbers(WAVES)
    work = CheckWork(heir, checks)
    work.take_part([((SOURCE, FILES), 1)])
    assert {wave: of for wave, of in work.results().items() if of} == EXPECTED
    assert (SOURCE, 0) not in checks.made
    assert heir.runs.share.takeovers == 1


def test_a_worker_gathers_the_units_of_others_first() -> None:
    waves = cut_checks({GATHERING: [(n, 1) for n in range(12)]})
    own = {0, 1, 2, 3, 4, 8}
    order = [run.first for run in in_order(waves.runs[GATHERING], waves, 0, 3, own={GATHERING: own})]
    assert set(order[:6]) == set(range(12)) - own
    assert set(order[6:]) == own


# -- a file alone ------------------------------------------------------------------------------------------


def cut_tensors(commit_begins: int) -> tuple[MemoryStore, Manifest, dict[str, ObjectInfo]]:
    """Tensors that go on from file to file, at places that no block begins at, and their manifest."""
    random = np.random.default_rng(7)
    store, files, rows = MemoryStore(), 4, []
    contents = [bytearray() for _ in range(files)]
    for number, size in enumerate((3 * BLOCK_BYTES + 1000, BLOCK_BYTES // 2, 4 * BLOCK_BYTES, 77)):
        data = random.integers(0, 256, size, dtype=np.uint8).tobytes()
        cuts = sorted({0, size, *(int(c) for c in random.integers(1, size, files - 1))})
        places = [(file, len(contents[file]), low, high) for file, (low, high) in enumerate(pairwise(cuts))]
        for file, _, low, high in places:
            contents[file] += data[low:high]
        rows.append((f"t{number}", places))
    for number, content in enumerate(contents):
        store.put(f"b/{number}", bytes(content), metadata={}, if_absent=True)
    manifest = Manifest.model_construct(
        files=tuple(
            ManifestFile(path=str(n), size_bytes=len(c), pin="", chunks=((0, len(c), zlib.crc32(c)),))
            for n, c in enumerate(contents)
        ),
        tensors=tuple(
            ManifestTensor(fqn=name, state="s", dtype="uint8", shape=(1,), xxh3="", extents=tuple(places))
            for name, places in rows
        ),
    )
    there = Location(store, "b", "mem://b").files()
    return store, manifest, {path: info for path, info in there.items() if int(path) < commit_begins}


@pytest.mark.parametrize("commit_begins", [4, 2])
def test_files_that_are_read_alone_give_the_digests_of_all_tensors(commit_begins: int) -> None:
    """Also if some of them can be read only later, because they are published last."""
    store, manifest, first = cut_tensors(commit_begins)
    there = Location(store, "b", "mem://b").files()
    whole = TargetCheck(manifest, lambda: None)
    whole.read(store, there, range(4))
    alone = TargetCheck(manifest, lambda: None)
    for number in range(4):
        readable = first if number < commit_begins else there
        reading = TargetCheck(manifest, lambda: None).read_alone(store, readable, number)
        assert reading.problems == []
        assert reading.damaged == []
        alone.absorb(reading)
    alone.read_missing(store, there)
    digests = [whole.digest_of(n) for n in range(4)]
    assert None not in digests
    assert [alone.digest_of(n) for n in range(4)] == digests
    assert alone.sha256 == whole.sha256


def test_a_reading_of_another_file_or_of_blocks_that_do_not_exist_is_none() -> None:
    store, manifest, there = cut_tensors(4)
    full = SimpleNamespace(
        plan=SimpleNamespace(files=manifest.files, units=(), digest="a plan"),
        checkpoint=SimpleNamespace(files=()),
        files_of=lambda *, commit: () if commit else range(4),
        written=SimpleNamespace(store=store),
        written_files=lambda: there,
    )
    checks = FullChecks(cast("Any", full), manifest, SEALED, lambda: None)
    found = json.loads(json.dumps(checks.perform(CheckItem(FILES, 1, 0))))
    reading = checks.understood(FILES, 1, found)
    assert reading == TargetCheck(manifest, lambda: None).read_alone(store, there, 1)
    assert found["blocks"]
    block = found["blocks"][0]
    damage = {"file": 2, "begin": 0, "end": 1, "crc32": 0, "expected": 1}
    for change in (
        {"file": 2},
        {"sha256": "ab"},
        {"read_bytes": "many"},
        {"damaged": [damage]},
        {"blocks": [{**block, "first": -1}]},
        {"blocks": [{**block, "first": 1 << 20}]},
        {"blocks": [{**block, "tensor": 99}]},
        {"blocks": [{**block, "digests": "AAAA"}]},
        {"blocks": [{**block, "digests": "!!!!"}]},
    ):
        with pytest.raises((ValueError, LookupError, TypeError)):
            checks.understood(FILES, 1, {**found, **change})
