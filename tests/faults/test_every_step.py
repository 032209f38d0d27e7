"""A fault at every operation of a small conversion, in five modes, then the same request again.

In memory a process is a thread whose every later operation fails; locally it is a real one, which SIGKILL ends
and SIGSTOP stops. `make chaos` tries every mode at every operation. The short run tries every mode at the first
operation of each kind and at the last one. Of the others it tries a third, each with one mode; operations and modes
take turns, so that RESHARD_TURN draws others.
"""

from __future__ import annotations

import errno
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException

from faults import local_trials, memory_trials
from faults.judge import Ledger
from faults.small import (
    ACCELERATE,
    EVERY_LAYOUT,
    INT8,
    ONE_LAYOUT,
    OPTIONS,
    RANKS,
    STATE_DICT,
    small_request,
)
from house.tiers import sampling_turn
from laws.dcp_files import read_metadata
from reshard.choices import TargetFormat
from reshard.errors import SourceError, StorageError
from reshard.options import SourceSpec
from reshard_engine.local import LocalEngine
from reshard_engine.operations.conversion import Conversion
from reshard_engine.testing.stores import Fault, FaultyStore, MemoryStore, Operation, Steps

END_MODES = (Fault.ERROR_BEFORE, Fault.ERROR_AFTER, Fault.KILL_BEFORE, Fault.KILL_AFTER)
READS = {"stat", "lstat", "fstat", "scandir", "listdir", "pread", "preadv"}
READS |= {"read_into", "list_directory", "list_tree", "list_uploads"}
"""Calls without an effect: all modes but an error are those of the next call that has one."""

MemoryCases = Callable[[MemoryStore, str], memory_trials.Case]
LocalCases = Callable[[Path, str], local_trials.Case]


def kind_of(operation: Operation) -> str:
    """Operations of one kind differ in numbers only; those without an effect differ in nothing but their place."""
    if operation.name in READS:
        return operation.name
    return f"{operation.name} {re.sub('[0-9a-f]*[0-9][0-9a-f]*', '#', operation.path.rpartition('/')[2])}"


def trials(
    operations: Sequence[Operation], modes: Callable[[Operation], Sequence[Fault]], request: pytest.FixtureRequest
) -> Iterator[tuple[Operation, Fault]]:
    """Every operation with its modes, or the short run's choice of them: see above."""
    if request.node.get_closest_marker("full") is not None:
        yield from ((o, mode) for o in operations for mode in modes(o))
        return
    last = [o for o in operations if o.name not in READS][-1]
    drawn = sampling_turn()
    met: Counter[str] = Counter()
    for operation in operations:
        # A kill after an operation is that before the next one, but for the last.
        listed = [m for m in modes(operation) if m is not Fault.KILL_AFTER or operation is last]
        turn = met[kind_of(operation)]
        met[kind_of(operation)] += 1
        if not listed:
            continue
        if turn == 0 or operation is last:
            yield from ((operation, mode) for mode in listed)
        elif (turn + drawn) % 3 == 0:
            yield operation, listed[(turn + drawn) // 3 % len(listed)]


def run_memory(case: memory_trials.Case, title: str, request: pytest.FixtureRequest) -> None:
    """Faults at every operation of an object store."""
    operations = case.operations()
    ledger = Ledger(f"{title}, memory store: {len(operations)} operations")
    for operation, fault in trials(operations, lambda _: (*END_MODES, Fault.HANG), request):
        if fault is Fault.HANG:
            trial = memory_trials.hung(case, operation.number, memory_trials.finish)
        else:
            trial = memory_trials.disturbed(case, operation.number, fault)
        ledger.note(fault, *_at(operation, trial))
    ledger.settle()


def run_local(case: local_trials.Case, title: str, request: pytest.FixtureRequest, *, reads: Sequence[Fault]) -> None:
    """Faults at every call of the operating system; `reads` are the modes of calls without an effect."""
    operations, unseen = case.operations()
    assert unseen == []
    ledger = Ledger(f"{title}, local files: {len(operations)} operations")
    modes: Callable[[Operation], Sequence[Fault]] = lambda o: (  # noqa: E731
        reads if o.name in READS else (*END_MODES, Fault.SHORT, Fault.HANG)
    )
    for operation, fault in trials(operations, modes, request):
        if fault is Fault.HANG:
            trial = local_trials.hung(case, operation.number, local_trials.finish)
        else:
            trial = local_trials.disturbed(case, operation.number, fault)
        ledger.note(fault, *_at(operation, trial))
    ledger.settle()


def _at(operation: Operation, trial: tuple[str, list[str]]) -> tuple[str, str, list[str]]:
    end, problems = trial
    return end, f"#{operation.number} {operation.name} {operation.path}", problems


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("make", "to"),
    [
        (memory_trials.fresh_case, TargetFormat.UNIVERSAL),
        (memory_trials.overwrite_case, TargetFormat.SAFETENSORS),
        (memory_trials.fresh_case, ACCELERATE),
        (memory_trials.fresh_case, RANKS),
        (memory_trials.fresh_case, INT8),
        (memory_trials.from_ranks_case, TargetFormat.SAFETENSORS),
        pytest.param(memory_trials.from_ranks_case, RANKS, marks=pytest.mark.full),
        pytest.param(memory_trials.overwrite_case, EVERY_LAYOUT, marks=pytest.mark.full),  # 90 s
        (memory_trials.fresh_case, ONE_LAYOUT),
        (memory_trials.from_megatron_case, TargetFormat.SAFETENSORS),
        pytest.param(memory_trials.from_megatron_case, STATE_DICT, marks=pytest.mark.full),
        *(
            pytest.param(make, to, marks=pytest.mark.full, id=f"every-mode-{make.__name__}-{to}")
            for make in (memory_trials.fresh_case, memory_trials.overwrite_case)
            for to in OPTIONS
        ),
        pytest.param(memory_trials.crowded_case, TargetFormat.UNIVERSAL, marks=pytest.mark.full),
    ],
)
def test_object_store(memory: MemoryStore, make: MemoryCases, to: str, request: pytest.FixtureRequest) -> None:
    run_memory(make(memory, to), f"{make.__name__} {to}", request)


