"""Settings that a source does not say: the run that goes on keeps its own, as DeepSpeed's own loaders show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import reshard
from oracle.cases import CASES, Case
from oracle.driver import Oracle
from oracle.fixtures import TrainedFactory
from oracle.outputs import convert
from oracle.truth import Truth, differences
from oracle.unsaid import swapped_places
from reshard.errors import RequestError, SourceError
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


def _saved(oracle: Oracle, case: Case, folder: Path) -> tuple[Truth, list[str], tuple[float, ...]]:
    """A save at stage 0 whose optimizer has two parameters in another order than the model; and its names in order."""
    (got,) = oracle.worlds.run(
        "oracle.unsaid:train_and_save",
        world=1,
        case=case.to_json(),
        save_dir=str(folder / "ckpt"),
        truth_dir=str(folder),
        steps_after=3,
    )
    truth = Truth(folder / "truth.safetensors", folder / "truth.json")
    tensors = truth.tensors
    (group,) = truth.meta["groups"]
    order: list[str] = group["names"]
    places = swapped_places([tuple(tensors[f"fp32/{n}"].shape) for n in order])
    assert len({order[place] for place in places}) == 2
    return truth, order, tuple(got["losses_after"])


@pytest.mark.parametrize("name", ["z0_fp32", "z0_bf16"])
def test_stage_0_numbers_parameters_in_the_order_of_its_optimizer(name: str, oracle: Oracle, tmp_path: Path) -> None:
    """In 16 bits the masters prove the order, and in fp32 nothing does: a warning says what is assumed."""
    truth, order, losses = _saved(oracle, CASES[name], tmp_path / "source")
    source, options = tmp_path / "source/ckpt", {"to": "zero", "dp": 1, "zero_stage": "1"}
    if name == "z0_bf16":
        with pytest.raises(SourceError) as refused:
            reshard.convert(source, tmp_path / "guessed/global_step3", **options)
        assert refused.value.code == "checkpoint.disagreement"
        assert "--param-order FILE" in str(refused.value.fix)
    else:
        result = reshard.convert(source, tmp_path / "guessed/global_step3", **options)
        assert [w for w in result.warnings if "which nothing proves in fp32: --param-order FILE" in w]
    said = reshard.convert(source, tmp_path / "said/global_step3", **options, param_order=order)
    assert not [w for w in said.warnings if "param-order" in w]
    out = tmp_path / "state"
    (got,) = oracle.worlds.run(
        "oracle.unsaid:resume_native",
        world=1,
        case=replace(CASES[name], stage=1).to_json(),
        load_dir=str(tmp_path / "said"),
        tag=None,
        out=str(out),
        steps=3,
    )
    assert differences(truth, Truth(out / "resumed.safetensors", out / "resumed.json")) == []
    if name == "z0_fp32":
        assert got["losses"] == pytest.approx(losses, rel=1e-6)
