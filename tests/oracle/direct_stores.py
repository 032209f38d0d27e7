"""Direct loads from an object store; runs inside the ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

import reshard.deepspeed
from oracle.cases import Case
from oracle.train import CLIENT_STATE, RESUME_SEED, build_engine, dump_states, start_world
from reshard_engine.operations.virtual import checkpoint, loading
from reshard_engine.operations.virtual.checkpoint import VirtualCheckpoint

_WIDTH = 1024
_LAYERS = 5


def resume(case: dict[str, Any], url: str, env: dict[str, str], out: str) -> dict[str, Any]:
    """Loads from a store and dumps ``out/resumed.*``; windows are so small that a small run has many."""
    os.environ.update(env)
    loading._WINDOW_BYTES, loading._OWN_BYTES = 1_000, 64
    _, world = start_world()
    moved: list[int] = []
    move = loading._SharedReads._move

    def note(self: Any, begin: int) -> None:
        moved.append(begin)
        move(self, begin)

    loading._SharedReads._move = note
    engine = build_engine(Case(**case), world, seed=RESUME_SEED, load_universal=False)
    _, client_state = reshard.deepspeed.load_checkpoint(engine, url)
    kept = {key: value for key, value in client_state.items() if key in CLIENT_STATE}
    dump_states(engine, Path(out), "resumed", {"client_state": kept})
    return {"windows": len(moved)}


def _engine() -> Any:
    torch.manual_seed(1)
    initialize: Any = deepspeed.initialize
    return initialize(
        model=nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS))),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        },
    )[0]


def save(folder: str) -> dict[str, Any]:
    """One step of a model of 10 MiB, and `save_checkpoint`."""
    start_world()
    engine = _engine()
    engine.backward(engine(torch.ones(1, _WIDTH, dtype=torch.bfloat16)).float().mean())
    engine.step()
    engine.save_checkpoint(folder, tag="step1")
    return {}


def load(url: str, env: dict[str, str]) -> dict[str, Any]:
    """Loads that model from a store; ``read`` is the bytes of tensors that this rank has read from it.

    The blocks are as small beside the model as those of a run are beside a model of 160 MiB.
    """
    os.environ.update(env)
    checkpoint._REMOTE_BLOCK_BYTES = 256 << 10
    start_world()
    read: list[int] = []
    close = VirtualCheckpoint.close

    def note(self: VirtualCheckpoint) -> None:
        close(self)
        read.append(self.read_bytes)

    VirtualCheckpoint.close = note
    reshard.deepspeed.load_checkpoint(_engine(), url, compare=False)
    return {"read": sum(read)}
