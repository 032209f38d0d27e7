"""One state of one run under many tags, saved and loaded by DeepSpeed; runs inside the ranks."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from oracle.cases import CASES
from oracle.gather import gather_module, gather_states
from oracle.train import RESUME_SEED, SOURCE_SEED, build_engine, start_world, train_steps


def digest_of(engine: Any, *, weights: bool = True) -> str:
    """A digest of the optimizer's states with the masters, and of the weights too, whole; collective."""
    whole = (gather_module(engine) if weights else {}) | gather_states(engine).tensors
    found = hashlib.sha256()
    for name in sorted(whole):
        found.update(name.encode() + whole[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def save_all(case: str, folders: list[str], tags: list[str | int]) -> dict[str, Any]:
    """Trains two steps, saves each folder under its tag, and trains on; the tag is given as it is, an integer too."""
    rank, world = start_world()
    engine = build_engine(CASES[case], world, seed=SOURCE_SEED)
    train_steps(engine, 2, rank, world)
    for folder, tag in zip(folders, tags, strict=True):
        engine.save_checkpoint(folder, tag=tag)
    return {"state": digest_of(engine), "losses": train_steps(engine, 2, rank, world)}


def load_all(case: str, loads: list[list[Any]]) -> list[Any]:
    """Each (folder, tag) loaded into one engine: the state, the next losses, and the error in place of both."""
    rank, world = start_world()
    engine = build_engine(CASES[case], world, seed=RESUME_SEED)
    found: list[Any] = []
    for folder, tag in loads:
        path, _ = engine.load_checkpoint(folder, tag=tag)
        if path is None:
            found.append(f"DeepSpeed finds no checkpoint {tag!r} in {folder}")
        else:
            found.append({"state": digest_of(engine), "losses": train_steps(engine, 2, rank, world)})
    return found
