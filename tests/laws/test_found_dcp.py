"""What the laws found in distributed checkpoints, each as the smallest case that shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

from house.conversions import convert
from laws.dcp_files import Save, Sharded, StridedShard, nested, read_metadata, save
from reshard.choices import OpaquePolicy
from reshard.errors import RequestError, SourceError
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
    convert(tmp_path / "in", tmp_path / "out", "dcp")
    before, after = (read_metadata(tmp_path / place / ".metadata").planner_data for place in ("in", "out"))
    said = [[key for key in paths if key.startswith("notes")] for paths in (before, after)]
    assert said == [["notes.1.a", "notes.3.b"], ["notes.0", "notes.1.a", "notes.2", "notes.3.b"]]
    assert nested(dict.fromkeys(said[0], 1), before)["notes"] == [None, {"a": 1}, None, {"b": 1}]


def test_a_buffer_under_two_names_keeps_both(tmp_path: Path) -> None:
    """With numbers, ties are found among all tensors; a tensor that FSDP left whole is taken for a buffer."""
    model = {"a": Sharded(EMBED[:, :3].clone(), (Shard(0),)), "whole": HEAD, "again": HEAD}
    optimizer = {"state": {0: {"exp_avg": model["a"]}}, "param_groups": [{"lr": 0.1, "foreach": None, "params": [0]}]}
    save({"model": model, "optimizer": optimizer}, tmp_path / "in", Save((2,)))
    options = {"dp": 1, "zero_stage": "1", "dtype": "fp32"}
    convert(tmp_path / "in", tmp_path / "run" / "step", "zero", **options)
    states = torch.load(tmp_path / "run" / "step" / "mp_rank_00_model_states.pt", weights_only=False)
    assert list(states["module"]) == ["a", "whole", "again"]


def test_client_state_does_not_become_weights(tmp_path: Path) -> None:
    """At the root, torchtitan's place of the model, every tensor is a weight."""
    _saved(tmp_path / "in", *MESHES["rows"], seed=torch.ones(2), nested={"seed": torch.ones(2)}, epoch=3)
    result = convert(tmp_path / "in", tmp_path / "out", "dcp", options={"dcp": {"framework": "torchtitan"}})
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


# An adapter that the Trainer saved alone: PEFT leaves the adapter's name out of the model's keys alone.

_MODULE = "base_model.model"
OF_ADAPTER = {
    f"{_MODULE}.q.lora_A.weight": f"{_MODULE}.q.lora_A.default.weight",
    f"{_MODULE}.q.lora_B.weight": f"{_MODULE}.q.lora_B.default.weight",
    f"{_MODULE}.q.lora_magnitude_vector": f"{_MODULE}.q.lora_magnitude_vector.default.weight",
    f"{_MODULE}.embed.lora_embedding_A": f"{_MODULE}.embed.lora_embedding_A.default",
    f"{_MODULE}.default.v.hada_w1_a": f"{_MODULE}.default.v.hada_w1_a.default",
    f"{_MODULE}.head.weight": f"{_MODULE}.head.modules_to_save.default.weight",
    f"{_MODULE}.q.base_layer.bias": f"{_MODULE}.q.base_layer.bias",
}
"""The names of trained parameters in the model's state dict, with those in the optimizer's."""


def _adapter_saved(directory: Path, names: dict[str, str], more: dict[str, Any], **shapes: tuple[int, ...]) -> Path:
    model = {name: torch.full((2, 3), float(i)) for i, name in enumerate(names)}
    moments = {key: torch.ones(shapes.get(key.rpartition(".")[2], (2, 3))) for key in names.values()}
    states = {key: {"exp_avg": value, "step": torch.tensor(3.0)} for key, value in moments.items()}
    groups = [{"lr": 0.1, "params": list(names.values())}, {"lr": 0.1, "params": []}]
    save({"model": {**model, **more}}, directory / "pytorch_model_fsdp_0", Save())
    save({"optimizer": {"state": states, "param_groups": groups}}, directory / "optimizer_0", Save())
    return directory


def test_the_optimizer_proves_the_names_of_an_adapter(tmp_path: Path) -> None:
    whole = {f"{_MODULE}.head.running_mean": torch.ones(3)}
    base = {f"{_MODULE}.embed.base_layer.weight": torch.zeros(5, 3)}
    found = _read(_adapter_saved(tmp_path / "in", OF_ADAPTER, whole | base))
    assert {p.fqn for p in found.trained} == {*OF_ADAPTER.values()}
    held = found.module_names
    assert held == (*OF_ADAPTER.values(), f"{_MODULE}.head.modules_to_save.default.running_mean", *base)
    convert(tmp_path / "in", tmp_path / "out", "dcp")
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        before, after = (read_metadata(tmp_path / place / part / ".metadata") for place in ("in", "out"))
        assert after.state_dict_metadata.keys() == before.state_dict_metadata.keys(), part
        assert after.planner_data == before.planner_data


def _without(name: str) -> dict[str, str]:
    return {k: v for k, v in OF_ADAPTER.items() if k != name}


