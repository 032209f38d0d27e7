"""From one file of torch.save to another: the script that saved the source loads the target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import reshard
from house.expected import raised
from reshard.errors import SourceError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
FILE = "checkpoint.pt"


class _Run:
    """A model, as its script wraps it, with the optimizers of the script."""

    def __init__(self, seed: int, *, muon: bool, wrap: Callable[[nn.Module], nn.Module] = nn.DataParallel) -> None:
        torch.manual_seed(seed)
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.model = wrap(self.inner)
        parameters = [*self.model.parameters()]
        self.optimizers: list[torch.optim.Optimizer] = (
            [
                torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.01),
                torch.optim.AdamW([p for p in parameters if p.ndim == 1], lr=0.01),
            ]
            if muon
            else [torch.optim.AdamW(parameters, lr=0.01)]
        )

    def steps(self, first: int, count: int) -> list[float]:
        losses: list[float] = []
        for number in range(first, first + count):
            batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
            loss = self.model(batch).square().mean()
            loss.backward()
            losses.append(loss.item())
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return losses


def _of_ddp(run: _Run) -> dict[str, Any]:
    return {
        "epoch": 3,
        "model_state_dict": run.model.state_dict(),
        "optimizer_state_dict": run.optimizers[0].state_dict(),
    }


def _load_ddp(run: _Run, file: dict[str, Any]) -> None:
    run.model.load_state_dict(file["model_state_dict"], strict=True)
    run.optimizers[0].load_state_dict(file["optimizer_state_dict"])


def _of_a_list(run: _Run) -> dict[str, Any]:
    return {"state_dict": run.model.state_dict(), "optimizers": [o.state_dict() for o in run.optimizers], ("a", 1): 2}


def _load_a_list(run: _Run, file: dict[str, Any]) -> None:
    assert file[("a", 1)] == 2
    run.model.load_state_dict(file["state_dict"], strict=True)
    for optimizer, state in zip(run.optimizers, file["optimizers"], strict=True):
        optimizer.load_state_dict(state)


def _of_names(run: _Run) -> dict[str, Any]:
    """What torch's functions make of two optimizers: one state dict with names."""
    return {"net": get_model_state_dict(run.inner), "optim": get_optimizer_state_dict(run.inner, run.optimizers)}


def _load_names(run: _Run, file: dict[str, Any]) -> None:
    run.inner.load_state_dict(file["net"], strict=True)
    set_optimizer_state_dict(run.inner, run.optimizers, file["optim"])


def _compiled(model: nn.Module) -> Any:
    return torch.compile(nn.DataParallel(model), backend="eager")


CASES = {
    "ddp": (False, _of_ddp, _load_ddp),
    "list": (True, _of_a_list, _load_a_list),
    "names": (True, _of_names, _load_names),
}


@pytest.mark.parametrize("name", CASES)
def test_the_script_goes_on_from_the_target(name: str, tmp_path: Path) -> None:
    muon, saved, loads = CASES[name]
    run = _Run(1, muon=muon)
    run.steps(0, 3)
    torch.save(saved(run), tmp_path / "run.pt")
    reshard.convert(tmp_path / "run.pt", tmp_path / "out", to="torch_save", progress=False)
    again = _Run(2, muon=muon)
    loads(again, torch.load(tmp_path / "out" / FILE, weights_only=True))
    assert again.steps(3, 3) == run.steps(3, 3)


@pytest.mark.parametrize("wrap", [nn.DataParallel, _compiled])
def test_keys_and_names_stay_where_the_training_state_is_read(wrap: Any, tmp_path: Path) -> None:
    """In a directory, and with an option that asks for more than a copy."""
    run = _Run(1, muon=False, wrap=wrap)
    run.steps(0, 3)
    place = tmp_path / "run"
    place.mkdir()
    torch.save(_of_ddp(run), place / "run.pt")
    reshard.convert(place, tmp_path / "out", to="torch_save", progress=False)
    order = tmp_path / "order.txt"
    order.write_text("\n".join(n for n, _ in run.model.named_parameters()))
    reshard.convert(place / "run.pt", tmp_path / "said", to="torch_save", progress=False, param_order=str(order))
    ahead = run.steps(3, 3)
    for out in ("out", "said"):
        again = _Run(2, muon=False, wrap=wrap)
        _load_ddp(again, torch.load(tmp_path / out / FILE, weights_only=True))
        assert again.steps(3, 3) == ahead


