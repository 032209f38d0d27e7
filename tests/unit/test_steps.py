"""The steps of a run: `reshard ls` tells what is there, and `reshard prune` removes nothing that is protected."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from house.dying import dying
from house.expected import raised
from house.promises import command
from house.saves import DATA
from house.tiers import rest_full
from reshard.engine import load_engine
from reshard.errors import RequestError, SourceError
from reshard.models.reports import PruneDecision, PrunePolicy, RunListing, RunStep
from reshard.options import SourceSpec
from reshard_engine.operations.runs import pruning
from reshard_engine.operations.runs.pruning import decide
from reshard_engine.operations.runs.steps import number_of
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import ObjectInfo

NAMES = ("global_step{}", "checkpoint-{}", "iter_{:07d}", "epoch{}", "best", "final", "dp{}")


def weights(place: Path) -> None:
    """A small directory of weights, which says no step: that of a Trainer with `save_only_model`."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    place.mkdir(parents=True)
    (place / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    (place / "config.json").write_text("{}")


def run_of(place: Path, *numbers: int) -> Path:
    for number in numbers:
        weights(place / f"checkpoint-{number}")
    return place


def there(run: Path) -> list[int]:
    return sorted(number for path in run.glob("[!.]*") if (number := number_of(path.name)) is not None)


def pruned(run: Path, *words: str) -> str:
    code, out, err = command("prune", str(run), *words)
    assert code == 0, err
    return out + err


# The decision, over runs and policies of all kinds.


def listing_of(rows: Sequence[tuple[str, int, str]]) -> RunListing:
    """A run with a checkpoint for each row: the form of its name, its number, and what is the matter with it."""
    found = [
        RunStep(
            name=f"{at}/{form.format(number)}",
            step=None if matter in ("no step", "incomplete") else number,
            files=1,
            size_bytes=1,
            complete=matter != "incomplete",
            code="checkpoint.incomplete" if matter == "incomplete" else "",
            named_by=("latest",) if matter == "named" else (),
            in_use=matter == "in use",
            sealed=matter == "sealed",
        )
        for at, (form, number, matter) in enumerate(rows)
    ]
    return RunListing(url="run", steps=tuple(found))


ROWS = st.tuples(
    st.sampled_from(NAMES),
    st.sampled_from([0, 1, 7, 10, 20, 30, 100, 500, 1_000, 1_500]),
    st.sampled_from(["", "", "", "named", "in use", "incomplete", "no step", "sealed"]),
)


@settings(max_examples=1_000, deadline=None)
@given(
    listing=st.lists(ROWS, max_size=12).map(listing_of),
    policy=st.builds(
        PrunePolicy,
        keep_last=st.integers(1, 15),
        keep_every=st.none() | st.integers(1, 1_000),
        keep_sealed=st.booleans(),
    ),
)
def test_no_policy_removes_what_is_protected(listing: RunListing, policy: PrunePolicy) -> None:
    decided = {found.name: found for found in decide(listing, policy)}
    assert decided.keys() == {step.name for step in listing.steps}
    known = sorted({step.step for step in listing.steps if step.complete and step.step is not None})
    for step in listing.steps:
        if not decided[step.name].kept_for:
            assert step.complete
            assert not step.named_by
            assert not step.in_use
            assert step.step is not None
            assert any(c.isdigit() for c in step.name.rpartition("/")[2])
            assert step.step not in known[-policy.keep_last :]
            assert not (policy.keep_sealed and step.sealed)
            assert policy.keep_every is None or step.step % policy.keep_every
    for step in listing.steps:
        free = step.complete and not step.named_by and not step.in_use and number_of(step.name) is not None
        asked_for = step.step in known[-policy.keep_last :] or (
            step.step is not None and policy.keep_every is not None and step.step % policy.keep_every == 0
        )
        asked_for = asked_for or (policy.keep_sealed and step.sealed)
        if free and step.step is not None and not asked_for:
            assert not decided[step.name].kept_for, "what nothing protects goes"


MAKERS: dict[str, Callable[[Path], object]] = {
    "pointer": lambda path: (path.parent / "latest").write_text(path.name),
    "link": lambda path: (path.parent / "best").symlink_to(path.name),
    "absolute link": lambda path: (path.parent / "last").symlink_to(path.absolute()),
    "incomplete": lambda path: os.truncate(path / "model.safetensors", 40),
    "claim": lambda path: (path.parent / f".{path.name}.reshard-claim").write_text("{}"),
    "journal": lambda path: (path.parent / f".{path.name}.reshard-0123456789abcdef.journal").write_text(""),
    "a run of its own": lambda path: weights(path / "checkpoint-7"),
    "two runs": lambda path: shutil.copytree(DATA / "zero2_tiny" / "global_step3", path / "global_step3"),
}
"""What protects a checkpoint."""


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_nothing_protected_leaves_the_disk(tmp_path: Path, data: st.DataObject) -> None:
    run = tmp_path / "run"
    shutil.rmtree(run, ignore_errors=True)
    numbers = sorted(data.draw(st.sets(st.integers(1, 30), min_size=2, max_size=6)))
    run_of(run, *(100 * number for number in numbers))
    guarded = data.draw(st.dictionaries(st.sampled_from(numbers), st.sampled_from(sorted(MAKERS)), max_size=3))
    used = {kind: number for number, kind in guarded.items()}
    for kind, number in used.items():
        MAKERS[kind](run / f"checkpoint-{100 * number}")
    keep, every = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([None, 200, 500]))
    pruned(run, "--keep-last", str(keep), "--yes", *(("--keep-every", str(every)) if every else ()))
    whole = [n for n in numbers if n not in used.values() or _stays_complete(used, n)]
    kept = {*used.values(), *whole[-keep:], *(n for n in numbers if every and 100 * n % every == 0)}
    assert there(run) == sorted(100 * n for n in kept)


