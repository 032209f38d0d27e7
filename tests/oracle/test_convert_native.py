"""Native output: plain ``engine.load_checkpoint`` on another number of ranks, another stage, gives the run's state.

Every bit of masters and moments, counters, hyper-parameters, buffers and frozen weights is compared right after
loading, then the losses of the next three steps with the uninterrupted run's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from house.tiers import rest_full
from oracle.cases import CASES, Case
from oracle.conversions import UniversalFactory, agree
from oracle.driver import Oracle, Resumed, Trained
from oracle.fixtures import TrainedFactory
from oracle.outputs import convert
from oracle.truth import Truth, differences, meta_differences
from reshard.options import NativeLayout

WORLDS = (1, 3, 4)
# Each stage and dtype, and each feature that moves boundaries; `-m full` runs the rest of the zoo.
ALWAYS = (
    ("z0_fp32", 3),
    ("z1_fp32", 4),
    ("z2_fp32", 3),
    ("z3_fp32", 3),
    ("bf16opt_two_groups", 3),
    ("z1_two_groups", 3),
    ("z2_bf16", 4),
    ("z3_sub_groups_two_groups", 4),
    ("z1_round_robin_two_groups", 3),
    ("z2_round_robin_alignment", 4),
    ("z2_fp16_skipped", 3),
    ("z3_fp16", 1),
    ("z1_adagrad", 4),
    ("z2_empty_param", 3),
    ("z3_fast_writer", 3),
    ("z3_nvme", 3),
    ("z2_legacy_stream", 3),
    ("z1_elastic", 3),
    ("z3_frozen_late", 3),
    ("z3_frozen_late_only", 3),
)
# The files of a nameless stage 0 have no states to write.
_WITHOUT_STATE = ("z0_before_first_step",)
EVERYTHING = tuple((name, world) for name in CASES if name not in _WITHOUT_STATE for world in WORLDS)
STAGE_CHANGES = (
    ("z1_fp32", 2),
    ("z2_fp32", 3),
    ("z3_fp32", 1),
    ("z3_fp32", 0),
    ("z0_fp32", 2),
    ("z1_two_groups", "bf16opt"),
    ("bf16opt_two_groups", 2),
    ("bf16opt_two_groups", 3),
    ("z3_sub_groups_two_groups", 2),
    ("z2_fp16_skipped", 3),
    ("z0_fp16", 1),
    ("z2_fp16_skipped", 0),
    ("z2_frozen_late", 3),
    ("z3_frozen_late", 2),
    ("z3_frozen_late_only", 1),
)
# From each stage and to each.
STAGES_ALWAYS = (
    ("z1_fp32", 2),
    ("z2_fp32", 3),
    ("z0_fp32", 2),
    ("z1_two_groups", "bf16opt"),
    ("bf16opt_two_groups", 3),
    ("z3_sub_groups_two_groups", 2),
    ("z2_fp16_skipped", 0),
    ("z3_frozen_late_only", 1),
)


def _native(run: Trained, folder: Path, world: int, case: Case) -> Path:
    stage = "bf16" if case.stage == "bf16opt" else str(case.stage)
    wanted: dict[str, Any] = {"dp": world, "zero_stage": stage}
    if case.sub_group_size is not None:
        wanted["sub_group_size"] = case.sub_group_size
    convert(run.dir, folder / run.tag, "zero", layout=NativeLayout(**wanted))
    assert (folder / "latest").read_text() == run.tag
    return folder


def _scale(state: Truth) -> float | None:
    scale: float | None = state.meta["loss_scale"] or state.meta["plain_loss_scale"]
    return scale


def _assert_continues(run: Trained, resumed: Resumed, case: Case, spread: float) -> None:
    wrong = differences(run.truth, resumed.state)
    if run.case.steps == 0:
        # Engines make the moments before the first step, and leave them out of the file.
        wrong = [text for text in wrong if not text.startswith(("exp_avg", "scalar step"))]
    assert wrong == []
    other = meta_differences(run.truth, resumed.state)
    assert [text for text in other if not text.startswith("loss_scale:")] == []
    # Optimizers that never scale have no scale at all, or 1; those of stage 0 keep it in another place.
    assert (_scale(run.truth) or 1.0) == (_scale(resumed.state) or 1.0)
    assert resumed.wrong_weights == []
    if case.dtype == "fp32":
        assert agree(resumed.losses, run.losses_after, significant=6)
    elif (case.stage == 0) != (run.case.stage == 0):
        # DeepSpeed's 16-bit optimizers of stage 0 step differently from its ZeRO optimizers (0.013 after one step, from
        # equal weights): only the loss before the first step says something.
        assert agree(resumed.losses[:1], run.losses_after[:1], significant=6)
    else:
        assert resumed.losses == pytest.approx(run.losses_after, rel=0, abs=spread)


@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=() if case in ALWAYS else pytest.mark.full)
        for case in dict.fromkeys((*ALWAYS, *EVERYTHING))
    ],
)
def test_plain_load_checkpoint_resumes_on_another_world(
    name: str, world: int, trained: TrainedFactory, oracle: Oracle, tmp_path: Path, bf16_spread: float
) -> None:
    run = trained(name)
    case = replace(run.case, elastic=False, zip_files=True, writer=None, nvme=None)
    folder = _native(run, tmp_path / "out", world, case)
    resumed = oracle.resume_native(case, folder, tmp_path / "state", world=world)
    _assert_continues(run, resumed, case, bf16_spread)


@pytest.mark.parametrize(
    ("name", "stage"), rest_full(STAGE_CHANGES, *STAGES_ALWAYS), ids=[f"{n}-to-{s}" for n, s in STAGE_CHANGES]
)
def test_another_stage_resumes(
    name: str, stage: Any, trained: TrainedFactory, oracle: Oracle, tmp_path: Path, bf16_spread: float
) -> None:
    run = trained(name)
    case = replace(run.case, stage=stage)
    folder = _native(run, tmp_path / "out", 3, case)
    resumed = oracle.resume_native(case, folder, tmp_path / "state", world=3)
    _assert_continues(run, resumed, case, bf16_spread)


@pytest.mark.parametrize(("name", "stage", "world"), [("z2_bf16", 2, 3), ("z1_fp32", 3, 4), ("z3_two_groups", 3, 1)])
def test_a_universal_checkpoint_becomes_native(
    name: str,
    stage: Any,
    world: int,
    universal: UniversalFactory,
    oracle: Oracle,
    tmp_path: Path,
    bf16_spread: float,
) -> None:
    converted = universal(name)
    run, case = converted.run, replace(converted.run.case, stage=stage)
    layout = NativeLayout(dp=world, zero_stage=str(stage))
    convert(converted.root, tmp_path / "out" / run.tag, "zero", layout=layout)
    resumed = oracle.resume_native(case, tmp_path / "out", tmp_path / "state", world=world)
    _assert_continues(run, resumed, case, bf16_spread)
