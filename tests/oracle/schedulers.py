"""Runs with schedulers of every kind: saved as plain DCP without the scheduler, resumed by DeepSpeed; in the ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import lr_scheduler as torch_kinds
from transformers.optimization import GreedyLR

from oracle.cases import Case, ds_config
from oracle.models import build_model
from oracle.train import RESUME_SEED, SOURCE_SEED, batch, start_world

CASE = Case("scheduled", 0, "fp32", tied=False, frozen=False, unused=False, buffers=False)
STEPS = 4
"""Steps before the save, and after it."""
_RATE = 1e-2

CONFIGURED: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_max_lr": _RATE, "warmup_num_steps": 6},
    "WarmupDecayLR": {"warmup_max_lr": _RATE, "warmup_num_steps": 3, "total_num_steps": 10},
    "WarmupCosineLR": {"warmup_num_steps": 3, "total_num_steps": 10},
    "OneCycle": {"cycle_min_lr": 1e-3, "cycle_max_lr": _RATE, "cycle_first_step_size": 5},
    "LRRangeTest": {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2},
}
"""DeepSpeed's own, by name with their parameters."""
TORCH: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: torch_kinds.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: torch_kinds.MultiplicativeLR(o, lambda step: 1 - 0.05 * step),
    "StepLR": lambda o: torch_kinds.StepLR(o, 3, gamma=0.5),
    "MultiStepLR": lambda o: torch_kinds.MultiStepLR(o, [2, 6], gamma=0.5),
    "ConstantLR": lambda o: torch_kinds.ConstantLR(o, total_iters=6),
    "LinearLR": lambda o: torch_kinds.LinearLR(o, total_iters=9),
    "ExponentialLR": lambda o: torch_kinds.ExponentialLR(o, gamma=0.9),
    "PolynomialLR": lambda o: torch_kinds.PolynomialLR(o, total_iters=9),
    "CosineAnnealingLR": lambda o: torch_kinds.CosineAnnealingLR(o, T_max=9),
    "CyclicLR": lambda o: torch_kinds.CyclicLR(o, 1e-3, _RATE, step_size_up=5, cycle_momentum=False),
    "OneCycleLR": lambda o: torch_kinds.OneCycleLR(o, _RATE, total_steps=10),
    "CosineAnnealingWarmRestarts": lambda o: torch_kinds.CosineAnnealingWarmRestarts(o, T_0=5),
    "ReduceLROnPlateau": lambda o: torch_kinds.ReduceLROnPlateau(o, patience=2),
    "GreedyLR": lambda o: GreedyLR(o, patience=1, factor=0.5),
    "SequentialLR": lambda o: torch_kinds.SequentialLR(
        o, [torch_kinds.LinearLR(o, total_iters=3), torch_kinds.ExponentialLR(o, gamma=0.9)], [3]
    ),
    "ChainedScheduler": lambda o: torch_kinds.ChainedScheduler(
        [torch_kinds.ConstantLR(o, total_iters=6), torch_kinds.ExponentialLR(o, gamma=0.9)]
    ),
}
"""Torch's, and one of transformers, made from the optimizer."""


def _engine(kind: str, world: int, seed: int, stage: int, *, universal: bool = False) -> Any:
    config = ds_config(CASE, world) | {"zero_allow_untested_optimizer": True}
    config.pop("optimizer", None)
    config.pop("scheduler", None)
    config["zero_optimization"] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if universal:
        config["checkpoint"] = {"load_universal": True}
    if kind in CONFIGURED:
        config["scheduler"] = {"type": kind, "params": CONFIGURED[kind]}
    model = build_model(CASE, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.1)
    scheduler = TORCH[kind](optimizer) if kind in TORCH else None
    initialize: Any = deepspeed.initialize
    engine, *_ = initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    return engine


def _train(engine: Any, kind: str, rank: int, world: int) -> tuple[list[float], list[float]]:
    """Rates and losses of the next steps; schedulers that want a metric get one that never gets better."""
    rates, losses = [], []
    for _ in range(STEPS):
        rates.append(float(engine.optimizer.param_groups[0]["lr"]))
        loss = engine(*batch(engine.global_steps, rank, world))
        engine.backward(loss)
        engine.step(lr_kwargs={"metrics": 1.0} if kind in ("ReduceLROnPlateau", "GreedyLR") else None)
        losses.append(float(loss))
    return rates, losses


def save_all(folder: str, kinds: list[str]) -> dict[str, Any]:
    """Trains each kind, saves ``folder/<kind>`` without the scheduler's state, and trains on: rates and losses."""
    rank, world = start_world()
    found: dict[str, Any] = {}
    for kind in kinds:
        engine = _engine(kind, world, SOURCE_SEED, 0)
        _train(engine, kind, rank, world)
        model, optimizer = get_state_dict(engine.module, engine.basic_optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=str(Path(folder, kind)))
        found[kind] = _train(engine, kind, rank, world)
    return found


def load_all(folders: dict[str, str], stage: int, universal: bool = False) -> dict[str, Any]:
    """Resumes each kind from its save directory: rates and losses, or what the load raised."""
    rank, world = start_world()
    found: dict[str, Any] = {}
    for kind, folder in folders.items():
        engine = _engine(kind, world, RESUME_SEED, stage, universal=universal)
        try:
            engine.load_checkpoint(folder)
        except (AttributeError, KeyError, TypeError) as error:
            found[kind] = f"{type(error).__name__}: {error}"
        else:
            found[kind] = _train(engine, kind, rank, world)
    return found
