"""DeepSpeed's ZeRO on the same model and data, with the same optimizer and scheduler; runs inside the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch

import reshard.deepspeed
from oracle.cases import Case, ds_config
from oracle.models import build_model, client_optimizer, param_groups
from oracle.train import RESUME_SEED, SOURCE_SEED, dump_states, start_world, train_steps

STEPS = 3
DECOUPLED = "decoupled_weight_decay"
"""Torch before 2.7 and DeepSpeed's FusedAdam have no such key: sources of Adam are saved without it."""


def _engine(case: Case, world: int, seed: int, *, compiled: bool = False, turned: bool = False) -> Any:
    model: Any = build_model(case, seed)
    model = torch.compile(model, backend="eager") if compiled else model
    config = ds_config(case, world) | {"gradient_clipping": 0.0}
    groups = param_groups(case, model)[:: -1 if turned else 1]
    initialize: Any = deepspeed.initialize
    engine, *_ = initialize(
        model=model,
        model_parameters=groups,
        optimizer=client_optimizer(case, groups),
        config=config,
        lr_scheduler=None if turned else lambda found: torch.optim.lr_scheduler.ExponentialLR(found, gamma=0.8),
    )
    return engine


def save(case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Trains three steps, saves ``folder/ckpt`` with the truth in ``folder``, trains three more.

    Returns:
        ``tag``, ``losses_before``, and ``losses_after`` of the uninterrupted run.
    """
    rank, world = start_world()
    engine = _engine(Case(**case), world, SOURCE_SEED)
    before = train_steps(engine, STEPS, rank, world)
    tag = f"global_step{engine.global_steps}"
    groups = engine.optimizer.param_groups
    kept = [group.pop(DECOUPLED, None) if case["optimizer"] == "adam" else None for group in groups]
    engine.save_checkpoint(str(Path(folder, "ckpt")), tag=tag)
    for group, value in zip(groups, kept, strict=True):
        group.update({} if value is None else {DECOUPLED: value})
    dump_states(engine, Path(folder), "truth", {"losses_before": before})
    return {"tag": tag, "losses_before": before, "losses_after": train_steps(engine, STEPS, rank, world)}


def load(
    case: dict[str, Any],
    path: str,
    out: str,
    compiled: bool = False,
    turned: bool = False,
    direct: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Resumes from a DeepSpeed checkpoint, dumps ``out/resumed.*`` as loaded and trains three steps.

    Args:
        case: the run.
        path: the checkpoint.
        out: where to dump.
        compiled: by ``torch.compile``, whose wrapper makes every name of the state dict longer.
        turned: with an optimizer that has the parameters in the opposite order, and without a scheduler.
        direct: by `reshard.deepspeed.load_checkpoint` with these options, from a checkpoint of any format.
    """
    rank, world = start_world()
    engine = _engine(Case(**case), world, RESUME_SEED, compiled=compiled, turned=turned)
    if direct is None:
        found, _ = engine.load_checkpoint(path)
    else:
        found, _ = reshard.deepspeed.load_checkpoint(engine, path, **direct)
    assert found is not None, f"DeepSpeed found no checkpoint in {path}"
    dump_states(engine, Path(out), "resumed", {})
    engine.global_steps = STEPS  # the number of the next batch; the dump has what the checkpoint says
    return {"losses": train_steps(engine, STEPS, rank, world)}
