"""Three workers that share a conversion in a memory store, one of which is disturbed at one of its operations.

Each worker is a thread with the real engine. Its calls of the store are counted and disturbed as those of a process:
a paused one does nothing in any thread. A killed or paused worker counts as dead at once, as if its lease had ended,
and as alive when it goes on. Clocks run a hundred times as fast.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import pytest

from faults.judge import difference, partial_result, strays
from faults.memory_trials import ENGINE, Case, clone, discard, tree
from reshard.errors import ReshardError
from reshard.shared_work import SharedWork
from reshard_engine.distributed.members import Members
from reshard_engine.distributed.runs import cut_into_runs
from reshard_engine.operations import shared_conversion
from reshard_engine.storage.locations import serving
from reshard_engine.testing.stores import Fault, FaultyStore, Killed, MemoryStore, Operation, Steps

_T = TypeVar("_T")

WORKERS = 3
SPEED = 100.0
JOIN_S = 60.0
_RUNS = 2
_UNIT_S = 0.005
"""Each part takes so long, so that others have time to wait for a split."""
_KINDS = {
    "begin the session": r"/epoch-\d+$",
    "make ready": r"/ready$|segment-resumed",
    "elect": "/claim-commit-",
    "claim": "/claim-[0-9]",
    "split": "/split-",
    "record": "/segment-",
    "offer an upload": "/upload-",
    "wait": "/idle-",
    "heartbeat": "/beats/",
    "look": r"/workers$",
    "take the target": r"-claim$|plan[.]json$",
}
"""Steps of the protocol by the names of its texts."""


def kind_of(operation: Operation) -> str | None:
    """The step of the protocol to which an operation belongs; None for reads of the source."""
    if operation.name in {"delete", "abort_multipart", "list_uploads"}:
        return "collect"
    if operation.name in {"create_multipart", "put_part"}:
        return "data"
    if operation.name in {"complete_multipart", "list_parts"} or re.search(r"reshard[.]json$|/latest", operation.path):
        return "commit"
    for kind, pattern in _KINDS.items():
        if re.search(pattern, operation.path):
            return kind
    return None if operation.path.startswith("data/") else "data"


class ProcessSteps(Steps):
    """The operations of one worker: while one of its threads is paused, all are."""

    def __init__(self, where: int | str = 0, fault: Fault | None = None) -> None:
        """`where` is the number of the operation that is disturbed, or the kind of step whose first one is."""
        super().__init__()
        self._script = self._faults = dict[int, Fault | Callable[[], None]]()
        self._where = where
        self._fault = fault
        self.disturbed: Operation | None = None
        self.reached = threading.Event()
        """Set when the disturbed operation begins."""

    @property
    def is_gone(self) -> bool:
        return self.dead or (self.hung.is_set() and not self._woken.is_set())

    def step(self, name: str, path: str, effect: Callable[[], _T], short: Callable[[], _T] | None = None) -> _T:
        if self.hung.is_set() and not self._woken.wait(JOIN_S):
            raise AssertionError("nobody woke the worker")
        if name == "put_part" or (name == "put" and ".reshard-" not in path):
            time.sleep(_UNIT_S)
        with self._lock:
            operation = Operation(len(self.done) + 1, name, path)
            if self.disturbed is None and self._where in {operation.number, kind_of(operation)}:
                self.disturbed = operation
                if self._fault is not None:
                    self._faults[operation.number] = self._fault
                self.reached.set()
        return super().step(name, path, effect, short)


class Worker(threading.Thread):
    """One of the workers."""

    def __init__(self, store: MemoryStore, case: Case, number: int, steps: ProcessSteps) -> None:
        super().__init__(name=f"worker-{number}", daemon=True)
        self._store = FaultyStore(store, steps)
        self._case = case
        self._number = number
        self.steps = steps
        self.end = "untyped"

    def run(self) -> None:
        work = SharedWork(number=self._number, count=WORKERS, lease_s=60)
        with serving("mem", self._store):
            try:
                done = ENGINE.convert(self._case.request, work=work).already_done
                self.end = "recognised" if done else "done"
            except Killed:
                self.end = "killed"
            except ReshardError as error:
                self.end = error.code
        self.steps.reached.set()


class _FastClock:
    """A hundred seconds for each second."""

    def monotonic(self) -> float:
        return time.monotonic() * SPEED

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds / SPEED)


@contextmanager
def quick_protocol(steps: dict[str, ProcessSteps]) -> Generator[None]:
    """Workers are named after their threads; those whose steps are gone count as ended."""

    def name() -> str:
        return f"abc-{threading.current_thread().name.partition('-')[2]}-{0:012x}"

    def ended(worker: str) -> bool:
        return worker in steps and steps[worker].is_gone

    def ignore(args: threading.ExceptHookArgs) -> None:
        if not issubclass(args.exc_type, Killed):
            threading.__excepthook__(args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_conversion, "time", _FastClock())
        patch.setattr(shared_conversion, "process_name", name)
        patch.setattr(shared_conversion, "Members", partial(Members, ended=ended))
        patch.setattr(shared_conversion, "cut_into_runs", partial(cut_into_runs, most=_RUNS))
        patch.setattr(shared_conversion, "_TICK_S", 0.002)
        patch.setattr(threading, "excepthook", ignore)
        yield


def undisturbed(case: Case) -> list[Operation]:
    """The operations of a worker that works alone."""
    steps = ProcessSteps()
    with quick_protocol({}):
        worker = Worker(clone(case.store), case, 0, steps)
        worker.start()
        worker.join(JOIN_S)
    assert worker.end == "done"
    return steps.done


def killed_before(case: Case, number: int) -> tuple[str, str | None, list[str], int]:
    """A worker is killed before an operation; another ends its work. Returns also the step, and how many uploads there
    were."""
    store = clone(case.store)
    begun = store._begun
    end, step, problems = disturbed(case, number, Fault.KILL_BEFORE, alone=True, store=store, others=1)
    return end, step, problems, store._begun - begun


def disturbed(
    case: Case,
    where: int | str,
    fault: Fault,
    *,
    alone: bool,
    store: MemoryStore | None = None,
    others: int = WORKERS - 1,
) -> tuple[str, str | None, list[str]]:
    """One trial: how the disturbed worker ended, the step that was disturbed, and what was wrong.

    Args:
        case: The conversion.
        where: The number of the operation that is disturbed, or the kind of step whose first one is.
        fault: What happens at it.
        alone: The others begin when the operation is reached, so that its number means the same in each trial.
        store: Where the case is; by default a copy.
        others: Number of workers that are not disturbed.
    """
    store = store or clone(case.store)
    steps = ProcessSteps(where, fault)
    victim = Worker(store, case, 0, steps)
    rest = [Worker(store, case, n, ProcessSteps()) for n in range(1, others + 1)]
    with quick_protocol({"abc-0-000000000000": steps}):
        victim.start()
        if alone:
            assert steps.reached.wait(JOIN_S)
            if fault is Fault.HANG and victim.end == "untyped":
                assert steps.hung.wait(JOIN_S)
        problems = [partial_result(tree(store), case.new)]
        for worker in rest:
            worker.start()
        for worker in rest:
            worker.join(JOIN_S)
        problems += [f"another worker ended with {w.end}" for w in rest if w.end not in {"done", "recognised"}]
        problems.append(None if case.new.is_whole_in(tree(store)) else difference(tree(store), case.new))
        steps.wake()
        victim.join(JOIN_S)
    problems.append("the disturbed worker does not end" if victim.is_alive() else None)
    problems.append("an error without a type" if victim.end == "untyped" else None)
    left = strays(tree(store)) + [path for path, _ in store.list_uploads("")]
    if left and not steps.dead:
        problems.append(f"left behind although nobody was killed: {left}")
    discard(store, case.request)
    left = strays(tree(store)) + [path for path, _ in store.list_uploads("")]
    problems += [f"left behind after the collection: {left}"] if left else []
    problems.append(difference(tree(store), case.new))
    return victim.end, steps.disturbed and kind_of(steps.disturbed), [p for p in problems if p]
