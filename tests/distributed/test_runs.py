"""Runs: they hold each unit once, and each knows the bytes of other runs of its wave that its CRC slots need."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from checkpoints import write_zero_checkpoint

from house.measured import say
from house.sources import zero_source
from reshard.api.wire import convert_request
from reshard.options import SourceSpec
from reshard_engine.distributed.claimed_runs import HeldRun
from reshard_engine.distributed.runs import (
    GROUPS,
    SHRINKING_RUNS,
    SUMMED_AGAIN,
    Run,
    Waves,
    copied_records,
    cut_into_runs,
    runs_of,
)
from reshard_engine.operations.conversion import Conversion
from reshard_engine.plan.model import Unit
from reshard_engine.storage.locations import serving
from reshard_engine.tensors.layout import TargetFile
from reshard_engine.testing.stores import MemoryStore

PARAMETERS = [(f"layer.{n}.weight", (256, 257)) for n in range(24)] + [("embed.weight", (8192, 256))]
TARGETS: dict[str, dict[str, object]] = {"universal": {}, "zero": {"dp": 3}, "safetensors": {}, "torch": {}}


source = zero_source(PARAMETERS, stage=2)


@pytest.mark.parametrize("most", [1, 4, 512])
@pytest.mark.parametrize("target", TARGETS)
def test_runs_hold_each_unit_once_and_wait_for_no_other_run(
    target: str, most: int, source: Path, tmp_path: Path
) -> None:
    request = convert_request(
        SourceSpec(url=str(source)), str(tmp_path / "out"), target, {"part_bytes": 64 << 10, **TARGETS[target]}
    )
    conversion = Conversion.prepare(request)
    plan, files = conversion.plan, conversion.layout.files
    waves = cut_into_runs(plan, files, most=most)
    held = [u.index for wave in waves.units for u in wave]
    assert sorted(held) == [u.index for u in plan.units if not u.commit]
    for wave, runs in enumerate(waves.runs):
        assert [u for r in runs for u in waves.units_of(r)] == list(waves.units[wave])
        assert len({r.name for r in runs}) == len(runs)
    for run in (r for runs in waves.runs for r in runs):
        _require_all_crcs(waves, run, files)
    share = waves.last_bytes / plan.write_bytes
    say(f"last wave of {target}, at most {most} runs: {share:.1%} of the bytes, {len(waves.runs[0])} runs before it")
    assert len(waves.runs[0]) <= max(2 * most, 2 * GROUPS)
    again = sum(_summed_again(waves, run) for runs in waves.runs for run in runs)
    say(f"bytes summed twice for {target}, at most {most} runs: {again / plan.write_bytes:.1%}")
    assert again <= plan.write_bytes / SUMMED_AGAIN


def _summed_again(waves: Waves, run: Run) -> int:
    parts = {part for unit in waves.units_of(run) for part in waves.parts_before(unit.index, run)}
    return sum(part.length_bytes for part in parts)


def _require_all_crcs(waves: Waves, run: Run, files: Sequence[TargetFile]) -> None:
    """The bytes of each record for which a run has a slot are its own, those of an earlier wave, or summed again."""
    assert _knows_all_crcs(waves, run, files, [u for w in range(run.wave) for u in waves.units[w]])


def _knows_all_crcs(waves: Waves, run: Run, files: Sequence[TargetFile], written: Sequence[Unit]) -> bool:
    spans = dict[int, list[tuple[int, int]]]()
    for unit in (*waves.units_of(run), *written):
        for chunk in unit.chunks:
            spans.setdefault(chunk.file, []).append((chunk.offset, chunk.length_bytes))
    for unit in waves.units_of(run):
        again = dict[tuple[int, int], int]()
        for part in waves.parts_before(unit.index, run):
            offset, length = files[part.file].template.records[part.record]
            assert offset <= part.begin < part.begin + part.length_bytes <= offset + length
            again[part.file, part.record] = again.get((part.file, part.record), 0) + part.length_bytes
        for chunk in unit.chunks:
            template = files[chunk.file].template
            for _, record in template.slots_in(chunk.offset, chunk.offset + chunk.length_bytes):
                offset, length = template.records[record]
                covered = sum(
                    max(0, min(begin + held, offset + length) - max(begin, offset)) for begin, held in spans[chunk.file]
                )
                assert covered + again.get((chunk.file, record), 0) <= length
                if covered + again.get((chunk.file, record), 0) < length:
                    return False
    return True


@pytest.mark.parametrize("target", ["universal", "zero"])
def test_a_run_of_the_last_wave_begins_when_its_records_are_written(target: str, source: Path, tmp_path: Path) -> None:
    """Runs end in any order, and some were split. What they wrote is counted in bytes of records."""
    request = convert_request(
        SourceSpec(url=str(source)), str(tmp_path / "out"), target, {"part_bytes": 64 << 10, **TARGETS[target]}
    )
    conversion = Conversion.prepare(request)
    files = conversion.layout.files
    waves = cut_into_runs(conversion.plan, files)
    chance = random.Random(7)
    first = [part for run in waves.runs[0] for part in _halves(run, split=chance.random() < 0.3)]
    assert len(first) > len(waves.runs[0])
    assert len(waves.runs[1]) > 1
    ends, done = list(first), set[str]()
    chance.shuffle(ends)
    early = 0
    for number, ended in enumerate([None, *ends]):
        done |= {ended.name} if ended else set()
        ready = waves.ready([*first, *waves.runs[1]], done.__contains__)
        assert all(ready(run) for run in first)
        written = [u for run in first if run.name in done for u in waves.units_of(run)]
        for run in waves.runs[1]:
            complete = _knows_all_crcs(waves, run, files, written)
            assert ready(run) == complete, f"{run.name} after {number} of {len(first)} runs"
            early += complete and number < len(first)
    assert early, "no run of the last wave could begin early"


def _halves(run: Run, *, split: bool) -> list[Run]:
    middle = (run.first + run.end) // 2
    if not split or middle == run.first:
        return [run]
    return [Run(run.wave, run.first, middle), Run(run.wave, middle, run.end)]


def test_the_last_runs_of_a_wave_are_short() -> None:
    sizes = [1 << 20] * 4096
    runs = runs_of(0, sizes, [0] * len(sizes), 16 << 20)
    lengths = [run.end - run.first for run in runs]
    assert lengths == sorted(lengths, reverse=True)
    assert (lengths[0], lengths[-2]) == (16, 4)
    assert sum(length < 16 for length in lengths) >= SHRINKING_RUNS
    assert len(runs) <= 4096 // 16 + 2 * SHRINKING_RUNS


def test_a_file_of_many_records_is_divided(source: Path, tmp_path: Path) -> None:
    """Each unit ends a record that the one before begins, so the whole file was one run."""
    options = {"part_bytes": 64 << 10}
    request = convert_request(SourceSpec(url=str(source)), str(tmp_path / "out"), "torch", options)
    conversion = Conversion.prepare(request)
    waves = cut_into_runs(conversion.plan, conversion.layout.files, most=64)
    largest = max(sum(u.length_bytes for u in waves.units_of(run)) for run in waves.runs[0])
    say(f"torch, at most 64 runs: {len(waves.runs[0])}, the largest has {largest / conversion.plan.write_bytes:.1%}")
    assert largest <= conversion.plan.write_bytes / 16
    assert len(waves.runs[0]) >= 32


def test_many_processes_create_one_text(tmp_path: Path) -> None:
    from reshard_engine.storage.texts import FileTexts

    root = tmp_path / "root"
    stores = [FileTexts(str(root)) for _ in range(8)]
    assert [s.create("epoch-000001", f"{n}".encode()) for n, s in enumerate(stores)] == [True] + [False] * 7
    stores[3].put("beats/a", b"1")
    before = stores[0].names()
    stores[3].put("beats/a", b"2")
    after = stores[0].names()
    assert set(before) == set(after) == {"epoch-000001", "beats/a"}
    assert before["beats/a"] != after["beats/a"]
    assert before["epoch-000001"] == after["epoch-000001"]
    assert (stores[1].read("beats/a"), stores[1].read("beats/b")) == (b"2", None)
    stores[2].delete(["beats/a", "beats/b"])
    assert set(stores[1].names()) == {"epoch-000001"}


def test_a_text_appears_on_file_systems_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from reshard_engine.storage.texts import FileTexts

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    store = FileTexts(str(tmp_path / "root"))
    assert store.create("epoch-000001", b"first")
    assert not store.create("epoch-000001", b"second")
    assert (store.read("epoch-000001"), list(store.names())) == (b"first", ["epoch-000001"])


@pytest.mark.parametrize("target", TARGETS)
def test_both_parts_of_a_run_that_is_split_know_the_crcs_that_they_need(
    target: str, source: Path, tmp_path: Path
) -> None:
    request = convert_request(
        SourceSpec(url=str(source)), str(tmp_path / "out"), target, {"part_bytes": 64 << 10, **TARGETS[target]}
    )
    conversion = Conversion.prepare(request)
    files = conversion.layout.files
    waves = cut_into_runs(conversion.plan, files, most=4)
    splits = 0
    for run in (r for runs in waves.runs for r in runs):
        for begun in range(run.end - run.first):
            held = HeldRun(run, 1, waves)
            for _ in range(begun):
                held.next_unit(())
            at = held.split()
            if at is None:
                continue
            splits += 1
            assert run.first + begun <= at < run.end
            behind = Run(run.wave, at, run.end)
            assert _summed_again(waves, behind) <= 2 * max(u.length_bytes for u in conversion.plan.units)
            _require_all_crcs(waves, behind, files)
            _require_all_crcs(waves, Run(run.wave, run.first, at), files)
    assert splits > 0


@pytest.mark.parametrize("part_kib", [4, 6, 9])
def test_units_of_a_record_that_the_store_copies_stay_together(part_kib: int, tmp_path: Path) -> None:
    """The CRC-32 of such a record is known by ranges of units, so no other worker can add to it."""
    write_zero_checkpoint(tmp_path, [("embed.weight", (100, 40)), ("head.weight", (64, 63))], stage=2, ranks=4)
    store = MemoryStore(min_part_bytes=1 << 10)
    store.load(tmp_path, "data/run")
    request = convert_request(
        SourceSpec(url="mem://data/run"), "mem://out/tag", "zero", {"dp": 2, "part_bytes": part_kib << 10}
    )
    with serving("mem", store):
        conversion = Conversion.prepare(request)
    plan, files = conversion.plan, conversion.layout.files
    copied = copied_records(plan)
    waves = cut_into_runs(plan, files)
    open_places = 0
    for wave, units in enumerate(waves.units):
        for place, may_begin in enumerate(waves.cuts[wave]):
            run = Run(wave, place, len(units))
            parts = [part for unit in waves.units_of(run) for part in waves.parts_before(unit.index, run)]
            is_open = any((part.file, part.record) in copied for part in parts)
            open_places += is_open
            assert not (is_open and may_begin)
    assert open_places > 0
