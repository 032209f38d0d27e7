"""Sources of another family: DeepSpeed resumes from what the fields that all formats share say, without its own facts.

The files are DeepSpeed's, and the reader's facts are taken away before any writer sees them: a reader of PyTorch's or
Megatron's distributed checkpoints would leave such a state.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from house.tiers import rest_full
from oracle.conversions import Converted, agree, assert_continues, target_of
from oracle.driver import Oracle
from oracle.fixtures import TrainedFactory
from oracle.outputs import convert
from oracle.truth import differences, meta_differences
from reshard.choices import WeightDtype
from reshard.errors import RequestError
from reshard.options import RunLayout
from reshard_engine.checkpoint import Checkpoint, FormatFacts
from reshard_engine.operations import requested

# Between them: every stage, scheduler, two groups, frozen and tied weights, buffers, Adam and others.
NATIVE = (("z0_fp32", 0), ("z1_fp32", 1), ("z2_bf16", 2), ("z3_bf16", 3), ("z1_two_groups", "bf16opt"), ("z2_lion", 2))
UNIVERSAL = ("z1_fp32", "z2_bf16", "z3_bf16", "bf16opt_two_groups")


@pytest.fixture(autouse=True)
def _other_family(monkeypatch: pytest.MonkeyPatch) -> None:
    read = requested.named_checkpoint

    def bare(*args: Any, **options: Any) -> Checkpoint:
        return replace(
            read(*args, **options), facts=FormatFacts(), family="other", format="other", framework_version=None
        )

    monkeypatch.setattr(requested, "named_checkpoint", bare)


def _layout(stage: Any, world: int) -> dict[str, Any]:
    return dict[str, Any](dp=world, zero_stage="bf16" if stage == "bf16opt" else str(stage))


@pytest.mark.parametrize(("name", "stage"), rest_full(NATIVE, *NATIVE[1:4]))
def test_plain_load_checkpoint_resumes(
    name: str, stage: Any, trained: TrainedFactory, oracle: Oracle, tmp_path: Path, bf16_spread: float
) -> None:
    run = trained(name)
    case = replace(run.case, stage=stage)
    folder = tmp_path / "out"
    convert(run.dir, folder / run.tag, "zero", **_layout(stage, 3), dtype=WeightDtype(case.dtype))
    resumed = oracle.resume_native(case, folder, tmp_path / "state", world=3)
    assert differences(run.truth, resumed.state) == []
    assert [t for t in meta_differences(run.truth, resumed.state) if not t.startswith("loss_scale:")] == []
    assert resumed.wrong_weights == []
    if case.dtype == "fp32":
        assert agree(resumed.losses, run.losses_after, significant=6)
    else:
        assert resumed.losses == pytest.approx(run.losses_after, rel=0, abs=bf16_spread)


@pytest.mark.parametrize("name", rest_full(UNIVERSAL, *UNIVERSAL[1:3]))
def test_a_universal_load_resumes(
    name: str, trained: TrainedFactory, oracle: Oracle, tmp_path: Path, bf16_spread: float
) -> None:
    run = trained(name)
    folder = tmp_path / "out" / f"{run.tag}_universal"
    result = convert(run.dir, folder, "universal")
    converted = Converted(run, folder, result.warnings)
    resumed = oracle.resume_universal(
        target_of(run.case), converted.root, tmp_path / "state", world=3, restore_from=run.truth
    )
    assert_continues(resumed, converted, bf16_spread)


def test_a_stage_that_nothing_says_is_asked_for(trained: TrainedFactory, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="does not say which ZeRO stage"):
        convert(trained("z2_bf16").dir, tmp_path / "out" / "step", "zero", layout=RunLayout(dp=3))
