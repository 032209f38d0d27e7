"""Training with each of torch's optimizers under FSDP2, saved by torch both ways; runs inside the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from oracle.dcp_models import start_world
from oracle.models import AdEMAMix, Lion

STEPS = 3
MAKE: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "sgd": lambda held: torch.optim.SGD(held, lr=1e-2, momentum=0.9),
    "adagrad": lambda held: torch.optim.Adagrad(held, lr=1e-2),
    "rmsprop": lambda held: torch.optim.RMSprop(held, lr=1e-3, momentum=0.9, centered=True),
    "radam": lambda held: torch.optim.RAdam(held, lr=1e-2),
    "nadam": lambda held: torch.optim.NAdam(held, lr=1e-2),
    "adamax": lambda held: torch.optim.Adamax(held, lr=1e-2),
    "muon": lambda held: torch.optim.Muon(held, lr=1e-2),
    "lion": lambda held: Lion(held, lr=1e-3),
    "ademamix": lambda held: AdEMAMix(held, lr=1e-3),
}


def _model(name: str) -> nn.Module:
    """A model of which no two parameters have one shape, so that their numbers have names; for Muon of matrices."""
    torch.manual_seed(1)
    bias = name != "muon"
    return nn.Sequential(nn.Linear(6, 10, bias=bias), nn.GELU(), nn.Linear(10, 4, bias=bias))


def save(folder: str) -> list[str]:
    """Each optimizer's run, as a distributed checkpoint and as the files of ranks that verl writes."""
    rank, world = start_world()
    made: list[str] = []
    for name, make in MAKE.items():
        model = _model(name)
        fully_shard(model, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",)))
        optimizer = make([*model.parameters()])
        for step in range(STEPS):
            torch.manual_seed(step)
            (model(torch.randn(8, 6)) - torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found, state = states.get_state_dict(model, optimizer)
        dcp.save({"model": found, "optimizer": state}, checkpoint_id=str(Path(folder, name, "dcp")))
        where = Path(folder, name, "ranks")
        where.mkdir(parents=True, exist_ok=True)
        end = f"world_size_{world}_rank_{rank}.pt"
        torch.save(model.state_dict(), where / f"model_{end}")
        torch.save(optimizer.state_dict(), where / f"optim_{end}")
        torch.save({"lr_scheduler": None, "rng": None}, where / f"extra_state_{end}")
        dist.barrier()
        made.append(name)
    return made
