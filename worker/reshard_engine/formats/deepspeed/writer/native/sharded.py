"""Optimizer files of stage 3: each parameter is cut into equal shares, and a rank's shares are joined by sub-group.

Source: deepspeed 0.19.8 `runtime/zero/stage3.py` (`_rigid_state_dict`, `_rigid_load_state_dict`).
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard_engine.formats.deepspeed.names import OPTIMIZER_STATE
from reshard_engine.formats.deepspeed.partitioning import Run, clipped, sub_groups
from reshard_engine.formats.deepspeed.writer.native.autoep import partition_groups, slice_of
from reshard_engine.formats.deepspeed.writer.native.model import LocalModel, LocalParameter
from reshard_engine.formats.deepspeed.writer.native.optimizer import Groups, state_runs, trained_groups, zero_stage_node
from reshard_engine.formats.deepspeed.writer.native.scaling import scaler_entries
from reshard_engine.formats.deepspeed.writer.native.target import Target
from reshard_engine.pickles.nodes import Node, PList, PRuns, mapping_of


def share_of(runs: Sequence[Run], numel: int, rank: int, ranks: int) -> list[Run]:
    """One rank's share of a parameter, padded with zeros to the length that all shares have."""
    share = -(-numel // ranks)
    return clipped(runs, rank * share, (rank + 1) * share)


class ShardedStates:
    """The optimizer's state of one model-parallel rank, where each parameter is cut over the data-parallel ranks.

    Fused experts are cut over the ranks that hold the same experts. They share no sub-group with other parameters.
    """

    def __init__(self, groups: Groups, model: LocalModel, target: Target) -> None:
        """Cut the groups into sub-groups once for all ranks."""
        self._groups, self._target, self._fused = groups, target, model.fused
        self._sub_groups: list[list[LocalParameter]] = []
        self._numbers: list[list[int]] = []
        for members in trained_groups(model, groups.count):
            first = len(self._sub_groups)
            by_ranks: dict[bool, list[LocalParameter]] = {}
            for parameter in members:
                by_ranks.setdefault(parameter.fqn in model.fused, []).append(parameter)
            for experts, same in by_ranks.items():
                numels = [p.numel // (target.layout.ep if experts else 1) for p in same]
                cuts = sub_groups(numels, self._ranks(experts=experts), sub_group_size=target.sub_group_size)
                self._sub_groups += [[same[i] for i in cut] for cut in cuts]
            self._numbers.append(list(range(first, len(self._sub_groups))))

    def _ranks(self, *, experts: bool) -> int:
        """The number of ranks that share a sub-group."""
        return self._target.dp // (self._target.layout.ep if experts else 1)

    def _experts(self, members: Sequence[LocalParameter]) -> bool:
        return members[0].fqn in self._fused

    def _held(self, members: Sequence[LocalParameter], rank: int) -> list[LocalParameter]:
        """The parameters of a sub-group, with fused ones cut to the experts of a data-parallel rank."""
        ep, mine = self._target.layout.ep, self._target.expert_place(rank)[0]
        return [slice_of(p, ep, mine) for p in members] if self._experts(members) else list(members)

    def optimizer_of(self, rank: int) -> Node:
        """`optimizer_state_dict` of one data-parallel rank."""
        entries: dict[str | int, Node] = {"zero_stage": zero_stage_node(3)}
        entries |= scaler_entries(self._target)
        entries["partition_count"] = self._target.dp
        if self._fused:
            shared = [(self._experts(m), self._sharing(rank, experts=self._experts(m))) for m in self._sub_groups]
            entries["ds_zero_partition_groups"] = partition_groups(shared, self._target, rank)
        state: dict[str | int, Node] = {}
        masters: list[Node] = []
        for number, whole in enumerate(self._sub_groups):
            experts, members = self._experts(whole), self._held(whole, rank)
            ranks, place = self._ranks(experts=experts), self._target.expert_place(rank)[1] if experts else rank
            runs = {s: _joined(members, s, place, ranks) for s in self._groups.states}
            shape = (sum(-(-p.numel // ranks) for p in members),)
            masters.append(PRuns(self._groups.dtype_of("fp32", members).name, shape, runs["fp32"]))
            if len(self._groups.states) > 1 or any(p.scalars for p in members):
                state[number] = self._groups.state_entry(members, runs, shape)
        groups = self._groups.with_params(self._numbers, ep=self._target.layout.ep)
        entries[OPTIMIZER_STATE] = mapping_of({"state": mapping_of(state), "param_groups": groups})
        entries["fp32_flat_groups"] = PList(masters)
        return mapping_of(entries)

    def _sharing(self, rank: int, *, experts: bool) -> list[int]:
        """The ranks that share a sub-group with this one."""
        everybody = range(self._target.dp)
        mine = self._target.expert_place(rank)[0]
        return [r for r in everybody if self._target.expert_place(r)[0] == mine] if experts else list(everybody)

    def shapes(self) -> list[list[LocalParameter]]:
        """The content of `param_shapes`: the members of each sub-group, as the first rank holds them."""
        return [self._held(members, 0) for members in self._sub_groups]


def _joined(members: Sequence[LocalParameter], state: str, place: int, ranks: int) -> tuple[Run, ...]:
    """One state of a sub-group on the rank at `place` among the ranks that share the sub-group."""
    return tuple(run for p in members for run in share_of(state_runs(p, state), p.numel, place, ranks))
