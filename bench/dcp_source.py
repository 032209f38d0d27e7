"""Saves a checkpoint of any size with torch itself: four ranks, sharded along the first dimension.

python bench/dcp_source.py DIRECTORY PARAMETERS.json [verl]

It is a distributed checkpoint, or has the files that verl's ranks save.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

RANKS = 4


def _rows(shape: list[int], rank: int) -> int:
    step = -(-shape[0] // RANKS)
    return max(0, min(step, shape[0] - rank * step))


def _save(rank: int, rendezvous: str, directory: str, parameters: list[tuple[str, list[int]]], to: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",) if to == "verl" else None)
    generator = torch.Generator().manual_seed(rank)

    def tensor(shape: list[int]) -> DTensor:
        local = torch.randn((_rows(shape, rank), *shape[1:]), generator=generator)
        size = torch.Size(shape)
        return DTensor.from_local(local, mesh, [Shard(0)], shape=size, stride=torch.empty(size, device="meta").stride())

    model = {name: tensor(shape) for name, shape in parameters}
    states = {
        name: {"step": torch.tensor(7.0), "exp_avg": tensor(shape), "exp_avg_sq": tensor(shape)}
        for name, shape in parameters
    }
    group: dict[str, Any] = {
        "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "maximize": False,
        "foreach": None, "capturable": False, "differentiable": False, "fused": None, "decoupled_weight_decay": True,
        "params": [name for name, _ in parameters],
    }  # fmt: skip
    if to == "verl":
        numbers = {name: number for number, (name, _) in enumerate(parameters)}
        numbered = {"state": {numbers[n]: s for n, s in states.items()}, "param_groups": [group]}
        group["params"] = list(numbers.values())
        for key, value in (("model", model), ("optim", numbered), ("extra_state", {"lr_scheduler": None, "rng": {}})):
            torch.save(value, os.path.join(directory, f"{key}_world_size_{RANKS}_rank_{rank}.pt"))
        dist.destroy_process_group()
        return
    dcp.save({"model": model, "optimizer": {"state": states, "param_groups": [group]}}, checkpoint_id=directory)
    dist.destroy_process_group()


def main() -> None:
    """Save the checkpoint that the arguments name."""
    directory, parameters, to = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), "".join(sys.argv[3:])
    if to == "verl":
        Path(directory).mkdir(parents=True)
        Path(directory, "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": RANKS}))
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(_save, (os.path.join(scratch, "rendezvous"), directory, parameters, to), nprocs=RANKS)


if __name__ == "__main__":
    main()
