"""What the laws found in distributed checkpoints, each as the smallest case that shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from laws.dcp_files import Save, Sharded, StridedShard, nested, read_metadata, save
from reshard.local import load_engine
from reshard.models import ConvertRequest, ConvertResult, OpaquePolicy
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import open_location

EMBED, HEAD, FROZEN = (torch.arange(first, first + 24.0).reshape(6, 4) for first in (0, 100, 200))


def _read(directory: Path) -> Checkpoint:
    return read_checkpoint(open_location(str(directory)), None, OpaqueLedger(OpaquePolicy.REFUSE))


def _saved(directory: Path, how: Save, placements: tuple[Placement, ...], **beside: Any) -> Path:
    """Two names for one trained matrix, one more trained matrix, and a frozen one."""
    held = {n: Sharded(t, placements) for n, t in {"embed": EMBED, "head": HEAD, "frozen": FROZEN}.items()}
    states = {name: {"exp_avg": held[name]} for name in ("embed", "head")}
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": ["embed", "head"]}]}
    save({"model": {**held, "tied": held["embed"]}, "optimizer": optimizer, **beside}, directory, how)
    return directory


def _convert(source: Path, target: Path, to: str = "dcp", **options: Any) -> ConvertResult:
    request = {"source": {"url": str(source)}, "target": str(target), "to": to, **options}
    return load_engine().convert(ConvertRequest.model_validate(request))


MESHES: dict[str, tuple[Save, tuple[Placement, ...]]] = {
    "rows": (Save((2,)), (Shard(0),)),
    "replicas of rows": (Save((2, 3)), (Replicate(), Shard(0))),
    "replicas of boxes": (Save((2, 2, 2)), (Replicate(), Shard(0), Shard(1))),
    "strided rows": (Save((2, 2)), (StridedShard(0, split_factor=2), Shard(0))),
    "ranks alone": (Save((2, 2), collectives=False), (Replicate(), Shard(0))),
    "copies alone": (Save((3,), collectives=False), (Replicate(),)),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_ties_and_roles_are_found_on_every_mesh(mesh: str, tmp_path: Path) -> None:
    """Of replicas, any rank may write: chunks come in another order for each tensor, or several times."""
    found = _read(_saved(tmp_path / "in", *MESHES[mesh]))
    assert found.shared == {"tied": "embed"}
    assert [p.fqn for p in found.parameters if p.trained] == ["embed", "head"]
    assert [p.fqn for p in found.parameters if not p.trained] == ["frozen"]
    assert found.buffers == ()


def test_chunks_come_in_another_order_for_each_tensor(tmp_path: Path) -> None:
    """The control of the test above."""
    entries: Any = read_metadata(_saved(tmp_path / "in", *MESHES["replicas of rows"]) / ".metadata").state_dict_metadata
    orders = {tuple(tuple(c.offsets) for c in entries[key].chunks) for key in entries if key.startswith("model.")}
    assert len(orders) > 1


@pytest.mark.parametrize("steps", [0, 3])
def test_numbers_of_parameters_are_no_indices_of_lists(steps: int, tmp_path: Path) -> None:
    model = {"a": Sharded(EMBED[:2, :2].clone(), (Shard(0),)), "b": torch.ones(3)}
    states = {0: {"exp_avg": model["a"]}, 1: {"exp_avg": model["b"]}} if steps else {}
    optimizer = {
        "state": states,
        "param_groups": [{"lr": 0.1, "foreach": None, "params": [0, 1] if steps else ["a", "b"]}],
    }
    save({"model": model, "optimizer": optimizer, "rng": [torch.ones(99), 3]}, tmp_path / "in", Save((2,)))
    assert [p.fqn for p in _read(tmp_path / "in").trained] == ["a", "b"]


def test_a_parameter_that_is_called_by_a_number(tmp_path: Path) -> None:
    model = {"1": torch.ones(2), "0": torch.zeros(2)}
    states = {name: {"exp_avg": tensor} for name, tensor in model.items()}
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": ["0"]}, {"lr": 0.2, "params": ["1"]}]}
    save({"model": model, "optimizer": optimizer}, tmp_path / "in", Save())
    assert {p.fqn: p.group for p in _read(tmp_path / "in").trained} == {"0": 0, "1": 1}


def test_empty_dicts_in_lists_become_none_as_torch_makes_them(tmp_path: Path) -> None:
    _saved(tmp_path / "in", *MESHES["rows"], notes=[{}, {"a": 1}, {}, {"b": torch.ones(2)}])
    _convert(tmp_path / "in", tmp_path / "out")
    before, after = (read_metadata(tmp_path / place / ".metadata").planner_data for place in ("in", "out"))
    said = [[key for key in paths if key.startswith("notes")] for paths in (before, after)]
    assert said == [["notes.1.a", "notes.3.b"], ["notes.0", "notes.1.a", "notes.2", "notes.3.b"]]
    assert nested(dict.fromkeys(said[0], 1), before)["notes"] == [None, {"a": 1}, None, {"b": 1}]


def test_a_buffer_under_two_names_keeps_both(tmp_path: Path) -> None:
    """With numbers, ties are found among all tensors; a tensor that FSDP left whole is taken for a buffer."""
    model = {"a": Sharded(EMBED[:, :3].clone(), (Shard(0),)), "whole": HEAD, "again": HEAD}
    optimizer = {"state": {0: {"exp_avg": model["a"]}}, "param_groups": [{"lr": 0.1, "foreach": None, "params": [0]}]}
    save({"model": model, "optimizer": optimizer}, tmp_path / "in", Save((2,)))
    options = {"layout": {"dp": 1, "zero_stage": "1"}, "dtype": "fp32"}
    _convert(tmp_path / "in", tmp_path / "run" / "step", "zero", **options)
    states = torch.load(tmp_path / "run" / "step" / "mp_rank_00_model_states.pt", weights_only=False)
    assert list(states["module"]) == ["a", "whole", "again"]


def test_client_state_does_not_become_weights(tmp_path: Path) -> None:
    """At the root, torchtitan's place of the model, every tensor is a weight."""
    _saved(tmp_path / "in", *MESHES["rows"], seed=torch.ones(2), nested={"seed": torch.ones(2)}, epoch=3)
    result = _convert(tmp_path / "in", tmp_path / "out", options={"dcp": {"grammar": "torchtitan"}})
    assert [entry.path for entry in result.not_carried] == ["seed"]
    found = _read(tmp_path / "out")
    assert found.module_names == ("embed", "head", "frozen", "tied")
    assert {"nested", "epoch"} <= found.client_state.keys()


def test_accelerates_directories_of_ranks_that_save_alone(tmp_path: Path) -> None:
    how, placements = MESHES["ranks alone"]
    held = {"w": Sharded(EMBED, placements)}
    save({"model": held}, tmp_path / "in" / "pytorch_model_fsdp_0", how)
    optimizer = {"state": {"w": {"exp_avg": held["w"], "step": 3}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
    save({"optimizer": optimizer}, tmp_path / "in" / "optimizer_0", how)
    assert [p.fqn for p in _read(tmp_path / "in").trained] == ["w"]
