"""How often a store is asked: on a store far away, calls are the time."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from house.requests import asked
from reshard.choices import TargetFormat
from reshard.engine import load_engine
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec
from reshard_engine.operations.conversion import Conversion
from reshard_engine.storage.locations import serving
from reshard_engine.testing.stores import MemoryStore

DATA = Path(__file__).parent.parent / "data"
WAIT_S = 20


class _Watched(MemoryStore):
    """Counts reads by object; `gate` is entered by every read while it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.puts: Counter[str] = Counter()
        self.gate: Callable[[str], None] = lambda _: None

    def read_into(self, info: Any, offset: int, buffer: memoryview) -> None:
        self.reads[info.path] += 1
        self.gate(f"read {info.path}")
        super().read_into(info, offset, buffer)

    def put(self, path: str, data: Any, **options: Any) -> Any:
        self.puts[path] += 1
        self.gate(f"put {path}")
        return super().put(path, data, **options)


@pytest.fixture
def store() -> Iterator[_Watched]:
    made = _Watched()
    made.load(DATA / "zero3_tiny", "data/run")
    with serving("mem", made):
        yield made


def _request(**options: Any) -> ConvertRequest:
    source = SourceSpec(url="mem://data/run")
    return asked(source=source, target="mem://out/jobs/u", to=TargetFormat.UNIVERSAL, **options)


def test_metadata_of_a_rank_is_one_read(store: _Watched) -> None:
    """Directory, pickle and step count of a small file lie in one window."""
    Conversion.prepare(_request())
    ranks = {path: count for path, count in store.reads.items() if path.endswith(".pt")}
    assert len(ranks) >= 3
    assert set(ranks.values()) == {1}, ranks


def _meeting(store: _Watched, what: Callable[[str], bool]) -> threading.Event:
    """Set once two calls of a kind are on their way at the same time; the first waits for a second."""
    met, lock, flying = threading.Event(), threading.Lock(), [0]

    def gate(call: str) -> None:
        if not what(call):
            return
        with lock:
            flying[0] += 1
            if flying[0] == 2:
                met.set()
        met.wait(WAIT_S)
        with lock:
            flying[0] -= 1

    store.gate = gate
    return met


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(lambda call: call.startswith("read data/run") and call.endswith("_optim_states.pt"), id="reads"),
        pytest.param(lambda call: call.startswith("put out/jobs/u/zero/"), id="puts"),
    ],
)
def test_calls_of_one_unit_are_on_their_way_together(store: _Watched, kind: Callable[[str], bool]) -> None:
    """All of this checkpoint is one unit: its calls would never meet if they were made in turn."""
    request = _request(threads=2)
    assert len([u for u in Conversion.prepare(request).plan.units if not u.commit]) == 1
    met = _meeting(store, kind)
    load_engine().convert(request)
    assert met.is_set()
    alone = request.model_copy(update={"target": "mem://out/alone/u", "threads": 1})
    store.gate = lambda _: None
    load_engine().convert(alone)
    tree = {p.removeprefix("out/jobs/"): d for p, d in store.snapshot("out/jobs").items() if not p.endswith(".json")}
    assert tree == {
        p.removeprefix("out/alone/"): d for p, d in store.snapshot("out/alone").items() if not p.endswith(".json")
    }
