"""`accelerator.save_state` with the hooks of diffusers' scripts: models in directories, the optimizer at the top."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from house.promises import command


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, torch.Tensor]]:
    """The directory of a save of Accelerate itself, and the weights of its `unet`."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(1, 3)).square().mean())
    optimizer.step()

    def hook(models: list[torch.nn.Module], weights: list[object], folder: str) -> None:
        for number, name in enumerate(("unet", "unet_ema")):
            place = Path(folder, name)
            place.mkdir(exist_ok=True)
            tensors = {key: value + number for key, value in models[0].state_dict().items()}
            save_file(tensors, place / "diffusion_pytorch_model.safetensors")
        weights.clear()

    accelerator.register_save_state_pre_hook(hook)
    accelerator.save_state(str(tmp_path / "run"))
    accelerator.free_memory()
    return tmp_path / "run", {key: value.detach().clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("words", [("inspect",), ("convert", "--to", "safetensors")])
def test_the_models_and_the_optimizer_that_is_not_read_are_named(
    words: tuple[str, ...], saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    place, weights = saved
    assert (place / "optimizer.bin").exists()
    name, *options = words
    targets = [str(tmp_path / "out")] if name == "convert" else []
    code, _, err = command(name, str(place), *targets, *options)
    assert code == 3
    assert "optimizer.bin lies beside these directories and is not read yet" in err
    assert err.index("unet") == err.index("unet, unet_ema")
    fix = re.search(r"fix: name the checkpoint below it: (reshard inspect \S+); there are: unet, unet_ema", err)
    assert fix is not None
    assert fix[1].endswith("/unet")
    code, _, err = command(*shlex.split(fix[1])[1:])
    assert code == 0, err
    assert "optimizer.bin lies beside the directory of the weights and is not read yet" in err
    code, _, err = command("convert", str(place / "unet"), str(tmp_path / "unet"), "--to", "safetensors")
    assert code == 0, err
    assert "optimizer.bin lies beside the directory of the weights and is not read yet" in err
    found = load_file(tmp_path / "unet" / "model.safetensors")
    assert all(torch.equal(found[key], value) for key, value in weights.items())


def test_a_target_of_training_says_why_there_is_no_optimizer(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    code, _, err = command("convert", str(saved[0] / "unet"), str(tmp_path / "out"), "--to", "zero", "--dp", "2")
    assert code != 0
    assert "none were read: optimizer.bin lies beside the directory of the weights and is not read yet" in err
    assert "write the weights alone: --to safetensors" in err
