"""torch_checkpointing's own manager around the oracle's model; runs inside the ranks.

Two of its parts want a GPU, and are told to do without: the ranks exchange their metadata over CUDA (0.1.1,
`metadata_manager.py`, `_all_gather_pickled_data`), here over gloo; and the saver is that of its configuration which
neither stages nor writes past the cache of the file system.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from oracle.dcp_cases import ITEM_FORMS, TITAN_FOLDER, FsdpRun
from oracle.dcp_grammars import first_step_of_nothing, nested
from oracle.dcp_models import RESUME_SEED, SOURCE_SEED, STEPS, Running, clean, start, start_world, train_steps
from oracle.dcp_truth import dump

_TRAIN_STATE = {"step": STEPS, "tokens": 96 * STEPS}


def _import() -> Any:
    if TITAN_FOLDER in os.environ:
        sys.path.append(os.environ[TITAN_FOLDER])  # last: what is installed comes first

    def gather(_self: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
        found: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(found, data, group=process_group)
        return dict(enumerate(found))

    metadata = importlib.import_module("torch_checkpointing.metadata_manager")
    metadata.DefaultMetadataManager._all_gather_pickled_data = gather
    return importlib.import_module("torch_checkpointing")


def _manager(package: Any, form: str) -> Any:
    """A manager that can load on another number of ranks; it saves the model in one of the two forms."""

    def part(name: str) -> Any:
        return importlib.import_module(f"torch_checkpointing.{name}")

    resharder, layouts = part("default_resharder").DefaultResharder, part("checkpoint_layout")
    items = {key: package.ItemSpec(resharder=resharder(), required=False) for key in ("model", "optimizer")}
    if form == "safetensors":
        layout = layouts.LayoutInfo(
            file_path="model_{rank}.safetensors", serialization_format=layouts.SafetensorsSerialization()
        )
        items["model"] = package.ItemSpec(resharder=resharder(), layout=layout)
    return package.CheckpointManager(
        package.CheckpointManager.Config(
            items=items,
            storage_config=part("storage.filesystem").LocalFileSystemStorageConfig(use_direct_io=False),
            save=part("config").SyncCheckpointSaverConfig(),
        )
    )


def _start(run: FsdpRun, seed: int) -> Running:
    """A run whose optimizer knows the names of its parameters, as torch's own does that is made of named ones."""
    running = start(run, seed=seed)
    names = {param: clean(name) for name, param in running.model.named_parameters()}
    for group in running.optimizer.param_groups:
        group["param_names"] = [names[param] for param in group["params"]]
    return running


def _payload(package: Any, running: Running) -> dict[str, Any]:
    found = {"model": running.model.state_dict()}
    found["optimizer"] = package.state_transformations.optimizer_transform_pre(running.optimizer.state_dict())
    return found | {"lr_scheduler": running.scheduler.state_dict(), "train_state": dict(_TRAIN_STATE)}


def save(run: dict[str, Any], folder: str) -> dict[str, Any]:
    """Trains three steps, saves ``folder/<form>``, ``folder/nested`` and the truth in ``folder``, trains three more.

    Args:
        run: an ``FsdpRun`` as plain data.
        folder: where everything goes: a directory of the manager in each form, and a distributed checkpoint.
    """
    start_world()
    package, running = _import(), _start(FsdpRun.of(run), SOURCE_SEED)
    before = train_steps(running)
    for form in ITEM_FORMS:
        if form != "safetensors" or not running.run.model.tied:
            manager = _manager(package, form)
            manager.save(str(Path(folder, form)), _payload(package, running))
            manager.close()
    dump(running.model, running.optimizer, running.scheduler, Path(folder), "truth")
    names = [group.pop("param_names") for group in running.optimizer.param_groups]
    dcp.save(nested(running) | {"train_state": dict(_TRAIN_STATE)}, checkpoint_id=Path(folder, "nested"))
    for group, held in zip(running.optimizer.param_groups, names, strict=True):
        group["param_names"] = held
    return {"losses_before": before, "losses_after": train_steps(running)}


def load(run: dict[str, Any], path: str, form: str, out: str, resharded: bool) -> dict[str, Any]:
    """Resumes from the manager's directory, dumps ``out/resumed.*`` as loaded, and trains three steps.

    Args:
        run: an ``FsdpRun`` as plain data.
        path: the directory.
        form: how the manager reads the model.
        out: where to dump.
        resharded: the files are those of another number of ranks. Then the manager reads tensors alone, and the caller
            takes the learning rates from the scheduler.

    Returns:
        The losses, and the learning rates as the manager left them.
    """
    start_world()
    package, running = _import(), _start(FsdpRun.of(run), RESUME_SEED)
    optimizer = running.optimizer
    first_step_of_nothing(optimizer)  # the manager loads into states that are there
    manager = _manager(package, form)
    into = _payload(package, running) | {"train_state": dict.fromkeys(_TRAIN_STATE, 0)}
    found = manager.load(path, into=into)
    manager.close()
    running.model.load_state_dict(found["model"])
    optimizer.load_state_dict(package.state_transformations.optimizer_transform_post(found["optimizer"]))
    running.scheduler.load_state_dict(found["lr_scheduler"])
    assert found["train_state"] == _TRAIN_STATE
    rates = [group["lr"] for group in optimizer.param_groups]
    if resharded:
        for group, rate in zip(optimizer.param_groups, running.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
    dump(running.model, optimizer, running.scheduler, Path(out), "resumed")
    running.steps = STEPS
    return {"losses": train_steps(running), "rates": rates}
