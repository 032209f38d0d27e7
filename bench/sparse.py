"""Checkpoints of any size on paper: real files in DeepSpeed's shapes whose tensor data is a hole.

`torch.serialization.skip_data` leaves the room of a storage unwritten, so that 4,096 rank files of a trillion
parameters take a few megabytes of disk, and everything that looks at metadata sees what it would see.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from checkpoints import STATES, common_entries, config_of, group_entry
from torch._subclasses.fake_tensor import FakeTensorMode

Parameters = list[tuple[str, tuple[int, ...]]]


def dense(numel: int, count: int) -> Parameters:
    """About `numel` parameters in `count` tensors, nine in ten of them matrices."""
    width = 16_384
    rows = numel // (width * (count * 9 // 10))
    return [(f"layers.{i // 10}.w{i % 10}", (rows, width) if i % 10 else (width,)) for i in range(count)]


def mixture(numel: int, count: int) -> Parameters:
    """About `numel` parameters in `count` tensors of experts."""
    width = 2_048
    rows = numel // (width * count)
    return [(f"layers.{i // 768}.experts.{i // 3 % 256}.w{i % 3}", (rows, width)) for i in range(count)]


def write_sparse_checkpoint(directory: Path, parameters: Parameters, *, stage: int, ranks: int) -> Path:
    """Write `directory/global_step7` and `latest`; returns the tag directory."""
    tag = directory / "global_step7"
    tag.mkdir(parents=True)
    shapes = OrderedDict((name, torch.Size(shape)) for name, shape in parameters)
    numels = [math.prod(shape) for _, shape in parameters]
    total = sum(numels)
    length = sum(-(-n // ranks) for n in numels) if stage == 3 else 2 * math.ceil(total / (2 * ranks))
    first = tag
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        weights = OrderedDict((n, torch.empty(0 if stage == 3 else s, dtype=torch.bfloat16)) for n, s in parameters)
        model = common_entries(stage, ranks, shapes, weights)
        for rank in range(ranks):
            padding = 0 if stage == 3 else max(0, (rank + 1) * length - total)
            name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
            if not rank:
                torch.save(model, first := tag / f"{name}_model_states.pt")
            elif stage == 3:
                os.link(first, tag / f"{name}_model_states.pt")
            torch.save(
                {"optimizer_state_dict": _optimizer(stage, ranks, length, padding), "ds_config": config_of(stage)},
                tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )
    (directory / "latest").write_text("global_step7")
    return tag


def _optimizer(stage: int, ranks: int, length: int, padding: int) -> dict[str, Any]:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    state = {0: {"step": 7, **{key: torch.empty(length) for key in STATES}}}
    base = {"state": state, "param_groups": [group_entry([0])]}
    master = torch.empty(length - padding)
    same = {"loss_scaler": LossScaler(scale=1.0), "overflow": False, "dynamic_loss_scale": False}
    if stage == 3:
        parts = {"optimizer_state_dict": base, "fp32_flat_groups": [master], "partition_count": ranks}
        return {"zero_stage": ZeroStageEnum(3), **same, **parts}
    return {
        "zero_stage": stage,
        **same,
        "clip_grad": 1.0,
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": [master],
        "group_paddings": [padding],
        "partition_count": [ranks],
        "ds_version": "0.19.8",
    }
