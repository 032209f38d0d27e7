"""Workers read the source's metadata once: one reads, the others take it from its pack, whatever happens to either."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_zero_checkpoint
from safetensors.torch import save_file

from reshard.errors import ReshardError
from reshard.local import load_engine
from reshard.models import ConvertRequest, ConvertResult, SourceSpec, WorkShare
from reshard.shared_work import SharedWork
from reshard_engine.distributed import first_reader
from reshard_engine.integrity.manifest import MANIFEST_NAME
from reshard_engine.operations import shared_metadata
from reshard_engine.operations.conversion import Conversion
from reshard_engine.operations.shared_metadata import SharedMetadata
from reshard_engine.storage.locations import serving
from reshard_engine.storage.packed_store import ReadRecorder
from reshard_engine.storage.protocol import ObjectInfo
from reshard_engine.storage.read_pack import to_part
from reshard_engine.testing.memory_store import MemoryStore

PARAMETERS = [(f"layer.{n}.weight", (16, 17)) for n in range(12)] + [("embed.weight", (64, 32))]
PACKS = "data/.out.reshard-packs/"
ENGINE = load_engine()


class CountingStore(MemoryStore):
    """Counts the reads of each object."""

    def __init__(self) -> None:
        super().__init__(min_part_bytes=1)
        self.reads: Counter[str] = Counter()
        self.before_read: Callable[[str], None] = lambda _: None

    def read_into(self, info: ObjectInfo, offset: int, buffer: memoryview) -> None:
        self.reads[info.path] += 1
        self.before_read(info.path)
        super().read_into(info, offset, buffer)

    @property
    def source_reads(self) -> Counter[str]:
        return Counter({path: n for path, n in self.reads.items() if ".reshard-" not in path})

    def count(self, kind: str) -> int:
        """Reads of the `source`, or of the texts of a `pack`."""
        if kind == "source":
            return self.source_reads.total()
        return sum(n for path, n in self.reads.items() if path.startswith((f"{PACKS}packs/", f"{PACKS}parts/")))


def request(to: str = "universal", source: str = "mem://data/run", **options: Any) -> ConvertRequest:
    return ConvertRequest.model_validate(
        {
            "source": {"url": source},
            "target": "mem://data/out",
            "to": to,
            "part_bytes": 4096,
            "threads": 1,
            **options,
        }
    )


class Worker(threading.Thread):
    """A worker that converts."""

    def __init__(
        self, store: MemoryStore, wanted: ConvertRequest, number: int = 0, count: int = 1, *, least_bytes: int = 0
    ) -> None:
        super().__init__(daemon=True, name=f"worker-{number}")
        self._store, self._wanted = store, wanted
        self._work = SharedWork(number=number, count=count, lease_s=30, least_bytes=least_bytes)
        self.result: ConvertResult | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        with serving("mem", self._store):
            try:
                self.result = ENGINE.convert(self._wanted, work=self._work)
            except (ReshardError, RuntimeError) as error:
                self.error = error

    def done(self) -> ConvertResult:
        self.join(60)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


def plan(store: MemoryStore, wanted: ConvertRequest) -> tuple[str, Mapping[str, float], SharedMetadata]:
    """One worker plans, and leaves its pack: the digest, the seconds, and what is to be closed."""
    metadata = SharedMetadata(SharedWork(), lambda: None)
    with serving("mem", store):
        conversion = Conversion.prepare(wanted, metadata)
    return conversion.plan.digest, conversion.planning, metadata


def plan_alone(store: MemoryStore, wanted: ConvertRequest) -> str:
    with serving("mem", store):
        return Conversion.prepare(wanted).plan.digest


def packs(store: MemoryStore) -> dict[str, bytes]:
    return store.snapshot(PACKS)


def strays(store: MemoryStore) -> list[str]:
    return [path for path in store.snapshot("data") if ".reshard-" in path]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A native source, its universal form, its weights; adapters, and the base model that they need."""
    root = tmp_path_factory.mktemp("sources")
    write_zero_checkpoint(root / "run", PARAMETERS, stage=2, ranks=2)
    for to in ("universal", "safetensors"):
        ENGINE.convert(ConvertRequest(source=SourceSpec(url=str(root / "run")), target=str(root / to), to=to))
    head = "base_model.model.layer."
    adapters = [(f"{head}{n}.lora_{ab}.default.weight", shape) for n in range(3) for ab, shape in SHAPES.items()]
    write_zero_checkpoint(root / "lora", adapters, stage=2, ranks=2)
    (root / "base").mkdir()
    save_file({f"layer.{n}.weight": torch.ones(16, 17) for n in range(3)}, root / "base" / "model.safetensors")
    return root


