"""torchtitan's own optimizer, scheduler and checkpoint manager around the oracle's model; runs inside the ranks.

torchtitan's trainer wants a GPU; these parts of it want none.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from oracle.dcp_cases import TITAN_FOLDER, FsdpRun
from oracle.dcp_grammars import Dataloader, TrainState
from oracle.dcp_models import RESUME_SEED, SOURCE_SEED, STEPS, Running, start_world, train_steps, wrap
from oracle.dcp_truth import dump
from oracle.models import build_model

_PATTERNS = (r"(embed|head|up|down)\.weight$", r".*")


def _import() -> tuple[Any, Any]:
    if TITAN_FOLDER in os.environ:
        sys.path.append(os.environ[TITAN_FOLDER])  # last: what is installed comes first
    optimizer = importlib.import_module("torchtitan.components.optimizer")
    return optimizer, importlib.import_module("torchtitan.components.checkpoint")


def _decay(step: int) -> float:
    return 0.8**step


def _containers(module: Any, run: FsdpRun, model: Any) -> tuple[Any, Any]:
    adam = {"betas": (0.9, 0.95), "eps": 1e-8}
    rates = [{"lr": 1e-2, "weight_decay": 0.1}, {"lr": 5e-3, "weight_decay": 0.0}]
    patterns = _PATTERNS if run.model.two_groups else (r".*",)
    groups = [
        module.ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=adam | rate)
        for pattern, rate in zip(patterns, rates, strict=False)
    ]
    config = module.OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
    optimizers = module.OptimizersContainer(config, model_parts=[model])
    return optimizers, module.LRSchedulersContainer(optimizers, _decay)


def _start(run: FsdpRun, seed: int, folder: str, mode: str, leave_out: list[str]) -> tuple[Running, Any, TrainState]:
    start_world()
    optimizer, checkpoint = _import()
    model = wrap(run, build_model(run.model, seed))
    optimizers, schedulers = _containers(optimizer, run, model)
    train_state = TrainState()
    config = checkpoint.CheckpointManager.Config(
        enable=True, interval=STEPS, keep_latest_k=0, async_mode=mode, exclude_from_loading=leave_out
    )
    manager = checkpoint.CheckpointManager(
        config,
        dataloader=Dataloader(STEPS),
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": train_state},
        sd_adapter=None,
        base_folder=folder,
    )
    return Running(run, model, optimizers, schedulers), manager, train_state


def _dump(running: Running, folder: str, stem: str, train_state: TrainState) -> None:
    extra = {"train_state": train_state.state_dict()}
    dump(running.model, running.optimizer, running.scheduler, Path(folder), stem, extra)


def save(run: dict[str, Any], folder: str, mode: str = "disabled") -> dict[str, Any]:
    """Trains three steps, saves ``folder/checkpoint/step-3`` with its truth in ``folder``, trains three more.

    Args:
        run: an ``FsdpRun`` as plain data.
        folder: where everything goes.
        mode: ``async_mode`` of the manager.
    """
    running, manager, train_state = _start(FsdpRun.of(run), SOURCE_SEED, folder, mode, [])
    before = train_steps(running)
    train_state.__init__(running.steps)
    manager.save(running.steps)
    manager.maybe_wait_for_staging()
    manager.maybe_wait_for_saving()
    _dump(running, folder, "truth", train_state)
    return {"losses_before": before, "losses_after": train_steps(running)}


def load(run: dict[str, Any], folder: str, out: str) -> dict[str, Any]:
    """Resumes from ``folder/checkpoint/step-3``, dumps ``out/resumed.*`` as loaded and trains three steps."""
    running, manager, train_state = _start(FsdpRun.of(run), RESUME_SEED, folder, "disabled", ["dataloader"])
    assert manager.load()
    _dump(running, out, "resumed", train_state)
    running.steps = train_state.step
    return {"losses": train_steps(running)}
