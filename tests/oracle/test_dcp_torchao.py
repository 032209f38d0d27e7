"""torchao's low-bit optimizers: weights come out, and a distributed target keeps the quantized states as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import reshard
from house.shared import made_once
from house.tiers import rest_full
from oracle.conversions import agree
from oracle.dcp_cases import TITAN_FOLDER, is_here
from oracle.dcp_driver import TIMEOUT_S
from oracle.launcher import Worlds
from oracle.outputs import read_safetensors
from reshard.engine import load_engine
from reshard.errors import RequestError
from reshard.options import SourceSpec

pytestmark = pytest.mark.skipif(
    not is_here("torchao"), reason=f"torchao is not installed, and {TITAN_FOLDER} names no folder of it"
)
OPTIMIZERS = {"AdamW8bit": "OptimState8bit", "AdamW4bit": "OptimState4bit", "AdamWFp8": "OptimStateFp8"}
"""Optimizers, each with the class of its states."""
SEVERAL = rest_full(OPTIMIZERS, "AdamW8bit")


def _run(worlds: Worlds, function: str, world: int, **kwargs: Any) -> dict[str, Any]:
    ranks = worlds.run(f"oracle.dcp_torchao:{function}", world=world, timeout_s=TIMEOUT_S, **kwargs)
    found: dict[str, Any] = ranks[0]
    return found


def _saved(worlds: Worlds, factory: pytest.TempPathFactory, name: str) -> tuple[Path, list[float]]:
    """The folder of a real run on two ranks, and the losses after its save."""

    def save(folder: Path) -> list[float]:
        got = _run(worlds, "save", 2, name=name, folder=str(folder))
        assert got["kinds"] == sorted(["Tensor", OPTIMIZERS[name]])
        return got["losses"]

    return made_once(factory, f"dcp-torchao-{name}", save)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_come_out_and_states_are_named(
    name: str, worlds: Worlds, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    folder, _ = _saved(worlds, tmp_path_factory, name)
    result = reshard.convert(folder / "dcp", tmp_path / "weights", to="safetensors")
    assert read_safetensors(tmp_path / "weights").tensors == read_safetensors(folder / "weights").tensors
    assert {"optimizer.state.*.exp_avg", "optimizer.state.*.exp_avg_sq"} <= {e.path for e in result.not_carried}
    with pytest.raises(RequestError, match=rf"exp_avg \(torchao\.optim\.\w+\.{OPTIMIZERS[name]}\)") as refused:
        reshard.convert(folder / "dcp", tmp_path / "zero" / "step", to="zero", dp=2, zero_stage=1)
    assert refused.value.code == "request.unsatisfiable"
    assert "--to safetensors" in str(refused.value.fix)
    found = load_engine().inspect(SourceSpec(url=str(folder / "dcp")))
    assert {t.name: t.possible for t in found.targets} == {
        "zero --dp": False, "universal": False, "safetensors": True, "torch": True, "dcp": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "world"), rest_full([(n, w) for n in OPTIMIZERS for w in (1, 2, 4)], ("AdamW8bit", 2), ("AdamW4bit", 1))
)
def test_a_distributed_target_keeps_the_states(
    name: str, world: int, worlds: Worlds, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    folder, losses = _saved(worlds, tmp_path_factory, name)
    result = reshard.convert(folder / "dcp", tmp_path / "dcp", to="dcp", files=3)
    assert result.not_carried == ()
    ours, theirs = (
        _run(worlds, "resume", world, name=name, path=str(path))["losses"]
        for path in (tmp_path / "dcp", folder / "dcp")
    )
    assert ours == theirs  # torch resumes from both alike: on other ranks it cuts the blocks otherwise, and rounds
    assert agree(tuple(ours[:2]), tuple(losses[:2]), significant=5)
    assert world != 2 or agree(tuple(ours), tuple(losses), significant=5)
    assert len(set(losses)) == 3


@pytest.mark.parametrize("name", SEVERAL)
def test_a_file_of_torch_save_becomes_what_dcp_loads(name: str, worlds: Worlds, tmp_path: Path) -> None:
    losses = _run(worlds, "save_as_file", 1, name=name, folder=str(tmp_path))["losses"]
    reshard.convert(tmp_path / "state.pt", tmp_path / "dcp", to="dcp")
    got = _run(worlds, "resume_without_fsdp", 1, name=name, path=str(tmp_path / "dcp"))
    assert got["losses"] == losses


@pytest.mark.parametrize("name", SEVERAL)
def test_one_file_of_a_distributed_checkpoint_names_what_it_lacks(
    name: str, worlds: Worlds, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    folder, _ = _saved(worlds, tmp_path_factory, name)
    result = reshard.convert(folder / "dcp", tmp_path / "file", to="torch_save")
    lost = {f"optimizer.state.{n}.weight.{state}" for n in (0, 2) for state in ("exp_avg", "exp_avg_sq")}
    assert {entry.path for entry in result.not_carried} == lost
