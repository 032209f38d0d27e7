"""Functions that run inside the ranks: train under FSDP, save in every grammar, and say what the state is.

Every function is collective, takes JSON-able arguments and returns a JSON-able summary; tensors go through files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from oracle.dcp_accelerate import join_as_accelerate, start as start_accelerate
from oracle.dcp_cases import FsdpRun
from oracle.dcp_grammars import save
from oracle.dcp_models import SOURCE_SEED, Running, start, start_world, train_steps
from oracle.dcp_truth import collect, dump
from oracle.models import build_model


def _whole_as_drawn(running: Running) -> None:
    """Refuses to go on unless the gathered parameters of a fresh run are those that were drawn: proves the gather."""
    tensors, _ = collect(running.model, running.optimizer)
    for name, param in build_model(running.run.model, SOURCE_SEED).named_parameters():
        whole = tensors[f"{'fp32' if param.requires_grad else 'frozen'}/{name}"]
        assert torch.equal(param, whole), f"{name} is gathered wrongly"


def _finish(running: Running, folder: str, before: list[float]) -> dict[str, Any]:
    extra = {"losses_before": before}
    dump(running.model, running.optimizer, running.scheduler, Path(folder), "truth", extra)
    return {"losses_before": before, "losses_after": train_steps(running)}


def torch_only(run: dict[str, Any], folder: str, kinds: list[str]) -> dict[str, Any]:
    """Trains three steps, saves ``folder/<kind>`` for each kind with the truth in ``folder``, trains three more.

    Args:
        run: an ``FsdpRun`` as plain data.
        folder: where everything goes.
        kinds: what to save; see ``oracle.dcp_grammars.save``.

    Returns:
        ``losses_before``, and ``losses_after`` of the uninterrupted run.
    """
    start_world()
    running = start(FsdpRun.of(run), seed=SOURCE_SEED)
    _whole_as_drawn(running)
    before = train_steps(running)
    for kind in kinds:
        save(running, kind, Path(folder, kind))
    return _finish(running, folder, before)


def accelerate(run: dict[str, Any], folder: str) -> dict[str, Any]:
    """As ``torch_only`` under Accelerate, which saves ``folder/state`` by ``save_state``."""
    join_as_accelerate()
    accelerator, running = start_accelerate(FsdpRun.of(run), seed=SOURCE_SEED)
    before = train_steps(running)
    accelerator.save_state(str(Path(folder, "state")))
    return _finish(running, folder, before)
