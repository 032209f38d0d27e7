"""`reshard.deepspeed.load_checkpoint` into engines of other kinds: experts, AutoTP, AutoEP, states on the CPU, on NVMe.

The state right after loading is that of the source and that after a plain load of the converted files, bit for bit, and
so are the next losses. The layout is always the one that the engine itself says.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from house.tiers import rest_full
from oracle.cases import Case
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
from oracle.parallel_cases import GPT_CASES, PARALLEL_CASES, Layout
from oracle.truth import Resumed, differences, meta_differences


def _same(left: Resumed, right: Resumed) -> None:
    """Fail unless two runs have the same state after loading, and the same losses after it, in every bit."""
    assert differences(left.state, right.state) == []
    assert meta_differences(left.state, right.state) == []
    assert left.losses == right.losses


def _goes_on(case: CheckpointCase, trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path) -> None:
    """Load a case directly, and after a conversion: both runs go on from the source's state, alike."""
    run = trained_on(case.name, case.source)
    again = case.direct(run, parallel, tmp_path)
    case.assert_resumed(run, again)
    _same(again, case.converted(run, parallel, tmp_path))


@pytest.mark.parametrize(
    "case",
    sampled(
        (*NATIVE_EXPERTS, *DATA_FIRST, *FUSED_EXPERTS),
        "moe_fp32_z2-dp2ep2-dp4ep2",
        "autoep_z3_sub_groups-dp4ep2-dp2ep2",
    ),
    ids=str,
)
def test_experts_go_on_on_other_ranks(
    case: CheckpointCase, trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    _goes_on(case, trained_on, parallel, tmp_path)


@pytest.mark.parametrize("case", sampled(TENSOR_RANKS, "autotp_z1-tp4-tp2dp2"), ids=str)
def test_autotp_goes_on_at_another_size(
    case: CheckpointCase, trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    _goes_on(case, trained_on, parallel, tmp_path)


@pytest.mark.parametrize("case", sampled(OTHER_STAGES), ids=str)
def test_fused_experts_go_on_at_another_stage(
    case: CheckpointCase, trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    _goes_on(case, trained_on, parallel, tmp_path)


@pytest.mark.parametrize("case", sampled(SPLIT_EXPERTS), ids=str)
def test_groups_of_experts_are_cut_by_size_as_deepspeed_cuts_them(
    case: CheckpointCase, trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run = trained_on(case.name, case.source)
    case.assert_resumed(run, case.direct(run, parallel, tmp_path))


@pytest.mark.parametrize("kind", ["moe_fp32_z1", "autoep_z1"])
def test_the_order_of_experts_is_that_of_the_source_or_it_is_refused(
    kind: str, trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    ranks, run = Layout(dp=4, ep=2), trained_on(kind, Layout(dp=4, ep=4))
    with pytest.raises(WorldError, match='set "use_data_before_expert_parallelism": false in the run'):
        parallel.resume(PARALLEL_CASES[f"{kind}_data_first"], ranks, run.dir, tmp_path / "no", direct={})
    again = parallel.resume(PARALLEL_CASES[kind], ranks, run.dir, tmp_path / "yes", direct={})
    assert differences(run.truth, again.state) == []


def _taken_over(
    case: Case, run: Any, oracle: Oracle, tmp_path: Path, *, world: int = 3, **load: Any
) -> tuple[Resumed, Resumed]:
    """The run after a direct load, and after a plain load of converted files."""
    directly = oracle.resume_native(case, run.dir, tmp_path / "directly", world=world, direct={}, load=load)
    stage = "bf16" if case.stage == "bf16opt" else str(case.stage)
    wanted: dict[str, Any] = {"dp": world, "zero_stage": stage, "parameter_alignment": case.parameter_alignment}
    if case.sub_group_size is not None:
        wanted["sub_group_size"] = case.sub_group_size
    dtype = None if case.dtype == run.case.dtype else case.dtype
    convert(run.dir, tmp_path / "to" / run.tag, "zero", **wanted, dtype=dtype)
    plainly = oracle.resume_native(case, tmp_path / "to", tmp_path / "plainly", world=world, load=load)
    return directly, plainly


@pytest.mark.parametrize(
    ("name", "changes"),
    rest_full(
        [
            ("z1_fp32", {}),
            ("z2_bf16", {}),
            ("z2_bf16", {"stage": 3}),
            ("z3_sub_groups", {}),
            ("z3_nvme", {"nvme": None}),
            ("z3_fp32", {"offload": "parameters"}),
        ],
        ("z2_bf16", {"stage": 3}),
    ),
)
def test_states_on_the_cpu_are_loaded(
    name: str, changes: dict[str, Any], trained: TrainedFactory, oracle: Oracle, tmp_path: Path
) -> None:
    run = trained(name)
    case = replace(run.case, **{"offload": "optimizer", **changes})
    directly, plainly = _taken_over(case, run, oracle, tmp_path)
    assert differences(run.truth, directly.state) == []
    assert meta_differences(run.truth, directly.state) == []
    _same(directly, plainly)


def test_states_go_on_from_the_cpu(trained: TrainedFactory, oracle: Oracle, tmp_path: Path) -> None:
    case = replace(trained("z2_fp32").case, name="z2_offload", offload="optimizer")
    run = oracle.train(case, tmp_path / "from")
    directly = oracle.resume_native(case, run.dir, tmp_path / "out", world=3, direct={})
    assert differences(run.truth, directly.state) == []
    assert agree(directly.losses, run.losses_after, significant=6)


def test_engines_that_load_other_files_are_refused(trained: TrainedFactory, worlds: Worlds) -> None:
    run = trained("z3_fp32")
    found = worlds.run("oracle.direct_faults:refused", world=2, case=run.case.to_json(), source=str(run.dir))
    assert found[0] == found[1]
    fixes = {
        "universal": 'set "load_universal": false in the section checkpoint of the run\'s config',
        "zenflow": "take zenflow and super_offload out of zero_optimization of the run's config",
        "superoffload": "take zenflow and super_offload out of zero_optimization of the run's config",
    }
    assert found[0] == {name: {"code": "request.unsatisfiable", "fix": fix} for name, fix in fixes.items()}


@pytest.mark.parametrize(
    ("nvme", "offload", "fix"),
    [
        ("optimizer", "optimizer", '"offload_optimizer": {"device": "cpu"}'),
        ("parameters alone", "parameters", '"offload_param": {"device": "cpu"}'),
        ("parameters", "parameters", '"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}'),
    ],
)
def test_states_on_nvme_are_refused_and_loaded_by_what_the_error_says(
    nvme: Any, offload: Any, fix: str, trained: TrainedFactory, oracle: Oracle, tmp_path: Path
) -> None:
    run = trained("z3_nvme")
    with pytest.raises(WorldError, match=re.escape(f"set {fix} in zero_optimization of the run's config")):
        oracle.resume_native(replace(run.case, nvme=nvme), run.dir, tmp_path / "no", world=3, direct={})
    case = replace(run.case, nvme=None, offload=offload)
    again = oracle.resume_native(case, run.dir, tmp_path / "yes", world=3, direct={})
    assert differences(run.truth, again.state) == []
    assert agree(again.losses, run.losses_after, significant=6)


@pytest.mark.full
def test_deepspeed_itself_loads_no_parameters_on_nvme(trained: TrainedFactory, oracle: Oracle, tmp_path: Path) -> None:
    # Why that is refused. When this fails, it is mended.
    run = trained("z3_fp32")
    with pytest.raises(WorldError, match="'NoneType' object has no attribute 'data'"):
        oracle.resume_native(replace(run.case, nvme="parameters alone"), run.dir, tmp_path, world=2)


def test_two_sizes_of_expert_parallelism_are_refused(worlds: Worlds, trained_on: TrainedOn) -> None:
    run = trained_on("moe_fp32_z1", Layout(dp=4, ep=4))
    found = worlds.run("oracle.direct_faults:refused_sizes", world=2, source=str(run.dir))
    assert found[0] == found[1]
    assert found[0]["code"] == "request.unsatisfiable"
    assert "experts over 1, 2 ranks" in found[0]["message"]
    assert found[0]["fix"] == "give all MoE layers of the model one ep_size"


@pytest.mark.parametrize(
    ("name", "changes"),
    rest_full(
        [
            ("z2_fp32", {"dtype": "bf16"}),
            ("z2_bf16", {"dtype": "fp32"}),
            ("z3_bf16", {"dtype": "fp32"}),
            ("z0_fp32", {"stage": "bf16opt", "dtype": "bf16"}),
            ("z2_bf16", {"parameter_alignment": True}),
            ("z2_alignment", {"parameter_alignment": False}),
            ("z2_fp32", {"elastic": True}),
        ],
        ("z2_fp32", {"dtype": "bf16"}),
        ("z2_alignment", {"parameter_alignment": False}),
    ),
)
def test_the_engine_says_its_dtype_and_its_alignment(
    name: str, changes: dict[str, Any], trained: TrainedFactory, oracle: Oracle, tmp_path: Path
) -> None:
    run = trained(name)
    directly, plainly = _taken_over(replace(run.case, **changes), run, oracle, tmp_path)
    assert differences(run.truth, directly.state, without=("module", "frozen", "buffer")) == []
    _same(directly, plainly)


@pytest.mark.parametrize(
    ("name", "load"),
    rest_full(
        [
            (name, load)
            for name in ("z0_fp32", "z2_bf16", "z3_bf16", "bf16opt")
            for load in ({"load_optimizer_states": False}, {"load_module_only": True})
        ],
        ("z3_bf16", {"load_optimizer_states": False}),
    ),
)
def test_a_part_of_the_state_is_loaded_as_deepspeed_loads_it(
    name: str, load: dict[str, Any], trained: TrainedFactory, oracle: Oracle, tmp_path: Path
) -> None:
    run = trained(name)
    directly, plainly = _taken_over(run.case, run, oracle, tmp_path, **load)
    _same(directly, plainly)
    assert differences(run.truth, directly.state) != []


@pytest.mark.full
def test_a_pipeline_of_one_stage_is_loaded(trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path) -> None:
    run = trained_on("gpt_fp32", Layout(2, 2, 2))
    case = GPT_CASES["gpt_fp32"]
    again = parallel.resume(case, Layout(2, 1, 2), run.dir, tmp_path, direct={"vocab_divisor": case.pad_to})
    assert differences(run.truth, again.state) == []
