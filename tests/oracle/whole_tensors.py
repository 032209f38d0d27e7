"""The contents of a distributed checkpoint, and their differences from the truth of a run that saved whole tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner  # pyright: ignore[reportPrivateUsage]
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict  # pyright: ignore[reportPrivateUsage]

from house.rank_cases import RankCase


def whole(folder: Path) -> dict[str, Any]:
    """Everything in a distributed checkpoint, read by torch."""
    found: dict[str, Any] = {}
    _load_state_dict(found, FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return found


def named(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a state dict under the truth's names; of the model as `NAME/model`."""
    tensors = {f"{name}/model": value for name, value in found["model"].items()}
    for name, states in found.get("optimizer", {}).get("state", {}).items():
        tensors |= {f"{name}/{state}": value for state, value in states.items()}
    return tensors


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def differences(case: RankCase, found: dict[str, torch.Tensor]) -> list[str]:
    """Every tensor that is missing, foreign or different, bit for bit."""
    wanted: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(case.truth).items():
        name, _, kind = key.rpartition("/")
        wanted[f"{name}/{'model' if kind in ('fp32', 'buffer') else kind}"] = tensor
    for alias, owner in case.facts.get("tied", {}).items():
        name = alias if f"{alias}/model" in found else next(k for k in found if k.endswith(f".{alias}/model"))
        head = name.removesuffix("/model").removesuffix(alias)
        wanted[f"{head}{alias}/model"] = next(v for k, v in wanted.items() if k.endswith(f"{owner}/model"))
    problems = [f"{k}: missing" for k in wanted.keys() - found.keys()]
    problems += [f"{k}: not in the run" for k in found.keys() - wanted.keys()]
    for key in wanted.keys() & found.keys():
        a, b = wanted[key], found[key]
        if key == "model.b16/model" and "_fsdp1_" in case.folder.name:
            a = a.to(torch.bfloat16)  # FSDP1 casts buffers while it runs, and saves them in their own type
        if (a.dtype, a.shape) != (b.dtype, b.shape) or not torch.equal(_bits(a), _bits(b)):
            problems.append(f"{key}: {a.dtype} {tuple(a.shape)}, {b.dtype} {tuple(b.shape)}")
    return sorted(problems)
