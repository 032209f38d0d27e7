"""Functions that run inside the ranks: load a distributed checkpoint into sharded tensors of a world of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from oracle.dcp_models import start_world


def load(path: str, expected: str, tied: dict[str, str], out: str) -> dict[str, int]:
    """Loads every tensor that the truth names into zeros that this world shards by rows, and gathers them.

    Args:
        path: The distributed checkpoint, with the keys of `dcp.save({"model": ..., "optimizer": ...})`.
        expected: The file of the truth, whose names and shapes are those to load.
        tied: Second names of tied pairs, which the checkpoint has as well.
        out: Where the first rank leaves what came in, by the truth's names.
    """
    start_world()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: dict[str, Any] = {}
    states: dict[str, dict[str, Any]] = {}

    def empty(tensor: torch.Tensor) -> Any:
        zeros = torch.zeros_like(tensor)
        return distribute_tensor(zeros, mesh, [Shard(0)]) if tensor.dim() else zeros

    wanted = load_file(expected)
    for key, tensor in wanted.items():
        name, _, kind = key.rpartition("/")
        if kind in ("fp32", "buffer"):
            model[name] = torch.zeros_like(tensor) if kind == "buffer" else empty(tensor)
        else:
            states.setdefault(name, {})[kind] = empty(tensor)
    for alias, owner in tied.items():
        model[alias] = empty(wanted[f"{owner}/fp32"])
    dcp.load({"model": model, "optimizer": {"state": states}}, checkpoint_id=path)
    found = {f"{name}/model": value for name, value in model.items()}
    found |= {f"{name}/{kind}": value for name, held in states.items() for kind, value in held.items()}
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in found.items()}
    if dist.get_rank() == 0:
        save_file({k: v.contiguous().clone() for k, v in whole.items()}, out)
        Path(f"{out}.json").write_text(json.dumps(sorted(whole)))
    return {"tensors": len(whole)}
