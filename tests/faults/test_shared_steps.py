"""Every step of the protocol of many workers, and every fault: the others commit, whole and once, and nothing is left.

The short form takes one operation of each kind of step for each fault, at random; the long one all operations, and one
more time each with all workers at work from the beginning.
"""

from __future__ import annotations

import random

import pytest

from faults import shared_trials
from faults.judge import Ledger
from faults.memory_trials import Case, fresh_case
from faults.small import OPTIONS
from house.seeds import run_seed
from reshard.choices import TargetFormat
from reshard_engine.testing.stores import Fault, MemoryStore, Operation

FAULTS = (Fault.ERROR_BEFORE, Fault.ERROR_AFTER, Fault.KILL_BEFORE, Fault.HANG)
SHORT = {f: f.removesuffix(" past the lease").removeprefix("effect done, then ") for f in FAULTS}
SHORT[Fault.ERROR_AFTER] = "error after"
SEED = run_seed()
STEPS = {
    "begin the session",
    "make ready",
    "claim",
    "record",
    "offer an upload",
    "heartbeat",
    "look",
    "elect",
    "data",
    "commit",
    "collect",
    "take the target",
}
"""The steps of a worker that works alone. `split` and `wait` need others."""


def by_kind(operations: list[Operation]) -> dict[str, list[int]]:
    """The numbers of the operations of each kind of step, from the first session on."""
    begun = next(o.number for o in operations if shared_trials.kind_of(o) == "begin the session")
    found: dict[str, list[int]] = {}
    for operation in operations:
        kind = shared_trials.kind_of(operation)
        if kind is not None and operation.number >= begun - 1:
            found.setdefault(kind, []).append(operation.number)
    return found


def trial(
    ledger: Ledger, case: Case, where: int | str, fault: Fault, *, intended: str = "", alone: bool = True
) -> str | None:
    """One trial; the kind of step that was disturbed, or None if the worker ended before it came to it."""
    end, kind, problems = shared_trials.disturbed(case, where, fault, alone=alone)
    mode = f"{intended or kind or 'not reached'}: {SHORT[fault]}"
    ledger.note(mode, end, f"{where}{'' if alone else ' of three'}", problems)
    return kind


@pytest.mark.timeout(900)
def test_a_fault_at_each_step(memory: MemoryStore) -> None:
    case = fresh_case(memory, TargetFormat.UNIVERSAL)
    kinds = by_kind(shared_trials.undisturbed(case))
    assert set(kinds) >= STEPS
    chance, ledger = random.Random(SEED), Ledger(f"a fault at each step of three workers, seed {SEED}")
    for kind, numbers in kinds.items():
        for fault in FAULTS:
            trial(ledger, case, chance.choice(numbers), fault, intended=kind)
    disturb_waiting(ledger, case, times=1)
    ledger.settle()


def disturb_waiting(ledger: Ledger, case: Case, *, times: int) -> None:
    """Disturb the steps that only a worker among others does. It is drawn by lot which worker waits for which."""
    for kind in ("split", "wait"):
        for fault in FAULTS:
            reached = 0
            for _ in range(150 * times):  # one trial in about ten comes to a split
                reached += trial(ledger, case, kind, fault, alone=False) == kind
                if reached == times:
                    break
            assert reached == times, f"no worker came to a {kind}"


@pytest.mark.timeout(900)
def test_a_zombies_segment_and_part_after_the_commit_change_nothing(memory: MemoryStore) -> None:
    """A worker is paused before a record, or before a part, until the others have committed; then it goes on."""
    case = fresh_case(memory, TargetFormat.UNIVERSAL)
    kinds = by_kind(shared_trials.undisturbed(case))
    ledger = Ledger("a worker that goes on after the commit")
    for kind, number in [("record", n) for n in kinds["record"]] + [("data", n) for n in kinds["data"][::3]]:
        trial(ledger, case, number, Fault.HANG, intended=kind)
    ledger.settle()


@pytest.mark.timeout(900)
def test_uploads_and_records_of_a_dead_worker_are_kept(memory: MemoryStore) -> None:
    """The others go on with the uploads that a dead worker named, and send none of its recorded parts again."""
    case = fresh_case(memory, TargetFormat.UNIVERSAL)
    operations = shared_trials.undisturbed(case)
    kinds = by_kind(operations)
    named = kinds["offer an upload"][0]
    recorded = next(n for n in kinds["record"] if n > named)
    number = next(n for n in kinds["data"] if n > recorded)
    for later in range(24):
        # On a busy machine, heartbeats in between give operations higher numbers.
        end, step, problems, uploads = shared_trials.killed_before(case, number + later // 3)
        assert (end, problems) == ("killed", [])
        if step == "data":
            break  # any other step may come before the upload has a name
    else:
        pytest.fail("the worker was never killed before it wrote data")
    assert uploads == sum(o.name == "create_multipart" for o in operations), "an upload was begun twice"


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("to", OPTIONS)
def test_every_fault_at_every_operation(memory: MemoryStore, to: str) -> None:
    case = fresh_case(memory, to)
    kinds = by_kind(shared_trials.undisturbed(case))
    numbers = sorted((n, kind) for kind, found in kinds.items() for n in found)
    ledger = Ledger(f"every fault at every operation of a worker, two others, {to}: {len(numbers)} operations")
    for number, kind in numbers:
        for fault in FAULTS:
            trial(ledger, case, number, fault, intended=kind)
            trial(ledger, case, number, fault, alone=False)
    disturb_waiting(ledger, case, times=10)
    ledger.settle()
