"""Runs: they hold each unit once, and no unit waits for a CRC of bytes that another run of its wave writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoints import write_zero_checkpoint

from house.measured import say
from reshard._wire import convert_request
from reshard.models import SourceSpec
from reshard_engine.distributed.held_run import HeldRun
from reshard_engine.distributed.runs import GROUPS, cut_into_runs
from reshard_engine.operations.conversion import Conversion

PARAMETERS = [(f"layer.{n}.weight", (256, 257)) for n in range(24)] + [("embed.weight", (8192, 256))]
TARGETS: dict[str, dict[str, object]] = {"universal": {}, "zero": {"dp": 3}, "safetensors": {}, "torch": {}}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "run"
    write_zero_checkpoint(directory, PARAMETERS, stage=2, ranks=2)
    return directory


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
    # The bytes of each record that a run's unit writes a slot for are in the same run, or in an earlier wave.
    for wave, runs in enumerate(waves.runs):
        for run in runs:
            before = {c for w in range(wave) for u in waves.units[w] for c in u.chunks}
            mine = {c for u in waves.units_of(run) for c in u.chunks}
            for chunk in mine:
                template = files[chunk.file].template
                for _, record in template.slots_in(chunk.offset, chunk.offset + chunk.length_bytes):
                    offset, length = template.records[record]
                    covered = sum(
                        min(c.offset + c.length_bytes, offset + length) - max(c.offset, offset)
                        for c in mine | before
                        if c.file == chunk.file and c.offset < offset + length and c.offset + c.length_bytes > offset
                    )
                    assert covered == length
    share = waves.last_bytes / plan.write_bytes
    say(f"last wave of {target}, at most {most} runs: {share:.1%} of the bytes, {len(waves.runs[0])} runs before it")
    assert len(waves.runs[0]) <= max(2 * most, 2 * GROUPS)


def test_many_processes_create_one_text(tmp_path: Path) -> None:
    from reshard_engine.distributed.file_coordination import FileCoordination

    root = tmp_path / "root"
    stores = [FileCoordination(str(root)) for _ in range(8)]
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
    from reshard_engine.distributed.file_coordination import FileCoordination

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    store = FileCoordination(str(tmp_path / "root"))
    assert store.create("epoch-000001", b"first")
    assert not store.create("epoch-000001", b"second")
    assert (store.read("epoch-000001"), list(store.names())) == (b"first", ["epoch-000001"])


@pytest.mark.parametrize("target", TARGETS)
def test_a_run_is_split_only_where_no_unit_waits_for_a_crc_of_an_earlier_one(
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
            given = {c for u in waves.units[run.wave][at : run.end] for c in u.chunks}
            kept = {c for u in waves.units[run.wave][run.first : at] for c in u.chunks}
            for chunk in given:
                template = files[chunk.file].template
                begin, end = chunk.offset, chunk.offset + chunk.length_bytes
                opened = min((template.records[r][0] for _, r in template.slots_in(begin, end)), default=begin)
                before = [c for c in kept if c.file == chunk.file and opened < c.offset + c.length_bytes <= begin]
                assert before == [], f"split at {at}: {chunk} needs CRCs of {before}"
    assert splits > 0