SHAPES = {"A": (2, 17), "B": (16, 2)}
CASES: dict[str, dict[str, Any]] = {
    "zero": {"to": "universal"},
    "universal": {"to": "zero", "source": "mem://data/universal", "options": {"deepspeed": {"dp": 3}}},
    "safetensors": {"to": "torch", "source": "mem://data/safetensors"},
    "adapters": {
        "to": "safetensors",
        "source": "mem://data/lora",
        "options": {"peft": {"merge_adapter": True, "base": "mem://data/base", "lora_alpha": 4.0}},
    },
}


@pytest.fixture
def store(sources: Path) -> CountingStore:
    found = CountingStore()
    found.load(sources, "data")
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_joining_worker_reads_nothing_of_the_source(case: str, store: CountingStore) -> None:
    wanted = request(**CASES[case])
    alone = plan_alone(store, wanted)
    by_one = store.count("source")
    assert by_one >= 1
    store.reads.clear()
    first, seconds, metadata = plan(store, wanted)
    assert (first, store.count("source")) == (alone, by_one)
    assert seconds["publish"] > 0
    store.reads.clear()
    second, seconds, _ = plan(store, wanted)
    assert (second, store.count("source")) == (alone, 0)
    assert seconds["pack"] > 0
    assert store.count("pack") == 2, "the number of parts, and the part"
    with serving("mem", store):
        metadata.close()
    assert strays(store) == []


@pytest.mark.parametrize("case", CASES)
def test_four_workers_read_the_metadata_once(case: str, store: CountingStore) -> None:
    wanted = request(**CASES[case])
    plan_alone(store, wanted)
    by_one = store.count("source")
    store.reads.clear()
    reading = Readings(store, wanted, 4)
    assert len(set(reading.digests)) == 1
    assert reading.roles == Counter({"pack": 3, "publish": 1})
    assert store.count("source") == by_one
    assert store.count("pack") == 3 * 2, "the number of parts, and the part"


class Readings:
    """Several workers that plan at the same time."""

    def __init__(self, store: MemoryStore, wanted: ConvertRequest, count: int) -> None:
        self.digests: list[str] = []
        self.roles: Counter[str] = Counter()

        def work() -> None:
            digest, seconds, _ = plan(store, wanted)
            self.digests.append(digest)
            self.roles.update(set(seconds) - {"plan"} or {"alone"})

        threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(self.digests) == count


def test_workers_commit_and_leave_no_pack(store: CountingStore) -> None:
    workers = [Worker(store, request(), n, 4) for n in range(4)]
    for worker in workers:
        worker.start()
    assert sorted(w.done().already_done for w in workers) == [False, True, True, True]
    assert strays(store) == []
    with serving("mem", store):
        assert ENGINE.verify("mem://data/out").ok


def test_a_single_process_uses_no_packs(store: CountingStore) -> None:
    with serving("mem", store):
        result = ENGINE.convert(request())
    assert set(result.seconds) & {"pack", "publish"} == set()
    assert store.count("pack") == 0


