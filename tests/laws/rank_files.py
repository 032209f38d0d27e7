"""Files of FSDP's ranks, made by torch in one process: DTensors on real meshes, whose process groups are fake.

A fake group knows its rank and its size and moves nothing. So one process makes the file of each rank after the other,
and `torch.save` pickles what the real rank would pickle.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard, ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Placement, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from laws.dcp_files import Sharded

Placements = Sequence[Placement] | str
ROWS = (Shard(0),)
Change = Callable[[int, str, dict[str, Any]], None]
"""Changes what one rank saves: the rank, the name of the item, and the value."""


@dataclass(frozen=True)
class World:
    """A mesh of ranks.

    Attributes:
        shape: sizes of the axes.
        names: names of the axes; None as Accelerate makes them.
        part: the axes on which tensors lie; None for all of them.
        flat: those axes are one.
    """

    shape: tuple[int, ...] = (2,)
    names: tuple[str, ...] | None = ("fsdp",)
    part: tuple[str, ...] | None = None
    flat: bool = False

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.shape)

    @contextmanager
    def mesh_of(self, rank: int) -> Generator[DeviceMesh]:
        """The mesh as a rank knows it."""
        dist.init_process_group("fake", rank=rank, world_size=self.size, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", self.shape, mesh_dim_names=self.names)
            mesh = mesh if self.part is None else mesh[self.part]
            yield mesh._flatten("one") if self.flat else mesh  # pyright: ignore[reportPrivateUsage]
        finally:
            dist.destroy_process_group()


@dataclass(frozen=True)
class Tensors:
    """A model and its optimizer as whole tensors.

    Attributes:
        parameters: by name, in the model's order, with the placements of each.
        buffers: plain tensors by name; they lie before the parameters.
        ties: second names, each with the first one.
        groups: names of the parameters of each param group.
        states: states by name of the parameter; by default two moments and a step.
    """

    parameters: Mapping[str, tuple[torch.Tensor, Placements]]
    buffers: Mapping[str, torch.Tensor]
    ties: Mapping[str, str]
    groups: Sequence[Sequence[str]]

    def states_of(self, name: str) -> dict[str, torch.Tensor]:
        """The whole states of a parameter: other numbers than its own."""
        whole = self.parameters[name][0]
        return {"exp_avg": whole + 1000, "exp_avg_sq": whole + 2000, "step": torch.tensor(3.0)}


def sharded_tensor(whole: torch.Tensor, rank: int, world: int) -> ShardedTensor:
    """A tensor as FSDP1 without a device mesh shards it: rows, by a specification that lists every rank's."""
    chunk = -(-whole.shape[0] // world)
    begins = [min(whole.shape[0], r * chunk) for r in range(world + 1)]
    tail = [0] * (whole.dim() - 1)
    shards = [
        ShardMetadata([a, *tail], [b - a, *whole.shape[1:]], f"rank:{r}/cpu")
        for r, (a, b) in enumerate(pairwise(begins))
    ]
    properties = TensorProperties(dtype=whole.dtype)
    metadata = ShardedTensorMetadata(shards, whole.shape, properties)
    mine = [LocalShard(whole[begins[rank] : begins[rank + 1]].clone(), shards[rank])]
    spec = ChunkShardingSpec(0, [f"rank:{r}/cpu" for r in range(world)])
    return ShardedTensor._init_from_local_shards_and_global_metadata(  # pyright: ignore[reportPrivateUsage]
        mine, metadata, sharding_spec=spec
    )


def numbers(first: int, *shape: int) -> torch.Tensor:
    """Numbers that no other tensor has."""
    return torch.arange(first, first + prod(shape), dtype=torch.float32).reshape(shape)


def small_model(placements: Placements = ROWS, *, rows: int = 5) -> Tensors:
    """Uneven rows, two matrices of one shape, a vector shorter than the ranks, a tied head and two buffers."""
    found = {
        "embed.weight": (numbers(0, rows + 2, 4), placements),
        "layers.0.q.weight": (numbers(100, rows, 4), placements),
        "layers.0.o.weight": (numbers(200, rows, 4), placements),
        "norm.weight": (numbers(300, rows), placements),
    }
    buffers = {"count": torch.tensor(7), "table": numbers(400, 2, 3)}
    return Tensors(found, buffers, {"head.weight": "embed.weight"}, [list(found)])


def save_verl(
    tensors: Tensors,
    folder: Path,
    world: World,
    *,
    change: Change | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """The files of verl: numbers in place of names, one set for each rank."""
    order = list(tensors.parameters)
    groups = [[order.index(n) for n in names] for names in tensors.groups]
    return _save(
        tensors, folder, world, order.index, groups, _VERL, change, extra or {"lr_scheduler": None, "rng": None}
    )


def save_verl_run(place: Path, models: Sequence[str] = ("actor", "critic")) -> Path:
    """A run of verl on two ranks, with the state of its data loader, an older step, and its tracker."""
    step, two = place / "global_step_3", World((2,), ("fsdp",))
    for model in models:
        extra = {"lr_scheduler": {"last_epoch": 3, "_last_lr": [0.1]}, "rng": None}
        save_verl(small_model(), step / model, two, extra=extra)
        (step / model / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 2}))
    (step / "data.pt").write_bytes(b"data loader")
    shutil.copytree(step, place / "global_step_2")
    (place / "latest_checkpointed_iteration.txt").write_text("3")
    return place


