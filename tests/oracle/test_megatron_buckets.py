"""Optimizer states in buckets of real runs of Megatron-core: `dp_reshardable`, and directories of ranks.

The truth of each case is the live model and optimizer before the save; tensors are compared bit for bit.
"""

from __future__ import annotations

import json
import pickle
import shutil
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import reshard
from house.conversions import refused_conversion
from house.rank_cases import RankCase
from house.repository import real_checkpoint
from oracle.whole_tensors import named, whole

TORCH_DIST = ("td_dpresh_gpt_bf16_tp2dp2", "v19_td_dpresh_llama_bf16_tp2pp2dp2")
LEGACY = (
    "legacy_gpt_bf16_tp2pp1dp2_dist", "legacy_llama_bf16_tp1pp2vpp2dp2_dist", "legacy_moe_bf16_tp1ep2dp2_dist",
)  # fmt: skip


def case_of(name: str, place: Path) -> RankCase:
    archive = real_checkpoint(f"mcore/{name}.tar.xz")
    if not (place / name).exists():
        with tarfile.open(archive) as files:
            files.extractall(place, filter="data")
    return RankCase(place / name)


@pytest.mark.parametrize("name", [*TORCH_DIST, *LEGACY])
def test_every_tensor_and_group_is_that_of_the_run(name: str, place: Path, tmp_path: Path) -> None:
    case = case_of(name, place)
    source = case.folder / "ckpt"
    reshard.convert(source, tmp_path / "dcp", to="dcp", grammar="state-dict", progress=False)
    read = whole(tmp_path / "dcp")
    found = {k.replace("/model", "/fp32"): v for k, v in named(read).items() if not k.endswith("/step")}
    reshard.convert(source, tmp_path / "weights", to="safetensors", dtype="bf16", progress=False)
    found |= {f"{k}/weight": v for k, v in load_file(tmp_path / "weights" / "model.safetensors").items()}
    wanted = load_file(case.truth)
    assert found.keys() == wanted.keys()
    assert [k for k, v in wanted.items() if v.dtype != found[k].dtype or not torch.equal(found[k], v)] == []
    optimizer = read["optimizer"]
    assert {state["step"] for state in optimizer["state"].values()} == {3}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer["param_groups"]]
    said = [{k: v for k, v in g.items() if k != "step"} for g in case.facts["param_groups"]]
    # The truth of the older case with experts lists the groups of its first optimizer alone.
    assert json.loads(json.dumps(groups))[: len(said)] == said
    assert len(groups) - len(said) == ("moe" in name)


class _Stub:
    def __init__(self, *_: Any) -> None:
        """Take the place of any class of Megatron-core."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Stub if module.startswith("megatron") else super().find_class(module, name)


class _Pickles:
    """What `torch.load` takes for a module of pickles."""

    Unpickler = _Unpickler


refused = partial(refused_conversion, reshard.convert, to="dcp", progress=False)


@pytest.mark.parametrize("name", TORCH_DIST)
def test_the_order_of_keys_in_the_metadata_decides_nothing_in_silence(name: str, place: Path, tmp_path: Path) -> None:
    case = case_of(name, place)
    source = Path(shutil.copytree(case.checkpoint, tmp_path / "ckpt"))
    path = source / "iter_0000003" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    entries = dict(metadata.state_dict_metadata)
    norms = [k for k in entries if "layer_norm_weight" in k]
    metadata.state_dict_metadata = {
        {norms[0]: norms[1], norms[1]: norms[0]}.get(k, k): entries[{norms[0]: norms[1], norms[1]: norms[0]}.get(k, k)]
        for k in entries
    }
    metadata.all_local_plans = None
    path.write_bytes(pickle.dumps(metadata))
    error = refused(source, tmp_path / "dcp")
    assert error.code == "checkpoint.ambiguous"
    assert "orders of parameters fit" in str(error)


def test_two_iterations_in_one_directory_are_refused(place: Path, tmp_path: Path) -> None:
    case = case_of(LEGACY[0], place)
    source = Path(shutil.copytree(case.checkpoint, tmp_path / "ckpt"))
    path = source / "iter_0000003" / "mp_rank_01" / "model_optim_rng.pt"

    state = torch.load(path, weights_only=False, pickle_module=_Pickles)
    state["iteration"] = 4
    delattr(state["args"], "attention_backend")
    torch.save(state, path)
    error = refused(source, tmp_path / "dcp")
    assert (error.code, "iteration is 3" in str(error)) == ("checkpoint.mixed", True)


@pytest.mark.parametrize("name", LEGACY)
def test_states_of_another_rank_are_refused(name: str, place: Path, tmp_path: Path) -> None:
    case = case_of(name, place)
    source = Path(shutil.copytree(case.checkpoint, tmp_path / "ckpt"))
    first, second = sorted((source / "iter_0000003").iterdir())
    shutil.copy(second / "distrib_optim.pt", first / "distrib_optim.pt")
    error = refused(source, tmp_path / "dcp")
    assert error.code in ("checkpoint.damaged", "checkpoint.ambiguous", "checkpoint.incomplete")
