"""Two conversions into one target: the second is refused at once, and what nobody goes on with can be removed."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from house.promises import command
from house.requests import asked
from house.saves import DATA
from house.waiting import at_once
from reshard.choices import TargetFormat
from reshard.errors import ExitCode, RequestError
from reshard.options import SourceSpec
from reshard_engine.execute.sinks.leftovers import is_held, journal_of, plans_beside
from reshard_engine.operations.cleaning import clean_target
from reshard_engine.operations.conversion import Conversion
from reshard_engine.storage.locations import open_location, serving
from reshard_engine.testing.stores import MemoryStore

SOURCE = str(DATA / "zero2_tiny")
PLACES = ("local", "store")


@pytest.fixture(params=PLACES)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A target in a local directory, and one in an object store."""
    if request.param == "local":
        yield str(tmp_path / "jobs" / "out")
        return
    with serving("mem", MemoryStore()):
        yield "mem://bucket/jobs/out"


def prepared(target: str, to: str = "universal", **options: Any) -> Conversion:
    spec = {"source": SourceSpec(url=SOURCE), "target": target, "to": TargetFormat(to), **options}
    return Conversion.prepare(asked(**spec))


def begun(target: str, to: str = "universal") -> Conversion:
    """A conversion that is at work: it has the target, and one unit is written."""
    conversion = prepared(target, to)
    conversion.sink.begin(conversion.plan, overwrite=False)
    return conversion


def refusal(target: str, to: str, **options: Any) -> RequestError:
    read: list[str] = []
    conversion = prepared(target, to, **options)
    with pytest.raises(RequestError) as caught:
        conversion.run(on_progress=lambda p: read.append(p.phase), should_stop=None)
    assert read == [], "it was at work already"
    return caught.value


def test_other_options_are_refused_at_the_start(target: str) -> None:
    first = begun(target)
    for to in ("safetensors", "torch"):
        error = refusal(target, to)
        assert error.code == "request.target_busy"
        assert "reshard clean" in error.fix
    first.run(on_progress=None, should_stop=None) if "://" in target else first.sink.close()


def test_a_finished_target_is_refused_at_the_start(target: str) -> None:
    prepared(target).run(on_progress=None, should_stop=None)
    assert refusal(target, "safetensors").code == "request.target_exists"


def test_of_two_that_begin_at_once_one_goes_on(tmp_path: Path) -> None:
    """Local: journals of other plans are looked at after the own one is locked."""
    for turn in range(8):
        target = str(tmp_path / str(turn))
        both = [prepared(target, to) for to in ("universal", "safetensors")]
        ends: list[str] = []
        gate = threading.Barrier(2)

        def run(conversion: Conversion, gate: threading.Barrier = gate, ends: list[str] = ends) -> None:
            gate.wait()
            try:
                conversion.run(on_progress=None, should_stop=None)
                ends.append("done")
            except RequestError as error:
                ends.append(error.code)

        at_once(partial(run, c) for c in both)
        assert "done" in ends
        assert set(ends) <= {"done", "request.target_busy", "request.target_exists"}
        left = [name for name in os.listdir(tmp_path) if name.startswith(f".{turn}.")]
        assert left == []


def test_what_nobody_goes_on_with_is_removed(target: str) -> None:
    begun(target).sink.close()
    location = open_location(target)
    shown = clean_target(location, dry_run=True, idle_s=0)
    assert shown.leftovers
    assert not shown.removed
    assert not any(found.in_use for found in shown.leftovers)
    assert clean_target(location, dry_run=True, idle_s=0) == shown, "a look changes nothing"
    assert clean_target(location, dry_run=False, idle_s=0).removed
    assert clean_target(location, dry_run=True, idle_s=0).leftovers == ()
    prepared(target, "safetensors").run(on_progress=None, should_stop=None)


def test_a_finished_target_stays(target: str) -> None:
    prepared(target).run(on_progress=None, should_stop=None)
    location = open_location(target)
    before = location.files()
    assert clean_target(location, dry_run=False, idle_s=0).leftovers == ()
    assert location.files() == before


def test_what_a_process_is_at_work_on_stays(tmp_path: Path) -> None:
    target = str(tmp_path / "out")
    first = begun(target)
    begun_files = sorted(os.listdir(tmp_path))
    code, told, said = command("clean", target)
    assert code == ExitCode.CONFLICT
    assert "in use, stays" in told
    assert "request.target_busy" in said
    code, told, said = command("clean", target, "--idle")  # a lock is not a guess
    assert code == ExitCode.CONFLICT
    assert sorted(os.listdir(tmp_path)) == begun_files
    first.sink.close()
    code, told, _ = command("clean", target, "--dry-run", "--json")
    found = json.loads(told)
    assert (code, found["removed"]) == (0, False)
    assert {item["kind"] for item in found["leftovers"]} == {"staging", "journal"}
    assert sorted(os.listdir(tmp_path)) == begun_files
    assert command("clean", target)[0] == 0
    assert os.listdir(tmp_path) == []
    assert command("clean", target) == (0, f"nothing is left beside {target}\n", "")


def test_a_look_takes_no_lock_from_anyone(tmp_path: Path) -> None:
    target = str(tmp_path / "out")
    begun(target).sink.close()
    journal = journal_of(target, next(iter(plans_beside(target))))
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            is_held(journal)
            time.sleep(0.001)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(20):
            begun(target).sink.close()
    finally:
        stop.set()
        thread.join(10)


def test_a_directory_names_the_targets_below_it_and_touches_none(tmp_path: Path) -> None:
    save = tmp_path / "run2"
    target = str(save / "global_step3")
    begun(target)
    before = sorted(os.listdir(save))
    code, told, said = command("clean", str(save))
    assert (code, told) == (0, f"nothing is left beside {save}\n")
    assert f"reshard clean {target}" in said
    assert sorted(os.listdir(save)) == before
