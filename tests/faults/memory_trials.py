"""Conversions between prefixes of a memory store, with a fault at one operation."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace as replace_field
from pathlib import Path

from faults.judge import Outcome, Tree, difference, partial_result, strays
from faults.small import RANKS, name_of, small_request, sources_of
from reshard.engine import load_engine
from reshard.errors import ReshardError
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec
from reshard_engine.operations.conversion import Conversion
from reshard_engine.storage.locations import serving
from reshard_engine.storage.protocol import ObjectStore
from reshard_engine.testing.stores import Fault, FaultyStore, Killed, MemoryStore, Operation, Steps

SOURCES, PARENT = "mem://data", "mem://out/jobs"
SOURCE = f"{SOURCES}/run"
ENGINE = load_engine()


@dataclass(frozen=True)
class Case:
    """A conversion, and the store before it."""

    empty: MemoryStore
    """The sources alone."""
    store: MemoryStore
    request: ConvertRequest
    new: Outcome
    old: Outcome | None = None
    clearing: range = range(0)
    """The operations that remove what `--overwrite` replaces."""

    def operations(self) -> list[Operation]:
        """What an undisturbed run does."""
        steps = Steps()
        assert attempt(FaultyStore(clone(self.store), steps), self.request) == "done"
        return steps.done


def loaded_store(root: Path) -> MemoryStore:
    """A store with the checkpoints below a directory and nothing else."""
    store = MemoryStore()
    for source in sorted(p for p in root.iterdir() if p.name.endswith(("run", "other"))):
        store.load(source, f"data/{source.name}")
    return store


def _sources(to: str) -> tuple[str, str]:
    first, other = (f"{SOURCES}/{name}" for name in sources_of(to))
    return first, other


def fresh_case(store: MemoryStore, to: str) -> Case:
    """Into an empty place."""
    request = small_request(_sources(to)[0], PARENT, to)
    return Case(store, store, request, outcome(store, request))


def crowded_case(store: MemoryStore, to: str) -> Case:
    """Into an empty place, with calls on their way together: numbers of operations only say how many there were."""
    request = small_request(_sources(to)[0], PARENT, to, threads=4)
    return Case(store, store, request, outcome(store, request))


def from_ranks_case(store: MemoryStore, to: str) -> Case:
    """From files of FSDP's ranks into an empty place."""
    held = clone(store)
    made = small_request(SOURCE, "mem://data/made", RANKS)
    assert attempt(held, made) == "done"
    request = small_request(made.target, PARENT, to)
    return Case(held, held, request, outcome(held, request))


def from_megatron_case(store: MemoryStore, to: str) -> Case:
    """From directories of Megatron-core's ranks into an empty place."""
    request = small_request(_sources("megatron")[0], PARENT, to)
    return Case(store, store, request, outcome(store, request))


def overwrite_case(store: MemoryStore, to: str) -> Case:
    """Over a finished conversion of another checkpoint."""
    source, other = _sources(to)
    before = small_request(other, PARENT, to)
    held = clone(store)
    assert attempt(held, before) == "done"
    request = small_request(source, PARENT, to, overwrite=True)
    case = Case(store, held, request, outcome(store, request), outcome(store, before))
    claims = [o.number for o in case.operations() if o.name == "put" and o.path.endswith("-claim")]
    settled = next(o.number for o in case.operations() if o.name == "put" and o.path.endswith("/plan.json"))
    return replace_field(case, clearing=range(claims[1] + 1, settled + 1))


def clone(store: MemoryStore) -> MemoryStore:
    """The same objects and uploads in a store of its own."""
    twin = MemoryStore(min_part_bytes=store.min_part_bytes)
    with store._lock:
        twin._objects = dict(store._objects)
        twin._uploads = copy.deepcopy(store._uploads)
        twin._begun = store._begun
    return twin


def tree(store: MemoryStore) -> Tree:
    """What is in the target's parent."""
    head = PARENT.partition("://")[2] + "/"
    return {path.removeprefix(head): body for path, body in store.snapshot(head).items()}


def outcome(store: MemoryStore, request: ConvertRequest) -> Outcome:
    """What an undisturbed run leaves."""
    here = clone(store)
    with serving("mem", here):
        conversion = Conversion.prepare(request)
        conversion.run(on_progress=None, should_stop=None)
    assert here.list_uploads("") == []
    name = name_of(request)
    commit = frozenset(f"{name}/{f.path}" for f in conversion.plan.files if f.commit)
    return Outcome(name, tree(here), commit, conversion.plan.pointer)


