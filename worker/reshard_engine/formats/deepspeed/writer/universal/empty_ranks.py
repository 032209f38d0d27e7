"""Warnings about small param groups of which a rank holds nothing: DeepSpeed's universal loader fails there.

Source: deepspeed 0.19.8 `runtime/base_optimizer.py` (`load_hp_checkpoint_state_from_checkpoint_dir`: `steps[0]` of the
parameters that the rank holds), `runtime/zero/stage_1_and_2.py` and `runtime/bf16_optimizer.py` (partitions: equal, of
a multiple of two elements).
"""

from __future__ import annotations

from math import prod

from reshard_engine.checkpoint import Checkpoint

_RANKS = 16
"""The largest world that is checked, if twice the source's is not larger. Any group is too small for some world."""


def empty_rank_warnings(checkpoint: Checkpoint) -> list[str]:
    """One warning for all groups that a world of usual size would leave empty on a rank."""
    sizes: dict[int, int] = {}
    for parameter in checkpoint.trained:
        group = parameter.group or 0
        sizes[group] = sizes.get(group, 0) + prod(parameter.shape)
    limit = max(_RANKS, 2 * checkpoint.world.get("dp", 1))
    found = {group: ranks for group, size in sizes.items() if (ranks := _smallest_world(size, limit)) is not None}
    if not found:
        return []
    listed = ", ".join(f"group {g} ({sizes[g]} elements) on {ranks}" for g, ranks in sorted(found.items())[:4])
    text = "DeepSpeed's universal loader fails at ZeRO-1, 2 and BF16 where a rank holds nothing of a param group"
    return [f"{text}, and the smallest such numbers of ranks are {listed}: use fewer ranks, ZeRO-3, or --to zero"]


def _smallest_world(size: int, limit: int) -> int | None:
    """The smallest number of ranks, up to a limit, of which the last holds nothing of a flat group."""
    for ranks in range(2, limit + 1):
        partition = 2 * -(-size // (2 * ranks))
        if (ranks - 1) * partition >= size:
            return ranks
    return None
