"""One universal directory for every stage, and what stage 3 of DeepSpeed 0.19.8 makes of it.

Its loader gives every parameter group the first group's hyper-parameters and all sub-groups one step counter, from
whatever universal checkpoint: states are compared all the same, hyper-parameters as DeepSpeed sets them, and losses
where there is one sub-group.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from house.tiers import rest_full
from oracle.cases import Case, Stage
from oracle.conversions import (
    TWO_GROUPS_AT_STAGE_3,
    UniversalFactory,
    agree,
    assert_continues,
    hyper_parameters_of,
    target_of,
)
from oracle.driver import Oracle
from oracle.launcher import WorldError
from oracle.outputs import convert
from oracle.truth import NOT_LOADED_BY_UNIVERSAL, differences, meta_differences
from reshard.errors import RequestError


@pytest.mark.parametrize(
    ("source", "stage"),
    rest_full(
        product(("z2_bf16", "z3_bf16"), (1, 2, 3, "bf16opt")),
        *(("z2_bf16", 1), ("z2_bf16", 3), ("z3_bf16", 2), ("z3_bf16", "bf16opt")),
    ),
)
def test_one_directory_loads_at_every_stage(
    source: str, stage: Stage, oracle: Oracle, universal: UniversalFactory, bf16_spread: float, tmp_path: Path
) -> None:
    converted = universal(source)
    target = target_of(converted.run.case, stage)
    resumed = oracle.resume_universal(target, converted.root, tmp_path, world=3, restore_from=converted.run.truth)
    # BF16_Optimizer has no loss scale, and stage 3 computes its bf16 losses by another kernel.
    same = replace(converted.run.case, stage=stage) == converted.run.case
    wrong = differences(converted.run.truth, resumed.state, without=NOT_LOADED_BY_UNIVERSAL)
    wrong += [
        text for text in meta_differences(converted.run.truth, resumed.state) if text != "loss_scale: 1.0 != None"
    ]
    assert (wrong, resumed.wrong_weights) == ([], [])
    if same:
        assert resumed.losses == pytest.approx(converted.run.losses_after, rel=0, abs=bf16_spread)


@pytest.mark.parametrize(
    ("source", "stage"),
    rest_full([("z2_fp32", 3), ("z3_fp32", 1), ("z3_fp32", 2), ("z1_fp32", 3)], ("z3_fp32", 1), ("z1_fp32", 3)),
)
def test_losses_go_on_at_another_stage_in_fp32(
    source: str, stage: Stage, oracle: Oracle, universal: UniversalFactory, tmp_path: Path
) -> None:
    converted = universal(source)
    target = target_of(converted.run.case, stage)
    resumed = oracle.resume_universal(target, converted.root, tmp_path, world=3, restore_from=converted.run.truth)
    assert_continues(resumed, converted, 0.0)


@pytest.mark.parametrize("name", TWO_GROUPS_AT_STAGE_3)
@pytest.mark.parametrize("world", [1, pytest.param(3, marks=pytest.mark.full)])
def test_two_groups_of_stage_3_go_on_at_stage_2(
    name: str, world: int, oracle: Oracle, universal: UniversalFactory, tmp_path: Path
) -> None:
    converted = universal(name)
    target = target_of(converted.run.case, 2)
    resumed = oracle.resume_universal(target, converted.root, tmp_path, world=world, restore_from=converted.run.truth)
    assert_continues(resumed, converted, 0.0, losses=False)


@pytest.mark.parametrize("name", TWO_GROUPS_AT_STAGE_3)
@pytest.mark.parametrize("world", [1, 3])
def test_stage_3_restores_states_but_the_first_groups_hyper_parameters(
    name: str, world: int, oracle: Oracle, universal: UniversalFactory, tmp_path: Path
) -> None:
    # The loader's fault, not the files': `optimizer_state.pt` holds both groups.  When this fails, it is mended.
    converted = universal(name)
    (said,) = (text for text in converted.warnings if text.startswith("at ZeRO-3"))
    assert "gives the 2 param groups the first one's lr, weight_decay: set them after loading" in said
    truth = converted.run.truth
    resumed = oracle.resume_universal(converted.run.case, converted.root, tmp_path, world=world, steps=0)
    assert differences(truth, resumed.state, without=NOT_LOADED_BY_UNIVERSAL) == []
    assert hyper_parameters_of(truth, "gain") == (5e-3, 0.0)
    assert hyper_parameters_of(resumed.state, "gain") == hyper_parameters_of(truth, "embed.weight") == (1e-2, 0.1)


def test_amsgrad_goes_on_at_stage_2_and_fails_at_stage_3_as_a_warning_says(oracle: Oracle, tmp_path: Path) -> None:
    run = oracle.train(Case("amsgrad", 2, "fp32", optimizer="amsgrad"), tmp_path)
    result = convert(run.dir, tmp_path / "any" / run.tag, "universal")
    (said,) = result.warnings
    assert said.startswith("at ZeRO-3 DeepSpeed's universal loader does not load max_exp_avg_sq (the first step of am")
    resumed = oracle.resume_universal(run.case, tmp_path / "any", tmp_path / "out", world=3, restore_from=run.truth)
    assert differences(run.truth, resumed.state, without=NOT_LOADED_BY_UNIVERSAL) == []
    assert agree(resumed.losses, run.losses_after, significant=6)
    with pytest.raises(WorldError, match="KeyError: 'max_exp_avg_sq'"):
        oracle.resume_universal(replace(run.case, stage=3), tmp_path / "any", tmp_path / "no", world=2)
    # What the warning advises.
    convert(run.dir, tmp_path / "zero" / run.tag, "zero", options={"deepspeed": {"dp": 3, "zero_stage": "3"}})
    resumed = oracle.resume_native(replace(run.case, stage=3), tmp_path / "zero", tmp_path / "three", world=3)
    assert differences(run.truth, resumed.state) == []
    assert agree(resumed.losses, run.losses_after, significant=6)


def test_asgd_is_refused_and_goes_on_by_what_the_error_says(oracle: Oracle, tmp_path: Path) -> None:
    run = oracle.train(Case("asgd", 2, "fp32", optimizer="asgd"), tmp_path)
    with pytest.raises(RequestError, match="optimizer state 'eta' is one number per group") as refused:
        convert(run.dir, tmp_path / "any" / run.tag, "universal")
    assert refused.value.fix.startswith("--to zero --dp N keeps it")
    convert(run.dir, tmp_path / "zero" / run.tag, "zero", options={"deepspeed": {"dp": 3}})
    resumed = oracle.resume_native(run.case, tmp_path / "zero", tmp_path / "out", world=3)
    assert differences(run.truth, resumed.state) == []
    assert agree(resumed.losses, run.losses_after, significant=6)


@pytest.mark.parametrize("world", [1, 3])
def test_sub_groups_of_the_target_get_the_right_states(
    world: int, oracle: Oracle, universal: UniversalFactory, tmp_path: Path
) -> None:
    # No losses: DeepSpeed lets all sub-groups share one step tensor after a universal load, so it advances too fast.
    converted = universal("z3_sub_groups")
    resumed = oracle.resume_universal(converted.run.case, converted.root, tmp_path, world=world, steps=0)
    assert_continues(resumed, converted, 0.0, losses=False)
