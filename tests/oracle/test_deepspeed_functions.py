"""DeepSpeed's functions and scripts by their own names: signatures, bits on real checkpoints, what they refuse."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command

from house.expected import raised, some
from oracle.cases import Case
from oracle.driver import Oracle, Trained
from oracle.fixtures import TrainedFactory
from oracle.models import TinyLM
from oracle.outputs import cast, raw, read_bin, read_safetensors
from oracle.test_convert_weights import PEER_REFUSES, WHERE_THE_PEER_WORKS, expected_weights, peer_weights
from reshard import deepspeed
from reshard.cli.main import app
from reshard.errors import ReshardError

_SIGNATURES = """
import inspect, json
from deepspeed.checkpoint import utils
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import zero_to_fp32
found = {}
for name in NAMES:
    function = getattr(zero_to_fp32, name, None) or getattr(utils, name, None) or getattr(DeepSpeedEngine, name)
    parameters = inspect.signature(function).parameters.values()
    found[name] = [(p.name, p.kind.name, "-" if p.default is p.empty else repr(p.default)) for p in parameters]
print(json.dumps(found))
"""


def _words(parameter: Parameter) -> list[str]:
    default = parameter.default
    return [parameter.name, parameter.kind.name, "-" if default is Parameter.empty else repr(default)]


_OURS = {"torch.float32": "'float32'", "device(type='cpu')": "'cpu'", "self": "engine", "load_dir": "source"}
"""A signature is made without torch, so a dtype and a device are their names, which DeepSpeed takes too. A method of an
engine is a function of it, and its directory is any source."""


def _as_ours(words: list[str]) -> list[str]:
    return [_OURS.get(word, word) for word in words]


def test_signatures_are_those_of_the_installed_deepspeed() -> None:
    script = f"NAMES = {list(deepspeed.__all__)!r}{_SIGNATURES}"
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    theirs = json.loads(done.stdout.splitlines()[-1])
    for name in deepspeed.__all__:
        parameters = signature(getattr(deepspeed, name)).parameters.values()
        # Options of ours that DeepSpeed does not have come after all of its own, by keyword alone.
        ours = [_words(p) for p in parameters if name != "load_checkpoint" or p.kind is Parameter.POSITIONAL_OR_KEYWORD]
        assert ours == [_as_ours(words) for words in theirs[name]], name


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("zero-to-fp32", "utils/zero_to_fp32.py"),
        ("zero-to-torch", "utils/zero_to_torch.py"),
        ("ds-to-universal", "checkpoint/ds_to_universal.py"),
    ],
)
def test_every_flag_of_a_script_is_taken(command: str, script: str) -> None:
    spec = some(find_spec("deepspeed"))
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / script).read_text())
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    taken = [c.args for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "add_argument"]
    wanted = {str(arg.value) for args in taken for arg in args if isinstance(arg, ast.Constant)}
    found: Any = get_command(app)
    ours = {
        name
        for p in found.commands[command].params
        for name in ([p.name] if p.param_type_name == "argument" else p.opts)
    }
    assert len(wanted) >= 7
    assert wanted <= ours


def _raw(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: raw(value) for name, value in state.items()}


def _named(run: Trained) -> dict[str, Any]:
    expected = expected_weights(run, torch.float32)
    return expected | {alias: expected[owner] for alias, owner in run.truth.meta["aliases"].items()}


@pytest.mark.parametrize("name", WHERE_THE_PEER_WORKS)
def test_state_dicts_are_deepspeeds(name: str, oracle: Oracle, trained: TrainedFactory, tmp_path: Path) -> None:
    run = trained(name)
    ours = _raw(deepspeed.get_fp32_state_dict_from_zero_checkpoint(run.dir))
    assert ours == _named(run)
    theirs = peer_weights(oracle, run, tmp_path / "peer.safetensors")
    # What has no master comes back in the model's type there, and frozen parameters of stage 1 not at all.
    left_out = run.truth.kind("frozen").keys() - run.truth.kind("fp32").keys() if run.case.stage == 1 else set()
    assert set(ours) - left_out == set(theirs)
    if run.case.empty_param:
        # Below stage 3 DeepSpeed compares addresses, which are 0 for both: it takes the second for a tie of the first.
        assert theirs.pop("no_rows") == theirs["empty"] != ours["no_rows"]
    loose = {*run.truth.kind("frozen"), *run.truth.kind("module")} - {*run.truth.kind("fp32")}
    assert {k: cast(v, torch.float32) if k in loose else v for k, v in theirs.items()} == {k: ours[k] for k in theirs}


@pytest.mark.parametrize("name", PEER_REFUSES)
def test_what_deepspeed_refuses_is_read(name: str, trained: TrainedFactory) -> None:
    run = trained(name)
    assert _raw(deepspeed.get_fp32_state_dict_from_zero_checkpoint(run.dir, tag=run.tag)) == _named(run)


def test_frozen_parameters_can_be_left_out(trained: TrainedFactory) -> None:
    found = deepspeed.get_fp32_state_dict_from_zero_checkpoint(trained("z3_bf16").dir, exclude_frozen_parameters=True)
    assert set(_named(trained("z3_bf16"))) - set(found) == {"adapter.weight"}


@pytest.mark.parametrize("name", ["z2_bf16", "z3_bf16"])
def test_lazy_tensors_are_the_same_tensors(name: str, trained: TrainedFactory) -> None:
    run = trained(name)
    lazy = deepspeed.get_fp32_state_dict_from_zero_checkpoint(run.dir, lazy_mode=True)
    whole = deepspeed.get_fp32_state_dict_from_zero_checkpoint(run.dir)
    assert list(lazy) == list(whole)
    for key, one in lazy.items():
        assert (one.shape, one.dtype, one.numel()) == (whole[key].shape, whole[key].dtype, whole[key].numel())
        assert torch.equal(one.contiguous(), whole[key])
    assert lazy["head.weight"] is lazy["embed.weight"]
    assert whole["head.weight"] is whole["embed.weight"]
    again = deepspeed.to_torch_tensor(lazy, dtype=torch.bfloat16)
    assert {n: t.dtype for n, t in again.items() if t.dtype is not torch.bfloat16} == {"seen": torch.int64}
    assert all(torch.equal(again[n], whole[n].bfloat16()) for n in again if n != "seen")
    empty = deepspeed.to_torch_tensor(lazy, return_empty_tensor=True)
    assert {n: (t.shape, t.dtype) for n, t in empty.items()} == {n: (t.shape, t.dtype) for n, t in whole.items()}


def _model(case: Case, dtype: torch.dtype = torch.float32) -> TinyLM:
    torch.manual_seed(1)
    return TinyLM(case).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_loaded(dtype: torch.dtype, trained: TrainedFactory) -> None:
    run = trained("z2_bf16")
    model = deepspeed.load_state_dict_from_zero_checkpoint(_model(run.case, dtype), run.dir)
    whole = deepspeed.get_fp32_state_dict_from_zero_checkpoint(run.dir)
    found = model.state_dict()
    assert set(found) == set(whole)
    assert all(torch.equal(found[n], whole[n].to(found[n].dtype)) for n in found)
    assert model.head.weight is model.embed.weight


def test_a_model_of_other_names_is_refused_untouched(trained: TrainedFactory) -> None:
    run = trained("z2_bf16")
    model = torch.nn.Sequential(_model(run.case))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    error = raised(ReshardError, deepspeed.load_state_dict_from_zero_checkpoint, model, run.dir)
    assert error.code == "request.unsatisfiable"
    assert "0.embed.weight" in error.message
    assert "embed.weight" in error.details["unexpected"]
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_a_model_of_another_width_is_refused(trained: TrainedFactory) -> None:
    run = trained("z2_bf16")
    model = _model(run.case)
    model.gain = torch.nn.Parameter(torch.ones(2))
    error = raised(ReshardError, deepspeed.load_state_dict_from_zero_checkpoint, model, run.dir)
    assert error.code == "request.unsatisfiable"
    assert "gain is (2,) there and (1,)" in error.message


def test_a_wrong_tag_says_which_there_are(trained: TrainedFactory) -> None:
    run = trained("z2_bf16")
    error = raised(ReshardError, deepspeed.get_fp32_state_dict_from_zero_checkpoint, run.dir, tag="global_step99")
    assert error.code == "source.not_found"
    assert run.tag in error.fix


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", torch.bfloat16, "float16"])
@pytest.mark.parametrize("name", ["z1_fp32", "z3_bf16", "bf16opt"])
def test_weights_are_written(name: str, dtype: Any, safe: bool, trained: TrainedFactory, tmp_path: Path) -> None:
    run = trained(name)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    deepspeed.convert_zero_checkpoint_to_state_dict(
        run.dir, tmp_path / "out", dtype, max_shard_size="2KB", safe_serialization=safe, tag=run.tag
    )
    found = (read_safetensors if safe else read_bin)(tmp_path / "out")
    wanted = {"fp32": torch.float32, "float16": torch.float16}.get(dtype, torch.bfloat16)
    assert found.tensors == expected_weights(run, wanted)
    assert found.aliases == {"head.weight": "embed.weight"}
    assert len(found.files) > 1
    assert (tmp_path / "out" / "config.json").read_text() == "{}"


def test_tensors_are_cloned_out_of_their_flat_buffer(tmp_path: Path) -> None:
    flat = torch.arange(1000.0)
    item = {"a": flat[:3], "b": [flat[5:7], ("x", flat[9])], "n": 1}
    found = deepspeed.clone_tensors_for_torch_save(item)
    torch.save(found, tmp_path / "f.pt")
    assert (tmp_path / "f.pt").stat().st_size < 3_000
    assert torch.equal(found["a"], flat[:3])
    assert torch.equal(found["b"][1][1], flat[9])
    assert found["b"][1][0] == "x"
    assert found["n"] == 1
    assert found["a"].untyped_storage().nbytes() == 12
