"""A ZeRO-3 checkpoint of about 120 MB, written by real DeepSpeed on two ranks. Runs inside the ranks."""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from torch import nn
from torch.nn import functional

from oracle.train import start_world

WIDTH = 2051
"""Odd, so that partitions cut through rows; one matrix is four 5 MiB parts of fp32."""


class WideNet(nn.Module):
    """Two wide matrices, and small parameters between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.down(self.norm(functional.gelu(self.up(hidden)))), hidden)


def train_and_save(save_dir: str) -> int:
    """Train one step, save; returns the parameters' elements."""
    rank, _ = start_world()
    torch.manual_seed(7)
    model = WideNet()
    elems = sum(parameter.numel() for parameter in model.parameters())
    initialize: Any = deepspeed.initialize
    engine, *_ = initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": 3},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-3}},
            "steps_per_print": 10**9,
        },
    )
    torch.manual_seed(100 + rank)
    loss = engine(torch.randn(2, WIDTH, dtype=torch.bfloat16))
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(save_dir, tag="global_step1")
    return elems
