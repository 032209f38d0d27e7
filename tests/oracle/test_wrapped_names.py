"""Runs that `torch.compile` wraps: other loaders find the model's own names, and the same run finds its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from transformers import AutoModelForSeq2SeqLM

import reshard
from oracle.adapters import LORA, bart, logits_of
from oracle.cases import Case
from oracle.driver import Oracle, Trained
from oracle.launcher import Worlds
from oracle.models import build_model
from oracle.outputs import convert, raw, tensor_of
from oracle.train import RESUME_SEED
from oracle.truth import NOT_LOADED_BY_UNIVERSAL, Truth, differences
from reshard.engine import load_engine
from reshard.options import SourceSpec

RUNS = {"model": Case("compiled", 2, "bf16", compiled="model"), "layers": Case("layers", 1, "bf16", compiled="layers")}
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


@pytest.fixture(scope="module")
def runs(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    return {name: oracle.train(case, tmp_path_factory.mktemp(name)) for name, case in RUNS.items()}


def plain_model() -> Any:
    """The model of both runs, with other weights and without a wrapper."""
    return build_model(Case("plain", 2, "bf16"), RESUME_SEED)


def masters(run: Trained) -> dict[str, Any]:
    """The fp32 masters of the live run, under the names of the plain model."""
    return {name.replace("_orig_mod.", ""): value for name, value in run.truth.kind("fp32").items()}


def agrees(model: Any, run: Trained) -> None:
    trained = {name: raw(value) for name, value in model.named_parameters() if value.requires_grad}
    assert trained
    assert trained == masters(run)


@pytest.mark.parametrize("name", RUNS)
def test_the_plain_model_loads_weights(name: str, runs: dict[str, Trained], tmp_path: Path) -> None:
    run = runs[name]
    assert all("_orig_mod." in key for key in run.truth.kind("fp32") if ".up." in key)
    result = convert(run.dir, tmp_path / "weights", "safetensors")
    assert any("_orig_mod, the name of a module that wraps others" in text for text in result.warnings)
    model = plain_model().float()
    missing = model.load_state_dict(load_file(tmp_path / "weights" / "model.safetensors"), strict=False)
    assert missing == (["head.weight"], []), "it is the embedding's"
    agrees(model, run)
    convert(run.dir, tmp_path / "torch", "torch")
    model = plain_model().float()
    model.load_state_dict(torch.load(tmp_path / "torch" / "pytorch_model.bin", weights_only=True))
    agrees(model, run)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("framework", ["state-dict", "torchtitan"])
def test_torch_loads_distributed_checkpoints_into_the_compiled_model(
    name: str, framework: str, runs: dict[str, Trained], tmp_path: Path
) -> None:
    """Its `get_model_state_dict` takes the wrapper's name off, so the keys are those of the plain model."""
    reshard.convert(runs[name].dir, tmp_path / "dcp", to="dcp", framework=framework)
    model = build_model(RUNS[name], RESUME_SEED).float()
    weights = get_model_state_dict(model)
    state: dict[str, Any] = {"model": weights} if framework == "state-dict" else {**weights}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    loaded = {key: raw(value) for key, value in weights.items() if key in masters(runs[name])}
    assert loaded == masters(runs[name])


def test_one_file_has_the_names_of_the_plain_model(runs: dict[str, Trained], tmp_path: Path) -> None:
    for name, run in runs.items():
        reshard.convert(run.dir, tmp_path / name, to="torch_save")
        model = plain_model().float()
        model.load_state_dict(torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["model"])
        agrees(model, run)


@pytest.mark.parametrize("name", RUNS)
def test_the_compiled_run_goes_on_on_other_ranks(
    name: str, runs: dict[str, Trained], oracle: Oracle, tmp_path: Path
) -> None:
    run = runs[name]
    stage = str(run.case.stage)
    convert(run.dir, tmp_path / "zero" / run.tag, "zero", dp=3, zero_stage=stage)
    resumed = oracle.resume_native(run.case, tmp_path / "zero", tmp_path / "state", world=3)
    assert differences(run.truth, resumed.state) == []
    convert(run.dir, tmp_path / "any" / run.tag, "universal")
    resumed = oracle.resume_universal(run.case, tmp_path / "any", tmp_path / "state1", world=2, restore_from=run.truth)
    assert differences(run.truth, resumed.state, without=NOT_LOADED_BY_UNIVERSAL) == []
    # And what another conversion reads in either of them has the plain names again.
    for place in ("zero", "any"):
        inspected = load_engine().inspect(SourceSpec(url=str(tmp_path / place)))
        assert any("_orig_mod" in text for text in inspected.warnings)
        convert(tmp_path / place, tmp_path / f"{place}-weights", "safetensors")
        assert load_file(tmp_path / f"{place}-weights" / "model.safetensors").keys() >= masters(run).keys()


@pytest.fixture(scope="module")
def adapter_run(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    worlds.run("oracle.adapters:train", world=2, folder=str(folder), stage=2, compiled=True)
    return folder


@pytest.mark.parametrize("scale", ["of the configuration", "of the request"])
def test_peft_loads_the_adapter_of_a_compiled_run(adapter_run: Path, tmp_path: Path, scale: str) -> None:
    options: dict[str, Any] = {"lora_alpha": LORA["plain"]["lora_alpha"]}
    if scale == "of the configuration":
        options = {"model_files": str(adapter_run / "config")}
    convert(adapter_run / "state", tmp_path / "adapter", "peft", **options)
    model = PeftModel.from_pretrained(bart(), tmp_path / "adapter")
    truth = Truth(adapter_run / "truth.safetensors", adapter_run / "none")
    state = model.state_dict()
    wanted = {name.replace("_orig_mod.", ""): value for name, value in truth.kind("fp32").items()}
    assert wanted
    assert {name: raw(state[name]) for name in wanted} == wanted
    assert torch.allclose(logits_of(model), tensor_of(truth.tensors["logits"]), rtol=0, atol=1e-5)


def test_the_adapter_of_a_compiled_run_is_merged(adapter_run: Path, tmp_path: Path) -> None:
    bart().save_pretrained(tmp_path / "base")
    options: dict[str, Any] = {"merge_adapter": True, "lora_alpha": LORA["plain"]["lora_alpha"]}
    convert(adapter_run / "state", tmp_path / "merged", "safetensors", model_files=str(tmp_path / "base"), **options)
    merged = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged")
    wanted = Truth(adapter_run / "truth.safetensors", adapter_run / "none").tensors["logits"]
    assert torch.allclose(logits_of(merged), tensor_of(wanted), rtol=0, atol=1e-5)
