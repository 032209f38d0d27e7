"""A file that is larger than its tensors, as a real DeepSpeed run makes one; runs inside the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from oracle.train import start_world


def save_module(folder: str, stage: int) -> None:
    """One step in bf16, then rank 0 saves half of the module's state dict as `torch.save` saves views."""
    rank, _ = start_world()
    torch.manual_seed(4321)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-2}},
        "steps_per_print": 10**9,
    }
    initialize: Any = deepspeed.initialize
    engine, *_ = initialize(model=model, model_parameters=list(model.parameters()), config=config)
    loss = engine(torch.ones(2, 256, dtype=torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    engine.step()
    if rank == 0:
        state = {n: t for n, t in engine.module.state_dict().items() if int(n.partition(".")[0]) < 4}
        torch.save(state, Path(folder, "module.pt"))
