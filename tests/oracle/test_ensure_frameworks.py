"""The Trainer and Accelerate go on where they were, on three ranks instead of two, by one call and no option.

The issue's own words: `trainer.train(resume_from_checkpoint=reshard.ensure(dir, dp=3))`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import reshard
from house.tiers import rest_full
from oracle.checkpoint_cases import (
    DATA_FIRST,
    FUSED_EXPERTS,
    NATIVE_EXPERTS,
    OTHER_STAGES,
    SPLIT_EXPERTS,
    TENSOR_RANKS,
    CheckpointCase,
    sampled,
)
from oracle.conversions import agree
from oracle.driver import Oracle, ParallelOracle
from oracle.fixtures import TrainedFactory, TrainedOn
from oracle.launcher import WorldError, Worlds
from oracle.outputs import convert
from oracle.truth import differences
from reshard.engine import load_engine
from reshard.models.reports import DifferenceKind, DiffOptions, DiffReport
from reshard.options import SourceSpec

AFTER = ("4", "5", "6")
OLD, NEW = 2, 3


def losses(run: dict[str, Any], steps: tuple[str, ...] = AFTER) -> tuple[float, ...]:
    return tuple(run["losses"][step][0] for step in steps)


def rates(run: dict[str, Any]) -> list[float]:
    return [run["losses"][step][1] for step in AFTER]


def diff(a: Path | str, b: Path | str) -> DiffReport:
    return load_engine().diff(SourceSpec(url=str(a)), SourceSpec(url=str(b)), DiffOptions())


def one_path(results: list[dict[str, Any]]) -> Path:
    """What `ensure` returned: the same on every rank."""
    paths = {run["path"] for run in results}
    assert len(paths) == 1
    return Path(paths.pop())


def went_on_alike(resumed: Path, through: Path) -> None:
    """The ends of both runs: the same steps, rates and names; weights apart by what summing in another order does."""
    report = diff(resumed, through)
    assert {d.kind for d in report.differences} <= {DifferenceKind.ELEMENTS}
    assert max((d.max_abs or 0.0 for d in report.differences), default=0.0) < 1e-3


@pytest.mark.parametrize("stage", rest_full((2, 3), 3))
def test_the_trainer_resumes_by_one_call(stage: int, worlds: Worlds, tmp_path: Path) -> None:
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    kwargs: dict[str, Any] = {"stage": stage, "timeout_s": 240}
    uninterrupted = worlds.run("oracle.ensured:trainer", world=OLD, folder=str(through), **kwargs)[0]
    checkpoint = through / "checkpoint-3"

    results = worlds.run(
        "oracle.ensured:trainer", world=NEW, folder=str(resumed), source=str(checkpoint), dp=NEW, **kwargs
    )

    path = one_path(results)
    assert path.parent == checkpoint / ".reshard"
    assert diff(checkpoint, path).equal
    names = {p.name for p in path.iterdir()}
    assert {"trainer_state.json", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", "rng_state_2.pth"} <= names
    run = results[0]
    assert list(run["losses"]) == list(uninterrupted["losses"]) == ["1", "2", "3", "4", "5", "6"]
    assert rates(run) == rates(uninterrupted)
    assert agree(losses(run), losses(uninterrupted), significant=6)
    assert len(set(losses(run))) == len(AFTER)
    went_on_alike(resumed / "checkpoint-6", through / "checkpoint-6")
    # Without the call, this is what users meet, and what docs/ensure.md begins with.
    plain = kwargs | {"folder": str(tmp_path / "plain"), "source": str(checkpoint), "plain": True}
    with pytest.raises(WorldError, match="used a DP world size of 2 but the current world size is 3"):
        worlds.run("oracle.ensured:trainer", world=NEW, **plain)


@pytest.mark.parametrize("stage", rest_full((1, 2), 2))
def test_the_trainer_resumes_adafactor_by_one_call(stage: int, worlds: Worlds, tmp_path: Path) -> None:
    """Its updates are clipped by the mean over a rank's partition, so another number of ranks is only nearly the same.

    On as many ranks as before everything is, although each rank's `RMS` is gone: no step reads it.
    """
    through, kwargs = tmp_path / "through", {"stage": stage, "optim": "adafactor", "timeout_s": 240}
    uninterrupted = worlds.run("oracle.ensured:trainer", world=OLD, folder=str(through), **kwargs)[0]
    three = reshard.ensure(through / "checkpoint-3", dp=NEW, out=tmp_path / "three" / "checkpoint-3")
    two = reshard.ensure(three, dp=OLD, out=tmp_path / "two" / "checkpoint-3")

    runs = {}
    for world, source in ((NEW, three), (OLD, two)):
        folder = tmp_path / f"resumed{world}"
        runs[world] = worlds.run("oracle.ensured:trainer", world=world, folder=str(folder), source=source, **kwargs)[0]

    assert losses(runs[OLD]) == losses(uninterrupted)
    assert rates(runs[NEW]) == rates(uninterrupted)
    assert losses(runs[NEW]) == pytest.approx(losses(uninterrupted), rel=1e-3)


@pytest.mark.parametrize("stage", rest_full((1, 2, 3), 2, 3))
def test_the_trainer_resumes_an_adapter_by_one_call(stage: int, worlds: Worlds, tmp_path: Path) -> None:
    """PEFT's models are saved without their frozen weights; a loader that is given a list of these wants all of them.

    The model's head is tied: DeepSpeed leaves out the frozen embedding, and its other name stays.
    """
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    kwargs: dict[str, Any] = {"stage": stage, "lora": True, "timeout_s": 240}
    uninterrupted = worlds.run("oracle.ensured:trainer", world=OLD, folder=str(through), **kwargs)[0]
    checkpoint = through / "checkpoint-3"

    results = worlds.run(
        "oracle.ensured:trainer", world=NEW, folder=str(resumed), source=str(checkpoint), dp=NEW, **kwargs
    )

    assert diff(checkpoint, one_path(results)).equal
    assert rates(results[0]) == rates(uninterrupted)
    assert agree(losses(results[0]), losses(uninterrupted), significant=6)
    assert len(set(losses(uninterrupted, ("1", "2", "3", *AFTER)))) == 6


@pytest.mark.parametrize(
    ("stage", "device", "then"),
    rest_full(
        [(1, None, None), (2, None, None), (3, None, None), (3, "nvme", "cpu")], (2, None, None), (3, "nvme", "cpu")
    ),
)
def test_accelerate_resumes_by_one_call(
    stage: int, device: str | None, then: str | None, worlds: Worlds, tmp_path: Path
) -> None:
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    options: dict[str, Any] = {"stage": stage, "timeout_s": 240}
    saved = worlds.run("oracle.ensured:accelerate", world=OLD, folder=str(through), device=device, **options)
    state = through / "state"
    assert (state / "pytorch_model" / "offloaded_tensors").exists() == (device == "nvme")

    results = worlds.run(
        "oracle.ensured:accelerate", world=NEW, folder=str(resumed), source=str(state), device=then, **options
    )

    path = one_path(results)
    assert (path / "latest").read_text() == "pytorch_model"
    assert diff(state, path).equal
    assert rates(results[0]) == rates(saved[0])
    assert agree(losses(results[0]), losses(saved[0]), significant=6)
    assert len(set(losses(results[0]))) == len(AFTER)
    # Rank r goes on with the random state of rank r mod 2.
    assert [run["drawn"] for run in results] == [saved[rank % OLD]["drawn"] for rank in range(NEW)]
    assert saved[0]["drawn"] != saved[1]["drawn"]
    went_on_alike(resumed / "last", through / "last")


@pytest.mark.parametrize("stage", rest_full((2, 3), 3))
def test_accelerate_resumes_a_universal_directory(stage: int, worlds: Worlds, tmp_path: Path) -> None:
    """One directory for any number of ranks, as docs/recipes/accelerate.md makes it: the rest is copied beside it."""
    through, resumed, state = tmp_path / "through", tmp_path / "resumed", tmp_path / "any"
    options: dict[str, Any] = {"stage": stage, "timeout_s": 240}
    saved = worlds.run("oracle.ensured:accelerate", world=OLD, folder=str(through), **options)
    shutil.copytree(through / "state", state, ignore=shutil.ignore_patterns("pytorch_model"))
    convert(through / "state", state / "pytorch_model", "universal")

    results = worlds.run(
        "oracle.ensured:accelerate", world=NEW, folder=str(resumed), source=str(state), universal=True, **options
    )

    assert rates(results[0]) == rates(saved[0])
    assert agree(losses(results[0]), losses(saved[0]), significant=6)


@pytest.mark.parametrize("name", ["z0_fp32", "z2_fp32", "z3_fp32"])
def test_a_plain_engine_resumes_by_one_call(name: str, trained: TrainedFactory, oracle: Oracle, tmp_path: Path) -> None:
    run = trained(name)
    path = Path(reshard.ensure(run.dir, dp=NEW, out=tmp_path / "out"))
    # Stage 0 has one file for all ranks: it fits as it is.
    assert path == (run.dir if name == "z0_fp32" else tmp_path / "out")
    resumed = oracle.resume_native(run.case, path, tmp_path / "state", world=NEW)
    assert differences(run.truth, resumed.state) == []
    assert agree(resumed.losses, run.losses_after, significant=6)


@pytest.mark.parametrize(
    "case",
    sampled(
        (*NATIVE_EXPERTS, *DATA_FIRST, *FUSED_EXPERTS, *SPLIT_EXPERTS, *OTHER_STAGES, *TENSOR_RANKS),
        "moe_fp32_z1-dp4ep2-dp2",
        "autoep_z3-dp2ep2-dp3",
        "autotp_z1-tp4-tp2dp2",
    ),
    ids=str,
)
def test_an_engine_on_parallel_ranks_resumes_by_one_call(
    case: CheckpointCase, trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run = trained_on(case.name, case.source)
    case.assert_resumed(run, case.ensured(run, parallel, tmp_path))
