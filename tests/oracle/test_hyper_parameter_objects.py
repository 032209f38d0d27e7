"""Weights of runs whose hyper-parameters are objects of the user's own classes, which weights have no place for."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

import reshard
from house.expected import raised
from reshard.errors import SourceError

OBJECTS = "Fraction"


class _Lit(pl.LightningModule):
    """A module that saves an object among its hyper-parameters, as configurations of Hydra are saved."""

    def __init__(self, dropout: Fraction) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(4, 3)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def _of_lightning(place: Path) -> tuple[Path, nn.Module]:
    place.mkdir()
    model = _Lit(Fraction(1, 3))
    trainer = pl.Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=place,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4))
    path = place / "last.ckpt"
    trainer.save_checkpoint(path)
    return path, model


def _of_dcp(place: Path) -> tuple[Path, nn.Module]:
    """`dcp.save` with an object in a param group and another beside the model."""
    model = _Lit(Fraction(1, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.training_step(torch.ones(2, 4)).backward()
    optimizer.step()
    states = {n: optimizer.state[p] for n, p in model.named_parameters()}
    group: dict[str, Any] = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    group |= {"params": [*states], "schedule": Fraction(1, 7)}
    state = {
        "model": model.state_dict(), "optimizer": {"state": states, "param_groups": [group]},
        "config": {"dropout": Fraction(1, 3)},
    }  # fmt: skip
    dcp.save(state, checkpoint_id=place, no_dist=True)
    return place, model


@pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers, and torch's on `no_dist`
@pytest.mark.parametrize("to", ["safetensors", "torch"])
@pytest.mark.parametrize("make", [_of_lightning, _of_dcp])
def test_weights_are_written_without_a_question_about_them(make: Any, to: str, tmp_path: Path) -> None:
    source, model = make(tmp_path / "source")
    result = reshard.convert(source, tmp_path / "out", to=to, progress=False)
    assert any(OBJECTS in text and "nothing of it was executed" in text for text in result.warnings), result.warnings
    if to == "safetensors":
        state = load_file(tmp_path / "out" / "model.safetensors")
    else:
        state = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    loaded = _Lit(Fraction(1, 3))
    loaded.load_state_dict(state, strict=True)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    plain = next(t for t in reshard.inspect(source).targets if t.name == to)
    assert (plain.possible, "--opaque" in plain.example) == (True, False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [_of_lightning, _of_dcp])
def test_targets_with_a_place_for_them_ask(make: Any, tmp_path: Path) -> None:
    source, _ = make(tmp_path / "source")
    error = raised(SourceError, reshard.convert, source, tmp_path / "out", to="universal", progress=False)
    assert error.code.startswith("pickle.forbidden")
    assert not (tmp_path / "out").exists()
    target = next(t for t in reshard.inspect(source).targets if t.name == "universal")
    assert "--opaque drop" in target.example


@pytest.mark.filterwarnings("ignore")
def test_an_object_of_the_model_is_asked_about(tmp_path: Path) -> None:
    """An extra state is part of what a strict load wants: leaving it out is for the user to say."""
    source, _ = _of_lightning(tmp_path / "source")
    saved = torch.load(source, weights_only=False)
    saved["state_dict"]["layer._extra_state"] = Fraction(1, 5)
    torch.save(saved, source)
    error = raised(SourceError, reshard.convert, source, tmp_path / "out", to="torch", progress=False)
    assert error.code.startswith("pickle.forbidden")
    assert not (tmp_path / "out").exists()
    target = next(t for t in reshard.inspect(source).targets if t.name == "torch")
    assert "--opaque drop" in target.example
