"""Plants chosen bit patterns into a checkpoint that DeepSpeed wrote; runs inside a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def plant(tag_dir: str, patterns: list[int], half_patterns: list[int]) -> dict[str, Any]:
    """Overwrites the first elements of each rank's first flat group: masters and ``exp_avg`` alike.

    Frozen ``adapter.weight`` gets the 16-bit patterns (``module`` and its fragment, where rank 0 holds them); a bool
    buffer ``mask`` and a scalar float buffer ``scale`` are added.

    Args:
        tag_dir: a folder that nothing else uses.
        patterns: 32-bit patterns.
        half_patterns: 16-bit patterns.

    Returns:
        ``partition``: elements of rank 0's first flat group.
    """
    paths = sorted(Path(tag_dir).glob("*_optim_states.pt"))
    sizes = []
    for path in paths:
        contents = torch.load(path, weights_only=False)
        inner = contents["optimizer_state_dict"]
        sharded = "fp32_flat_groups" in inner
        master = inner["fp32_flat_groups" if sharded else "single_partition_of_fp32_groups"][0]
        state = inner["optimizer_state_dict" if sharded else "base_optimizer_state"]["state"][0]
        for flat in (master, state["exp_avg"]):
            flat.data[: len(patterns)] = _words(patterns, torch.int32).view(torch.float32)
        sizes.append(master.numel())
        torch.save(contents, path)
    for path in sorted(Path(tag_dir).glob("*mp_rank_*_model_states.pt")):
        model = torch.load(path, weights_only=False)
        _plant_model(model, half_patterns, first="pp_rank_1" not in path.name)
        torch.save(model, path)
    return {"partition": sizes[0]}


def _plant_model(model: dict[str, Any], half_patterns: list[int], *, first: bool) -> None:
    model["module"]["mask"] = torch.tensor([True, False, True])
    model["module"]["scale"] = torch.tensor(1.1)
    model["buffer_names"] += ["mask", "scale"]
    halves = _words(half_patterns, torch.int16).view(torch.bfloat16)
    for place in (model["module"], model["frozen_param_fragments"] or {}):
        frozen = place.get("adapter.weight")
        if first and frozen is not None and frozen.numel():
            frozen.data.view(-1)[: len(halves)] = halves


def _words(patterns: list[int], dtype: torch.dtype) -> torch.Tensor:
    bits = torch.iinfo(dtype).bits
    return torch.tensor([p - (1 << bits) if p >= 1 << (bits - 1) else p for p in patterns], dtype=dtype)
