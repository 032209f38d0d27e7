"""Directories of torch_checkpointing, made by torch in one process, with the metadata that the framework would write.

Source: torch_checkpointing 0.1.1 `distributed_metadata.py`, `dtensor_metadata.py`, `default_resharder.py`
(`_replicated_tensor_metadata`), `state_transformations.py` (`optimizer_transform_pre`), `checkpoint_writer.py`.
"""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from laws.rank_files import Tensors, World, of_rank

HYPER_PARAMETERS = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False,
                    "foreach": None}  # fmt: skip
Change = Callable[[int, dict[str, Any]], None]
"""Changes the payload of one rank."""


@dataclass(frozen=True)
class Items:
    """The way in which a payload is saved.

    Attributes:
        numbers: the optimizer has numbers in place of names.
        layouts: for items that have one, the file's path with `{rank}`.
        described: items with a resharder; the metadata describe them.
        version: of the metadata.
        others: further items; a function is called with the rank.
    """

    numbers: bool = False
    layouts: Mapping[str, str] = field(default_factory=dict[str, str])
    described: Sequence[str] = ("model", "optimizer")
    version: str = "2.0"
    others: Mapping[str, Any] = field(default_factory=dict[str, Any])


def save_items(
    tensors: Tensors,
    folder: Path,
    world: World,
    how: Items = Items(),
    *,
    change: Change | None = None,
    change_metadata: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """The files of each rank, and `metadata.pkl` if an item is described."""

    def payload_of(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        return _payload(tensors, mesh, how, rank)

    return save_payloads(payload_of, folder, world, how, change=change, change_metadata=change_metadata)


def save_item_run(
    model: Mapping[str, Any], optimizer: Mapping[str, Any], others: Mapping[str, Any], folder: Path, world: World
) -> Path:
    """The items of a run whose state dicts hold `dcp_files.Sharded`; its optimizer has names."""
    groups = [{"param_names": g["params"], **{k: v for k, v in g.items() if k != "params"}}
              for g in optimizer["param_groups"]]  # fmt: skip

    def payload_of(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        made: dict[int, Any] = {}
        states = {"state": of_rank(optimizer["state"], mesh, made), "param_groups": groups}
        items = {"model": OrderedDict(of_rank(dict(model), mesh, made))}
        return {**items, "optimizer": {**states, "_optimizer_state_format_version": 1}, **others}

    return save_payloads(payload_of, folder, world, Items())


def save_payloads(
    payload_of: Callable[[int, DeviceMesh], dict[str, Any]],
    folder: Path,
    world: World,
    how: Items,
    *,
    change: Change | None = None,
    change_metadata: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """The files of each rank's payload, and `metadata.pkl` if an item is described."""
    folder.mkdir(parents=True, exist_ok=True)
    specs: dict[str, dict[str, dict[str, Any]]] = {}
    for rank in range(world.size):
        with world.mesh_of(rank) as mesh:
            payload = payload_of(rank, mesh)
            for item in how.described:
                for path, spec in _specs(payload[item], world.size):
                    text = json.dumps(path, separators=(",", ":"))
                    specs.setdefault(item, {}).setdefault(text, {})[str(spec)] = spec
            if change is not None:
                change(rank, payload)
            for item, value in payload.items():
                _save(value, folder / how.layouts.get(item, f"{item}_{{rank}}.pt").format(rank=rank))
    if how.described:
        metadata = _metadata(specs, how, world.size)
        if change_metadata is not None:
            change_metadata(metadata)
        (folder / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    return folder


def _payload(tensors: Tensors, mesh: DeviceMesh, how: Items, rank: int) -> dict[str, Any]:
    def cut(whole: torch.Tensor, placements: Any) -> Any:
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)

    model: OrderedDict[str, Any] = OrderedDict(tensors.buffers)
    for name, (whole, placements) in tensors.parameters.items():
        model[name] = cut(whole, placements)
    for alias, owner in tensors.ties.items():
        model[alias] = model[owner]
    order = [n for g in tensors.groups for n in g]
    key_of: Callable[[str], Any] = order.index if how.numbers else str
    states = {
        key_of(name): {
            state: value if state == "step" else cut(value, tensors.parameters[name][1])
            for state, value in sorted(tensors.states_of(name).items(), key=lambda item: item[0] != "step")
        }
        for name in order
    }
    groups: list[dict[str, Any]] = [
        {**HYPER_PARAMETERS, "params": [order.index(n) for n in names]}
        if how.numbers
        else {"param_names": list(names), **HYPER_PARAMETERS}
        for names in tensors.groups
    ]
    optimizer = {"state": states, "param_groups": groups}
    optimizer |= {} if how.numbers else {"_optimizer_state_format_version": 1}
    others = {key: value(rank) if callable(value) else value for key, value in how.others.items()}
    return {"model": model, "optimizer": optimizer, **others}


def _save(value: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(value, sort_keys=True, indent=4))
    elif path.suffix == ".safetensors":
        local = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in value.items()}
        save_file({n: t.contiguous() for n, t in local.items()}, path)
    else:
        torch.save(value, path)


def _specs(value: Any, world: int, path: tuple[Any, ...] = ()) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    if isinstance(value, torch.Tensor):
        yield list(path), _spec(value, world)
    elif isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _specs(inner, world, (*path, key))


def _spec(tensor: torch.Tensor, world: int) -> dict[str, Any]:
    mesh = {"device_type": "cpu", "mesh_shape": (world,), "mesh_data": tuple(range(world)), "mesh_dim_names": None}
    placements: Sequence[Any] = [{"type": "Replicate"}]
    if isinstance(tensor, DTensor):
        on = tensor.device_mesh
        ranks = tuple(on.mesh.flatten().tolist())
        mesh |= {"mesh_shape": tuple(on.mesh.shape), "mesh_data": ranks, "mesh_dim_names": on.mesh_dim_names}
        placements = [_placement(p) for p in tensor.placements]
    data = {"global_shape": list(tensor.shape), "dtype": str(tensor.dtype), "stride": list(tensor.stride())}
    return {"type": "DTensorShardingMetadata", "data": {**data, "mesh_spec": mesh, "placements": placements}}


def _placement(placement: Placement) -> dict[str, Any]:
    if isinstance(placement, _StridedShard):
        return {"type": "StridedShard", "dim": placement.dim, "split_factor": placement.split_factor}
    return {"type": "Shard", "dim": placement.dim} if isinstance(placement, Shard) else {"type": "Replicate"}


_FORMS = {".pt": "Torch", ".json": "Json", ".safetensors": "Safetensors"}


def _layout(item: str, how: Items, rank: int) -> dict[str, Any] | None:
    if (pattern := how.layouts.get(item)) is None:
        return None
    form = f"{_FORMS[Path(pattern).suffix]}Serialization"
    return {"file_path": pattern.format(rank=rank), "serialization_format": {"type": form}}


def _metadata(specs: Mapping[str, Mapping[str, Mapping[str, Any]]], how: Items, world: int) -> dict[str, Any]:
    def groups(found: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [
            {"sharding_metadata": s, "ranks": tuple(sorted(s["data"]["mesh_spec"]["mesh_data"]))}
            for s in found.values()
        ]

    if how.version == "1.0":
        paths = {
            json.dumps([item, *json.loads(path)], separators=(",", ":")): groups(found)
            for item, held in specs.items()
            for path, found in held.items()
        }
        layouts = {r: {item: _layout(item, how, r) for item in specs} for r in range(world)}
        return {"metadata": paths, "rank_to_layout_info_mappings": layouts, "world_size": world, "version": "1.0"}
    items = {
        item: {
            "nested_path_to_metadata": {path: groups(found) for path, found in held.items()},
            "rank_to_layout_info": {r: _layout(item, how, r) for r in range(world)},
        }
        for item, held in specs.items()
    }
    return {"metadata": items, "world_size": world, "version": how.version}


# Comparing.


def _differences(a: Any, b: Any, at: str = "") -> list[str]:
    """The places where two values differ; DTensors with their meshes, dicts with their order."""
    if type(a) is not type(b):
        return [f"{at}: {type(a)}, {type(b)}"]
    if isinstance(a, DTensor):
        state_a, state_b = ({**t.device_mesh.__getstate__(), "_hash": 0} for t in (a, b))
        same = (str(state_a), a.placements, a.shape, a.stride()) == (str(state_b), b.placements, b.shape, b.stride())
        specs = [(t._spec.tensor_meta, t._spec.shard_order) for t in (a, b)]  # pyright: ignore[reportPrivateUsage]
        return _differences(a.to_local(), b.to_local(), at) + ([] if same and specs[0] == specs[1] else [f"{at}: mesh"])
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        return [] if same else [f"{at}: {a}, {b}"]
    if isinstance(a, np.ndarray):  # of numpy's random state
        return [] if (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()) else [f"{at}: {a}, {b}"]
    if isinstance(a, dict):
        if list(a) != list(b):
            return [f"{at}: {list(a)}, {list(b)}"]
        return [d for k in a for d in _differences(a[k], b[k], f"{at}.{k}")]
    if isinstance(a, list | tuple):
        found = [d for i, pair in enumerate(zip(a, b, strict=False)) for d in _differences(*pair, f"{at}[{i}]")]
        return found + ([] if len(a) == len(b) else [f"{at}: {len(a)}, {len(b)}"])
    return [] if a == b else [f"{at}: {a!r}, {b!r}"]


def _content(file: Path) -> Any:
    if file.suffix == ".pt":
        return torch.load(file, weights_only=False)
    if file.suffix == ".pkl":
        return pickle.loads(file.read_bytes())
    return load_file(file) if file.suffix == ".safetensors" else file.read_text()


def folder_differences(a: Path, b: Path) -> list[str]:
    """The places where the files of two directories differ, but for how long storages are."""
    names = [
        sorted(str(f.relative_to(d)) for f in d.rglob("*") if f.is_file() and f.name != "reshard.json") for d in (a, b)
    ]
    if names[0] != names[1]:
        return [f"{names[0]}, {names[1]}"]
    found = [d for n in names[0] if n != "metadata.pkl" for d in _differences(_content(a / n), _content(b / n), n)]
    both = [_content(d / "metadata.pkl") for d in (a, b) if (d / "metadata.pkl").exists()]
    return found + ([] if not both or both[0] == both[1] else ["metadata.pkl"])
