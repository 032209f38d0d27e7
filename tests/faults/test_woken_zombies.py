"""A process that was stopped goes on after another one finished its conversion: it must leave nothing behind.

The tests of `test_every_step` collect leftovers at the end of each trial. Here nobody does (the process must clean up
itself), or the process dies right after the call that it was stopped at, and the service looks later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from faults import memory_trials
from faults.judge import difference, partial_result, strays
from faults.memory_trials import Case
from reshard.choices import TargetFormat
from reshard.errors import ReshardError
from reshard_engine.operations.conversion import Conversion
from reshard_engine.storage.locations import serving
from reshard_engine.testing.stores import Fault, FaultyStore, MemoryStore, Steps

MAKERS = [memory_trials.fresh_case, memory_trials.overwrite_case]
READS = {"stat", "read_into", "list_directory", "list_tree", "list_uploads", "metadata", "list_parts"}


def digest_of(case: Case) -> str:
    """The plan of a case."""
    with serving("mem", memory_trials.clone(case.store)):
        return Conversion.prepare(case.request).plan.digest


def woken(
    case: Case, number: int, meanwhile: Callable[[MemoryStore], None], *, dies: bool
) -> tuple[MemoryStore, list[str]]:
    """A process stops before an operation, `meanwhile` happens, and it goes on; it may die after the operation."""
    store = memory_trials.clone(case.store)
    steps = Steps({number: Fault.HANG, **({number + 1: Fault.KILL_BEFORE} if dies else {})})
    ends: list[str] = []
    zombie = threading.Thread(
        target=lambda: ends.append(memory_trials.attempt(FaultyStore(store, steps), case.request))
    )
    zombie.start()
    assert steps.hung.wait(30)
    try:
        meanwhile(store)
    finally:
        steps.wake()
        zombie.join(30)
    return store, ends


def finish(case: Case) -> Callable[[MemoryStore], None]:
    """Another process runs the same request to its end."""

    def run(store: MemoryStore) -> None:
        assert memory_trials.attempt(store, case.request) in {"done", "recognised"}

    return run


def left_in(store: MemoryStore) -> list[str]:
    """Everything that only an unfinished conversion may have."""
    return strays(memory_trials.tree(store)) + [path for path, _ in store.list_uploads("")]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("make", MAKERS)
def test_a_woken_process_leaves_nothing_after_the_end_of_its_conversion(
    memory: MemoryStore, make: Callable[[MemoryStore, TargetFormat], Case]
) -> None:
    case = make(memory, TargetFormat.SAFETENSORS)
    failures: list[str] = []
    for operation in case.operations():
        store, ends = woken(case, operation.number, finish(case), dies=False)
        if left := left_in(store):
            failures.append(f"#{operation.number} {operation.name} {operation.path} ({ends}): {left}")
        if operation.number not in case.clearing and (wrong := difference(memory_trials.tree(store), case.new)):
            failures += [] if left else [f"#{operation.number} {operation.name} ({ends}): {wrong}"]
    assert not failures, "\n".join(failures)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("make", MAKERS)
def test_a_woken_process_that_is_told_to_stop_leaves_nothing_either(
    memory: MemoryStore, make: Callable[[MemoryStore, TargetFormat], Case]
) -> None:
    """This is what the supervisor of an engine does that wakes up without its lease."""
    case = make(memory, TargetFormat.SAFETENSORS)
    failures: list[str] = []
    for operation in case.operations():
        if operation.name in READS or operation.number in case.clearing:
            continue
        store = memory_trials.clone(case.store)
        steps = Steps({operation.number: Fault.HANG})
        zombie = threading.Thread(target=_stopped_later, args=(FaultyStore(store, steps), case, steps))
        zombie.start()
        assert steps.hung.wait(30)
        try:
            finish(case)(store)
        finally:
            steps.wake()
            zombie.join(30)
        if left := left_in(store):
            failures.append(f"#{operation.number} {operation.name} {operation.path}: {left}")
    assert not failures, "\n".join(failures)


def _stopped_later(store: FaultyStore, case: Case, steps: Steps) -> None:
    with serving("mem", store), suppress(ReshardError):
        memory_trials.ENGINE.convert(case.request, should_stop=steps.hung.is_set)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("make", MAKERS)
def test_what_a_woken_process_wrote_before_it_died_is_found_by_the_plan_of_its_job(
    memory: MemoryStore, make: Callable[[MemoryStore, TargetFormat], Case]
) -> None:
    case = make(memory, TargetFormat.SAFETENSORS)
    digest = digest_of(case)
    failures: list[str] = []
    left_behind = 0
    for operation in case.operations():
        if operation.name in READS or operation.number in case.clearing:
            continue
        store, _ = woken(case, operation.number, finish(case), dies=True)
        left_behind += bool(left_in(store))
        with serving("mem", store):
            memory_trials.ENGINE.discard(case.request, plans=(digest,), keep_unfinished=True)
        wrong = partial_result(memory_trials.tree(store), case.new) or difference(memory_trials.tree(store), case.new)
        if left := left_in(store):
            wrong = f"{wrong}; left: {left}"
        if wrong:
            failures.append(f"#{operation.number} {operation.name} {operation.path}: {wrong}")
    assert not failures, "\n".join(failures)
    assert left_behind, "the trials prove nothing if nothing was left"
