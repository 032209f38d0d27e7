"""Warnings about what DeepSpeed's universal loader does not restore of this run, and where it fails.

docs/deepspeed-universal-limits.md has the whole list. A warning names the runs for which the loss is certain.

Source: deepspeed 0.19.8 `runtime/zero/stage3.py` (`load_hp_checkpoint_state_from_checkpoint_dir_stage3`: three states
by name, `param_groups[0]` and one step for every group), `runtime/base_optimizer.py`
(`load_hp_checkpoint_state_from_checkpoint_dir`: `steps[0]` of the parameters that the rank holds),
`runtime/zero/stage_1_and_2.py` and `runtime/bf16_optimizer.py` (partitions: equal, of a multiple of two elements);
verified by running.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from reshard.errors import listed
from reshard_engine.checkpoint import Checkpoint, ParamGroup
from reshard_engine.formats.deepspeed.optimizer_states import ADAM_STATES
from reshard_engine.pickles.differences import compare_trees

_RANKS = 16
"""The largest world that is checked, if twice the source's is not larger. Any group is too small for some world."""


_NAMES = ("name", "param_names")
"""Entries of param groups that are no hyper-parameters."""
_AMSGRAD = "max_exp_avg_sq"


def stage_3_warnings(states: Sequence[str], groups: Sequence[ParamGroup]) -> Iterator[str]:
    """Yield what the loader of ZeRO-3 loses: states beside Adam's, and hyper-parameters of all groups but the first.

    Args:
        states: The states of the checkpoint.
        groups: The param groups of a run at ZeRO-3.
    """
    others = [s for s in states if s not in ("fp32", *ADAM_STATES)]
    if others and set(ADAM_STATES).issubset(states):
        fails = f" (the first step of amsgrad raises KeyError: {_AMSGRAD!r})" if _AMSGRAD in others else ""
        text = f"at ZeRO-3 DeepSpeed's universal loader does not load {listed(others)}{fails}"
        yield f"{text}: resume at ZeRO-1 or 2, or convert --to zero"
    differing = [key for key in dict.fromkeys(k for g in groups for k in g.hyper_parameters) if _differs(groups, key)]
    if differing:
        text = f"at ZeRO-3 DeepSpeed's universal loader gives the {len(groups)} param groups the first one's"
        yield f"{text} {listed([str(key) for key in differing])}: set them after loading, or convert --to zero"


def _differs(groups: Sequence[ParamGroup], key: str | int) -> bool:
    held = [g.hyper_parameters[key] for g in groups if key in g.hyper_parameters]
    if key in _NAMES:
        return False
    return len(held) < len(groups) or any(next(compare_trees(held[0], h, ""), None) is not None for h in held)


def step_warnings(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield that the parameters of a group have different step counters, of which the loader takes one."""
    for group in dict.fromkeys(p.group for p in checkpoint.trained):
        counts = {p.scalars["step"].value if "step" in p.scalars else 0 for p in checkpoint.trained if p.group == group}
        if len(counts) > 1:
            yield (
                f"the parameters of group {group} have {min(counts):g} to {max(counts):g} steps, and DeepSpeed's "
                "universal loader fails at ZeRO-1, 2 and BF16 (Steps are not equal) and takes one of them at ZeRO-3: "
                "convert --to zero --zero-stage 0 --dtype fp32, which keeps each parameter's own"
            )
            return


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
