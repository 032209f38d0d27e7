"""The model's state dict whole: extra states of modules that are not tensors, and nesting as Megatron nests it.

DeepSpeed itself loads what was written, strictly; the losses depend on every extra state.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle.cases import Stage
from oracle.conversions import agree
from oracle.driver import Oracle
from oracle.fixtures import TrainedFactory
from oracle.models import build_model
from oracle.outputs import convert
from oracle.truth import differences, meta_differences
from reshard.choices import OpaquePolicy
from reshard.engine import load_engine
from reshard.errors import ReshardError
from reshard.models.reports import DiffOptions
from reshard.options import SourceSpec

TRAINING_ONLY = "weights hold no training state"


def _native(source: Path, target: Path, stage: Stage, world: int, *, opaque: str = "keep") -> Any:
    return convert(source, target, "zero", dp=world, zero_stage=str(stage), opaque=OpaquePolicy(opaque))


@pytest.mark.parametrize(
    ("name", "stage", "world"),
    [
        ("z1_extra_states", 3, 3),
        ("z2_extra_states", 2, 3),
        ("z2_extra_states", 3, 1),
        ("z3_extra_states", 3, 3),
        ("z3_extra_states", 2, 1),
        ("z2_nested", 2, 3),
        ("z2_nested", 3, 2),
        ("z3_nested", 3, 3),
        ("z3_nested", 2, 2),
    ],
)
def test_the_whole_state_dict_is_loaded(
    trained: TrainedFactory, oracle: Oracle, tmp_path: Path, name: str, stage: Stage, world: int
) -> None:
    run = trained(name)
    result = _native(run.dir, tmp_path / "out" / run.tag, stage, world)
    assert result.not_carried == ()
    resumed = oracle.resume_native(replace(run.case, stage=stage), tmp_path / "out", tmp_path / "resumed", world=world)
    assert differences(run.truth, resumed.state) == []
    assert [d for d in meta_differences(run.truth, resumed.state) if not d.startswith("loss_scale")] == []
    assert agree(resumed.losses, run.losses_after, significant=6)


def test_by_way_of_the_universal_form(trained: TrainedFactory, oracle: Oracle, tmp_path: Path) -> None:
    """ZeRO-3 keeps no weights in `module`: the nesting is noted, and the extra states are there."""
    run = trained("z3_nested")
    result = convert(run.dir, tmp_path / "universal", "universal")
    assert result.not_carried == ()
    _native(tmp_path / "universal", tmp_path / "out" / run.tag, 3, 3)
    resumed = oracle.resume_native(run.case, tmp_path / "out", tmp_path / "resumed", world=3)
    assert differences(run.truth, resumed.state) == []
    assert agree(resumed.losses, run.losses_after, significant=6)


@pytest.mark.parametrize("name", ["z2_extra_states", "z3_extra_states"])
def test_pytorch_model_bin_loads_strictly(trained: TrainedFactory, tmp_path: Path, name: str) -> None:
    run = trained(name)
    result = convert(run.dir, tmp_path / "weights", "torch", opaque=OpaquePolicy.KEEP)
    assert {n.reason for n in result.not_carried} == {TRAINING_ONLY}
    model = build_model(run.case, seed=7)
    # Our own file of a test; the extra state of TransformerEngine's kind is an object.
    state = torch.load(tmp_path / "weights" / "pytorch_model.bin", weights_only=False)
    model.load_state_dict(state, strict=True)
    assert [c.seen for c in model.calibrations] == [run.case.steps] * len(model.calibrations)  # type: ignore[union-attr]
    again = convert(tmp_path / "weights", tmp_path / "again", "torch", opaque=OpaquePolicy.KEEP)
    assert again.not_carried == ()
    assert (tmp_path / "again" / "pytorch_model.bin").read_bytes() == (
        tmp_path / "weights" / "pytorch_model.bin"
    ).read_bytes()


def test_safetensors_name_what_they_cannot_hold(trained: TrainedFactory, tmp_path: Path) -> None:
    run = trained("z2_extra_states")
    result = convert(run.dir, tmp_path / "weights", "safetensors", opaque=OpaquePolicy.KEEP)
    named = {n.path for n in result.not_carried if n.reason != TRAINING_ONLY}
    assert named == {"module.calibrations.0._extra_state", "module.calibrations.2._extra_state"}
    manifest = json.loads((tmp_path / "weights" / "reshard.json").read_bytes())
    assert {n["path"] for n in manifest["not_carried"]} == {n.path for n in result.not_carried}


def test_objects_are_refused_dropped_and_kept_by_the_policy(trained: TrainedFactory, tmp_path: Path) -> None:
    run = trained("z2_extra_states")
    with pytest.raises(ReshardError) as caught:
        _native(run.dir, tmp_path / "refused", 2, 2, opaque="refuse")
    assert caught.value.code.startswith("pickle.forbidden")
    assert "_io.BytesIO" in caught.value.message
    assert not (tmp_path / "refused").exists()
    result = _native(run.dir, tmp_path / "dropped", 2, 2, opaque="drop")
    assert [n.path for n in result.not_carried] == ["module.calibrations.2._extra_state"]
    module = torch.load(tmp_path / "dropped" / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    assert module["calibrations.2._extra_state"] is None
    assert module["calibrations.0._extra_state"]["seen"] == run.case.steps


def test_a_comparison_finds_them(trained: TrainedFactory, tmp_path: Path) -> None:
    run = trained("z2_extra_states")
    _native(run.dir, tmp_path / "same", 2, 3)
    engine = load_engine()

    def compared(other: Path) -> set[str]:
        report = engine.diff(SourceSpec(url=str(run.dir)), SourceSpec(url=str(other)), DiffOptions())
        return {d.name for d in report.differences}

    assert compared(tmp_path / "same") == set()
    path = tmp_path / "same" / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    state["module"]["calibrations.0._extra_state"]["seen"] = 99
    del state["module"]["calibrations.2._extra_state"]
    torch.save(state, path)
    (tmp_path / "same" / "reshard.json").unlink()
    names = compared(tmp_path / "same")
    assert names == {"module.calibrations.0._extra_state.seen", "module.calibrations.2._extra_state"}
