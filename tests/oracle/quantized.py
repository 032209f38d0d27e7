"""Training with torchao's low-bit optimizers under DeepSpeed; runs inside the ranks."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from torch import nn

from oracle.dcp_torchao import STEPS, WIDTH, _optimizer
from oracle.train import start_world


def save(name: str, stage: int, folder: str) -> list[float]:
    """Three steps and a checkpoint; each rank's partition has a whole number of blocks, so that it is quantized."""
    rank, world = start_world()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False))
    config = {
        "train_micro_batch_size_per_gpu": 8 // world,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    initialize: Any = deepspeed.initialize
    engine, *_ = initialize(model=model, optimizer=_optimizer(name, model.parameters()), config=config)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        rows, wanted = (torch.randn(8, WIDTH).chunk(world)[rank] for _ in range(2))
        loss = (engine(rows) - wanted).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.save_checkpoint(folder, tag="step3")
    return losses