def _stays_complete(used: dict[str, int], number: int) -> bool:
    return all(kind not in ("incomplete", "a run of its own", "two runs") for kind, n in used.items() if n == number)


# The commands.


def test_a_run_is_listed_by_step(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 200, 1_000, 900)
    (run / "latest").write_text("checkpoint-900")
    os.truncate(run / "checkpoint-200" / "model.safetensors", 40)
    (run / "runs").mkdir()
    (run / "runs" / "events").write_text("")
    code, out, err = command("ls", str(run))
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert [row[1] for row in rows] == ["NAME", "checkpoint-200", "checkpoint-900", "checkpoint-1000"]
    assert "safetensors." in out.splitlines()[1]
    assert "complete  <- latest" in out.splitlines()[2]
    assert "runs" in err
    listed = RunListing.model_validate_json(command("ls", str(run), "--json")[1])
    assert [(s.step, s.complete, s.files) for s in listed.steps] == [(200, False, 2), (900, True, 2), (1_000, True, 2)]
    assert listed.others == ("runs",)


def test_placeholders_of_zero3_are_not_complete(tmp_path: Path) -> None:
    """`ls` shows them, and `prune` keeps what may be all that is there."""
    run = run_of(tmp_path / "run", 1, 2)
    empty = {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in ("a", "b")}
    header = json.dumps(empty).encode()
    (run / "checkpoint-1" / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    code, out, _ = command("ls", str(run))
    assert code == 0
    assert "checkpoint.incomplete" in out.splitlines()[1]
    listed = load_engine().steps(str(run))
    assert "2 of 2 parameters have the shape [0]" in listed.steps[0].detail
    assert [(s.step, s.complete) for s in listed.steps] == [(1, False), (2, True)]
    pruned(run, "--keep-last", "1", "--yes")
    assert there(run) == [1, 2]


def test_steps_of_a_checkpoint_come_before_numbers_of_names(tmp_path: Path) -> None:
    """Three epochs of a run that counts steps: the weights beside them say no step, and their names count epochs."""
    shutil.copytree(DATA / "zero2_tiny" / "global_step3", tmp_path / "run" / "epoch7")
    weights(tmp_path / "run" / "epoch8")
    listed = load_engine().steps(str(tmp_path / "run"))
    assert [(s.name, s.step) for s in listed.steps] == [("epoch7", 3), ("epoch8", None)]
    assert not any(not d.kept_for for d in decide(listed, PrunePolicy(keep_last=1)))


def test_a_directory_of_runs_is_never_pruned(tmp_path: Path) -> None:
    for name in ("exp_1", "exp_2", "exp_3"):
        shutil.copytree(DATA / "zero2_tiny", tmp_path / "runs" / name)
    for number in (4, 5, 6):
        weights(tmp_path / "runs" / f"exp_{number}")
        run_of(tmp_path / "runs" / f"exp_{number}", 10, 20)
    listed = load_engine().steps(str(tmp_path / "runs"))
    assert listed.steps == ()
    assert len(listed.others) == 6
    assert "0 checkpoints of 0" in pruned(tmp_path / "runs", "--keep-last", "1", "--yes")


def test_a_trainers_directory_is_one_checkpoint(tmp_path: Path) -> None:
    for number in (3, 30):
        shutil.copytree(DATA / "zero2_tiny", tmp_path / "run" / f"checkpoint-{number}")
    place = tmp_path / "run" / "checkpoint-30"
    (place / "global_step3").rename(place / "global_step30")
    (place / "latest").write_text("global_step30")
    listed = load_engine().steps(str(tmp_path / "run"))
    assert [(s.name, s.complete) for s in listed.steps] == [("checkpoint-3", True), ("checkpoint-30", True)]


def test_prune_shows_and_removes_only_when_it_may(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 100, 200, 300, 400)
    before = there(run)
    for words in ([], ["--dry-run"], ["--dry-run", "--yes"]):
        told = pruned(run, "--keep-last", "2", *words)
        assert "goes: checkpoint-100" in told
        assert "stays: checkpoint-300 (one of the last 2)" in told
        assert there(run) == before
    assert "removed 1 checkpoint" in pruned(run, "--keep-last", "2", "--keep-every", "200", "--yes")
    assert there(run) == [200, 300, 400]
    assert sorted(path.name for path in run.iterdir() if path.name.startswith(".")) == []
    report = json.loads(pruned(run, "--keep-last", "1", "--json"))
    assert [d["name"] for d in report["decisions"] if not d["kept_for"]] == ["checkpoint-200", "checkpoint-300"]
    assert not report["removed"]


def test_sealed_checkpoints_stay_on_request(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 100, 200, 300)
    (run / "checkpoint-100.sealed.json").write_text("{}")
    code, out, _ = command("ls", str(run))
    assert (code, [line.endswith("sealed") for line in out.splitlines()]) == (0, [False, True, False, False])
    assert "goes: checkpoint-100" in pruned(run, "--keep-last", "1")
    assert "stays: checkpoint-100 (sealed)" in pruned(run, "--keep-last", "1", "--keep-sealed", "--yes")
    assert there(run) == [100, 100, 300], "the checkpoint and its certificate"


def test_what_is_named_after_it_was_shown_stays(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 100, 200, 300)
    shown = load_engine().prune(str(run), keep_last=1)
    going = [d.name for d in shown.decisions if not d.kept_for]
    (run / "latest").write_text("checkpoint-100")
    done = load_engine().prune(str(run), keep_last=1, only=going)
    assert [d.kept_for for d in done.decisions if d.name == "checkpoint-100"] == ["named by latest"]
    assert there(run) == [100, 300]


def test_stores_that_are_only_read_are_listed_and_not_pruned(tmp_path: Path) -> None:
    run_of(tmp_path / "run", 100, 200)
    store: Any = fsspec.filesystem("memory")  # pyright: ignore[reportUnknownMemberType]
    store.put(str(tmp_path / "run"), "/steps/", recursive=True)
    try:
        url = next(f"memory:/{found}" for found in ("/steps/run", "/steps") if store.exists(f"{found}/checkpoint-100"))
        assert [s.step for s in load_engine().steps(url).steps] == [100, 200]
        assert raised(RequestError, lambda: load_engine().prune(url, keep_last=1)).code == "request.unknown_scheme"
    finally:
        store.rm("/steps", recursive=True)


def test_places_that_are_no_run(tmp_path: Path) -> None:
    assert raised(SourceError, lambda: load_engine().steps(str(tmp_path / "none"))).code == "source.not_found"
    inside = raised(RequestError, lambda: load_engine().steps(str(DATA / "zero2_tiny" / "global_step3")))
    assert f"reshard ls {DATA / 'zero2_tiny'}" in inside.fix
    weights(tmp_path / "alone")
    assert load_engine().steps(str(tmp_path)).steps[0].step is None
    assert command("prune", str(tmp_path), "--keep-last", "0")[0] == 2


# Only the weights of old steps are kept.


def trainers(run: Path) -> Path:
    """A Trainer's checkpoint with DeepSpeed, whose weights lie beside the state; the same without them; a later one."""
    place = run / "checkpoint-3"
    assert command("convert", str(DATA / "zero2_tiny"), str(place), "--to", "safetensors", "-q")[0] == 0
    (place / "reshard.json").unlink()
    (place / "config.json").write_text("{}")
    shutil.copytree(DATA / "zero2_tiny" / "global_step3", place / "global_step3")
    (place / "latest").write_text("global_step3")
    shutil.copytree(DATA / "zero2_tiny" / "global_step3", run / "global_step3")
    shutil.copytree(DATA / "tutorial_zero2" / "global_step4", run / "global_step4")
    return run


def test_only_weights_are_kept_where_they_are_files_of_their_own(tmp_path: Path) -> None:
    run = trainers(tmp_path / "run")
    assert [s.step for s in load_engine().steps(str(run)).steps] == [3, 3, 4]
    before = (run / "checkpoint-3" / "model.safetensors").read_bytes()
    told = pruned(run, "--keep-last", "1", "--weights-only", "--yes")
    assert "goes: training state of checkpoint-3" in told
    assert "stays: global_step3 (its weights are in no files of their own" in told
    assert sorted(path.name for path in (run / "checkpoint-3").iterdir()) == ["config.json", "model.safetensors"]
    assert (run / "checkpoint-3" / "model.safetensors").read_bytes() == before
    assert len(list((run / "global_step3").iterdir())) == 3
    assert all(step.complete for step in load_engine().steps(str(run)).steps)
    assert "weights alone" in pruned(run, "--keep-last", "1", "--weights-only", "--yes")


def test_newer_weights_do_not_cost_the_last_state_that_a_run_resumes_from(tmp_path: Path) -> None:
    run = run_of(trainers(tmp_path / "run"), 8, 9)
    assert load_engine().steps(str(run)).newest == "global_step4"
    told = pruned(run, "--keep-last", "1", "--yes")
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-9", "global_step4"], told


def test_files_that_were_written_again_are_not_those_that_were_to_go(tmp_path: Path) -> None:
    run = trainers(tmp_path / "run")
    words = ["prune", str(run), "--keep-last", "1", "--weights-only", "--yes"]
    done = subprocess.run(dying(_REMOVALS, 1, words), check=False, capture_output=True)
    assert done.returncode == -9, done.stderr
    place = run / "checkpoint-3"
    assert not (place / "latest").exists(), "it goes first"
    assert load_engine().steps(str(run)).removing == ("checkpoint-3",)
    again = place / "global_step3" / "mp_rank_00_model_states.pt"
    os.utime(again, ns=(1, 1))
    assert "goes: the rest of checkpoint-3, whose removal has begun" in pruned(run, *words[2:])
    assert list((place / "global_step3").iterdir()) == [again]
    assert (place / "model.safetensors").exists()


# A process that dies while it removes.

_REMOVALS = "os.rename, os.unlink, os.rmdir = map(counted, (os.rename, os.unlink, os.rmdir))"


@pytest.mark.parametrize("operations", rest_full([0, 1, 2, 4, 6], 1, 4))
def test_a_killed_prune_leaves_nothing_half_listed(tmp_path: Path, operations: int) -> None:
    run = run_of(tmp_path / "run", 100, 200, 300, 400)
    words = ["prune", str(run), "--keep-last", "1", "--yes"]
    done = subprocess.run(dying(_REMOVALS, operations, words), check=False, capture_output=True)
    assert done.returncode == -9, done.stderr
    listed = load_engine().steps(str(run))
    assert all(step.complete and step.files == 2 for step in listed.steps)
    assert {f"checkpoint-{number}" for number in (100, 200, 300, 400)} == {
        *(step.name for step in listed.steps), *listed.removing, *_gone(run, listed)
    }  # fmt: skip
    pruned(run, "--keep-last", "1", "--yes")
    assert [path.name for path in run.iterdir()] == ["checkpoint-400"]


def _gone(run: Path, listed: RunListing) -> set[str]:
    names = {f"checkpoint-{number}" for number in (100, 200, 300)}
    return {name for name in names if not (run / name).exists() and name not in listed.removing}


# Marks that no `prune` made, and names that end a removal halfway.


def outside(run: Path) -> Path:
    """A checkpoint beside a run, which no command on the run may touch."""
    weights(run.parent / "victim")
    return run.parent / "victim"


def hostile(run: Path, mark: str, *files: str) -> None:
    """A mark in a run that asks for the removal of files with their present pins."""
    pins = [(f, f"mtime:{s.st_mtime_ns}-{s.st_size}", None) for f in files if (s := os.stat(run / f))]
    (run / mark).write_text(json.dumps({"first": 0, "files": pins}))


@pytest.mark.parametrize(
    "mark", ["..%2Fvictim", "checkpoint-300%2F..%2F..%2Fvictim", ".%2F..%2Fvictim", "link%2Fvictim", "link"]
)
def test_a_mark_that_names_a_place_outside_the_run_removes_nothing(tmp_path: Path, mark: str) -> None:
    run = run_of(tmp_path / "run", 100, 200, 300)
    victim = outside(run)
    (run / "link").symlink_to(victim if mark == "link" else tmp_path)
    name = "link" if mark == "link" else "link/victim" if mark.startswith("link") else "../victim"
    hostile(run, f".reshard-removing-{mark}", *(f"{name}/{file.name}" for file in victim.iterdir()))
    told = pruned(run, "--keep-last", "2", "--yes")
    assert sorted(path.name for path in victim.iterdir()) == ["config.json", "model.safetensors"]
    assert f"goes: {name}" not in told
    assert there(run) == [200, 300], "the mark does not block the removal of old steps"
    assert (run / f".reshard-removing-{mark}").exists()


def test_a_mark_that_is_damaged_is_reported_and_removes_nothing(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 100, 200)
    (run / ".reshard-removing-..%2Fvictim").write_text("{}")
    (run / ".reshard-removing-check%70oint-100").write_text("{}")
    (run / ".reshard-removing-checkpoint-200").write_text("not a record")
    listed = load_engine().steps(str(run))
    assert listed.removing == ()
    assert listed.newest == "checkpoint-200", "a mark without a record hides no checkpoint"
    assert listed.others == (
        ".reshard-removing-..%2Fvictim",
        ".reshard-removing-check%70oint-100",
        ".reshard-removing-checkpoint-200",
    )


def test_a_file_behind_a_linked_directory_is_no_part_of_a_removal(tmp_path: Path) -> None:
    run = trainers(tmp_path / "run")
    state = run / "checkpoint-3" / "global_step3"
    state.rename(tmp_path / "elsewhere")
    state.symlink_to(tmp_path / "elsewhere")
    assert "linked directory" in pruned(run, "--keep-last", "1", "--weights-only", "--yes")
    assert len(list((tmp_path / "elsewhere").iterdir())) == 3
    assert (run / "checkpoint-3" / "latest").exists()


@pytest.mark.parametrize("name", [b"checkpoint-\xff-100", "検".encode() * 80 + b"-step100"], ids=["bytes", "long"])
def test_a_name_that_needs_many_bytes_does_not_stop_a_removal(tmp_path: Path, name: bytes) -> None:
    run = run_of(tmp_path / "run", 50, 200, 300)
    weights(run / os.fsdecode(name))
    listed = json.loads(command("ls", str(run), "--json")[1])
    assert len(listed["steps"]) == 4
    pruned(run, "--keep-last", "1", "--yes")
    left = sorted(os.listdir(os.fsencode(run)))
    assert left == [b"checkpoint-300"] if len(name) < 99 else [b"checkpoint-300", name]


@pytest.mark.parametrize(
    "text",
    ["./checkpoint-100", "checkpoint-100/", "x/../checkpoint-100", "out/run/checkpoint-100", "{run}/./checkpoint-100"],
)
def test_a_pointer_names_a_step_however_its_path_is_written(tmp_path: Path, text: str) -> None:
    run = run_of(tmp_path / "run", 100, 200, 300)
    (run / "latest").write_text(text.format(run=run))
    assert "stays: checkpoint-100 (named by latest)" in pruned(run, "--keep-last", "1", "--yes")
    assert there(run) == [100, 300]


def _long_pointer(run: Path) -> None:
    (run / "latest").write_text("checkpoint-100" + "\n" * 1_100)


def _pointer_through_a_link(run: Path) -> None:
    (run / "here").symlink_to(".")
    (run / "latest").write_text("here/checkpoint-100")


def _pointer_of_another_directory(run: Path) -> None:
    (run / "out").mkdir()
    (run / "latest").write_text("out/run/checkpoint-100")


def _best_of_another_directory(run: Path) -> None:
    """TensorBoard writes into `runs`, which is the first segment of the Trainer's paths as well."""
    (run / "runs" / "Nov28_host").mkdir(parents=True)
    (run / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": "runs/exp/checkpoint-100"}))


def _best_in_a_long_state(run: Path) -> None:
    state = {"best_model_checkpoint": "out/checkpoint-100", "log_history": ["x" * (65 << 20)]}
    (run / "checkpoint-300" / "trainer_state.json").write_text(json.dumps(state, indent=2, sort_keys=True))


def _file_of_the_newest_in_it(run: Path) -> None:
    (run / "checkpoint-300" / "config.json").unlink()
    (run / "checkpoint-300" / "config.json").symlink_to("../checkpoint-100/config.json")


def _link_in_another_directory(run: Path) -> None:
    (run / "chosen").mkdir()
    (run / "chosen" / "model").symlink_to("../checkpoint-100")


@pytest.mark.parametrize(
    "name_it",
    [
        _long_pointer, _pointer_through_a_link, _pointer_of_another_directory, _best_of_another_directory,
        _best_in_a_long_state, _file_of_the_newest_in_it, _link_in_another_directory,
    ],
)  # fmt: skip
def test_what_is_named_in_an_unusual_way_stays(name_it: Callable[[Path], None], tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 100, 200, 300)
    name_it(run)
    pruned(run, "--keep-last", "1", "--yes")
    assert there(run) == [100, 300]


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("checkpoint-300", ["checkpoint-300/model.safetensors", "checkpoint-300/config.json"]),
        ("checkpoint-300/model.safetensors", ["checkpoint-300/model.safetensors"]),
        ("dataset", ["dataset/a.bin", "checkpoint-300/model.safetensors"]),
        ("checkpoint-200", ["latest"]),
    ],
)
def test_a_mark_removes_nothing_that_the_policy_keeps(name: str, files: list[str], tmp_path: Path) -> None:
    """Whoever writes the mark knows the pins of the files."""
    run = run_of(tmp_path / "run", 100, 200, 300)
    (run / "dataset").mkdir()
    (run / "dataset" / "a.bin").write_text("a")
    (run / "latest").write_text("checkpoint-100")
    hostile(run, f".reshard-removing-{quote(name, safe='')}", *files)
    assert load_engine().steps(str(run)).newest == "checkpoint-300"
    pruned(run, "--keep-last", "2", "--yes")
    assert there(run) == [100, 200, 300]
    assert all((run / file).exists() for file in files)


