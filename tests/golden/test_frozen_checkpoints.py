"""Small frozen checkpoints, written by real DeepSpeed, against the truth that was recorded with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from house.conversions import convert
from house.repository import DATA
from reshard.choices import TargetFormat, WeightDtype
from reshard.engine import load_engine
from reshard.models.reports import DiffOptions
from reshard.options import SourceSpec

FROZEN = ["zero2_tiny", "zero3_tiny", "zero2_python3112", "zero3_python3112"]


def _truth(name: str, kind: str) -> dict[str, torch.Tensor]:
    tensors = load_file(DATA / name / "expected.safetensors")
    return {k.removeprefix(f"{kind}/"): v for k, v in tensors.items() if k.startswith(f"{kind}/")}


@pytest.mark.parametrize("name", FROZEN)
def test_universal_holds_the_recorded_tensors(name: str, tmp_path: Path) -> None:
    convert(DATA / name, tmp_path / "u", TargetFormat.UNIVERSAL)
    for kind in ("fp32", "exp_avg", "exp_avg_sq"):
        truth = _truth(name, kind)
        assert truth
        for fqn, expected in truth.items():
            atom = torch.load(tmp_path / "u" / "zero" / fqn / f"{kind}.pt", weights_only=True)
            assert atom["param"].dtype == torch.float32
            assert torch.equal(atom["param"], expected), f"{kind} of {fqn}"
    steps = json.loads((DATA / name / "expected.json").read_text())["scalars"]["step"]
    for fqn in _truth(name, "fp32"):
        assert float(torch.load(tmp_path / "u" / "zero" / fqn / "step.pt", weights_only=True)) == float(steps[fqn])
    states = torch.load(tmp_path / "u" / "mp_rank_00_model_states.pt", weights_only=True)
    for kind in ("buffer", "frozen"):
        for fqn, expected in _truth(name, kind).items():
            assert states["module"][fqn].dtype == expected.dtype
            assert torch.equal(states["module"][fqn], expected), f"{kind} {fqn}"
    assert (tmp_path / "latest_universal").read_text() == "u"


@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.parametrize("to", [TargetFormat.SAFETENSORS, TargetFormat.TORCH])
@pytest.mark.parametrize("dtype", list(WeightDtype))
@pytest.mark.parametrize("sharded", [False, True])
def test_weights_are_the_recorded_masters(
    name: str, to: TargetFormat, dtype: WeightDtype, sharded: bool, tmp_path: Path
) -> None:
    convert(DATA / name, tmp_path / "w", to, dtype=dtype, max_shard_bytes=600 if sharded else None)
    found: dict[str, torch.Tensor] = {}
    for path in sorted((tmp_path / "w").glob("*.safetensors")):
        found |= load_file(path)
    for path in sorted((tmp_path / "w").glob("*.bin")):
        found |= torch.load(path, weights_only=True)
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype.value]
    for kind in ("fp32", "frozen"):
        for fqn, expected in _truth(name, kind).items():
            assert torch.equal(found[fqn], expected.to(wanted)), fqn
    for fqn, expected in _truth(name, "buffer").items():
        cast = expected.is_floating_point() and expected.dim() > 0
        assert torch.equal(found[fqn], expected.to(wanted) if cast else expected), fqn
    assert ("head.weight" in found) == (to is TargetFormat.TORCH), "tied weights are stored once"
    if sharded:
        index = json.loads(next((tmp_path / "w").glob("*.index.json")).read_text())
        assert len(set(index["weight_map"].values())) > 1
        assert set(index["weight_map"]) == set(found) - {"head.weight"}
        assert index["metadata"]["total_size"] == sum(t.nbytes for n, t in found.items() if n != "head.weight")


@pytest.mark.parametrize("name", FROZEN)
def test_inspection_is_what_it_was(name: str) -> None:
    found = load_engine().inspect(SourceSpec(url=str(DATA / name)))
    assert (found.format, found.zero_stage) == (f"deepspeed-{name[:5]}", int(name[4]))
    assert (found.world, found.step, found.param_groups) == ({"dp": 2, "tp": 1, "pp": 1}, 3, 1)
    assert found.optimizer_states == ("exp_avg", "exp_avg_sq", "step")
    assert found.foreign_globals == ()
    shared = {t.fqn: t.shared_with for t in found.tensors if t.shared_with}
    assert shared == {"head.weight": "embed.weight"}
    assert [t.fqn for t in found.tensors if t.frozen] == ["adapter.weight"]


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_the_python_that_saved_makes_no_difference(stage: str) -> None:
    """3.11.2 names members of enums where others give their values: the rest of the run is the same."""
    by_name = SourceSpec(url=str(DATA / f"{stage}_python3112"))
    found = load_engine().diff(SourceSpec(url=str(DATA / f"{stage}_tiny")), by_name, DiffOptions())
    assert found.equal, found
