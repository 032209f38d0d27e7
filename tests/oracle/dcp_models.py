"""The oracle's model under FSDP: wrapped, optimized and trained in the same way on every mesh."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Replicate

from oracle.dcp_cases import FsdpRun, Mesh
from oracle.models import Block, batch, build_model

SOURCE_SEED = 1234
RESUME_SEED = 98765  # other weights than the source's: what a loader does not load shows
STEPS = 3
"""Steps before a save, and after it."""
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|module)\.")


@dataclass
class Running:
    """A run in this rank: its wrapped model, optimizer, scheduler, and how many steps it has made."""

    run: FsdpRun
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    steps: int = 0


def start_world() -> tuple[int, int]:
    """Joins the process group; returns (rank, world)."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A file store instead of host and port: nothing else on the machine can take the port between launch and bind.
    dist.init_process_group("gloo", init_method=os.environ["ORACLE_STORE"], rank=rank, world_size=world)
    return rank, world


def clean(name: str) -> str:
    """The parameter's name in the model as it was before any wrapper."""
    return _WRAPPERS.sub("", name)


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """The mesh with the dimensions that it has, of ``replicate``, ``shard`` and ``tensor``."""
    sizes = {"replicate": mesh.replicate, "shard": mesh.shard, "tensor": mesh.tensor}
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return init_device_mesh("cpu", tuple(kept.values()), mesh_dim_names=tuple(kept) if mesh.named else None)


def group_names(run: FsdpRun, model: nn.Module) -> list[list[str]]:
    """Names of the trained parameters by group; see ``FsdpRun.by_block``."""
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if not run.model.two_groups:
        return [[name for name, _ in trained]]
    if run.by_block:
        apart = [name.startswith("layers.0.") for name, _ in trained]
    else:
        apart = [param.ndim > 1 for _, param in trained]
    return [[n for (n, _), first in zip(trained, apart, strict=True) if first is side] for side in (True, False)]


def wrap_fsdp2(model: Any, data: DeviceMesh, tensor: DeviceMesh | None) -> None:
    """Cuts the model in place: over ``tensor`` first, then over ``data``."""
    if tensor is not None and tensor.size() > 1:
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        for index in range(len(model.layers)):
            # Uneven widths: as plain tensors the pieces would be taken for even ones.
            plan |= {f"layers.{index}.up": ColwiseParallel(use_local_output=False)}
            plan |= {f"layers.{index}.down": RowwiseParallel()}
        parallelize_module(model, tensor, plan)
    for layer in model.layers:
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)


def _fsdp2(model: Any, mesh: Mesh) -> nn.Module:
    whole = device_mesh(mesh)
    data = whole
    if mesh.named:
        data = whole["replicate", "shard"] if mesh.replicate > 1 else whole["shard"]
    wrap_fsdp2(model, data, whole["tensor"] if mesh.tensor > 1 else None)
    return model  # type: ignore[no-any-return]


def _fsdp1(model: Any, run: FsdpRun) -> nn.Module:
    apart = [model.adapter] if run.parallel == "fsdp1_flat" and run.model.frozen else []
    policy = CustomPolicy(lambda module: isinstance(module, Block) or any(module is each for each in apart))
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=run.parallel == "fsdp1", device_id=torch.device("cpu")
    )


def wrap(run: FsdpRun, model: nn.Module) -> nn.Module:
    """The model under the run's kind of FSDP."""
    return _fsdp2(model, run.mesh) if run.parallel == "fsdp2" else _fsdp1(model, run)


def optimizer_of(run: FsdpRun, model: nn.Module, names: list[list[str]]) -> torch.optim.Optimizer:
    """The run's optimizer over the wrapped model, with the groups of ``names``."""
    by_name = {clean(name): param for name, param in model.named_parameters() if param.requires_grad}
    if run.parallel == "fsdp1_flat":
        apart = [run.by_block and "layers.0." in name for name in by_name]
        sides = [
            [p for p, first in zip(by_name.values(), apart, strict=True) if first is side] for side in (True, False)
        ]
        params = [side for side in sides if side]
    else:
        params = [[by_name[name] for name in group] for group in names]
    groups: list[dict[str, Any]] = [{"params": group} for group in params]
    if len(groups) == 2:
        groups[0] |= {"lr": 1e-2, "weight_decay": 0.3 if run.optimizer == "adam" else 0.1}
        groups[1] |= {"lr": 5e-3, "weight_decay": 0.0}
    if run.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9, weight_decay=0.01)
    if run.optimizer == "adam":
        return torch.optim.Adam(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3)
    return torch.optim.AdamW(
        groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, amsgrad=run.optimizer == "amsgrad"
    )


def scheduler_of(run: FsdpRun, optimizer: torch.optim.Optimizer) -> Any:
    """The run's scheduler, or None."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8) if run.scheduler else None


def start(run: FsdpRun, *, seed: int) -> Running:
    """A run that has made no step yet, with freshly drawn weights."""
    model = build_model(run.model, seed)
    names = group_names(run, model)
    wrapped = wrap(run, model)
    optimizer = optimizer_of(run, wrapped, names)
    return Running(run, wrapped, optimizer, scheduler_of(run, optimizer))


def rows(mesh: Mesh, step: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of the global batch of ``step``; ranks of one tensor-parallel group take the same ones."""
    return batch(step, dist.get_rank() // mesh.tensor, mesh.data)


def mean_over_ranks(loss: Tensor) -> float:
    """The loss of the global batch."""
    mean = loss.detach().to(torch.float64)
    dist.all_reduce(mean)
    return float(mean.item()) / dist.get_world_size()


def train_steps(running: Running, steps: int = STEPS) -> list[float]:
    """Global mean losses of the next ``steps`` steps."""
    losses = []
    running.model.train()
    for _ in range(steps):
        tokens, targets = rows(running.run.mesh, running.steps)
        running.optimizer.zero_grad()
        loss = running.model(tokens, targets)
        loss.backward()
        running.optimizer.step()
        if running.scheduler is not None:
            running.scheduler.step()
        running.steps += 1
        losses.append(mean_over_ranks(loss))
    return losses
