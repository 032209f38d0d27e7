"""Training files with whole tensors that lie, name what is not there, or are something else: typed refusals."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor, distribute_tensor

import reshard
from house.promises import command
from laws.rank_files import ROWS, World, small_model
from reshard.errors import ReshardError


def model() -> dict[str, torch.Tensor]:
    return {"a.weight": torch.ones(3, 4), "b.weight": torch.ones(4, 3), "c.bias": torch.ones(3)}


def optimizer() -> dict[str, Any]:
    states = {
        i: {"step": torch.tensor(2.0), "exp_avg": t * 3, "exp_avg_sq": t * 5} for i, t in enumerate(model().values())
    }
    return {"state": states, "param_groups": [{"lr": 0.5, "betas": (0.9, 0.99), "params": [0, 1, 2]}]}


def saved() -> dict[str, Any]:
    return {"model": model(), "optimizer": optimizer(), "epoch": 2}


Change = Callable[[dict[str, Any]], Any]


def _state(value: dict[str, Any], key: Any, state: Any) -> None:
    value["optimizer"]["state"][key] = state


def _params(value: dict[str, Any], params: list[Any]) -> None:
    value["optimizer"]["param_groups"][0]["params"] = params


MALFORMED: dict[str, tuple[Change, str]] = {
    "a state for a number nobody has": (lambda v: _state(v, 9, {"step": torch.tensor(1.0)}), "1 parameter of no param"),
    "a state for a name": (lambda v: _state(v, "a.weight", {}), "1 parameter of no param group: a.weight"),
    "a number twice": (lambda v: _params(v, [0, 1, 2, 2]), "2 is in the param groups twice"),
    "numbers that leave gaps": (lambda v: _params(v, [0, 1, 2, 9]), "leave gaps"),
    "a negative number": (lambda v: _params(v, [0, 1, 2, -1]), "leave gaps"),
    "numbers and names": (lambda v: _params(v, [0, 1, 2, "x"]), "names and numbers"),
    "a number that is true": (lambda v: _params(v, [0, 1, 2, True]), "a param group has the member"),
    "params that are no list": (lambda v: _params(v, 3), "params of a param group is not a list"),
    "groups that are no list": (lambda v: v["optimizer"].update(param_groups=3), "param_groups is not a list"),
    "states that are no mapping": (lambda v: _state(v, 0, 3), "state of 0 is not a mapping"),
    "an object in a group": (
        lambda v: v["optimizer"]["param_groups"][0].update(x=Fraction(1, 2)), "param_groups[0].x holds an object"
    ),
    "a list of names with one twice": (
        lambda v: v["optimizer"]["param_groups"][0].update(param_names=["a.weight", "a.weight", "c.bias"]), ""
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_an_optimizer_that_contradicts_itself_is_refused(name: str, tmp_path: Path) -> None:
    change, text = MALFORMED[name]
    value = saved()
    change(value)
    torch.save(value, tmp_path / "a.pt")
    with pytest.raises(ReshardError) as caught:
        reshard.convert(tmp_path / "a.pt", tmp_path / "out", to="universal", opaque="keep", progress=False)
    assert caught.value.code in ("checkpoint.malformed", "checkpoint.ambiguous")
    assert text in caught.value.message
    assert not (tmp_path / "out").exists()


UNREAD: dict[str, tuple[Change, str]] = {
    "states of another shape": (
        lambda v: v["optimizer"]["state"][0].update(exp_avg=torch.ones(4, 4), exp_avg_sq=torch.ones(4, 4)),
        "numbers 3 parameters, and the model's files hold 2",
    ),
    "states of two shapes": (lambda v: v["optimizer"]["state"][0].update(exp_avg=torch.ones(2)), "several shapes"),
    "states in another order": (
        lambda v: v["optimizer"].update(state={k: v["optimizer"]["state"][2 - k] for k in range(3)}) or _twins(v),
        "do not count the model's parameters in order",
    ),
    "a state that is a text": (lambda v: v["optimizer"]["state"][0].update(x="y"), "neither tensors nor numbers"),
    "more numbers than parameters": (lambda v: _params(v, [0, 1, 2, 3]), "numbers 4 parameters"),
}


def _twins(value: dict[str, Any]) -> None:
    """Two more parameters of one shape, so that shapes prove nothing."""
    for number, name in enumerate(("d.bias", "e.bias"), 3):
        value["model"][name] = torch.ones(7)
        _state(value, number, {"exp_avg": torch.ones(7)})
    _params(value, [0, 1, 2, 3, 4])


@pytest.mark.parametrize("name", UNREAD)
def test_an_optimizer_that_does_not_fit_stays_unread(name: str, tmp_path: Path) -> None:
    change, text = UNREAD[name]
    value = saved()
    change(value)
    torch.save(value, tmp_path / "a.pt")
    for options in ({"to": "universal"}, {"to": "dcp", "framework": "accelerate"}):
        with pytest.raises(ReshardError) as caught:
            reshard.convert(tmp_path / "a.pt", tmp_path / "out", progress=False, **options)  # type: ignore[arg-type]
        assert caught.value.code == "checkpoint.ambiguous"
        assert text in caught.value.message
    reshard.convert(tmp_path / "a.pt", tmp_path / "weights", to="safetensors", progress=False)


def _sharded() -> torch.Tensor:
    with World((2,), None).mesh_of(0) as mesh:
        return distribute_tensor(torch.ones(4, 4), mesh, ROWS)  # type: ignore[arg-type]


FILES: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "a list": ("source.unknown_kind", "holds a list, no mapping", lambda: [1, 2]),
    "an optimizer alone": ("source.unknown_kind", "no state dict of a model", optimizer),
    "no model": ("source.unknown_kind", "epoch", lambda: {"epoch": 1, "optimizer": optimizer()}),
    "a model that is a text": ("source.unknown_kind", "no state dict", lambda: {**saved(), "model": "x"}),
    "Megatron's": (
        "source.unsupported",
        "Megatron-LM",
        lambda: {**saved(), "checkpoint_version": 3.0, "args": {}, "iteration": 5},
    ),
    "a class of a script": (
        "pickle.forbidden_call", "fractions.Fraction", lambda: {**saved(), "args": Fraction(1, 2)}
    ),
    "names that climb": ("name.invalid", "a parameter is called", lambda: {"model": {"../x": torch.ones(2)}}),
    "two names that are one": (
        "checkpoint.ambiguous",
        "two entries are called w",
        lambda: {"model": {"w": torch.ones(2), "_orig_mod.w": torch.ones(2)}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_of_something_else_are_refused(name: str, tmp_path: Path) -> None:
    code, text, make = FILES[name]
    torch.save(make(), tmp_path / "a.pt")
    place = str(tmp_path / "a.pt")
    inspected = [] if code == "pickle.forbidden_call" else [["inspect", place]]  # inspect only lists what it names
    for words in (*inspected, ["convert", place, str(tmp_path / "x"), "--to", "universal"]):
        status, _, said = command(*words)
        assert status != 0
        assert code in said
        assert text in said


def test_a_shard_is_not_taken_for_a_whole_tensor(tmp_path: Path) -> None:
    value = _sharded()
    assert isinstance(value, DTensor)
    torch.save({**saved(), "model": {**model(), "w": value}}, tmp_path / "a.pt")
    with pytest.raises(ReshardError) as caught:
        reshard.convert(tmp_path / "a.pt", tmp_path / "out", to="safetensors", opaque="keep", progress=False)
    assert caught.value.code == "checkpoint.incomplete"
    assert "w is a DTensor, of which one rank's file holds the rank's share" in caught.value.message


@pytest.mark.parametrize("cut", [1, 100, 1000])
def test_files_that_are_cut_off_are_refused(cut: int, tmp_path: Path) -> None:
    torch.save(saved(), tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(data[:-cut])
    status, _, said = command("inspect", str(tmp_path / "a.pt"))
    assert status == 3
    assert "zip." in said


def test_a_trainers_optimizer_that_is_none_is_refused(tmp_path: Path) -> None:
    save_file(model(), tmp_path / "model.safetensors")
    for value, code in ((model(), "checkpoint.malformed"), ([1], "checkpoint.malformed")):
        torch.save(value, tmp_path / "optimizer.pt")
        status, _, said = command("inspect", str(tmp_path))
        assert (status, code in said) == (3, True)
    (tmp_path / "optimizer.pt").write_bytes(b"x")
    assert "source.unknown_kind: optimizer.pt begins with" in command("inspect", str(tmp_path))[2]


def test_ranks_files_are_not_single_ones(tmp_path: Path) -> None:
    """A model of FSDP's ranks in one file keeps its own message."""
    assert small_model().parameters
    (tmp_path / "model_world_size_2_rank_0.pt").write_bytes(b"x")
    assert "model_world_size_2_rank_1.pt" in command("inspect", str(tmp_path))[2]
