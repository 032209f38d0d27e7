"""Checkpoints of real Megatron-core, 0.16.1 and 0.19.2, read as the live run had it.

The truth of each case is the live model and optimizer before the save; tensors are compared bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import reshard
from house.rank_cases import RankCase, rank_case
from house.repository import real_checkpoint
from oracle.whole_tensors import named, whole
from reshard.errors import SourceError

GOOD = (
    "td_full_gpt_fp32_tp2dp2", "td_full_llama_bf16_pad_tp2dp2", "td_nodist_llama_bf16_tp2pp2dp1",
    "v19_td_full_gpt_fp32_tp2dp2", "v19_td_moe_bf16_ep2dp2", "td_dpresh_gpt_bf16_tp2dp2",
    "v19_td_dpresh_llama_bf16_tp2pp2dp2", "legacy_gpt_bf16_tp2pp1dp2_dist", "legacy_llama_bf16_tp1pp2vpp2dp2_dist",
    "legacy_moe_bf16_tp1ep2dp2_dist",
)  # fmt: skip
DAMAGED = "damaged_v16_td_full_buckets_llama_bf16_dp2"
OPTIMIZER = {"fp32": "model"}
"""The place of a master in a distributed checkpoint of torch is the model's tensor."""


def case_of(name: str, place: Path) -> RankCase:
    return rank_case(name, place, folder="mcore")


def truth_of(case: RankCase, *kinds: str) -> dict[str, torch.Tensor]:
    tensors = load_file(case.truth)
    found = {key: value for key, value in tensors.items() if key.rpartition("/")[2] in kinds}
    assert found
    return found


def differing(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    missing = sorted(wanted.keys() ^ found.keys())
    assert missing == []
    return [k for k, v in wanted.items() if v.dtype != found[k].dtype or not torch.equal(found[k], v)]


def weights(source: Path, target: Path, **options: Any) -> dict[str, torch.Tensor]:
    reshard.convert(source, target, to="safetensors", progress=False, **options)
    return {f"{name}/weight": value for name, value in load_file(target / "model.safetensors").items()}


@pytest.mark.parametrize("name", GOOD)
def test_masters_moments_and_groups_are_those_of_the_run(name: str, place: Path, tmp_path: Path) -> None:
    case = case_of(name, place)
    result = reshard.convert(case.folder / "ckpt", tmp_path / "dcp", to="dcp", framework="state-dict", progress=False)
    found = whole(tmp_path / "dcp")
    tensors = {k.replace("/model", "/fp32"): v for k, v in named(found).items() if not k.endswith("/step")}
    assert differing(tensors, truth_of(case, "fp32", "exp_avg", "exp_avg_sq")) == []
    optimizer = found["optimizer"]
    assert {state["step"] for state in optimizer["state"].values()} == {3}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer["param_groups"]]
    wanted = [{k: v for k, v in g.items() if k != "step"} for g in case.facts["param_groups"]]
    # Of chained optimizers, the case's facts have the groups of the first one.
    assert json.loads(json.dumps(groups))[: len(wanted)] == wanted
    assert all(group["is_expert_parallel"] for group in groups[len(wanted) :])
    for group in optimizer["param_groups"]:
        for parameter in group["params"]:
            decays = found["model"][parameter].ndim > 1 and not parameter.endswith(".bias")
            assert (group["wd_mult"] != 0) is decays
            assert group["is_expert_parallel"] is (".experts." in parameter)
    assert any("default rule" in w for w in result.warnings) or len(groups) == 1


@pytest.mark.parametrize("name", GOOD)
def test_weights_are_those_of_the_run(name: str, place: Path, tmp_path: Path) -> None:
    case = case_of(name, place)
    bf16 = {"dtype": "bf16"} if "bf16" in name else {}
    assert differing(weights(case.folder / "ckpt", tmp_path / "out", **bf16), truth_of(case, "weight")) == []


def test_inspect_says_run_and_step(place: Path) -> None:
    case = case_of("td_full_llama_bf16_pad_tp2dp2", place)
    found = reshard.inspect(str(case.folder / "ckpt"))
    assert (found.format, found.tag, found.step) == ("megatron-torch-dist", "iter_0000003", 3)
    assert found.world == {"tp": 2, "pp": 1, "dp": 2}
    padded = next(t for t in found.tensors if t.fqn == "embedding.word_embeddings.weight")
    assert padded.shape == (100, 32)


def test_shifted_states_are_named_and_the_weights_are_left(place: Path, tmp_path: Path) -> None:
    """Megatron-LM#5077: masters behind the first padded bucket are those of other parameters."""
    case = case_of(DAMAGED, place)
    said = json.loads((case.folder / "damaged.json").read_text())["tensors"]
    source = case.folder / "ckpt"
    with pytest.raises(SourceError) as caught:
        reshard.convert(source, tmp_path / "dcp", to="dcp", progress=False)
    assert caught.value.code == "checkpoint.damaged"
    wrong = {key.rpartition("/")[0] for key in said if key.endswith("/fp32")}
    assert set(caught.value.details["parameters"]) == wrong
    assert "--damaged drop-optimizer" in (caught.value.fix or "")
    assert not (tmp_path / "dcp").exists()
    found = weights(source, tmp_path / "weights", damaged="drop-optimizer")
    assert differing(found, truth_of(case, "weight")) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("td_full_gpt_fp32_tp2dp2", "v19_td_full_gpt_fp32_tp2dp2"),
        ("td_dpresh_gpt_bf16_tp2dp2", "legacy_gpt_bf16_tp2pp1dp2_dist"),
    ],
)
def test_saves_of_one_training_are_equal_however_they_were_made(one: str, other: str, place: Path) -> None:
    """Versions, and kinds of files and of optimizer states."""
    report = reshard.diff(case_of(one, place).folder / "ckpt", case_of(other, place).folder / "ckpt")
    assert report.equal, report


def test_a_save_without_arguments_is_read(tmp_path: Path) -> None:
    """Megatron-core alone, without Megatron-LM's script: no padding is known, and masters round to the weights."""
    folder = real_checkpoint("mcore_tp2pp2dp2")
    result = reshard.convert(folder, tmp_path / "dcp", to="dcp", framework="state-dict", progress=False)
    found = whole(tmp_path / "dcp")
    assert len(found["model"]) == len(found["optimizer"]["state"]) == 27
    assert found["model"]["embedding.word_embeddings.weight"].shape == (208, 32)
    assert any("default rule" in warning for warning in result.warnings)
