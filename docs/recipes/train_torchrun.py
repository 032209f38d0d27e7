"""A DeepSpeed run that survives its processes' deaths and other numbers of them: `torchrun` starts it again.

    torchrun --nproc-per-node 2 --max-restarts 3 train_torchrun.py runs/one

The model and the data are as small as they can be; what matters is `resume`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import reshard

GLOBAL_BATCH = 24  # of all processes together: steps stay the same steps on any number of them that divides it
WIDTH, STEPS, SAVE_EVERY = 16, 6, 2


def rows(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for your data: this process's rows of a step."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(GLOBAL_BATCH, WIDTH, generator=generator)
    labels = torch.randint(WIDTH, (GLOBAL_BATCH,), generator=generator)
    mine = slice(rank * GLOBAL_BATCH // world, (rank + 1) * GLOBAL_BATCH // world)
    return inputs[mine], labels[mine]


def resume(engine: Any, output: Path) -> None:
    """Loads the newest checkpoint, in this world's layout.

    Rank 0 looks and works, the others wait for its answer: all load the same, and if it fails, nobody trains.
    """
    path: str | None = None
    problem: str | None = None
    if dist.get_rank() == 0:
        try:
            path = reshard.ensure(str(output)) if (output / "latest").exists() else None
        except Exception as error:  # noqa: BLE001 - whatever it is, the others have to hear of it
            problem = str(error)
    said = [path, problem]
    dist.broadcast_object_list(said)
    path, problem = said
    if problem is not None:
        raise RuntimeError(problem)
    if path is not None:
        engine.load_checkpoint(path)


def main(output: Path) -> None:
    """Trains to the end, from the newest checkpoint in `output` if there is one."""
    deepspeed.init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    if GLOBAL_BATCH % world:
        raise ValueError(f"{world} processes cannot share a global batch of {GLOBAL_BATCH} rows evenly")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        },
    )
    resume(engine, output)
    while engine.global_steps < STEPS:
        inputs, labels = rows(engine.global_steps, rank, world)
        loss = nn.functional.cross_entropy(engine(inputs.to(engine.device)), labels.to(engine.device))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            line = {"step": engine.global_steps, "loss": float(mean) / world, "world": world}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
        if engine.global_steps % SAVE_EVERY == 0:
            engine.save_checkpoint(str(output))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
