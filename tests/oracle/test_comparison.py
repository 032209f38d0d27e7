"""The claims of docs/comparison.md about tools of DeepSpeed and PyTorch, by running them beside ours."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter

import reshard
from house.repository import ROOT

CHECKPOINT = ROOT / "tests" / "data" / "zero2_tiny"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the peers worked."""
    folder = tmp_path_factory.mktemp("peers")
    script = Path(__file__).with_name("compared_peers.py")
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(CHECKPOINT), str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (folder / "said.json").exists(), done.stderr
    return folder


@pytest.fixture(scope="module")
def said(scratch: Path) -> dict[str, Any]:
    """Behaviour of each peer."""
    return json.loads((scratch / "said.json").read_text())


def test_peers_execute_what_a_checkpoint_names(said: dict[str, Any]) -> None:
    assert said["executed"] == ["dcp", "ds_to_universal", "zero_to_fp32"]


def test_reshard_executes_nothing(said: dict[str, Any], scratch: Path) -> None:
    made = scratch / "ran-ds_to_universal"
    made.rmdir()
    assert list(reshard.inspect(scratch / "hostile").foreign_globals) == ["os.makedirs"]
    with pytest.raises(reshard.ReshardError) as caught:
        reshard.convert(scratch / "hostile", scratch / "ours", to="universal", progress=False)
    assert caught.value.code == "pickle.forbidden_call"
    assert not made.exists()


def test_zero_to_fp32_gives_weights_and_no_training_state(said: dict[str, Any]) -> None:
    names = set(said["weights of zero_to_fp32"])
    parameters = {tensor.fqn for tensor in reshard.inspect(CHECKPOINT).tensors}
    assert names <= parameters | {"head.weight"}
    assert said["files of zero_to_fp32"] == ["pytorch_model.bin"]


def test_ds_to_universal_leaves_no_record_to_verify(said: dict[str, Any], scratch: Path) -> None:
    assert said["ds_to_universal"] == "ok"
    assert said["files of ds_to_universal"] == ["mp_rank_00_model_states.pt", "zero"]
    with pytest.raises(reshard.ReshardError) as caught:
        reshard.verify(scratch / "universal")
    assert caught.value.code.startswith("integrity.")


def test_deepspeeds_scripts_read_no_object_store(said: dict[str, Any]) -> None:
    assert said["s3 zero_to_fp32"].startswith("ValueError: Unable to find 'latest' file at s3://")
    assert said["s3 ds_to_universal"].startswith("FileNotFoundError")


def test_dcp_reads_no_zero_checkpoint(said: dict[str, Any]) -> None:
    assert said["dcp reads zero"].startswith("CheckpointException")
    assert ".metadata" in said["dcp reads zero"]
    assert said["dcp_to_torch_save"] == "ok"


def test_reshard_reads_dcp(scratch: Path, said: dict[str, Any], tmp_path: Path) -> None:
    assert said["dcp_to_torch_save"] == "ok"
    found = reshard.inspect(scratch / "clean-dcp")
    assert found.format == "dcp-state-dict"
    result = reshard.convert(scratch / "clean-dcp", tmp_path / "weights", to="safetensors")
    assert {t.fqn for t in found.tensors} == set(load_file(tmp_path / "weights" / "model.safetensors"))
    assert result.write_bytes


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_writes_safetensors_of_its_own_state(tmp_path: Path) -> None:
    state = {"up.weight": torch.arange(6.0).reshape(2, 3)}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(tmp_path)), no_dist=True)
    (written,) = tmp_path.glob("*.safetensors")
    assert torch.equal(load_file(written)["up.weight"], state["up.weight"])
    # The step that joins the files of several ranks; torch 2.13 has it in a module without a public name.
    joins = "torch.distributed.checkpoint._consolidate_hf_safetensors"
    assert hasattr(importlib.import_module(joins), "consolidate_safetensors_files")
