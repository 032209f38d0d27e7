"""A LoRA run of PEFT under FSDP2 that gives its optimizer the trained parameters alone; runs inside the ranks.

Each rank saves its files with the names and the calls of verl 0.9.1 `utils/checkpoint/fsdp_checkpoint_manager.py`:
`model.state_dict()`, `optimizer.state_dict()`, and an extra state with the scheduler and the random states.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from oracle.dcp_models import start_world
from oracle.rank_runs import RESUME_SEED, SOURCE_SEED, RankRun, go_on, small_model, with_adapter


@dataclass
class _Manager:
    """Saves and loads this rank's files."""

    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: Any

    def _file(self, folder: str, item: str) -> Path:
        return Path(folder, f"{item}_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt")

    def load(self, path: str) -> None:
        self.model.load_state_dict(torch.load(self._file(path, "model"), weights_only=False))
        self.optimizer.load_state_dict(torch.load(self._file(path, "optim"), weights_only=False))
        extra = torch.load(self._file(path, "extra_state"), weights_only=False)
        self.scheduler.load_state_dict(extra["lr_scheduler"])
        torch.set_rng_state(extra["rng"]["cpu"])
        np.random.set_state(extra["rng"]["numpy"])  # noqa: NPY002 - the generator of `rank_runs`
        random.setstate(extra["rng"]["random"])

    def save(self, path: str) -> None:
        rng = {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}  # noqa: NPY002
        extra = {"lr_scheduler": self.scheduler.state_dict(), "rng": rng}
        Path(path).mkdir(parents=True, exist_ok=True)
        values = {"model": self.model.state_dict(), "optim": self.optimizer.state_dict(), "extra_state": extra}
        for item, value in values.items():
            torch.save(value, self._file(path, item))
        if dist.get_rank() == 0:
            config = {"FSDP_version": 2, "world_size": dist.get_world_size()}
            Path(path, "fsdp_config.json").write_text(json.dumps(config, indent=4))
        dist.barrier()


def run(case: dict[str, Any], out: str, save: str, load: str | None = None) -> dict[str, Any]:
    """Train, from files of ranks or from the beginning; see `rank_runs.go_on`.

    Args:
        case: As for `small_model`.
        out: For what was loaded and saved.
        save: For the ranks' files.
        load: The ranks' files to go on from.
    """
    _, world = start_world()
    seed = SOURCE_SEED if load is None else RESUME_SEED
    model: Any = with_adapter(small_model(case, seed), seed)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    for layer in model.get_submodule("base_model.model.model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3, weight_decay=0.1, betas=(0.9, 0.98))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    found = go_on(RankRun(model, optimizer, scheduler, _Manager(model, optimizer, scheduler)), out, load, save)
    return {**found, "trained": len(trained), "parameters": len(list(model.parameters()))}