def test_a_local_source_uses_no_packs(sources: Path, tmp_path: Path) -> None:
    local = ConvertRequest(source=SourceSpec(url=str(sources / "run")), target=str(tmp_path / "out"), to="universal")
    result = ENGINE.convert(local, work=SharedWork())
    assert set(result.seconds) & {"pack", "publish"} == set()


def test_a_local_target_holds_packs_of_a_remote_source(store: CountingStore, tmp_path: Path) -> None:
    wanted = request(target=str(tmp_path / "below" / "out"))
    _, seconds, first = plan(store, wanted)
    assert seconds["publish"] > 0
    place = tmp_path / "below" / ".out.reshard-packs"
    assert len(list(place.rglob("*-0001*"))) == 3, "the claim, the number of parts, and the part"
    store.reads.clear()
    _, seconds, _ = plan(store, wanted)
    assert seconds["pack"] > 0
    assert store.count("source") == 0
    assert [f.kind for f in ENGINE.clean(wanted.target, dry_run=True).leftovers] == ["journal"]
    first.close()
    assert not place.exists()
    plan(store, wanted)
    assert ENGINE.clean(wanted.target).removed
    assert list(place.parent.iterdir()) == []


# -- packs that do not fit -------------------------------------------------------------------------------


def test_a_stale_pack_is_not_used(store: CountingStore, tmp_path: Path) -> None:
    """The source is written again between the pack and the worker that joins."""
    plan(store, request())
    before = store.snapshot("data/run")
    write_zero_checkpoint(tmp_path / "run", PARAMETERS, stage=2, ranks=2, seed=5)
    store.load(tmp_path / "run", "data/run")
    after = store.snapshot("data/run")
    assert {p: len(d) for p, d in before.items()} == {p: len(d) for p, d in after.items()}
    changed = {p for p, d in after.items() if d != before[p]}
    assert len(changed) >= 2
    store.reads.clear()
    alone = plan_alone(store, request())
    by_one = store.source_reads
    store.reads.clear()
    assert plan(store, request())[0] == alone
    assert store.source_reads == Counter({path: n for path, n in by_one.items() if path in changed})


def damaged(store: MemoryStore, change: Callable[[bytes], bytes | None]) -> None:
    """Change each part of each pack; None removes it."""
    for path, data in packs(store).items():
        if "/parts/" in path:
            changed = change(data)
            if changed is None:
                store.delete([path])
            else:
                store.put(path, changed, metadata={}, if_absent=False)


