"""Parameters whose tensor-parallel copies are averaged: real checkpoints that are said to have some, and the peer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle.driver import Oracle
from oracle.outputs import Bag, convert, load, raw, tensor_of
from oracle.real_folders import atom, load_any, real_folder
from reshard.errors import SourceError
from reshard.options import NativeLayout

TAG = "global_step3"
STATES = ("fp32", "exp_avg", "exp_avg_sq")
# Cut along dimension 0 in truth: as copies they differ everywhere. The norms' copies are equal.
DRIFTED = r"\d+.mlp.dense_h_to_4h.bias"
EQUAL = r"\d+.input_layernorm.(weight|bias)"


def _averaging(source: Path, target: Path) -> list[str]:
    """A copy of a checkpoint that says of some parameters that their copies are averaged; returns their names."""
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    names: dict[str, None] = {}
    for path in sorted(target.glob("mp_rank_*_model_states.pt")):
        state: dict[str, Any] = {k: v for k, v in load_any(path).items() if not isinstance(v, Bag)}
        info = state["universal_checkpoint_info"]
        info["parameter_to_average_patterns"] = [DRIFTED, EQUAL]
        info["tp_replicated_parameter_patterns"] = [
            p for p in info["tp_replicated_parameter_patterns"] if "input_layernorm" not in p
        ]
        shapes = [name for group in state["param_shapes"] for name in group]
        names |= dict.fromkeys(n for n in shapes if "dense_h_to_4h.bias" in n or "input_layernorm" in n)
        path.chmod(0o644)
        torch.save(state, path)
    return list(names)


@pytest.mark.parametrize("name", ["gpt_fp32_z1_tp2pp1dp2", "gpt_bf16_z1_tp2pp2dp2"])
def test_averages_are_those_of_deepspeed(name: str, oracle: Oracle, tmp_path: Path) -> None:
    source = real_folder(name) / "src" / TAG
    names = _averaging(source, tmp_path / "from" / TAG)
    assert len(names) == 12
    result = convert(tmp_path / "from" / TAG, tmp_path / "ours", "universal")
    assert any(f"{len(names)} parameters are the mean of 2" in warning for warning in result.warnings)
    assert oracle.peer_universal(tmp_path / "from" / TAG, tmp_path / "peer") is None
    plain = tmp_path / "plain"
    convert(source, plain, "universal")
    drifted = 0
    for state in STATES:
        for fqn in names:
            shape = tuple(load(tmp_path / "ours" / "zero" / fqn / f"{state}.pt")["param"].shape)
            ours = atom(tmp_path / "ours", fqn, state, shape)
            if "input_layernorm" in fqn:
                # Equal copies are no less exact than without the rule.
                assert ours == atom(plain, fqn, state, shape)
            assert ours == atom(tmp_path / "peer", fqn, state, shape)
            halves = tensor_of(atom(plain, fqn, state, (2 * shape[0],))) if DRIFTED[-8:] in fqn else None
            if halves is not None:
                assert ours == raw((halves[: shape[0]] + halves[shape[0] :]) / 2)
                drifted += ours != raw(halves[: shape[0]])
    assert drifted == 3 * 4  # every state of every layer


def test_an_average_reaches_every_target(tmp_path: Path) -> None:
    source = real_folder("gpt_bf16_z1_tp2pp2dp2") / "src" / TAG
    names = _averaging(source, tmp_path / "from" / TAG)
    convert(tmp_path / "from" / TAG, tmp_path / "direct", "universal")
    native = NativeLayout(tp=1, dp=3, pp=2)
    convert(tmp_path / "from" / TAG, tmp_path / "native" / TAG, "zero", layout=native)
    convert(tmp_path / "native" / TAG, tmp_path / "again", "universal")
    for fqn in names:
        for state in STATES:
            shape = tuple(load(tmp_path / "direct" / "zero" / fqn / f"{state}.pt")["param"].shape)
            assert atom(tmp_path / "direct", fqn, state, shape) == atom(tmp_path / "again", fqn, state, shape)
    for path in sorted((tmp_path / "native" / TAG).glob("layer_*-model_00-model_states.pt")):
        number = int(path.name[6:8])
        for inner, weight in load(path).items():
            if (fqn := f"{number}.{inner}") in names:
                master = atom(tmp_path / "direct", fqn, "fp32", tuple(weight.shape))
                assert raw(tensor_of(master).to(weight.dtype)) == raw(weight)


def test_each_copy_must_still_be_its_masters_rounding(tmp_path: Path) -> None:
    source = real_folder("gpt_fp32_z1_tp2pp1dp2") / "src" / TAG
    names = _averaging(source, tmp_path / TAG)
    path = tmp_path / TAG / "layer_02-model_01-model_states.pt"
    weights = load_any(path)
    assert "2.mlp.dense_h_to_4h.bias" in names
    weights["mlp.dense_h_to_4h.bias"] += 1.0
    path.chmod(0o644)
    torch.save(weights, path)
    with pytest.raises(SourceError) as caught:
        convert(tmp_path / TAG, tmp_path / "to", "universal")
    assert caught.value.code == "checkpoint.disagreement"
    assert "tensor-parallel rank 1" in caught.value.message
