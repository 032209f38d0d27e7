"""`reshard.deepspeed.load_checkpoint` and `reshard.dcp.Reader`: runs go on from a source of another layout itself.

The state right after loading is that of the source, bit for bit, as for plain ``engine.load_checkpoint`` of converted
files; then the next losses are compared.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from house.tiers import rest_full
from oracle.cases import Case
from oracle.checkpoint_cases import PIPELINES, RULES, CheckpointCase, sampled
from oracle.conversions import UniversalFactory, agree, assert_native_continues
from oracle.dcp_cases import RUNS, Mesh
from oracle.dcp_driver import FsdpOracle, Job, problems, zero_run
from oracle.driver import Oracle, ParallelOracle
from oracle.fixtures import SavedFactory, TrainedFactory, TrainedOn
from oracle.launcher import WorldError, Worlds
from oracle.test_convert_native import ALWAYS, EVERYTHING, STAGE_CHANGES
from oracle.test_dcp_across import assert_goes_on
from oracle.test_ensure_frameworks import NEW, OLD, losses, rates, went_on_alike
from oracle.truth import Resumed, Truth, differences

SAMPLE = (
    ("z0_fp32", 3),
    ("bf16opt_two_groups", 3),
    ("z1_round_robin_two_groups", 3),
    ("z2_fp16_skipped", 3),
    ("z3_sub_groups_two_groups", 4),
    ("z3_frozen_late", 3),
)


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*")}


def _target(case: Case, **changes: Any) -> Case:
    return replace(case, elastic=False, zip_files=True, writer=None, nvme=None, **changes)


@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=() if case in SAMPLE else pytest.mark.full)
        for case in dict.fromkeys((*SAMPLE, *ALWAYS, *EVERYTHING))
    ],
)
def test_a_run_goes_on_in_another_world(
    name: str, world: int, trained: TrainedFactory, oracle: Oracle, tmp_path: Path, bf16_spread: float
) -> None:
    run = trained(name)
    case, before = _target(run.case), _files(run.dir)
    resumed = oracle.resume_native(case, run.dir, tmp_path / "state", world=world, direct={})
    assert_native_continues(run, resumed, case, bf16_spread)
    assert _files(run.dir) == before


@pytest.mark.parametrize(
    ("name", "stage"),
    rest_full(STAGE_CHANGES, ("z1_fp32", 2), ("z3_sub_groups_two_groups", 2)),
    ids=[f"{n}-to-{s}" for n, s in STAGE_CHANGES],
)
def test_a_run_goes_on_at_another_stage(
    name: str, stage: Any, trained: TrainedFactory, oracle: Oracle, tmp_path: Path, bf16_spread: float
) -> None:
    run = trained(name)
    case = _target(run.case, stage=stage)
    resumed = oracle.resume_native(case, run.dir, tmp_path / "state", world=3, direct={})
    assert_native_continues(run, resumed, case, bf16_spread)


def test_a_universal_checkpoint_is_loaded_as_a_native_one(
    universal: UniversalFactory, oracle: Oracle, tmp_path: Path, bf16_spread: float
) -> None:
    converted = universal("z2_bf16")
    case = _target(converted.run.case, stage=3)
    resumed = oracle.resume_native(case, converted.root, tmp_path / "state", world=3, direct={})
    assert_native_continues(converted.run, resumed, case, bf16_spread)


@pytest.mark.parametrize(
    "case",
    sampled((*PIPELINES, *(case for case in RULES if case.rules is None)), "gpt_fp32-tp2pp2dp2-pp2dp2"),
    ids=str,
)
def test_model_parallel_runs_go_on_in_other_layouts(
    case: CheckpointCase, trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run = trained_on(case.name, case.source)
    case.assert_resumed(run, case.direct(run, parallel, tmp_path))


@pytest.mark.parametrize(
    ("stage", "mesh"),
    rest_full(
        [(stage, mesh) for stage in (1, 2, 3) for mesh in (Mesh(3), Mesh(2), Mesh(2, tensor=2))],
        (2, Mesh(2, tensor=2)),
        (3, Mesh(3)),
    ),
    ids=str,
)
def test_zero_is_read_by_torch_on_a_mesh(
    stage: Any, mesh: Mesh, saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path
) -> None:
    run = RUNS["fsdp2" if mesh.tensor == 1 else "fsdp2_tp"]
    source = saved(zero_run(stage, run, 4), "zero")
    before = _files(source.path())
    jobs = [
        Job(run.on(mesh), kind, source.path(), tmp_path / kind, direct=options)
        for options, kind in (({}, "nested"), ({"framework": "torchtitan"}, "flat"))
    ]
    for resumed in fsdp.resume_all(jobs):
        assert_goes_on(source, resumed)
    assert _files(source.path()) == before


@pytest.mark.parametrize(
    ("name", "mesh"), [("fsdp2", Mesh(3)), pytest.param("fsdp2_tp", Mesh(1, tensor=2), marks=pytest.mark.full)], ids=str
)
def test_a_distributed_checkpoint_is_read_on_another_mesh(
    name: str, mesh: Mesh, saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path
) -> None:
    source = saved(name)
    job = Job(source.run.on(mesh), "nested", source.path("nested"), tmp_path / "out", direct={})
    (resumed,) = fsdp.resume_all([job])
    assert isinstance(resumed, Resumed), resumed
    assert problems(source.truth, resumed.state) == []


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_run_of_fsdp_goes_on_under_deepspeed(
    stage: Any, saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path
) -> None:
    source = saved("fsdp2_tp")
    resumed = fsdp.resume("zero", zero_run(stage, source.run, 3), source.path("nested"), tmp_path / "out", direct={})
    assert_goes_on(source, resumed)


def test_accelerate_takes_a_run_of_deepspeed_into_fsdp(saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path) -> None:
    run = RUNS["fsdp2"]
    source = saved(zero_run(2, run, 4), "zero")
    before = _files(source.path())
    options = {"to": "dcp", "framework": "accelerate"}
    again = fsdp.resume("accelerate", run.on(Mesh(3)), source.path(), tmp_path / "out", direct=options)
    assert_goes_on(source, again)
    assert _files(source.path()) == before


@pytest.mark.parametrize("stage", rest_full((1, 2, 3), 3))
def test_the_trainer_resumes_without_a_conversion(stage: int, worlds: Worlds, tmp_path: Path) -> None:
    through = tmp_path / "through"
    kwargs: dict[str, Any] = {"stage": stage, "timeout_s": 240}
    uninterrupted = worlds.run("oracle.ensured:trainer", world=OLD, folder=str(through), **kwargs)[0]
    before = _files(through / "checkpoint-3")
    kwargs |= {"folder": str(tmp_path / "resumed"), "source": str(through / "checkpoint-3"), "direct": True}
    run = worlds.run("oracle.ensured:trainer", world=NEW, dp=NEW, **kwargs)[0]
    assert rates(run) == rates(uninterrupted)
    assert agree(losses(run), losses(uninterrupted), significant=6)
    assert _files(through / "checkpoint-3") == before
    assert not Path(run["path"]).exists()
    went_on_alike(tmp_path / "resumed" / "checkpoint-6", through / "checkpoint-6")


@pytest.mark.parametrize("stage", rest_full((1, 2, 3), 2))
def test_accelerate_resumes_without_a_conversion(stage: int, worlds: Worlds, tmp_path: Path) -> None:
    through = tmp_path / "through"
    kwargs: dict[str, Any] = {"stage": stage, "timeout_s": 240}
    saved = worlds.run("oracle.ensured:accelerate", world=OLD, folder=str(through), **kwargs)
    before = _files(through / "state")
    kwargs |= {"folder": str(tmp_path / "resumed"), "source": str(through / "state"), "direct": True}
    results = worlds.run("oracle.ensured:accelerate", world=NEW, **kwargs)
    assert rates(results[0]) == rates(saved[0])
    assert agree(losses(results[0]), losses(saved[0]), significant=6)
    assert [run["drawn"] for run in results] == [saved[rank % OLD]["drawn"] for rank in range(NEW)]
    assert _files(through / "state") == before
    went_on_alike(tmp_path / "resumed" / "last", through / "last")


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("replaced", "source.changed"),
        ("truncated", "source.changed"),
        ("down", "storage.unavailable"),
        ("refused", "request.unsatisfiable"),
    ],
)
@pytest.mark.parametrize("name", rest_full(("z2_fp32", "z3_fp32"), "z3_fp32"))
def test_a_fault_on_one_rank_ends_the_load_on_all(
    name: str, fault: str, code: str, trained: TrainedFactory, worlds: Worlds, tmp_path: Path
) -> None:
    run = trained(name)
    source = tmp_path / "source"
    shutil.copytree(run.dir, source)
    arguments = {"case": _target(run.case).to_json(), "source": str(source), "fault": fault, "out": str(tmp_path)}
    worlds.run("oracle.direct_faults:load", world=3, timeout_s=60, **arguments)
    assert [json.loads((tmp_path / f"{rank}.json").read_text())["code"] for rank in range(3)] == [code] * 3
    if fault != "truncated":
        # The same call works when the cause is gone.
        assert differences(run.truth, Truth(tmp_path / "resumed.safetensors", tmp_path / "resumed.json")) == []


def test_the_death_of_one_rank_ends_the_load_on_all(trained: TrainedFactory, worlds: Worlds, tmp_path: Path) -> None:
    run = trained("z3_fp32")
    arguments = {"case": _target(run.case).to_json(), "source": str(run.dir), "fault": "killed", "out": str(tmp_path)}
    with pytest.raises(WorldError, match="died silently"):
        worlds.run("oracle.direct_faults:load", world=2, timeout_s=60, **arguments)
    assert json.loads((tmp_path / "0.json").read_text())["code"] == "job.peer_failed"
