"""Optimizer files of stage 3: each parameter cut into equal shares, a rank's shares joined by sub-group.

Source: deepspeed 0.19.8 `runtime/zero/stage3.py` (`_rigid_state_dict`, `_rigid_load_state_dict`).
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard_engine.pickles.nodes import Node, PList, PRuns, mapping_of
from reshard_engine.writers.zero.model import LocalModel, LocalParameter
from reshard_engine.writers.zero.optimizer import Groups, state_runs, trained_groups, zero_stage_node
from reshard_engine.writers.zero.partitions import Run, clipped, sub_groups
from reshard_engine.writers.zero.scaling import scaler_entries
from reshard_engine.writers.zero.target import Target


def share_of(runs: Sequence[Run], numel: int, rank: int, ranks: int) -> list[Run]:
    """One rank's share of a parameter, padded with zeros to the length that all shares have."""
    share = -(-numel // ranks)
    return clipped(runs, rank * share, (rank + 1) * share)


class ShardedStates:
    """The optimizer's state of one model-parallel rank, each parameter cut over its data-parallel ranks."""

    def __init__(self, groups: Groups, model: LocalModel, target: Target) -> None:
        """Cut the groups into sub-groups once for all ranks."""
        self._groups, self._target = groups, target
        self._sub_groups: list[list[LocalParameter]] = []
        self._numbers: list[list[int]] = []
        for members in trained_groups(model, groups.count):
            cuts = sub_groups([p.numel for p in members], target.dp, sub_group_size=target.sub_group_size)
            first = len(self._sub_groups)
            self._sub_groups += [[members[i] for i in cut] for cut in cuts]
            self._numbers.append(list(range(first, len(self._sub_groups))))

    def optimizer_of(self, rank: int) -> Node:
        """`optimizer_state_dict` of one data-parallel rank."""
        entries: dict[str | int, Node] = {"zero_stage": zero_stage_node(3)}
        entries |= scaler_entries(self._target)
        entries["partition_count"] = self._target.dp
        state: dict[str | int, Node] = {}
        masters: list[Node] = []
        for number, members in enumerate(self._sub_groups):
            runs = {s: self._joined(members, s, rank) for s in self._groups.states}
            shape = (sum(-(-p.numel // self._target.dp) for p in members),)
            masters.append(PRuns(self._groups.dtype_of("fp32", members).name, shape, runs["fp32"]))
            if len(self._groups.states) > 1 or any(p.scalars for p in members):
                state[number] = self._groups.state_entry(members, runs, shape)
        groups = self._groups.with_params(self._numbers)
        entries["optimizer_state_dict"] = mapping_of({"state": mapping_of(state), "param_groups": groups})
        entries["fp32_flat_groups"] = PList(masters)
        return mapping_of(entries)

    def _joined(self, members: Sequence[LocalParameter], state: str, rank: int) -> tuple[Run, ...]:
        ranks = self._target.dp
        return tuple(run for p in members for run in share_of(state_runs(p, state), p.numel, rank, ranks))

    def shapes(self) -> list[list[LocalParameter]]:
        """What `param_shapes` lists: the members of each sub-group."""
        return self._sub_groups