def save_accelerate(tensors: Tensors, folder: Path, world: World, *, change: Change | None = None) -> Path:
    """The files of Accelerate without DCP: names, and no file beside model and optimizer."""
    return _save(tensors, folder, world, str, tensors.groups, _ACCELERATE, change, None)


def save_run(
    model: Mapping[str, Any], optimizer: Mapping[str, Any], extra: Mapping[str, Any] | None, folder: Path, world: World
) -> None:
    """The files of a run whose state dicts hold `dcp_files.Sharded`: verl's with an extra state, else Accelerate's.

    Entries that are one object stay one: a tied weight is one DTensor.
    """
    for rank in range(world.size):
        with world.mesh_of(rank) as mesh:
            made: dict[int, Any] = {}
            items = {"model": OrderedDict(of_rank(dict(model), mesh, made))}
            items["optim"] = of_rank(dict(optimizer), mesh, made)
            names = _ACCELERATE if extra is None else _VERL
            items |= {} if extra is None else {"extra_state": dict(extra)}
            for item, value in items.items():
                torch.save(value, folder / names[item].format(rank=rank, world=world.size))


def of_rank(value: Any, mesh: DeviceMesh, made: dict[int, Any]) -> Any:
    """A state dict that holds `dcp_files.Sharded` as one rank has it; `made` has the DTensors made so far."""
    if isinstance(value, Sharded):
        if id(value) not in made:
            made[id(value)] = _cut(value.whole, mesh, value.placements)
        return made[id(value)]
    return {k: of_rank(v, mesh, made) for k, v in value.items()} if isinstance(value, dict) else value


FSDP1 = "ShardedTensor"
"""In place of placements: the tensor is a `ShardedTensor`."""


def _cut(whole: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> Any:
    if placements == FSDP1:
        return sharded_tensor(whole, dist.get_rank(), dist.get_world_size())
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


_VERL = {key: f"{key}_world_size_{{world}}_rank_{{rank}}.pt" for key in ("model", "optim", "extra_state")}
_ACCELERATE = {"model": "pytorch_model_fsdp_0_rank{rank}.bin", "optim": "optimizer_0_rank{rank}.bin"}


def _save(
    tensors: Tensors,
    folder: Path,
    world: World,
    key_of: Callable[[str], Any],
    groups: Sequence[Sequence[Any]],
    names: Mapping[str, str],
    change: Change | None,
    extra: Mapping[str, Any] | None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world.size):
        with world.mesh_of(rank) as mesh:
            model: OrderedDict[str, Any] = OrderedDict(tensors.buffers)
            for name, (whole, placements) in tensors.parameters.items():
                model[name] = _cut(whole, mesh, placements)
            for alias, owner in tensors.ties.items():
                model[alias] = model[owner]
            states: dict[Any, dict[str, Any]] = {}
            for name in (n for g in tensors.groups for n in g):
                placements = tensors.parameters[name][1]
                states[key_of(name)] = {
                    state: _cut(value, mesh, placements) if state != "step" else value
                    for state, value in tensors.states_of(name).items()
                }
            hyper_parameters = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False,
                                "foreach": None}  # fmt: skip
            optim = {"state": states, "param_groups": [{**hyper_parameters, "params": list(g)} for g in groups]}
            items: dict[str, Any] = {"model": model, "optim": optim, "extra_state": dict(extra or {})}
            for item, name in names.items():
                if change is not None:
                    change(rank, item, items[item])
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)  # torch says that ShardedTensor goes away
                    torch.save(items[item], folder / name.format(rank=rank, world=world.size))
    return folder
