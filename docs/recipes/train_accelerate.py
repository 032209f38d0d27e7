"""An Accelerate run under DeepSpeed that goes on with whatever number of processes it is started with.

    accelerate launch --num_processes 2 --use_deepspeed --zero_stage 2 train_accelerate.py runs/one

The model and the data are as small as they can be; what matters is the line that loads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

import reshard

GLOBAL_BATCH = 12  # of all processes together: steps stay the same steps on any number of them
WIDTH, STEPS, SAVE_AT = 16, 6, 3


def rows(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for your data: this process's rows of a step."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(GLOBAL_BATCH, WIDTH, generator=generator)
    labels = torch.randint(WIDTH, (GLOBAL_BATCH,), generator=generator)
    mine = slice(rank * GLOBAL_BATCH // world, (rank + 1) * GLOBAL_BATCH // world)
    return inputs[mine], labels[mine]


def main(output: Path) -> None:
    """Trains to the end, from `output`/state if it is there."""
    torch.manual_seed(0)
    accelerator = Accelerator(step_scheduler_with_optimizer=False)
    world, rank = accelerator.num_processes, accelerator.process_index
    plugin = accelerator.state.deepspeed_plugin
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = GLOBAL_BATCH // world
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    first = 0
    if (output / "state").is_dir():
        accelerator.load_state(reshard.ensure(str(output / "state")))
        first = SAVE_AT
    for step in range(first, STEPS):
        inputs, labels = rows(step, rank, world)
        loss = nn.functional.cross_entropy(model(inputs.to(accelerator.device)).float(), labels.to(accelerator.device))
        accelerator.backward(loss)
        optimizer.step()
        rate = scheduler.get_last_lr()[0]
        scheduler.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), reduction="mean").item()
        accelerator.print(json.dumps({"step": step + 1, "loss": mean, "rate": rate}))
        if step + 1 == SAVE_AT:
            accelerator.save_state(str(output / "state"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
