"""Runs with complex parameters (neural operators): read from each kind of files, loaded by torch, and gone on with."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import reshard
from house.promises import command
from laws.dcp_files import Save, save as save_dcp
from oracle.complex_runs import Operator, adam, state_of, step, trained
from oracle.dcp_driver import TIMEOUT_S, FsdpOracle
from oracle.whole_tensors import whole

RANKS: dict[str, Any] = {"to": "fsdp_ranks", "dp": 2, "rank_framework": "accelerate", "device_type": "cpu"}
"""Options of files that `complex_runs.resume` loads."""


@pytest.fixture
def run(tmp_path: Path) -> tuple[Operator, torch.optim.Optimizer, Path]:
    """A trained operator, its optimizer, and the file that its script saved."""
    model, optimizer = trained()
    place = tmp_path / "run" / "checkpoint.pt"
    place.parent.mkdir()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, place)
    return model, optimizer, place


Run = tuple[Operator, torch.optim.Optimizer, Path]


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """All tensors have the same names, types, shapes and bits."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(found[name], value), name


def in_file(place: Path) -> Run:
    """A new operator that has loaded a file of `torch.save`."""
    torch.manual_seed(1)
    model = Operator()
    optimizer = adam(model)
    saved = torch.load(place, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return model, optimizer, place


def assert_goes_on(found: Run, wanted: Run) -> None:
    """Both have the same state, now and after the next step."""
    for number in (3, 4):
        assert_equal(state_of(*found[:2]), state_of(*wanted[:2]))
        assert step(*found[:2], number) == step(*wanted[:2], number)


def test_the_moments_of_a_complex_parameter_are_complex(run: Run) -> None:
    """What the rule rests on: torch keeps all states of complex parameters complex, and those of real ones real."""
    model, optimizer, _ = run
    for name, parameter in model.named_parameters():
        states = {k: v.dtype for k, v in optimizer.state[parameter].items() if k != "step"}
        assert states == dict.fromkeys(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), parameter.dtype), name


def test_a_file_of_torch_goes_on_as_the_run(run: Run, tmp_path: Path) -> None:
    reshard.convert(run[2].parent, tmp_path / "out", to="torch_save", progress=False)
    (file,) = (tmp_path / "out").glob("*.pt")
    assert_goes_on(in_file(file), run)


def test_a_distributed_checkpoint_goes_on_as_the_run(run: Run, tmp_path: Path) -> None:
    reshard.convert(run[2], tmp_path / "out", to="dcp", grammar="state-dict", progress=False)
    torch.manual_seed(1)
    model = Operator()
    optimizer = adam(model)
    state: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is one process
        dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_goes_on((model, optimizer, tmp_path), run)


@pytest.mark.parametrize(
    "options", [{"to": "dcp", "grammar": "state-dict"}, {**RANKS, "buffers": "rotations"}], ids=["dcp", "fsdp_ranks"]
)
def test_fsdp2_goes_on_with_a_file_of_torch(
    options: dict[str, Any], run: Run, tmp_path: Path, fsdp: FsdpOracle
) -> None:
    reshard.convert(run[2], tmp_path / "out", progress=False, **options)
    jobs = {"path": str(tmp_path / "out"), "out": str(tmp_path / "loaded.pt")}
    losses = fsdp.worlds.run("oracle.complex_runs:resume", world=2, timeout_s=TIMEOUT_S, **jobs)
    assert_equal(torch.load(tmp_path / "loaded.pt"), state_of(*run[:2]))
    assert losses == [pytest.approx([step(*run[:2], number) for number in (3, 4)], abs=1e-6)] * 2


def test_files_of_fsdps_ranks_go_on_in_each_kind_of_files(tmp_path: Path, fsdp: FsdpOracle) -> None:
    fsdp.worlds.run("oracle.complex_runs:save", world=2, timeout_s=TIMEOUT_S, folder=str(tmp_path))
    source, truth, after = tmp_path / "save", torch.load(tmp_path / "truth.pt"), torch.load(tmp_path / "after.pt")
    reshard.convert(source, tmp_path / "file", to="torch_save", progress=False)
    (file,) = (tmp_path / "file").glob("*.pt")
    found = in_file(file)
    assert_equal(state_of(*found[:2]), truth)
    assert step(*found[:2], 3) == pytest.approx(after.pop("loss"), abs=1e-6)
    torch.testing.assert_close(state_of(*found[:2]), after)
    for name, options in {"dcp": {"to": "dcp", "grammar": "state-dict"}, "ranks": RANKS}.items():
        reshard.convert(source, tmp_path / name, progress=False, **options)
        jobs = {"path": str(tmp_path / name), "out": str(tmp_path / f"{name}.pt")}
        fsdp.worlds.run("oracle.complex_runs:resume", world=2, timeout_s=TIMEOUT_S, **jobs)
        assert_equal(torch.load(tmp_path / f"{name}.pt"), truth)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_deepspeed_itself_takes_no_step_with_them(stage: int, fsdp: FsdpOracle) -> None:
    found = fsdp.worlds.run("oracle.complex_runs:with_deepspeed", world=2, timeout_s=TIMEOUT_S, stage=stage)
    assert all(found)