def test_a_state_dict_alone_stays_alone(tmp_path: Path) -> None:
    run = _Run(1, muon=False)
    place = tmp_path / "run"
    place.mkdir()
    torch.save(run.model.state_dict(), place / "run.pt")
    for number, source in enumerate((place, place / "run.pt")):
        out = tmp_path / f"out{number}"
        reshard.convert(source, out, to="torch_save", progress=False)
        again = _Run(2, muon=False)
        again.model.load_state_dict(torch.load(out / FILE, weights_only=True), strict=True)
        assert all(map(torch.equal, again.model.parameters(), run.model.parameters()))


def test_two_optimizers_in_one_numbered_file_are_warned_of(tmp_path: Path) -> None:
    """The warning's way out is executed: names, from which torch gives each optimizer its own states."""
    run = _Run(1, muon=True)
    run.steps(0, 3)
    place = tmp_path / "run"
    place.mkdir()
    torch.save({"model": get_model_state_dict(run.inner), "optimizer": _of_names(run)["optim"]}, place / "run.pt")
    warnings = reshard.convert(place, tmp_path / "file", to="torch_save", progress=False).warnings
    (text,) = [w for w in warnings if "several optimizers" in w]
    assert "group 0 has adjust_lr_fn, momentum" in text
    assert "betas" in text
    written = torch.load(tmp_path / "file" / FILE, weights_only=True)["optimizer"]
    for optimizer in run.optimizers:
        with pytest.raises(ValueError, match="different number of parameter groups"):
            optimizer.load_state_dict(written)
    assert "--to dcp" in text
    assert "set_optimizer_state_dict" in text
    reshard.convert(place, tmp_path / "dcp", to="dcp", framework="state-dict", progress=False)
    again = _Run(2, muon=True)
    state = {
        "model": get_model_state_dict(again.inner),
        "optimizer": get_optimizer_state_dict(again.inner, again.optimizers),
    }
    load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    again.inner.load_state_dict(state["model"])
    set_optimizer_state_dict(again.inner, again.optimizers, state["optimizer"])
    assert again.steps(3, 3) == run.steps(3, 3)


def test_one_optimizer_with_several_groups_is_not_warned_of(tmp_path: Path) -> None:
    """A key of the script's own in one group makes no second optimizer."""
    run = _Run(1, muon=False)
    adam = torch.optim.AdamW([{"params": [p]} for p in run.model.parameters()], lr=0.01)
    adam.param_groups[0]["name"] = adam.param_groups[1]["decays"] = "no"
    adam.param_groups[2]["of"] = "head"
    run.optimizers = [adam]
    run.steps(0, 2)
    place = tmp_path / "run"
    place.mkdir()
    torch.save(_of_ddp(run), place / "run.pt")
    warnings = reshard.convert(place, tmp_path / "out", to="torch_save", progress=False).warnings
    assert [w for w in warnings if "several optimizers" in w] == []


def test_choices_among_optimizers_are_asked_for_as_before(tmp_path: Path) -> None:
    run = _Run(1, muon=True)
    run.steps(0, 1)
    torch.save(_of_a_list(run), tmp_path / "run.pt")
    error = raised(SourceError, reshard.convert, tmp_path / "run.pt", tmp_path / "out", to="universal", progress=False)
    assert error.code == "checkpoint.ambiguous"
    assert "--optimizer-key" in error.fix
    weights = reshard.convert(tmp_path / "run.pt", tmp_path / "weights", to="torch", progress=False)
    assert "('a', 1)" in [entry.path for entry in weights.not_carried]