NO_ADAPTER: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "a moment of another shape": (OF_ADAPTER, {"shape": (3, 2)}),
    "a factor that the optimizer does not have": (
        _without(f"{_MODULE}.q.lora_A.weight"), {f"{_MODULE}.q.lora_A.weight": torch.ones(2, 3)},
    ),
    "a part of another method that the optimizer does not have": (OF_ADAPTER, {f"{_MODULE}.vera_A": torch.ones(2, 3)}),
    "two adapters": ({**OF_ADAPTER, f"{_MODULE}.v.lora_A.weight": f"{_MODULE}.v.lora_A.other.weight"}, {}),
    "another module": ({**OF_ADAPTER, f"{_MODULE}.v.lora_A.weight": f"{_MODULE}.k.lora_A.default.weight"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("kind", NO_ADAPTER)
def test_names_that_nothing_proves_are_refused(kind: str, tmp_path: Path) -> None:
    names, more = NO_ADAPTER[kind]
    shapes = {"weight": more["shape"]} if "shape" in more else {}
    source = _adapter_saved(tmp_path / "in", names, {} if shapes else more, **shapes)
    with pytest.raises(SourceError, match="the model has no such parameter") as refused:
        _read(source)
    assert refused.value.code == "checkpoint.incomplete"
    # The weights alone need no names of the optimizer.
    assert len(_read(source / "pytorch_model_fsdp_0").module_names) == len(names) + len({} if shapes else more)


def test_deepspeed_gets_no_group_without_members(tmp_path: Path) -> None:
    source = _adapter_saved(tmp_path / "in", OF_ADAPTER, {})
    torch.save({"base_lrs": [0.1, 0.1], "last_epoch": 3, "lr_lambdas": [{}, {}]}, source / "scheduler.bin")
    options = {"dp": 2, "zero_stage": "1"}
    result = convert(source, tmp_path / "run" / "step", "zero", **options)
    assert "optimizer.param_groups[1]" in [entry.path for entry in result.not_carried]
    found = _read(tmp_path / "run")
    assert found.optimizer is not None
    assert len(found.optimizer.groups) == 1
    for name in ("scheduler.bin", "mp_rank_00_model_states.pt"):
        held = torch.load(tmp_path / "run" / "step" / name, weights_only=False)
        held = held if name == "scheduler.bin" else held["lr_scheduler"]
        assert held == {"base_lrs": [0.1], "last_epoch": 3, "lr_lambdas": [{}]}


# Tensors of classes of their own.


def _of_a_class(directory: Path, *, weight: bool = False) -> Path:
    made: Any = TwoTensor(HEAD.clone(), HEAD + 1)
    states = {"a": {"exp_avg": EMBED, "step": torch.tensor(3.0)}, "b": {"exp_avg": made, "step": torch.tensor(3.0)}}
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": ["a", "b"]}]}
    save({"model": {"a": EMBED, "b": made if weight else HEAD}, "optimizer": optimizer}, directory, Save())
    return directory


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_state_of_an_unlisted_class_is_kept_or_dropped_as_asked(tmp_path: Path) -> None:
    """In the place of torchao's classes, which are listed."""
    source, key = _of_a_class(tmp_path / "in"), "optimizer.state.b.exp_avg"
    with pytest.raises(SourceError, match=r"two_tensor\.TwoTensor, which is not on the allow-list") as refused:
        convert(source, tmp_path / "no", "dcp")
    assert (refused.value.code, "--opaque keep" in str(refused.value.fix)) == ("pickle.forbidden_global", True)
    kept = convert(source, tmp_path / "kept", "dcp", opaque="keep")
    assert kept.not_carried == ()
    state = {"optimizer": {"state": {"b": {"exp_avg": TwoTensor(torch.zeros(6, 4), torch.zeros(6, 4))}}}}
    with torch.serialization.safe_globals([TwoTensor]):
        torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path / "kept", no_dist=True)
    found: Any = state["optimizer"]["state"]["b"]["exp_avg"]
    assert torch.equal(found.a, HEAD)
    assert torch.equal(found.b, HEAD + 1)
    dropped = convert(source, tmp_path / "dropped", "dcp", opaque="drop")
    assert [entry.path for entry in dropped.not_carried] == [key]
    assert key not in read_metadata(tmp_path / "dropped" / ".metadata").state_dict_metadata
    with pytest.raises(RequestError, match=r"exp_avg \(.*TwoTensor\)"):
        convert(source, tmp_path / "run" / "step", "zero", opaque="keep", dp=1, zero_stage="1")
    weights = convert(source, tmp_path / "weights", "safetensors", opaque="keep")
    assert "optimizer.state.*.exp_avg" in [entry.path for entry in weights.not_carried]


def test_a_weight_of_such_a_class_is_refused(tmp_path: Path) -> None:
    for to in ("dcp", "safetensors"):
        with pytest.raises(SourceError, match=r"model\.b is not a plain tensor, but a .*TwoTensor") as refused:
            convert(_of_a_class(tmp_path / to, weight=True), tmp_path / f"{to}-out", to, opaque="keep")
        assert refused.value.code == "source.unsupported"
