"""Saves and loads of a run by torch's own functions, in each grammar of keys that training programs use.

``app`` is torch's tutorial; ``nested`` has model and optimizer side by side; ``flat`` is ``nested`` with the model at
the root and the optimizer flattened; ``titan`` adds what torchtitan's trainer saves; ``raw`` is the optimizer's own
state dict.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter, state_dict as states
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

import reshard.dcp
from oracle.dcp_models import Running

DECOUPLED = "decoupled_weight_decay"
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class AppState(Stateful):
    """Torch's tutorial: one object with model and optimizer (recipes, "Getting Started with DCP")."""

    def __init__(self, running: Running, *, strict: bool = True) -> None:
        self.running = running
        self.options = StateDictOptions(strict=strict)

    def state_dict(self) -> dict[str, Any]:
        """Model and optimizer, below two keys."""
        model, optimizer = states.get_state_dict(self.running.model, self.running.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what ``state_dict`` gave."""
        states.set_state_dict(
            self.running.model,
            self.running.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
            options=self.options,
        )


class TrainState(Stateful):
    """Counters as torchtitan's trainer keeps them (0.3.0, ``trainer.py``)."""

    def __init__(self, step: int = 0) -> None:
        self.step, self.ntokens_seen = step, step * 96

    def state_dict(self) -> dict[str, Any]:
        """Two numbers."""
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes them."""
        self.step, self.ntokens_seen = state_dict["step"], state_dict["ntokens_seen"]


class Dataloader(Stateful):
    """A position in the data as torchtitan's dataloader saves it: a pickle below a key of the rank's own."""

    def __init__(self, step: int = 0) -> None:
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, and for how many ranks."""
        mine = pickle.dumps({"step": self.step, "rank": dist.get_rank()})
        return {f"dp_rank_{dist.get_rank()}": mine, "world_size": dist.get_world_size()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes it if the number of ranks is the same, as torchtitan does."""
        assert state_dict["world_size"] == dist.get_world_size()
        self.step = pickle.loads(state_dict[f"dp_rank_{dist.get_rank()}"])["step"]


def nested(running: Running) -> dict[str, Any]:
    """Model and optimizer side by side, and the scheduler."""
    model, optimizer = states.get_state_dict(running.model, running.optimizer)
    found: dict[str, Any] = {"model": model, "optimizer": optimizer}
    return found | ({"lr_scheduler": running.scheduler.state_dict()} if running.scheduler else {})


def _flat(running: Running) -> dict[str, Any]:
    model, optimizer = states.get_state_dict(running.model, running.optimizer, options=FLAT)
    found = model | {"optimizer": optimizer, "train_state": TrainState(running.steps)}
    return found | ({"lr_scheduler": running.scheduler.state_dict()} if running.scheduler else {})


def _titan(running: Running) -> dict[str, Any]:
    return _flat(running) | {"dataloader": Dataloader(running.steps)}


def _raw(running: Running) -> dict[str, Any]:
    return {"model": running.model.state_dict(), "optimizer": running.optimizer.state_dict()}


_GIVEN: dict[str, Callable[[Running], dict[str, Any]]] = {
    "app": lambda running: {"app": AppState(running)},
    "nested": nested,
    "flat": _flat,
    "titan": _titan,
    "raw": _raw,
}
"""The state dict of each grammar, as ``dcp.save`` gets it."""


def save(running: Running, kind: str, folder: Path) -> None:
    """Saves one checkpoint; collective.

    Args:
        running: the run.
        kind: a grammar, or a variant.
        folder: the checkpoint's directory.
    """
    path = str(folder)
    if kind in _GIVEN:
        dcp.save(_GIVEN[kind](running), checkpoint_id=path)
        return
    app = _GIVEN["app"](running)
    match kind:
        case "async":
            answer: Any = dcp.async_save(app, checkpoint_id=path)
            answer.result()
        case "no_collectives":
            dcp.save(app, checkpoint_id=path, use_collectives=False)
        case "threads":
            dcp.save(app, storage_writer=FileSystemWriter(path, thread_count=2))
        case "items":
            dcp.save(app, storage_writer=FileSystemWriter(path, single_file_per_rank=False))
        case "v2_3":
            with _grammar_of_2_3(running.optimizer):
                dcp.save(app, checkpoint_id=path)
        case "local":
            with FullyShardedDataParallel.state_dict_type(running.model, StateDictType.LOCAL_STATE_DICT):
                dcp.save({"model": running.model.state_dict()}, checkpoint_id=path)
        case "hf_consolidated":
            model = states.get_model_state_dict(running.model)
            writer = HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=True)
            dcp.save(model, storage_writer=writer)
        case _:
            model = states.get_model_state_dict(running.model)
            if running.run.model.tied:  # safetensors takes no tensor twice
                del model["head.weight"]
            dcp.save(model, storage_writer=HuggingFaceStorageWriter(path, save_distributed=True))
    dist.barrier()


@contextmanager
def _grammar_of_2_3(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Has torch flatten dicts as its versions up to 2.3 did (it can, to load what those wrote), without 2.7's key."""
    from torch.distributed.checkpoint import _version

    version: Any = _version
    version._derived_version = "2_3"
    kept = [group.pop(DECOUPLED, None) for group in optimizer.param_groups]
    try:
        yield
    finally:
        version._derived_version = None
        for group, value in zip(optimizer.param_groups, kept, strict=True):
            group.update({} if value is None else {DECOUPLED: value})


def load(
    running: Running,
    kind: str,
    folder: Path,
    *,
    partial: bool = False,
    direct: dict[str, Any] | None = None,
    line: str | None = None,
) -> None:
    """Loads one checkpoint into a run that has made no step, as the program that wrote the grammar would; collective.

    Args:
        running: a fresh run.
        kind: a grammar; variants are all ``app``.
        folder: the checkpoint's directory.
        partial: accepts that the checkpoint lacks states which a fresh optimizer is given.
        direct: reads by `reshard.dcp.Reader` with these options, from a checkpoint of any format.
        line: the call of a script that reads, in place of the one here; of ``nested``, ``flat`` and ``titan``.
    """
    # By default torch 2.13 drops what FSDP1 holds no piece of on this rank, takes the rest for a checkpoint of torch
    # 2.3, and finds no such keys.
    flatten = running.run.parallel == "fsdp2"
    planner = DefaultLoadPlanner(allow_partial_load=partial, flatten_sharded_tensors=flatten)
    reader = FileSystemReader(str(folder)) if direct is None else reshard.dcp.Reader(folder, **direct)
    kwargs: dict[str, Any] = {"storage_reader": reader, "planner": planner}
    wanted: dict[str, Any] = {}

    def read(state_dict: dict[str, Any]) -> None:
        if line is None:
            dcp.load(state_dict, **kwargs)
        else:
            eval(line, {"dcp": dcp, "state_dict": state_dict})

    match kind:
        case "nested":
            wanted = nested(running)
            read(wanted)
            _set(running, wanted["model"], wanted["optimizer"])
        case "flat" | "titan":
            wanted = _flat(running)
            read(wanted)
            model = {key: wanted[key] for key in states.get_model_state_dict(running.model)}
            _set(running, model, wanted["optimizer"], FLAT)
            running.steps = wanted["train_state"].step
        case "raw":
            first_step_of_nothing(running.optimizer)
            wanted = _raw(running)
            dcp.load(wanted, **kwargs)
            running.model.load_state_dict(wanted["model"])
            running.optimizer.load_state_dict(wanted["optimizer"])
        case _:
            dcp.load({"app": AppState(running, strict=not partial)}, **kwargs)
    if running.scheduler is not None and kind in ("nested", "flat", "titan"):
        running.scheduler.load_state_dict(wanted["lr_scheduler"])


def _set(running: Running, model: Any, optimizer: Any, options: StateDictOptions | None = None) -> None:
    states.set_state_dict(
        running.model, running.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=options
    )


def first_step_of_nothing(optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer create its states, by a step with gradients and a learning rate of zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