def test_deepspeed_is_refused_with_targets_that_work(run: Run, tmp_path: Path) -> None:
    model, _, place = run
    for number, target in enumerate((["universal"], *(["zero", "--dp", "2", "--zero-stage", s] for s in "0123"))):
        code, _, err = command("convert", str(place), str(tmp_path / str(number)), "-q", "--to", *target)
        assert code != 0
        assert "request.unsatisfiable: 2 trained parameters are complex (spectral.low, spectral.high)" in err
        assert "--to dcp, for a run under FSDP2 or DDP; or write the weights alone: --to safetensors" in err
    for target in ("dcp", "safetensors"):
        code, _, err = command("convert", str(place), str(tmp_path / target), "-q", "--to", target)
        assert code == 0, err
    assert_equal(load_file(tmp_path / "safetensors" / "model.safetensors"), model.state_dict())


def saved(place: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, place)
    return place


def members(place: Path) -> list[str]:
    """The optimizer's parameters, in its order."""
    return [str(name) for group in whole(place)["optimizer"]["param_groups"] for name in group["params"]]


class Rotating(nn.Module):
    """A complex parameter and a complex buffer of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(3, dtype=torch.cfloat))
        self.turn = nn.Parameter(torch.ones(3, dtype=torch.cfloat) * 2)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self) -> torch.Tensor:
        return (torch.view_as_real(self.turn * self.table) * self.scale[:, None]).square().sum()


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_buffer_that_states_do_not_tell_from_a_parameter_is_asked_for(kind: str, tmp_path: Path) -> None:
    """Of one shape with a complex parameter; and of any shape where the optimizer has no states, as SGD."""
    model = Rotating()
    optimizer = torch.optim.Adam(model.parameters()) if kind == "adam" else torch.optim.SGD(model.parameters(), lr=0.1)
    model().backward()
    optimizer.step()
    place = saved(tmp_path / "checkpoint.pt", model, optimizer)
    named = ("-q", "--to", "dcp", "--grammar", "state-dict")
    code, _, err = command("convert", str(place), str(tmp_path / "none"), *named)
    assert code != 0
    assert "checkpoint.ambiguous: the optimizer numbers 2 parameters, and the model's files hold 3 parameters" in err
    assert "--buffers NAME,… if some of them are buffers, or --param-order FILE" in err
    order = tmp_path / "order.txt"
    order.write_text("turn\nscale\n")
    for number, words in enumerate((["--buffers", "table"], ["--param-order", str(order)])):
        out = tmp_path / str(number)
        code, _, err = command("convert", str(place), str(out), *named, *words)
        assert code == 0, err
        assert members(out) == ["turn", "scale"]


def test_complex_states_are_of_no_real_parameter(tmp_path: Path) -> None:
    """Two groups in another order: the kinds of moments tell parameters of one shape apart."""
    model = Rotating()
    optimizer = torch.optim.Adam([{"params": [model.scale]}, {"params": [model.turn], "lr": 0.5}])
    model().backward()
    optimizer.step()
    place = saved(tmp_path / "checkpoint.pt", model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    save_dcp(state, tmp_path / "dcp", Save())
    for source in (place, tmp_path / "dcp"):
        out = tmp_path / f"out-{source.name}"
        reshard.convert(source, out, to="dcp", grammar="state-dict", buffers="table", progress=False)
        assert members(out) == ["scale", "turn"]
        assert whole(out)["optimizer"]["state"]["turn"]["exp_avg_sq"].dtype == torch.cfloat
    order = tmp_path / "order.txt"
    order.write_text("turn\nscale\n")
    with pytest.raises(
        reshard.ReshardError, match=r"number 1 has states of complex \(3,\), and the parameter in its pl"
    ):
        reshard.convert(place, tmp_path / "wrong", to="dcp", param_order=str(order), progress=False)


def test_the_states_that_a_complex_parameter_begins_with_are_complex(tmp_path: Path) -> None:
    """Torch makes states at a parameter's first step; a distributed checkpoint has zeros of its type until then."""
    model = Operator()
    model.unused = nn.Parameter(torch.ones(2, 3, dtype=torch.cfloat))
    optimizer = torch.optim.Adam([{"params": [model.unused, model.lift.bias]}, {"params": [model.spectral.low]}])
    model(torch.ones(1, 1, 16)).square().mean().backward()
    optimizer.step()
    place, order = saved(tmp_path / "checkpoint.pt", model, optimizer), tmp_path / "order.txt"
    order.write_text("unused\nlift.bias\nspectral.low\n")
    options: dict[str, Any] = {"to": "dcp", "grammar": "state-dict", "param_order": str(order)}
    reshard.convert(place, tmp_path / "out", progress=False, **options)
    states = whole(tmp_path / "out")["optimizer"]["state"]
    assert states["unused"]["exp_avg"].dtype == states["spectral.low"]["exp_avg"].dtype == torch.cfloat
    assert states["lift.bias"]["exp_avg"].dtype == torch.float32
    assert not states["unused"]["exp_avg"].any()
