"""The training run of the tutorial: real DeepSpeed, ZeRO-2, on CPUs, a model of a few kilobytes.

torchrun --standalone --nproc-per-node 2 train.py run1                   # six steps; a checkpoint after the fourth
torchrun --standalone --nproc-per-node 3 train.py run1 --load CHECKPOINT # goes on from a checkpoint
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections import OrderedDict

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

GLOBAL_BATCH = 12  # of all processes together: steps stay the same steps on any number of them
WIDTH, STEPS, SAVE_AFTER = 16, 6, 4

warnings.filterwarnings("ignore", category=FutureWarning)
# DeepSpeed would compile a program for shared memory first, which takes a minute and a compiler; gloo does without.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def rows(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for your data: this process's rows of a step."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(GLOBAL_BATCH, WIDTH, generator=generator)
    labels = torch.randint(WIDTH, (GLOBAL_BATCH,), generator=generator)
    mine = slice(rank * GLOBAL_BATCH // world, (rank + 1) * GLOBAL_BATCH // world)
    return inputs[mine], labels[mine]


def main(save: str, load: str | None) -> None:
    """Train to the last step, from the checkpoint `load` if there is one."""
    deepspeed.init_distributed("gloo", verbose=False)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = {"up": nn.Linear(WIDTH, 4 * WIDTH), "gelu": nn.GELU(), "down": nn.Linear(4 * WIDTH, WIDTH)}
    model = nn.Sequential(OrderedDict(layers))
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        },
    )
    if load:
        engine.load_checkpoint(load)
    while engine.global_steps < STEPS:
        inputs, labels = rows(engine.global_steps, rank, world)
        loss = nn.functional.cross_entropy(engine(inputs), labels)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            sys.stdout.write(f"step {engine.global_steps} on {world} ranks: loss {float(mean) / world:.4f}\n")
            sys.stdout.flush()
        if engine.global_steps == SAVE_AFTER and not load:
            engine.save_checkpoint(save)
    # Gloo's threads may outlive the interpreter, and end the process with an error: nothing is left to do here.
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("save")
    parser.add_argument("--load")
    chosen = parser.parse_args()
    main(chosen.save, chosen.load)
