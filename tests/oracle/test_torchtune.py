"""torchtune's own checkpointers and recipes: their files on other ranks, and files for them."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file

import reshard
from house.rank_cases import RankCase
from house.shared import made_once
from oracle.dcp_cases import TITAN_FOLDER
from oracle.dcp_driver import TIMEOUT_S, FsdpOracle
from oracle.whole_tensors import differences

HERE = Path(os.environ.get(TITAN_FOLDER, os.devnull), "torchtune").is_dir() or find_spec("torchtune") is not None
pytestmark = pytest.mark.skipif(
    not HERE, reason=f"torchtune is not installed, and {TITAN_FOLDER} names no folder of it"
)
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "distributed": (2, {"form": "tune", "recipe": "distributed"}),
    "single_device": (1, {"form": "tune", "recipe": "single_device"}),
    "hf": (2, {"form": "hf", "recipe": "distributed"}),
}
"""Runs of torchtune by the number of their ranks: an optimizer of names, one of numbers, weights of Hugging Face."""
Trained: TypeAlias = Callable[[str], RankCase]


@pytest.fixture(scope="module")
def trained(fsdp: FsdpOracle, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """`trained(name)`: torchtune's output directory after one epoch of two, with the run's truth."""

    def case(name: str) -> RankCase:
        world, how = KINDS[name]

        def make(folder: Path) -> list[float]:
            jobs: dict[str, Any] = {"folder": str(folder), "case": how}
            return list(fsdp.worlds.run("oracle.tune_runs:tune", world=world, timeout_s=TIMEOUT_S, **jobs)[0]["losses"])

        folder, losses = made_once(tmp_path_factory, f"tune-{name}", make)
        found = RankCase(folder)
        found.facts["losses_after"] = losses
        return found

    return case


@pytest.mark.parametrize("way", ["zero", "fsdp2"])
@pytest.mark.parametrize("name", ["distributed", "single_device"])
def test_torchtune_goes_on_from_files_that_were_elsewhere(
    name: str, way: str, trained: Trained, tmp_path: Path, fsdp: FsdpOracle
) -> None:
    """To ZeRO-3 on three ranks or FSDP2 on two, and back to the recipe that saved them, which loads them itself."""
    case, (world, how), out = trained(name), KINDS[name], tmp_path / "loaded.safetensors"
    shared: dict[str, Any] = {"case": how, "timeout_s": TIMEOUT_S}
    losses = pytest.approx(case.facts["losses_after"], abs=2e-6)
    there = tmp_path / "there" / "s"
    options: dict[str, Any] = {"dp": 3, "zero_stage": "3"} if way == "zero" else {"framework": "state-dict"}
    result = reshard.convert(case.checkpoint, there, to="zero" if way == "zero" else "dcp", progress=False, **options)
    assert any("numbers are taken for the model's order" in w for w in result.warnings) is (name == "single_device")
    ranks = 3 if way == "zero" else 2
    place = there.parent if way == "zero" else there
    function = f"oracle.tune_runs:resume_{'zero' if way == 'zero' else 'shards'}"
    found = fsdp.worlds.run(function, world=ranks, path=str(place), out=str(out), **shared)
    assert differences(case, load_file(out)) == []
    assert [f["losses"] for f in found] == [losses] * ranks
    more: dict[str, Any] = {"target_param_order": "groups"} if name == "single_device" else {}
    back = tmp_path / "back"
    reshard.convert(there, back, to="torch_save", framework="torchtune", progress=False, **more)
    found = fsdp.worlds.run("oracle.tune_runs:tune", world=world, folder=str(out), path=str(back), **shared)
    assert differences(case, load_file(out)) == []
    assert [f["losses"] for f in found] == [losses] * world


@pytest.mark.parametrize("name", ["distributed", "single_device"])
def test_torchtunes_files_are_the_same_values_again(name: str, trained: Trained, tmp_path: Path) -> None:
    case = trained(name)
    more: dict[str, Any] = {"target_param_order": "groups"} if name == "single_device" else {}
    reshard.convert(case.checkpoint, tmp_path / "out", to="torch_save", framework="torchtune", progress=False, **more)
    weights, state = (
        [torch.load(d / file, weights_only=True) for d in (case.checkpoint, tmp_path / "out")]
        for file in ("epoch_0/model-00001-of-00001.bin", "recipe_state/recipe_state.pt")
    )
    assert [*weights[0]] == [*weights[1]]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert state[0].keys() == state[1].keys()
    assert all(state[0][key] == state[1][key] for key in state[0].keys() - {"optimizer"})
    saved, now = (one["optimizer"] for one in state)
    assert saved["param_groups"] == now["param_groups"]
    assert saved["state"].keys() == now["state"].keys()
    assert all(torch.equal(v, now["state"][n][k]) for n, held in saved["state"].items() for k, v in held.items())


def test_weights_of_hugging_face_leave_the_optimizer_unread(trained: Trained, tmp_path: Path) -> None:
    """torchtune turns the rows of query and key for these, so that its states are of other rows."""
    case = trained("hf")
    with pytest.raises(reshard.ReshardError, match="is of parameters under other names") as caught:
        reshard.convert(case.checkpoint, tmp_path / "no", to="zero", dp=3, zero_stage="3", progress=False)
    assert caught.value.code == "checkpoint.ambiguous"
    assert "save with FullModelTorchTuneCheckpointer" in (caught.value.fix or "")
    reshard.convert(case.checkpoint, tmp_path / "out", to="safetensors", progress=False)
    saved = load_file(case.checkpoint / "epoch_0" / "model-00001-of-00001.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == found.keys()
    assert all(torch.equal(found[n], t) for n, t in saved.items())
