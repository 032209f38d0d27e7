"""Settings that a source does not say: the run that goes on keeps its own, as DeepSpeed's own loaders show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oracle.driver import Oracle
from oracle.fixtures import TrainedFactory
from oracle.outputs import convert
from oracle.truth import differences
from reshard.errors import RequestError
from reshard.models import NativeLayout, WeightDtype


@pytest.mark.parametrize("stage", [1, 2])
def test_a_bf16_run_says_no_loss_scale(stage: Any, trained: TrainedFactory, oracle: Oracle, tmp_path: Path) -> None:
    """Its scaler says 1 for good, which an fp16 run would take over: no step would ever be scaled again."""
    run = trained("z2_bf16")
    case = replace(run.case, stage=stage, dtype="fp16")
    layout = NativeLayout(dp=3, zero_stage=str(stage))  # pyright: ignore[reportArgumentType]
    result = convert(run.dir, tmp_path / "out" / run.tag, "zero", layout=layout, dtype=WeightDtype.FP16)
    assert [w for w in result.warnings if "says no loss scale: the run's config gives it" in w]
    resumed = oracle.resume_native(case, tmp_path / "out", tmp_path / "state", world=3)
    assert resumed.state.meta["loss_scale"] == 2.0**case.loss_scale_power
    kinds = ("fp32/", "exp_avg/", "exp_avg_sq/")
    assert [d for d in differences(run.truth, resumed.state) if d.startswith(kinds)] == []
    assert resumed.losses == pytest.approx(run.losses_after, rel=0, abs=0.02)


@pytest.mark.parametrize("stage", ["0", "3"])
def test_loaders_that_require_a_scale_get_none_of_our_making(
    stage: Any, trained: TrainedFactory, tmp_path: Path
) -> None:
    run = trained("z2_bf16")
    layout = NativeLayout(dp=3, zero_stage=stage)
    with pytest.raises(RequestError, match="says no loss scale") as refused:
        convert(run.dir, tmp_path / "out" / run.tag, "zero", layout=layout, dtype=WeightDtype.FP16)
    assert refused.value.fix.startswith("--zero-stage 1")  # type: ignore[union-attr]
