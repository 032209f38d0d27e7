"""Weights that a model under ZeRO-3 saved without gathering its parameters: placeholders of shape [0]."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from house.conversions import refused_conversion
from oracle.launcher import Worlds
from oracle.outputs import convert, read_safetensors, tensor_of
from oracle.truth import Truth
from reshard.engine import load_engine
from reshard.options import SourceSpec

_WHOLE_ELEMENTS = 100
"""Biases and norms stay whole, as those of real models do (`stage3_param_persistence_threshold`)."""


@pytest.fixture(scope="module")
def run(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`run(kind)`: folder with `ckpt/` of DeepSpeed, and the module as `st/model.safetensors` and in `bin/`."""
    done: dict[str, Path] = {}

    def made(kind: str) -> Path:
        if kind not in done:
            folder = done[kind] = tmp_path_factory.mktemp(kind)
            options = {"stage": 3, "persistence": _WHOLE_ELEMENTS, "ungathered": True}
            worlds.run("oracle.hf_models:train_and_save", world=2, kind=kind, folder=str(folder), **options)
        return done[kind]

    return made


def _stored(folder: Path) -> dict[str, Tensor]:
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    tensors: dict[str, Tensor] = torch.load(folder / "pytorch_model.bin", weights_only=True)
    return tensors


@pytest.mark.parametrize("form", ["st", "bin"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_placeholders_are_refused_and_the_training_state_is_named(
    kind: str, form: str, to: str, run: Callable[[str], Path], tmp_path: Path
) -> None:
    """The fix names DeepSpeed's checkpoint beside them, from which the values of the trained model are converted."""
    source = run(kind) / form
    empty = [name for name, tensor in _stored(source).items() if tensor.shape == (0,)]
    assert 0 < len(empty) < len(_stored(source)), "biases and norms are whole"
    error = refused_conversion(convert, source, tmp_path / "out", to)
    assert error.code == "checkpoint.incomplete"
    assert set(error.details["parameters"]) <= set(empty)
    assert f"{len(error.details['parameters'])} of " in error.message
    named = re.search(r"reshard inspect (\S+);", error.fix)
    assert named is not None, error.fix
    (place,) = shlex.split(named[1])
    convert(Path(place), tmp_path / "out", "safetensors")
    truth = Truth(run(kind) / "truth.safetensors", run(kind) / "none")
    weights = read_safetensors(tmp_path / "out")
    assert set(error.details["parameters"]) <= {*weights.tensors, *weights.aliases}
    for name, value in weights.tensors.items():
        assert torch.equal(tensor_of(value), tensor_of(truth.tensors[f"fp32/{name}"])), name


def test_inspection_names_placeholders_and_offers_no_target(run: Callable[[str], Path]) -> None:
    report = load_engine().inspect(SourceSpec(url=str(run("llama") / "st")))
    assert any("have the shape [0]" in warning for warning in report.warnings)
    assert report.targets
    assert not any(target.possible for target in report.targets)


def test_the_user_may_keep_them(run: Callable[[str], Path], tmp_path: Path) -> None:
    source = run("llama") / "st"
    result = convert(source, tmp_path / "out", "safetensors", empty_weights="keep")
    assert any("have the shape [0]" in warning for warning in result.warnings)
    ours, theirs = load_file(tmp_path / "out" / "model.safetensors"), _stored(source)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("empty", "whole", "refused"),
    [(1, 1, False), (2, 18, True), (2, 19, False), (4, 1, True)],
)
def test_a_few_empty_parameters_are_only_named(empty: int, whole: int, refused: bool, tmp_path: Path) -> None:
    """Several, and at least a tenth of all, are placeholders; fewer may be the model's own."""
    tensors = {f"empty.{n}": torch.empty(0) for n in range(empty)} | {f"whole.{n}": torch.ones(3) for n in range(whole)}
    source = tmp_path / "source"
    source.mkdir()
    save_file(tensors, source / "model.safetensors")
    if refused:
        error = refused_conversion(convert, source, tmp_path / "out", "safetensors")
        assert error.code == "checkpoint.incomplete"
        assert "global_step*" in error.fix  # no training state is near
        return
    result = convert(source, tmp_path / "out", "safetensors", verify="full")
    assert any(f"{empty} of {empty + whole} parameters have the shape [0]" in w for w in result.warnings)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()


def test_another_shape_without_elements_is_the_model_s_own(tmp_path: Path) -> None:
    """DeepSpeed's placeholders have one dimension."""
    source = tmp_path / "source"
    source.mkdir()
    save_file({f"empty.{n}": torch.empty(0, 4) for n in range(4)}, source / "model.safetensors")
    assert convert(source, tmp_path / "out", "safetensors").warnings == ()
