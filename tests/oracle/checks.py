"""Checks of the oracle against itself, run inside ranks: the gathered truth, and the launcher's promises."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from oracle.cases import Case
from oracle.gather import gather_states
from oracle.train import SOURCE_SEED, build_engine, start_world, train_steps


def api_disagreements(case: dict[str, Any]) -> list[str]:
    """Keys whose gathered tensor is not bit for bit what DeepSpeed's ``safe_get_full_*`` API reports."""
    rank, world = start_world()
    parsed = Case(**case)
    engine = build_engine(parsed, world, seed=SOURCE_SEED)
    train_steps(engine, parsed.steps, rank, world)
    ours = gather_states(engine).tensors
    wrong = []
    for name, param in engine.module.named_parameters():
        if f"fp32/{name}" not in ours:
            continue
        theirs: dict[str, Any] = {"fp32": safe_get_full_fp32_param(param)}
        for key in ("exp_avg", "exp_avg_sq"):
            theirs[key] = safe_get_full_optimizer_state(param, key)
        wrong += [f"{kind}/{name}" for kind, value in theirs.items() if not torch.equal(ours[f"{kind}/{name}"], value)]
    return wrong


def rank_of() -> int:
    """This rank's number."""
    return int(os.environ["RANK"])


def fail_on(rank: int) -> int:
    """Raises on one rank while the others wait for ever."""
    if rank_of() == rank:
        raise ValueError("told to fail")
    time.sleep(3600)
    return rank


def linger(marker: str) -> int:
    """Leaves a child behind that would outlive its rank, and returns the child's id."""
    child = subprocess.Popen(["sleep", marker])
    return child.pid


def hang() -> None:
    """Never returns."""
    time.sleep(3600)
