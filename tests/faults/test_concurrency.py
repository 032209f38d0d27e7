"""Two conversions into one target at once: one wins whole, the other is told. Sources that change are noticed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
from checkpoints import write_zero_checkpoint

from faults import local_trials, memory_trials
from faults.judge import Tree
from faults.small import NAME, small_request, write_source
from house.expected import raised
from house.measured import say
from house.waiting import at_once
from reshard.choices import TargetFormat, WeightDtype
from reshard.engine import load_engine
from reshard.errors import ReshardError
from reshard.models.jobs import ConvertRequest, Progress
from reshard.options import SourceSpec
from reshard_engine.storage.locations import serving
from reshard_engine.testing.stores import FaultyStore, MemoryStore, Steps
from servers.s3 import S3Server

ENGINE = load_engine()
ROUNDS = 15
CONFLICTS = {"request.target_busy", "request.target_exists", "storage.conflict", "recognised"}
"""What the loser hears; `storage.conflict` names an upload that the winner has ended."""


def race(attempts: Mapping[str, Callable[[], str]]) -> dict[str, str]:
    """How several attempts ended that began at one moment."""
    barrier = threading.Barrier(len(attempts))
    ends: dict[str, str] = {}

    def run(name: str, attempt: Callable[[], str]) -> None:
        barrier.wait()
        ends[name] = attempt()

    at_once(partial(run, *item) for item in attempts.items())
    return ends


def one_won(ends: Mapping[str, str]) -> None:
    assert "done" in ends.values(), ends
    assert set(ends.values()) <= {"done"} | CONFLICTS, ends


def rivals(source: str, parent: str) -> dict[str, ConvertRequest]:
    """Two requests that differ in every byte, and in nothing that a loader would notice."""
    return {
        dtype: small_request(source, parent, TargetFormat.SAFETENSORS, dtype=WeightDtype(dtype))
        for dtype in ("fp32", "bf16")
    }


def test_one_plan_twice_in_memory(memory: MemoryStore) -> None:
    ends = Counter[str]()
    for to in (TargetFormat.UNIVERSAL, TargetFormat.SAFETENSORS):
        case = memory_trials.fresh_case(memory, to)
        for _ in range(ROUNDS):
            store = memory_trials.clone(memory)
            attempt = lambda store=store, case=case: memory_trials.attempt(store, case.request)  # noqa: E731
            found = race({"first": attempt, "second": attempt})
            one_won(found)
            memory_trials.discard(store, case.request)
            assert case.new.is_all_of(memory_trials.tree(store))
            assert store.list_uploads("") == []
            ends.update(found.values())
    say(f"one plan twice in memory: {dict(ends)}")


def test_two_plans_in_memory(memory: MemoryStore) -> None:
    requests = rivals(memory_trials.SOURCE, memory_trials.PARENT)
    outcomes = {name: memory_trials.outcome(memory, request) for name, request in requests.items()}
    for _ in range(ROUNDS):
        store = memory_trials.clone(memory)
        ends = race({n: (lambda r=r, s=store: memory_trials.attempt(s, r)) for n, r in requests.items()})
        one_won(ends)
        winner = next(name for name, end in ends.items() if end == "done")
        assert list(ends.values()).count("done") == 1
        memory_trials.discard(store, requests[winner])
        assert outcomes[winner].is_all_of(memory_trials.tree(store)), ends
        assert store.list_uploads("") == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_plans_on_local_files(small_root: Path, overwrite: bool) -> None:
    """Processes of their own: locks of one process are not proof for two."""
    requests = {
        name: request.model_copy(update={"overwrite": overwrite})
        for name, request in rivals(str(small_root / "run"), str(small_root / "jobs")).items()
    }
    cases = {name: local_trials.case_of(small_root, request) for name, request in requests.items()}
    for _ in range(ROUNDS):
        next(iter(cases.values())).prepare()
        children = {name: local_trials.run_child(case, Steps()) for name, case in cases.items()}
        ends = {name: child.end() for name, child in children.items()}
        assert set(ends.values()) <= {"done"} | CONFLICTS, ends
        # The loser may come again with `--overwrite`, and would go on: its staging is there until it is discarded.
        ENGINE.discard(requests["fp32"])
        found = local_trials.tree(small_root / "jobs")
        whole = [name for name, case in cases.items() if case.new.is_all_of(found)]
        assert len(whole) == 1, (ends, sorted(found))
        assert ends[whole[0]] == "done"
        if not overwrite:
            assert list(ends.values()).count("done") == 1


def test_one_plan_four_times_on_local_files(small_root: Path) -> None:
    case = local_trials.fresh_case(small_root, TargetFormat.UNIVERSAL)
    for _ in range(ROUNDS):
        case.prepare()
        children = [local_trials.run_child(case, Steps()) for _ in range(4)]
        one_won({str(n): child.end() for n, child in enumerate(children)})
        assert case.new.is_all_of(local_trials.tree(case.parent))


@pytest.fixture
def bucket(bucket: str, s3: S3Server, tmp_path: Path) -> str:
    """A bucket with a checkpoint whose largest tensors are uploaded in two parts."""
    write_zero_checkpoint(tmp_path / "run", [("embed.weight", (1500, 1024)), ("bias", (7,))], stage=3, ranks=2)
    s3.upload(tmp_path / "run", bucket, "run")
    return bucket


def _attempt(request: ConvertRequest) -> str:
    try:
        return "recognised" if ENGINE.convert(request).already_done else "done"
    except ReshardError as error:
        return error.code


def _s3_tree(s3: S3Server, bucket: str, parent: str) -> Tree:
    uploads = s3.client().list_multipart_uploads(Bucket=bucket, Prefix=parent).get("Uploads") or []
    assert uploads == []
    return s3.read_all(bucket, parent)


@pytest.mark.parametrize("same_plan", [True, False])
def test_races_on_a_real_object_store(s3: S3Server, bucket: str, same_plan: bool) -> None:
    ends = Counter[str]()
    for number in range(2):
        target = f"s3://{bucket}/{number}/{NAME}"
        first = ConvertRequest(
            source=SourceSpec(url=f"s3://{bucket}/run"), target=target, to=TargetFormat.SAFETENSORS, part_bytes=5 << 20
        )
        second = first if same_plan else first.model_copy(update={"dtype": WeightDtype.BF16})
        found = race({"first": lambda r=first: _attempt(r), "second": lambda r=second: _attempt(r)})
        one_won(found)
        ENGINE.discard(first)
        tree = _s3_tree(s3, bucket, str(number))
        assert set(tree) == {f"{NAME}/model.safetensors", f"{NAME}/reshard.json"}
        assert ENGINE.verify(target).ok
        ends.update(found.values())
    say(f"races on SeaweedFS, {'one plan' if same_plan else 'two plans'}: {dict(ends)}")


def test_local_source_that_is_overwritten_during_the_read(small_root: Path, tmp_path: Path) -> None:
    source = write_source(tmp_path / "run")
    victim = next(source.rglob("*rank_1*optim_states.pt"))
    request = small_request(str(source), str(tmp_path / "jobs"), TargetFormat.UNIVERSAL)

    def save_again(progress: Progress) -> None:
        if progress.phase == "running":
            victim.write_bytes(next((small_root / "other").rglob("*rank_1*optim_states.pt")).read_bytes())

    assert raised(ReshardError, ENGINE.convert, request, on_progress=save_again).code == "source.changed"
    assert not (tmp_path / "jobs" / NAME).exists()


def test_object_that_is_overwritten_between_any_two_reads(memory: MemoryStore) -> None:
    """After planning: at every operation before the last look at the source."""
    case = memory_trials.fresh_case(memory, TargetFormat.SAFETENSORS)
    victim = next(p for p in memory.snapshot("data/run") if "rank_1" in p and "optim" in p)
    replacement = memory.snapshot("data/other")[victim.replace("data/run", "data/other")]
    operations = case.operations()
    begun = next(o.number for o in operations if o.name == "put")
    committed = min(o.number for o in operations if o.name == "stat" and o.path.startswith("data/run"))
    # Up to the last look: in it objects are looked at side by side, the victim perhaps before its replacement.
    for number in range(begun, committed):
        store = memory_trials.clone(memory)
        steps = Steps({number: lambda s=store: s.put(victim, replacement, metadata={}, if_absent=False)})
        assert memory_trials.attempt(FaultyStore(store, steps), case.request) == "source.changed"
        assert case.new.manifest not in memory_trials.tree(store)
        memory_trials.discard(store, case.request)
        assert memory_trials.tree(store) == {}


def test_object_on_a_real_store_that_is_overwritten_during_the_read(s3: S3Server, bucket: str) -> None:
    key = next(k for k in s3.read_all(bucket, "run") if "rank_1" in k and "optim" in k)
    other = s3.read_all(bucket, "run")[key][:-1] + b"\1"
    request = ConvertRequest(
        source=SourceSpec(url=f"s3://{bucket}/run"), target=f"s3://{bucket}/out/{NAME}", to=TargetFormat.UNIVERSAL
    )

    def save_again(progress: Progress) -> None:
        if progress.phase == "running" and progress.units_done == 0:
            s3.client().put_object(Bucket=bucket, Key=f"run/{key}", Body=other)

    assert raised(ReshardError, ENGINE.convert, request, on_progress=save_again).code == "source.changed"
    ENGINE.discard(request)
    assert _s3_tree(s3, bucket, "out") == {}


def test_a_store_serves_a_scheme_in_its_own_context_only(memory: MemoryStore) -> None:
    case = memory_trials.fresh_case(memory, TargetFormat.SAFETENSORS)
    with serving("mem", memory):
        ENGINE.convert(case.request)
    assert raised(ReshardError, ENGINE.verify, case.request.target).code == "request.unknown_scheme"