def test_a_step_that_is_saved_while_prune_runs_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(tmp_path / "run", 100, 200)

    def saved_meanwhile(listing: RunListing, policy: PrunePolicy) -> list[PruneDecision]:
        shutil.rmtree(run / "checkpoint-100")
        run_of(run, 100)
        return decide(listing, policy)

    monkeypatch.setattr(pruning, "decide", saved_meanwhile)
    assert "its files were written again meanwhile" in pruned(run, "--keep-last", "1", "--yes")
    assert there(run) == [100, 200]


def test_a_step_that_was_saved_again_after_a_removal_began_is_listed(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", 100, 200)
    (run / ".reshard-removing-checkpoint-200").mkdir()
    assert load_engine().steps(str(run)).newest == "checkpoint-200"
    pruned(run, "--keep-last", "1", "--yes")
    assert [path.name for path in run.iterdir()] == ["checkpoint-200"]


def test_the_best_checkpoint_of_a_trainer_stays(tmp_path: Path) -> None:
    """transformers 5.1 `trainer.py` keeps `state.best_model_checkpoint` when it removes old checkpoints."""
    run = run_of(tmp_path / "run", 100, 200, 300, 400)
    best = {200: "out/run/checkpoint-100", 300: "checkpoint-200", 400: r"C:\out\checkpoint-200"}
    for number, name in best.items():
        text = json.dumps({"global_step": number, "best_model_checkpoint": name})
        (run / f"checkpoint-{number}" / "trainer_state.json").write_text(text)
    told = pruned(run, "--keep-last", "1", "--yes")
    assert "stays: checkpoint-200 (the best checkpoint of checkpoint-400, by its record)" in told
    # The best of a step that stays: that of 200 is 100, which training from 200 would load in the end.
    assert there(run) == [100, 200, 400]
    (run / "checkpoint-400" / "trainer_state.json").write_text("{")
    (run / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": str(run / "checkpoint-100")}))
    pruned(run, "--keep-last", "1", "--yes")
    assert there(run) == [100, 400]


def save_files(place: Path, *steps: int) -> None:
    """Checkpoints of Lightning, each in one file."""
    for number in steps:
        facts = {"pytorch-lightning_version": "2.6.6", "epoch": 0, "global_step": number, "loops": {}}
        state = {**facts, "optimizer_states": [], "lr_schedulers": [], "state_dict": {"w": torch.ones(2)}}
        torch.save(state, place / f"step-{number}.ckpt")


def test_checkpoints_that_are_files_are_removed(tmp_path: Path) -> None:
    save_files(tmp_path, 1, 2, 3)
    assert "removed 2 checkpoints" in pruned(tmp_path, "--keep-last", "1", "--yes")
    assert [path.name for path in tmp_path.iterdir()] == ["step-3.ckpt"]


def test_a_removal_that_removes_nothing_is_not_reported_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_files(tmp_path, 1, 2)
    mark = pruning._mark

    def written_again(run: Location, name: str, going: Sequence[ObjectInfo]) -> None:
        mark(run, name, going)
        os.utime(tmp_path / name, (1e9, 1e9))

    monkeypatch.setattr(pruning, "_mark", written_again)
    told = pruned(tmp_path, "--keep-last", "1", "--yes")
    assert "removed 0 checkpoints" in told
    assert "stays after all: step-1.ckpt: its files were written again meanwhile" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1.ckpt", "step-2.ckpt"]


@pytest.mark.parametrize("words", [("ls",), ("prune", "--keep-last", "1"), ("inspect",)], ids=" ".join)
def test_a_link_beside_the_checkpoints_is_not_walked(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path / "run", 100, 200)
    (tmp_path / "data" / "set").mkdir(parents=True)
    (run / "data").symlink_to(tmp_path / "data")
    entered: list[str] = []
    walk = os.walk

    def watched(top: str, *args: Any, **kwargs: Any) -> Any:
        for found in walk(top, *args, **kwargs):
            entered.append(os.path.realpath(found[0]))
            yield found

    monkeypatch.setattr(os, "walk", watched)
    code, _, err = command(words[0], str(run), *words[1:])
    assert code == 0, err
    assert str(run / "checkpoint-200") in entered
    assert [place for place in entered if not place.startswith(str(run))] == []


def test_a_link_out_of_a_run_is_not_walked(tmp_path: Path) -> None:
    """Links to a data set, and even to the root, are common in the directories of runs."""
    run = run_of(tmp_path / "run", 100, 200)
    (run / "checkpoint-200" / "data").symlink_to("/")
    (run / "checkpoint-100" / "up").symlink_to("..")
    listing = load_engine().steps(str(run))
    assert [(s.name, s.files, s.complete) for s in listing.steps] == [
        ("checkpoint-100", 2, True),
        ("checkpoint-200", 2, True),
    ]


def test_a_run_is_described_whose_path_looks_like_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainers(tmp_path / "run-of-somebody")
    monkeypatch.setenv("ACCESS_TOKEN", "run-of-somebody")
    assert load_engine().inspect(SourceSpec(url=str(run))).newest == str(run / "global_step4")