def test_a_target_without_a_pointer_is_finished_with_its_manifest(memory: MemoryStore) -> None:
    """Its plan names the pointer of the format, which nobody will write in a directory of other things."""
    memory.put("out/jobs/note", b"", metadata={}, if_absent=True)
    case = memory_trials.fresh_case(memory, TargetFormat.UNIVERSAL)
    ends = [o.number for o in case.operations() if o.name == "put" and o.path.endswith("/reshard.json")]
    end, problems = memory_trials.disturbed(case, ends[-1], Fault.KILL_AFTER)
    assert (end, problems) == ("killed", [])
    store = memory_trials.clone(memory)
    assert memory_trials.attempt(FaultyStore(store, Steps({ends[-1]: Fault.KILL_AFTER})), case.request) == "killed"
    memory_trials.discard(store, case.request)
    assert "tag/reshard.json" in memory_trials.tree(store)
    assert "latest_universal" not in memory_trials.tree(store)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("make", "to", "reads"),
    [
        (local_trials.overwrite_case, TargetFormat.SAFETENSORS, ()),
        (local_trials.fresh_case, STATE_DICT, (Fault.ERROR_BEFORE,)),
        (local_trials.fresh_case, INT8, (Fault.ERROR_BEFORE,)),
        pytest.param(local_trials.fresh_case, EVERY_LAYOUT, (Fault.ERROR_BEFORE,), marks=pytest.mark.full),  # 220 s
        *(
            pytest.param(make, to, (*END_MODES, Fault.SHORT, Fault.HANG), marks=pytest.mark.full)
            for make in (local_trials.fresh_case, local_trials.overwrite_case)
            for to in OPTIONS
            if to is not TargetFormat.TORCH
        ),
    ],
)
def test_local_files(
    small_root: Path, make: LocalCases, to: str, reads: Sequence[Fault], request: pytest.FixtureRequest
) -> None:
    run_local(make(small_root, to), f"{make.__name__} {to}", request, reads=reads)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("make", "to"),
    [
        (memory_trials.fresh_case, TargetFormat.SAFETENSORS),
        pytest.param(memory_trials.fresh_case, TargetFormat.UNIVERSAL, marks=pytest.mark.full),
        pytest.param(memory_trials.overwrite_case, TargetFormat.SAFETENSORS, marks=pytest.mark.full),
        pytest.param(memory_trials.overwrite_case, TargetFormat.UNIVERSAL, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("meanwhile", [memory_trials.cancel, memory_trials.replace])
def test_sleeper_wakes_up_after_a_cancel_or_another_conversion(
    memory: MemoryStore, make: MemoryCases, to: str, meanwhile: memory_trials.Meanwhile
) -> None:
    case = make(memory, to)
    ledger = Ledger(f"{make.__name__} {to}, memory store; while the process hangs: {meanwhile.__name__}")
    for operation in case.operations():
        ledger.note(Fault.HANG, *_at(operation, memory_trials.hung(case, operation.number, meanwhile)))
    ledger.settle()


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("make", [local_trials.fresh_case, local_trials.overwrite_case])
def test_local_sleeper_wakes_up_after_another_conversion(small_root: Path, make: LocalCases) -> None:
    case = make(small_root, TargetFormat.UNIVERSAL)
    ledger = Ledger(f"{make.__name__}, local files; while the process hangs: replace")
    for operation in case.operations()[0]:
        if operation.name not in READS:
            trial = local_trials.hung(case, operation.number, local_trials.replace)
            ledger.note(Fault.HANG, *_at(operation, trial))
    ledger.settle()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("to", "folders"), [(STATE_DICT, [""]), (ACCELERATE, ["pytorch_model_fsdp_0", "optimizer_0"])])
def test_torch_loads_nothing_without_the_commit_file(
    small_root: Path, tmp_path: Path, to: str, folders: list[str]
) -> None:
    """What every step may leave is harmless because torch refuses a directory without `.metadata`."""
    request = small_request(str(small_root / "run"), str(tmp_path), to)
    files = Conversion.prepare(request).plan.files
    assert [f.path for f in files if f.commit] == [f"{folder}/.metadata".lstrip("/") for folder in folders]
    LocalEngine().convert(request)
    for folder in folders:
        place = Path(request.target, folder)
        kept = (place / ".metadata").read_bytes()
        keys = read_metadata(place / ".metadata").state_dict_metadata
        asked = {
            key: torch.zeros(40, 32) for key in keys if key.endswith(("embed.weight", "exp_avg")) and "bias" not in key
        }
        state_dict_loader.load(asked, checkpoint_id=place, no_dist=True)
        assert asked
        assert all(tensor.any() for tensor in asked.values())
        (place / ".metadata").unlink()
        with pytest.raises(CheckpointException):
            state_dict_loader.load(asked, checkpoint_id=place, no_dist=True)
        with pytest.raises(SourceError) as refused:
            LocalEngine().inspect(SourceSpec(url=request.target))
        assert refused.value.code == "checkpoint.incomplete"
        (place / ".metadata").write_bytes(kept)


CONFLICT = "409 or 412"
ANSWERS = {
    "404": lambda: SourceError("source.not_found", "injected"),
    "403": lambda: StorageError("storage.denied", "injected"),
    "garbage": lambda: StorageError("storage.protocol", "injected"),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("answer", [CONFLICT, *(pytest.param(a, marks=pytest.mark.full) for a in ANSWERS)])
def test_wrong_answers_of_an_object_store(memory: MemoryStore, answer: str) -> None:
    case = memory_trials.fresh_case(memory, TargetFormat.SAFETENSORS)
    ledger = Ledger(f"{answer}, memory store")
    error = ANSWERS.get(answer, lambda: StorageError("storage.conflict", "injected"))
    for operation in case.operations():
        for fault in (Fault.ERROR_BEFORE, Fault.ERROR_AFTER, Fault.SHORT):
            trial = memory_trials.disturbed(case, operation.number, fault, error)
            ledger.note(fault, *_at(operation, trial))
    ledger.settle()


@pytest.mark.timeout(600)
def test_a_full_disk(small_root: Path) -> None:
    case = local_trials.fresh_case(small_root, TargetFormat.SAFETENSORS)
    ledger = Ledger("ENOSPC, local files")
    for operation in case.operations()[0]:
        if operation.name in {"write", "pwrite", "mkdir", "fsync", "syncfs"}:
            trial = local_trials.disturbed(case, operation.number, Fault.ERROR_BEFORE, errno.ENOSPC)
            ledger.note(Fault.ERROR_BEFORE, *_at(operation, trial))
            # A directory that is there already needs no room.
            assert trial[0] == "storage.no_space" or (trial[0], operation.name) == ("done", "mkdir"), operation
    ledger.settle()
