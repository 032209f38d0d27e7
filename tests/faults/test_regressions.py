"""Faults that were found, each as small as it can be. The enumerations of `test_every_step` found most others."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from faults import local_trials, memory_trials
from faults.judge import strays
from faults.small import EVERY_LAYOUT, NAME, OPTIONS, STEP, small_request
from house.expected import raised, some
from reshard.choices import TargetFormat, WeightDtype
from reshard.engine import load_engine
from reshard.errors import ReshardError, SourceError
from reshard.models.jobs import ConvertRequest
from reshard_engine.execute.sinks.local import LocalSink
from reshard_engine.storage.local import LocalStore, kept_open
from reshard_engine.storage.locations import serving
from reshard_engine.testing.stores import Fault, FaultyStore, MemoryStore, Steps

ENGINE = load_engine()
TRACKER = "latest_checkpointed_iteration.txt"


def _stopped(request: ConvertRequest) -> None:
    with pytest.raises(ReshardError) as caught:
        ENGINE.convert(request, should_stop=iter([False, False, True, True]).__next__)
    assert caught.value.code == "job.cancelled"


def test_discard_leaves_a_target_alone_whose_name_begins_alike(small_root: Path, tmp_path: Path) -> None:
    """`tag.reshard-x` is not a leftover of `tag`: its journal begins with `.tag.reshard-`, too."""
    request = small_request(str(small_root / "run"), str(tmp_path), TargetFormat.UNIVERSAL)
    neighbour = request.model_copy(update={"target": f"{request.target}.reshard-x"})
    _stopped(neighbour)
    held = sorted(p.name for p in tmp_path.iterdir())
    assert held
    ENGINE.discard(request)
    assert sorted(p.name for p in tmp_path.iterdir()) == held
    assert ENGINE.convert(neighbour).resumed_bytes > 0


def test_discard_leaves_objects_alone_whose_target_begins_alike(memory: MemoryStore) -> None:
    request = memory_trials.fresh_case(memory, TargetFormat.UNIVERSAL).request
    neighbour = request.model_copy(update={"target": f"{request.target}.reshard-x"})
    with serving("mem", memory):
        _stopped(neighbour)
        held = memory.snapshot()
        ENGINE.discard(request)
        assert memory.snapshot() == held
        assert ENGINE.convert(neighbour).resumed_bytes > 0


def test_lock_on_a_removed_journal_is_no_lock(small_root: Path, tmp_path: Path) -> None:
    """Opened before its owner removed it, locked after: a second owner would have made another file by then."""
    request = small_request(str(small_root / "run"), str(tmp_path), TargetFormat.SAFETENSORS)
    real = os.open
    removed: list[str] = []

    def opened(path: str, *args: int, **options: int) -> int:
        descriptor = real(path, *args, **options)
        if str(path).endswith(".journal") and not removed:
            removed.append(path)
            os.unlink(path)
        return descriptor

    with mock.patch.object(os, "open", opened), mock.patch.object(LocalSink, "finish"):
        ENGINE.convert(request)
    assert len(removed) == 1
    assert Path(removed[0]).exists(), "the run wrote into a journal without a name"


def test_directory_that_cannot_be_listed_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").write_bytes(b"x")
    store = LocalStore()
    real = os.scandir

    def failing(path: str) -> object:
        if str(path).endswith("below"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    with mock.patch.object(os, "scandir", failing), pytest.raises(ReshardError) as caught:
        store.list_tree(str(tmp_path))
    assert caught.value.code == "storage.unavailable"
    assert store.list_tree(str(tmp_path / "absent")) == []


def test_refused_conversion_writes_nothing(memory: MemoryStore) -> None:
    case = memory_trials.fresh_case(memory, TargetFormat.SAFETENSORS)
    assert memory_trials.attempt(memory, case.request) == "done"
    other = case.request.model_copy(update={"dtype": WeightDtype.BF16})
    steps = Steps()
    assert memory_trials.attempt(FaultyStore(memory, steps), other) == "request.target_exists"
    assert {o.name for o in steps.done} <= {"list_directory", "list_tree", "stat", "read_into", "metadata"}


def test_resume_finds_that_another_attempt_has_just_finished(memory: MemoryStore) -> None:
    """Its uploads were there, the records of their units were gone, and the claim was not yet given up."""
    case = memory_trials.fresh_case(memory, TargetFormat.SAFETENSORS)
    named = next(o.number for o in case.operations() if o.name == "put" and "upload-" in o.path)
    store = memory_trials.clone(memory)
    assert memory_trials.attempt(FaultyStore(store, Steps({named: Fault.KILL_AFTER})), case.request) == "killed"

    undisturbed = Steps()
    assert memory_trials.attempt(FaultyStore(memory_trials.clone(store), undisturbed), case.request) == "done"
    parts_listed = next(o.number for o in undisturbed.done if o.name == "list_parts")
    releasing = [o.number for o in undisturbed.done if o.name == "delete"][-1]

    def overtake() -> None:
        other = FaultyStore(store, Steps({releasing: Fault.KILL_BEFORE}))
        assert memory_trials.attempt(other, case.request) == "killed"

    end = memory_trials.attempt(FaultyStore(store, Steps({parts_listed: overtake})), case.request)
    assert end == "recognised"
    assert case.new.is_all_of(memory_trials.tree(store))


def test_claim_that_is_none_is_a_typed_error(memory: MemoryStore) -> None:
    case = memory_trials.fresh_case(memory, TargetFormat.SAFETENSORS)
    memory.put(f"out/jobs/.{NAME}.reshard-claim", b"[]", metadata={}, if_absent=False)
    assert memory_trials.attempt(memory, case.request) == "integrity.journal"


def test_target_that_came_after_the_first_look_is_not_mixed_with(memory: MemoryStore) -> None:
    """Looked at before the claim only, the target of another conversion was taken for an empty place."""
    case = memory_trials.fresh_case(memory, TargetFormat.SAFETENSORS)
    other = case.request.model_copy(update={"dtype": WeightDtype.BF16})
    whole = memory_trials.outcome(memory, other)
    look = next(o.number for o in case.operations() if o.name == "list_tree")

    def convert_meanwhile() -> None:
        assert memory_trials.attempt(memory, other) == "done"

    steps = Steps({look + 1: convert_meanwhile})
    assert memory_trials.attempt(FaultyStore(memory, steps), case.request) == "request.target_exists"
    found = memory_trials.tree(memory)
    assert whole.is_whole_in(found)
    assert strays(found) == []


def test_object_of_someone_else_is_not_taken_for_ours(memory: MemoryStore) -> None:
    """A put that is refused because something is there is a success only if that is what we would have put."""
    case = memory_trials.fresh_case(memory, TargetFormat.SAFETENSORS)
    name = f"{NAME}/model-00002-of-00002.safetensors"
    settled = next(o.number for o in case.operations() if o.path.endswith("plan.json") and o.name == "put")
    foreign = bytes(len(case.new.tree[name]))
    steps = Steps({settled: lambda: memory.put(f"out/jobs/{name}", foreign, metadata={}, if_absent=True) and None})
    assert memory_trials.attempt(FaultyStore(memory, steps), case.request) == "storage.conflict"
    memory_trials.discard(memory, case.request)
    assert memory_trials.tree(memory) == {name: foreign}


def test_unit_whose_bytes_are_gone_is_written_again(memory: MemoryStore) -> None:
    """Between two attempts a lifecycle rule ends the uploads, and someone removes the objects."""
    case = memory_trials.fresh_case(memory, TargetFormat.UNIVERSAL)
    sealed = next(o.number for o in case.operations() if o.name == "complete_multipart")
    steps = Steps({sealed: Fault.KILL_BEFORE})
    assert memory_trials.attempt(FaultyStore(memory, steps), case.request) == "killed"
    assert memory.list_uploads("")
    for path, upload_id in memory.list_uploads(""):
        memory.abort_multipart(path, upload_id)
    memory.delete(list(memory.snapshot(f"out/jobs/{NAME}")))
    assert memory_trials.attempt(memory, case.request) == "done"
    assert case.new.is_all_of(memory_trials.tree(memory))


def test_staged_bytes_that_changed_are_written_again(small_root: Path, tmp_path: Path) -> None:
    request = small_request(str(small_root / "run"), str(tmp_path / "jobs"), TargetFormat.SAFETENSORS)
    _stopped(request)
    staged = next(p for p in (tmp_path / "jobs").rglob("*.safetensors"))
    staged.write_bytes(bytes(staged.stat().st_size))
    assert ENGINE.convert(request).resumed_bytes == 0
    assert ENGINE.verify(request.target).ok


@pytest.mark.parametrize("to", OPTIONS)
def test_overwriting_removes_first_what_a_loader_needs(memory: MemoryStore, to: str) -> None:
    """The models of verl's ranks were removed between its other files, and a `config.json` before its weights."""
    case = memory_trials.overwrite_case(memory, to)
    gone = [o.number for o in case.operations() if o.name == "delete" and o.number in case.clearing]
    assert gone
    for number in gone:
        assert memory_trials.disturbed(case, number, Fault.KILL_AFTER) == ("killed", [])