def attempt(store: ObjectStore, request: ConvertRequest) -> str:
    """How a run ended: `done`, `recognised`, `killed` or an error's code."""
    with serving("mem", store):
        try:
            return "recognised" if ENGINE.convert(request).already_done else "done"
        except Killed:
            return "killed"
        except ReshardError as error:
            return error.code


def discard(store: ObjectStore, request: ConvertRequest) -> None:
    """Collect what an unfinished conversion left."""
    with serving("mem", store):
        ENGINE.discard(request)


def disturbed(
    case: Case, number: int, fault: Fault, error: Callable[[], Exception] | None = None
) -> tuple[str, list[str]]:
    """One trial of a fault after which nobody is left: how it ended, and what was wrong."""
    store = clone(case.store)
    steps = Steps({number: fault}, **({"error": error} if error else {}))
    end = attempt(FaultyStore(store, steps), case.request)
    problems = [partial_result(tree(store), case.new, old=case.old)]
    problems += _collected(clone(store), case)
    problems += _resumed(store, case)
    return end, [p for p in problems if p]


def hung(case: Case, number: int, meanwhile: Meanwhile) -> tuple[str, list[str]]:
    """One trial of a process that hangs at an operation while others act, and then goes on: a zombie."""
    store = clone(case.store)
    steps = Steps({number: Fault.HANG})
    ends: list[str] = []
    zombie = threading.Thread(target=lambda: ends.append(attempt(FaultyStore(store, steps), case.request)))
    zombie.start()
    assert steps.hung.wait(30)
    problems = [partial_result(tree(store), case.new, old=case.old)]
    try:
        wanted, found = meanwhile(store, case)
        problems += found
    finally:
        steps.wake()
        zombie.join(30)
    if number in case.clearing:
        # The one thing that no look before can fence: a DELETE that was on its way. The next run repairs it.
        return ends[0], [p for p in (*problems, *_resumed(store, case)) if p]
    discard(store, case.request)
    left = tree(store)
    # Who slept before it took the target may take it from the one that has finished, if it overwrites.
    won = [wanted, case.new] if ends == ["done"] and case.request.overwrite else [wanted]
    problems.append(_left(store))
    if wanted is None:
        problems.append(partial_result(left, case.new, old=case.old))
    elif not any(w is not None and w.is_all_of(left) for w in won):
        problems.append(difference(left, wanted))
    return ends[0], [p for p in problems if p]


def finish(store: MemoryStore, case: Case) -> tuple[Outcome | None, list[str | None]]:
    """Another worker runs the same request to its end."""
    return case.new, _resumed(store, case)


def cancel(store: MemoryStore, case: Case) -> tuple[Outcome | None, list[str | None]]:
    """The job is cancelled, and what it left is collected."""
    return None, _collected(store, case)


def replace(store: MemoryStore, case: Case) -> tuple[Outcome | None, list[str | None]]:
    """Someone converts another checkpoint into the same target, `--overwrite`."""
    url = f"{case.request.source.url.removesuffix('run')}other"
    other = case.request.model_copy(update={"source": SourceSpec(url=url), "overwrite": True})
    end = attempt(store, other)
    return outcome(case.empty, other), [None if end in {"done", "recognised"} else f"the other run ended with {end}"]


Meanwhile = Callable[[MemoryStore, Case], tuple[Outcome | None, list[str | None]]]


def _collected(store: MemoryStore, case: Case) -> list[str | None]:
    discard(store, case.request)
    return [_left(store), partial_result(tree(store), case.new, old=case.old)]


def _left(store: MemoryStore) -> str | None:
    left = strays(tree(store)) + [path for path, _ in store.list_uploads("")]
    return f"after discard: {left}" if left else None


def _resumed(store: MemoryStore, case: Case) -> list[str | None]:
    end = attempt(store, case.request)
    found = tree(store)
    return [
        None if end in {"done", "recognised"} else f"the resumed run ended with {end}",
        difference(found, case.new),
        f"after the resumed run: {left}" if (left := store.list_uploads("")) else None,
    ]
