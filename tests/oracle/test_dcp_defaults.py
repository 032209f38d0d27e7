"""Without `--framework`, torch's own loader takes what `--to dcp` writes, by the line that the command prints.

The checkpoints of DeepSpeed are the frozen real ones of `tests/data`, with the tensors of their runs beside them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import reshard.dcp
from house.expected import raised
from house.promises import command
from house.saves import DATA, make_save
from laws.rank_files import World, save_accelerate, save_verl, small_model
from reshard.errors import RequestError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
"""The scripts of these tests load in one process."""
SOURCES = ("zero2_tiny", "zero3_tiny")
STATES = ("exp_avg", "exp_avg_sq")
NEXT = "next: in the script: "


def run_of(name: str) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, dict[str, float]]]:
    """The tensors of the run by kind and parameter, and the numbers of its optimizer by kind and parameter."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(DATA / name / "expected.safetensors").items():
        kind, _, parameter = key.partition("/")
        found.setdefault(kind, {})[parameter] = tensor
    return found, json.loads((DATA / name / "expected.json").read_text())["scalars"]


def empty(name: str) -> dict[str, Any]:
    """A state dict of zeros with the parameters of the run, as a script gives it to `dcp.load`."""
    tensors, _ = run_of(name)
    weights = {**tensors["fp32"], **tensors["frozen"], **tensors["buffer"]}
    states = {
        parameter: {"step": torch.tensor(-1.0), **{s: torch.zeros_like(master) for s in STATES}}
        for parameter, master in tensors["fp32"].items()
    }
    return {"model": {n: torch.zeros_like(t) for n, t in weights.items()}, "optimizer": {"state": states}}


def assert_the_runs(loaded: Mapping[str, Any], name: str) -> None:
    """All weights and states are those of the run, bit for bit."""
    tensors, numbers = run_of(name)
    weights = {**tensors["fp32"], **tensors["frozen"], **tensors["buffer"]}
    for parameter, value in weights.items():
        assert torch.equal(loaded["model"][parameter], value), parameter
    for parameter in tensors["fp32"]:
        states = loaded["optimizer"]["state"][parameter]
        assert all(torch.equal(states[s], tensors[s][parameter]) for s in STATES), parameter
        assert states["step"] == numbers["step"][parameter]


def next_line(*words: str) -> str:
    """The statement after `next: in the script:` that a conversion prints."""
    code, _, errors = command("convert", *words)
    assert code == 0, errors
    (line,) = [x for x in errors.splitlines() if x.startswith(NEXT)]
    return line.removeprefix(NEXT)


@pytest.mark.parametrize("name", SOURCES)
def test_the_reader_reads_a_checkpoint_of_deepspeed_by_default(name: str) -> None:
    state_dict = empty(name)
    dcp.load(state_dict, storage_reader=reshard.dcp.Reader(DATA / name))
    assert_the_runs(state_dict, name)


@pytest.mark.parametrize("name", SOURCES)
def test_the_printed_line_loads_what_was_written(name: str, tmp_path: Path) -> None:
    line = next_line(str(DATA / name), str(tmp_path / "out"), "--to", "dcp")
    assert line == f"dcp.load(state_dict, checkpoint_id={str(tmp_path / 'out')!r})"
    state_dict = empty(name)
    exec(line, {"dcp": dcp, "state_dict": state_dict})
    assert_the_runs(state_dict, name)


@pytest.mark.parametrize(
    ("framework", "call"),
    [
        ("state-dict", "dcp.load(state_dict, checkpoint_id={})"),
        ("torchtitan", "dcp.load(state_dict, checkpoint_id={})"),
        ("accelerate", "accelerator.load_state({})"),
        ("trainer", "trainer.train(resume_from_checkpoint={})"),
        ("lightning", "trainer.fit(model, ckpt_path={})"),
    ],
)
def test_the_printed_line_is_the_frameworks(framework: str, call: str, tmp_path: Path) -> None:
    target = str(tmp_path / "out")
    words = (str(DATA / "zero2_tiny"), target, "--to", "dcp", "--framework", framework)
    assert next_line(*words) == call.format(repr(target))
    assert next_line(*words) == call.format(repr(target)), "also for a target that is there already"


