"""The names in a planned target are read again before a tensor is moved: a target that no loader takes is not begun.

Each conversion here ends where the writer is right. `tests/planted` shows that the check, and nothing else, ends it
where the writer is not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import reshard
from house.expected import raised
from house.repository import ROOT
from reshard.choices import OpaquePolicy
from reshard.errors import JobError, RequestError, SourceError
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec
from reshard_engine.formats.model_weights import check_written
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.operations.conversion import Conversion
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import open_location

ZERO = ROOT / "tests" / "data" / "zero2_tiny"
ADAM: dict[str, Any] = {
    "lr": 0.1,
    "betas": (0.9, 0.99),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "foreach": None,
}


def _script(place: Path, prefix: str = "") -> Path:
    """One file of a script in a directory, with keys of its own."""
    names = [f"{prefix}layers.{i}.weight" for i in range(3)]
    states = {
        i: {"step": torch.tensor(1.0), "exp_avg": torch.ones(2, 2), "exp_avg_sq": torch.ones(2, 2)} for i in range(3)
    }
    saved = {
        "model_state_dict": {name: torch.full((2, 2), float(i)) for i, name in enumerate(names)},
        "optim": {"state": states, "param_groups": [{**ADAM, "params": [0, 1, 2]}]},
    }  # fmt: skip
    place.mkdir()
    torch.save(saved, place / "run.pt")
    return place


def _weights(place: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    place.mkdir()
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, place / "model.safetensors")
    return place


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp", "universal"])
def test_wrappers_of_single_layers_are_left_out(to: str, tmp_path: Path) -> None:
    if to == "universal":
        source, told = (
            _script(tmp_path / "in", "_orig_mod."),
            {"model_key": "model_state_dict", "optimizer_key": "optim"},
        )
    else:
        source, told = _weights(tmp_path / "in", {f"layers.{i}._orig_mod.weight": (2, 2) for i in range(3)}), {}
    reshard.convert(source, tmp_path / "out", to=to, progress=False, **told)


def test_a_framework_is_assumed_for_no_source_that_names_none(tmp_path: Path) -> None:
    reshard.convert(ZERO, tmp_path / "out", to="dcp", progress=False)


def test_placeholders_are_refused_as_what_they_are(tmp_path: Path) -> None:
    source = _weights(tmp_path / "in", {"a.weight": (0,), "b.weight": (0,), "b.bias": (3,)})
    error = raised(SourceError, reshard.convert, source, tmp_path / "out", to="safetensors", progress=False)
    assert error.code == "checkpoint.incomplete"
    reshard.convert(source, tmp_path / "kept", to="safetensors", empty_weights="keep", progress=False)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
def test_a_scripts_keys_are_kept(prefix: str, tmp_path: Path) -> None:
    source = _script(tmp_path / "in", prefix)
    reshard.convert(source, tmp_path / "out", to="torch_save", progress=False)
    asked = {"target_model_key": "net", "target_optimizer_key": "adam"}
    reshard.convert(source, tmp_path / "asked", to="torch_save", progress=False, **asked)
    assert torch.load(tmp_path / "asked" / "checkpoint.pt", weights_only=True).keys() == {"net", "adam"}


# The check itself.


def _read(place: Path) -> Any:
    return read_checkpoint(open_location(str(place)), None, OpaqueLedger(OpaquePolicy.REFUSE))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"_orig_mod.a.weight": (2, 2), "b": (3,)}, "wrapping modules would stay in the target: _orig_mod.a.weight"),
        ({"module.a.weight": (2, 2), "module.b": (3,)}, "module.a.weight, module.b"),
        ({"a.weight": (0, 2), "b": (3,)}, "a.weight would have no elements, and the source has"),
        ({"c": (0,), "d": (0,), "b": (3,)}, "2 of 3 weights would have no elements: c, d"),
    ],
)  # fmt: skip
def test_what_no_loader_takes(written: dict[str, tuple[int, ...]], said: str, tmp_path: Path) -> None:
    source = _weights(tmp_path / "in", {"a.weight": (2, 2), "b": (3,)})
    request = ConvertRequest(source=SourceSpec(url=str(source)), target=str(tmp_path / "out"), to="safetensors")
    error = raised(JobError, check_written, written, _read(source), request)
    assert error.code == "internal.error"
    assert said in error.message


def test_names_that_would_be_equal_without_wrappers_pass(tmp_path: Path) -> None:
    shapes = {"a._orig_mod.weight": (2, 2), "a.weight": (2, 2)}
    reshard.convert(_weights(tmp_path / "in", shapes), tmp_path / "out", to="safetensors", progress=False)


def test_a_module_that_is_called_module_passes(tmp_path: Path) -> None:
    shapes = {"module.a.weight": (2, 2), "a.weight": (2, 2), "module.b": (3,)}
    reshard.convert(_weights(tmp_path / "in", shapes), tmp_path / "out", to="safetensors", progress=False)


def test_nothing_exists_after_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the plan, so that no byte is moved."""
    from reshard_engine.formats import registry

    source = _weights(tmp_path / "in", {"a.weight": (2, 2)})
    request = ConvertRequest(source=SourceSpec(url=str(source)), target=str(tmp_path / "out"), to="safetensors")
    lay_out = registry.format_writing("safetensors").writer("safetensors").lay_out
    assert Conversion.prepare(request).plan.units
    renamed = _read(source).renamed({"a.weight": "_orig_mod.a.weight"})

    class Wrong:
        def lay_out(self, _checkpoint: Any, request: ConvertRequest, *, name: str) -> Any:
            return lay_out(renamed, request, name=name)

    monkeypatch.setattr(type(registry.format_writing("safetensors")), "writer", lambda _self, _target: Wrong())
    error = raised(JobError, Conversion.prepare, request)
    assert "_orig_mod.a.weight" in error.message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


def _adapter(place: Path, modules: list[str] | str) -> Path:
    layers = ("q_proj", "v_proj")
    head = "base_model.model.layers.0."
    factors = {
        f"{head}{m}.lora_{f}.default.weight": torch.ones((2, 4) if f == "A" else (4, 2)) for m in layers for f in "AB"
    }
    base = {f"{head}{m}.base_layer.weight": torch.ones(4, 4) for m in layers}
    place.mkdir()
    torch.save({"model": {**base, **factors}}, place / "run.pt")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": modules}
    (place / "adapter_config.json").write_text(json.dumps(config))
    return place


@pytest.mark.parametrize(
    "modules", [["q_proj", "v_proj"], ["layers.0.q_proj", "0.v_proj"], r".*\.[qv]_proj", "all-linear"]
)
def test_an_adapter_and_its_configuration_agree(modules: Any, tmp_path: Path) -> None:
    source = _adapter(tmp_path / "in", modules)
    reshard.convert(source / "run.pt", tmp_path / "out", to="peft", model_files=str(source), progress=False)


def test_an_adapter_of_another_configuration_is_refused(tmp_path: Path) -> None:
    """PEFT would load the factors of one module of two without a word (`tests/oracle/test_convert_adapters.py`)."""
    source = _adapter(tmp_path / "in", ["q_proj", "_proj"])
    options: dict[str, Any] = {"to": "peft", "model_files": str(source), "progress": False}
    error = raised(RequestError, reshard.convert, source / "run.pt", tmp_path / "out", **options)
    assert error.code == "request.unsatisfiable"
    assert "name 1 adapted module of 2" in error.message
    assert "layers.0.v_proj" in error.message
    assert "--model-files DIR" in error.fix
