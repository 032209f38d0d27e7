"""The run of `verl_manager` under other frameworks, which save it in formats of their own; inside the ranks.

Model, data, optimizer and schedule are those of verl's run, and so verl can go on with it. The schedule is that of
transformers: torch's distributed checkpoints hold nothing of its `functools.partial`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import get_constant_schedule_with_warmup

from oracle.dcp_models import start_world
from oracle.rank_runs import SOURCE_SEED, STEPS, RankRun, go_on, loss_of, mean_of, small_model
from oracle.train import dump_states, start_world as start_deepspeed

WARM_UP = 8
"""Steps until the learning rate has its full height."""


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.1)


class _Distributed:
    """Distributed checkpoints of torch, with the names of `rank_runs.Manager`; nothing loads them here."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler

    def load(self, path: str) -> None:
        raise NotImplementedError(path)

    def save(self, path: str) -> None:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        state = {"model": model, "optimizer": optimizer, "lr_scheduler": self._scheduler.state_dict()}
        dcp.save(state, checkpoint_id=path)


def dcp_run(case: dict[str, Any], out: str, save: str) -> dict[str, Any]:
    """Train under FSDP2 and save with torch's `dcp.save`; see `rank_runs.go_on`."""
    _, world = start_world()
    mesh = init_device_mesh("cpu", (world,))
    model: Any = small_model(case, SOURCE_SEED)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = _optimizer(model)
    scheduler = get_constant_schedule_with_warmup(optimizer, WARM_UP)
    return go_on(RankRun(model, optimizer, scheduler, _Distributed(model, optimizer, scheduler)), out, None, save)


def zero_run(case: dict[str, Any], out: str, save: str) -> dict[str, Any]:
    """Train under ZeRO-3 and save with DeepSpeed; the results of `rank_runs.go_on` without random states."""
    _, world = start_deepspeed()
    model = small_model(case, SOURCE_SEED)
    config = {
        "train_micro_batch_size_per_gpu": 12 // world,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 10**9,
    }
    initialize: Any = deepspeed.initialize
    engine, *_ = initialize(
        model=model,
        optimizer=_optimizer(model),
        config=config,
        lr_scheduler=lambda found: get_constant_schedule_with_warmup(found, WARM_UP),
    )
    losses: list[float] = []
    for number in range(2 * STEPS):
        if number == STEPS:
            dump_states(engine, Path(out), "saved", {})
            engine.save_checkpoint(save)
        loss = loss_of(engine, number)
        engine.backward(loss)
        engine.step()
        losses.append(mean_of(loss))
    return {"losses": losses[:STEPS], "losses_after": losses[STEPS:]}