class Model:
    """What the printed line calls of a model."""

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Takes the weights."""
        self.loaded = state_dict


def test_the_printed_line_loads_weights_of_torch(tmp_path: Path) -> None:
    line = next_line(str(DATA / "zero2_tiny"), str(tmp_path / "out"), "--to", "torch")
    model, weights = Model(), run_of("zero2_tiny")[0]
    exec(line, {"torch": torch, "model": model})
    assert all(torch.equal(model.loaded[n], t) for n, t in {**weights["fp32"], **weights["frozen"]}.items())


@pytest.mark.parametrize("framework", ["accelerate", "trainer"])
def test_the_reader_reads_what_accelerate_keeps_in_two_directories(framework: str, tmp_path: Path) -> None:
    source, name = tmp_path / "source", "zero2_tiny"
    reshard.convert(DATA / name, source, to="dcp", framework=framework, progress=False)
    state_dict = empty(name)
    dcp.load(state_dict, storage_reader=reshard.dcp.Reader(source))
    assert_the_runs(state_dict, name)
    error = raised(RequestError, reshard.dcp.Reader(source, framework=framework).read_metadata)
    assert (error.code, framework in error.message) == ("request.unsatisfiable", True)
    assert "framework='state-dict'" in (error.fix or "")


def files_by_default(source: Path, **options: Any) -> set[str]:
    """The first parts of the paths that `--to dcp` writes without a framework."""
    with reshard.open_layout(source, to="dcp", **options) as layout:
        return {file.path.partition("/")[0] for file in layout.files}


STATE_DICT = {".metadata", "__0_0.distcp"}
TWO = {"pytorch_model_fsdp_0", "optimizer_0"}
TRAINER = {*TWO, "scheduler.pt", "trainer_state.json"}
"""The Trainer loads no optimizer without a scheduler, so a state of one is made."""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"to": "zero", "dp": 1}, STATE_DICT),
        ({"to": "universal"}, STATE_DICT),
        ({"to": "safetensors"}, STATE_DICT),
        ({"to": "torch"}, STATE_DICT),
        ({"to": "torch_save"}, STATE_DICT),
        ({"to": "dcp"}, STATE_DICT),
        ({"to": "dcp", "framework": "torchtitan"}, STATE_DICT),
        ({"to": "dcp", "framework": "lightning"}, {*STATE_DICT, "meta.pt"}),
        ({"to": "dcp", "framework": "accelerate"}, TWO),
        ({"to": "dcp", "framework": "trainer"}, TRAINER),
        ({"to": "torch_save", "framework": "accelerate"}, TWO),
        ({"to": "torch_save", "framework": "trainer"}, TRAINER),
        (
            {"to": "torch_save", "framework": "trainer", "torch_file": "optimizer.pt"},
            TRAINER,
        ),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_a_source_that_names_its_framework_keeps_it(
    options: dict[str, Any], expected: set[str], tmp_path: Path
) -> None:
    reshard.convert(DATA / "zero2_tiny", tmp_path / "run" / "step3", progress=False, **options)
    order = tmp_path / "order.txt"
    order.write_text("\n".join(json.loads((DATA / "zero2_tiny" / "expected.json").read_text())["flat_order"][0]))
    more = {"param_order": str(order)} if options.get("torch_file") else {}
    assert files_by_default(tmp_path / "run" / "step3", **more) == expected


def test_ranks_files_of_accelerate_stay_accelerates(tmp_path: Path) -> None:
    assert files_by_default(save_accelerate(small_model(), tmp_path / "accelerate", World())) == TWO
    assert files_by_default(save_verl(small_model(), tmp_path / "verl", World())) == STATE_DICT


def test_a_checkpoint_of_lightning_stays_lightnings(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    states = {0: {"step": torch.tensor(4.0), "exp_avg": weight + 1, "exp_avg_sq": weight + 2}}
    groups = [{"lr": 0.5, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}]
    value = {
        "pytorch-lightning_version": "2.6.6", "state_dict": {"weight": weight}, "epoch": 1, "global_step": 4,
        "optimizer_states": [{"state": states, "param_groups": groups}], "lr_schedulers": [],
    }  # fmt: skip
    (tmp_path / "run").mkdir()
    torch.save(value, tmp_path / "run" / "last.ckpt")
    assert files_by_default(tmp_path / "run") == {*STATE_DICT, "meta.pt"}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("random_states_0.pkl", {"random_state": 1, "step": 2}, {*TWO, "random_states_0.pkl"}),
        ("rng_state.pth", {"python": 1}, {*TRAINER, "rng_state.pth"}),
        ("meta.pt", {"epoch": 1, "global_step": 3}, {*STATE_DICT, "meta.pt"}),
    ],
)
def test_the_files_of_a_trainer_name_the_framework(
    name: str, value: dict[str, Any], expected: set[str], tmp_path: Path
) -> None:
    torch.save(value, tmp_path / name)
    assert files_by_default(DATA / "zero2_tiny", trainer_files=str(tmp_path)) == expected


def test_ensure_makes_what_torch_loads_unless_files_name_a_framework(tmp_path: Path) -> None:
    plain, accelerates = make_save(tmp_path / "plain"), make_save(tmp_path / "state")
    torch.save({"random_state": 1, "step": 2}, accelerates / "random_states_0.pkl")
    state_dict = empty("zero2_tiny")
    dcp.load(state_dict, checkpoint_id=reshard.ensure(plain, to="dcp"))
    assert_the_runs(state_dict, "zero2_tiny")
    made = Path(reshard.ensure(accelerates, to="dcp"))
    assert {*TWO, "random_states_0.pkl"} <= {p.name for p in made.iterdir()}
