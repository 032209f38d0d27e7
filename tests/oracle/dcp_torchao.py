"""Training with torchao's low-bit optimizers under FSDP2; runs inside the ranks.

Every rank takes the same rows, so that the losses are those of any number of ranks.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from oracle.dcp_cases import TITAN_FOLDER
from oracle.dcp_models import start_world

WIDTH, STEPS = 64, 3


def _optimizer(name: str, parameters: Any) -> Any:
    if TITAN_FOLDER in os.environ:
        sys.path.append(os.environ[TITAN_FOLDER])  # last: what is installed comes first
    torch.compiler.set_stance("force_eager")  # compiling takes a minute, and changes nothing
    return getattr(importlib.import_module("torchao.optim"), name)(parameters, lr=1e-2)


def _model(seed: int) -> nn.Module:
    """Matrices of at least 4,096 elements, whose states are quantized, and vectors, whose states are not."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))


def _train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses: list[float] = []
    for step in steps:
        torch.manual_seed(step)
        loss = (model(torch.randn(8, WIDTH)) - torch.randn(8, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _sharded(model: nn.Module) -> nn.Module:
    _, world = start_world()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model


def save(name: str, folder: str) -> dict[str, Any]:
    """Three steps, a checkpoint, three more; the weights at the save as one file."""
    model = _sharded(_model(1))
    optimizer = _optimizer(name, model.parameters())
    _train(model, optimizer, range(STEPS))
    found, state = states.get_state_dict(model, optimizer)
    dcp.save({"model": found, "optimizer": state}, checkpoint_id=str(Path(folder, "dcp")))
    kinds = {type(v.to_local()).__name__ for held in state["state"].values() for v in held.values() if v.dim()}
    whole = states.get_model_state_dict(model, options=states.StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        Path(folder, "weights").mkdir()
        save_file(whole, Path(folder, "weights", "model.safetensors"), metadata={"format": "pt"})
    return {"losses": _train(model, optimizer, range(STEPS, 2 * STEPS)), "kinds": sorted(kinds)}


def resume(name: str, path: str) -> dict[str, Any]:
    """torch loads a checkpoint into a run of another seed, and trains on."""
    model = _sharded(_model(2))
    optimizer = _optimizer(name, model.parameters())
    found, state = states.get_state_dict(model, optimizer)
    dcp.load({"model": found, "optimizer": state}, checkpoint_id=path)
    states.set_state_dict(model, optimizer, model_state_dict=found, optim_state_dict=state)
    return {"losses": _train(model, optimizer, range(STEPS, 2 * STEPS))}


def save_as_file(name: str, folder: str) -> dict[str, Any]:
    """One process without FSDP: the state dicts in a file of ``torch.save``."""
    start_world()
    model = _model(1)
    optimizer = _optimizer(name, model.parameters())
    _train(model, optimizer, range(STEPS))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, Path(folder, "state.pt"))
    return {"losses": _train(model, optimizer, range(STEPS, 2 * STEPS))}


def resume_without_fsdp(name: str, path: str) -> dict[str, Any]:
    """The same, read by ``dcp.load``."""
    start_world()
    model = _model(2)
    optimizer = _optimizer(name, model.parameters())
    _train(model, optimizer, range(1))  # a fresh optimizer has no state to load into
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return {"losses": _train(model, optimizer, range(STEPS, 2 * STEPS))}