def test_megatrons_tracker_names_nothing_that_is_being_replaced(memory: MemoryStore, small_root: Path) -> None:
    """It holds a number, and stayed while the iteration that it means was removed."""
    case = memory_trials.overwrite_case(memory, EVERY_LAYOUT)
    gone = next(o for o in case.operations() if o.name == "delete" and f"/{STEP}/" in o.path)
    store = memory_trials.clone(case.store)
    assert TRACKER in memory_trials.tree(store)
    assert memory_trials.attempt(FaultyStore(store, Steps({gone.number: Fault.KILL_BEFORE})), case.request) == "killed"
    assert TRACKER not in memory_trials.tree(store)
    local = local_trials.overwrite_case(small_root, EVERY_LAYOUT)
    local.prepare()
    moved = next(o for o in local.operations()[0] if o.name in {"rename", "replace"} and o.path.endswith(STEP))
    local.prepare()
    assert local_trials.run_child(local, local_trials.scripted(moved.number, Fault.KILL_BEFORE, 0)).wait() == ""
    assert TRACKER not in local_trials.tree(local.parent)


@pytest.mark.parametrize("kept", [False, True])
def test_a_file_that_is_rewritten_while_it_is_read_has_changed(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer comes between the comparison with the pin and the read."""
    file, store, preadv = tmp_path / "file", LocalStore(), os.preadv
    file.write_bytes(b"old" * 1000)
    os.utime(file, ns=(0, 0))  # the clock of a file system is coarse
    info = some(store.stat(str(file)))
    buffer = bytearray(300)
    with kept_open() if kept else nullcontext():
        store.read_into(info, 0, memoryview(buffer))
        assert buffer == b"old" * 100

        def rewritten(*arguments: Any) -> int:
            with file.open("r+b") as writer:
                writer.write(b"new" * 1000)
            return preadv(*arguments)

        monkeypatch.setattr(os, "preadv", rewritten)
        assert raised(SourceError, lambda: store.read_into(info, 0, memoryview(buffer))).code == "source.changed"