HOSTILE: dict[str, Callable[[bytes], bytes | None]] = {
    "torn": lambda data: data[: len(data) // 2],
    "rotten": lambda data: data[:60] + bytes([data[60] ^ 4]) + data[61:],
    "empty": lambda data: b"",
    "gone": lambda data: None,
    "another's": lambda data: to_part({b"p\0data/run/latest\0etag:x\x006": [(0, b"wrong!")]}),
    "nonsense": lambda data: b"\0" * 1000,
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_damaged_pack_only_costs_reads(how: str, store: CountingStore) -> None:
    alone = plan_alone(store, request())
    by_one = store.count("source")
    plan(store, request())
    damaged(store, HOSTILE[how])
    store.reads.clear()
    joined, _, _ = plan(store, request())
    assert (joined, store.count("source")) == (alone, by_one)


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[" * 100_000, b'{"parts": 1e9}', b'{"parts": -1}', b'{"parts": 65}', b'{"parts": "1"}']
)
def test_a_hostile_index_only_costs_reads(text: bytes, store: CountingStore) -> None:
    alone = plan_alone(store, request())
    by_one = store.count("source")
    plan(store, request())
    (index,) = [path for path in packs(store) if "/packs/" in path]
    store.put(index, text, metadata={}, if_absent=False)
    store.reads.clear()
    joined, _, _ = plan(store, request())
    assert (joined, store.count("source")) == (alone, by_one)


def test_other_options_have_another_pack(store: CountingStore) -> None:
    plan(store, request())
    _, seconds, _ = plan(store, request(opaque="keep"))
    assert "publish" in seconds
    _, seconds, _ = plan(store, request(threads=3, overwrite=True, verify="full"))
    assert "pack" in seconds


# -- first readers that fail -----------------------------------------------------------------------------


def test_a_source_that_is_too_large_for_a_pack_is_read_by_each(
    store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_metadata, "ReadRecorder", lambda: ReadRecorder(most_bytes=100))
    alone = plan_alone(store, request())
    by_one = store.count("source")
    store.reads.clear()
    assert [plan(store, request())[0] for _ in range(2)] == [alone, alone]
    assert store.count("source") == 2 * by_one


def test_those_who_wait_go_on_together_when_the_first_reader_fails(store: CountingStore) -> None:
    """Its error is not repeated one worker after the other."""
    slow, failing = threading.Event(), threading.Event()

    def fail(path: str) -> None:
        if path.endswith("optim_states.pt") and not failing.is_set():
            failing.set()
            assert slow.wait(30)
            raise RuntimeError("the first reader's own trouble")

    store.before_read = fail
    errors: list[Exception] = []

    def first() -> None:
        metadata = SharedMetadata(SharedWork(), lambda: None)
        with serving("mem", store):
            try:
                Conversion.prepare(request(), metadata)
            except (ReshardError, RuntimeError) as error:
                errors.append(error)
            finally:
                metadata.close()

    thread = threading.Thread(target=first, daemon=True)
    thread.start()
    assert failing.wait(30)
    results: list[str] = []
    others = [
        threading.Thread(target=lambda: results.append("+".join(sorted(plan(store, request())[1]))), daemon=True)
        for _ in range(3)
    ]
    for other in others:
        other.start()
    time.sleep(0.5)
    assert results == [], "they wait"
    slow.set()
    for other in (thread, *others):
        other.join(30)
    assert [str(e) for e in errors] == ["the first reader's own trouble"]
    assert results == ["plan"] * 3


def test_a_first_reader_without_a_sign_of_life_is_replaced(
    store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_metadata, "_PATIENCE_S", 0.3)
    key = shared_metadata._key(request())
    store.put(f"{PACKS}claim-{key}-0001", b'{"worker": "elsewhere-1-0", "splits": []}', metadata={}, if_absent=True)
    _, seconds, _ = plan(store, request())
    assert "publish" in seconds
    assert seconds["plan"] < 20
    assert any(path.endswith("-0002") for path in packs(store))


def test_a_worker_does_not_wait_for_ever(store: CountingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first reader that is alive and never comes to an end is left alone."""
    monkeypatch.setattr(first_reader, "MOST_WAIT_S", 0.5)
    key = shared_metadata._key(request())
    store.put(f"{PACKS}claim-{key}-0001", b'{"worker": "elsewhere-1-0", "splits": []}', metadata={}, if_absent=True)
    _, seconds, metadata = plan(store, request())
    assert set(seconds) == {"plan"}
    metadata.close()
    assert len(packs(store)) == 1, "it is not this worker's to remove"


# -- ends ----------------------------------------------------------------------------------------------------


def test_a_pack_of_a_killed_run_is_collected(store: CountingStore) -> None:
    plan(store, request())
    assert strays(store)
    with serving("mem", store):
        report = ENGINE.clean("mem://data/out", dry_run=True, idle=True)
        assert {f.kind for f in report.leftovers} == {"journal"}
        assert len(report.leftovers) == len(strays(store))
        assert ENGINE.clean("mem://data/out", idle=True).removed
    assert strays(store) == []


def test_a_pack_of_a_killed_run_serves_the_next_and_ends_with_it(store: CountingStore) -> None:
    plan(store, request())
    store.reads.clear()
    worker = Worker(store, request())
    worker.start()
    assert "pack" in worker.done().seconds
    assert strays(store) == []


def test_a_single_process_removes_the_pack_of_killed_workers(store: CountingStore) -> None:
    plan(store, request())
    with serving("mem", store):
        ENGINE.convert(request())
    assert strays(store) == []


def test_a_first_reader_that_publishes_after_the_commit_removes_its_pack(store: CountingStore) -> None:
    """It is paused while it reads; another converts. Then it goes on, publishes, and finds the target finished."""
    paused, goes_on = threading.Event(), threading.Event()

    def pause(path: str) -> None:
        if path.endswith("optim_states.pt") and not paused.is_set():
            paused.set()
            assert goes_on.wait(60)

    store.before_read = pause
    late = Worker(store, request())
    late.start()
    assert paused.wait(30)
    with serving("mem", store):
        assert not ENGINE.convert(request()).already_done
    goes_on.set()
    assert late.done().already_done
    assert strays(store) == []


def test_a_first_reader_that_fails_removes_its_pack(store: CountingStore) -> None:
    store.put("data/out/notes.txt", b"mine", metadata={}, if_absent=True)
    worker = Worker(store, request())
    worker.start()
    with pytest.raises(Exception, match="data/out"):
        worker.done()
    assert strays(store) == []


@pytest.mark.parametrize("least_bytes", [0, 1])
def test_helpers_use_the_owners_pack(least_bytes: int, store: CountingStore) -> None:
    """A helper of the service joins while the owner's units run."""
    held, goes_on = threading.Event(), threading.Event()

    def hold(path: str) -> None:
        if any("/epoch-" in p for p in store.snapshot("data")) and not held.is_set() and "/run/" in path:
            held.set()
            assert goes_on.wait(60)

    store.before_read = hold
    owner = Worker(store, request(), least_bytes=least_bytes)
    owner.start()
    assert held.wait(30)
    store.reads.clear()
    work = SharedWork(number=1, count=2, lease_s=30, least_bytes=least_bytes)
    with serving("mem", store), closing(SharedMetadata(work, lambda: None, helps=True)) as metadata:
        assert "pack" in Conversion.prepare(request(), metadata).planning
    assert store.count("source") == 0
    shares: list[WorkShare] = []

    def help_it() -> None:
        with serving("mem", store):
            shares.append(ENGINE.help(request(), work))

    helper = threading.Thread(target=help_it, daemon=True)
    helper.start()
    goes_on.set()
    assert "publish" in owner.done().seconds
    helper.join(60)
    assert len(shares) == 1
    assert strays(store) == []


def test_an_owner_publishes_nothing_of_a_job_that_takes_no_helpers(store: CountingStore) -> None:
    written: list[str] = []
    put = store.put

    def noting(path: str, *args: Any, **options: Any) -> ObjectInfo:
        written.append(path)
        return put(path, *args, **options)

    store.put = noting  # pyright: ignore[reportAttributeAccessIssue]
    owner = Worker(store, request(), least_bytes=1 << 40)
    owner.start()
    assert "publish" not in owner.done().seconds
    assert [path for path in written if "reshard-packs" in path] == []


def test_what_workers_write_is_what_one_writes(store: CountingStore, sources: Path) -> None:
    for name, case in CASES.items():
        twin = CountingStore()
        twin.load(sources, "data")
        with serving("mem", twin):
            ENGINE.convert(request(**case))
        together = CountingStore()
        together.load(sources, "data")
        workers = [Worker(together, request(**case), n, 3) for n in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.done()
        found = {p: d for p, d in together.snapshot("data/out").items() if not p.endswith(MANIFEST_NAME)}
        assert found == {p: d for p, d in twin.snapshot("data/out").items() if not p.endswith(MANIFEST_NAME)}, name


def test_the_index_names_the_number_of_parts(store: CountingStore) -> None:
    plan(store, request())
    (index,) = [data for path, data in packs(store).items() if "/packs/" in path]
    parts: Sequence[str] = [path for path in packs(store) if "/parts/" in path]
    assert json.loads(index)["parts"] == len(parts) == 1
