"""Optimizer files of stages 1 and 2 and of BF16_Optimizer: one flat partition per group and rank.

Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py` (`state_dict`, `load_state_dict`), `runtime/bf16_optimizer.py`.
`param_slice_mappings` say what is so, also under `round_robin_gradients`, where DeepSpeed's own do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reshard_engine.pickles.nodes import Node, PList, PRuns, mapping_of, ordered_dict
from reshard_engine.writers.zero.model import LocalModel, LocalParameter
from reshard_engine.writers.zero.optimizer import (
    Groups,
    clip_grad_of,
    flat_runs,
    fragment_node,
    trained_groups,
    zero_stage_node,
)
from reshard_engine.writers.zero.partitions import (
    Concatenated,
    alignment_elems,
    clipped,
    concatenate,
    pieces,
    round_robin_order,
)
from reshard_engine.writers.zero.scaling import scaler_entries
from reshard_engine.writers.zero.target import Target


def flat_order(parameters: Sequence[LocalParameter], target: Target) -> list[LocalParameter]:
    """The parameters of a group as they follow one another in its flat tensor."""
    if not target.round_robin:
        return list(parameters)
    return [parameters[i] for i in round_robin_order(len(parameters), target.dp)]


class FlatStates:
    """The optimizer's state of one model-parallel rank, cut over its data-parallel ranks."""

    def __init__(self, groups: Groups, model: LocalModel, target: Target) -> None:
        """Lay the groups out once for all ranks."""
        self._groups, self._target = groups, target
        self._members = [flat_order(g, target) for g in trained_groups(model, groups.count)]
        alignment = alignment_elems(target.dtype.itemsize_bytes) if target.aligned else 1
        self._layouts = [concatenate([p.numel for p in g], target.dp, alignment=alignment) for g in self._members]
        self._pieces = [
            {
                state: pieces(flat_runs(members, layout.paddings, state), layout.partition_numel, target.dp)
                for state in groups.states
            }
            for members, layout in zip(self._members, self._layouts, strict=True)
        ]

    def optimizer_of(self, rank: int) -> Node:
        """`optimizer_state_dict` of one data-parallel rank."""
        target = self._target
        entries: dict[str | int, Node] = {}
        if not target.bf16_optimizer:
            entries |= scaler_entries(target)
        entries["clip_grad"] = clip_grad_of(target)
        entries["base_optimizer_state"] = self._base_state(rank)
        entries["single_partition_of_fp32_groups"] = PList(
            [self._master(index, rank) for index in range(len(self._members))]
        )
        if not target.bf16_optimizer:
            entries["zero_stage"] = zero_stage_node(target.stage)
        entries["group_paddings"] = PList([self._padding(layout, rank) for layout in self._layouts])
        if target.aligned:
            # Absent unless asked for: loaders compare it with their own, and older ones do not know it.
            entries["param_alignment_paddings"] = PList([PList(list(la.paddings)) for la in self._layouts])
        entries["partition_count"] = PList([target.dp] * len(self._layouts))
        entries["ds_version"] = target.version
        entries["param_slice_mappings"] = PList([self._fragments(index, rank) for index in range(len(self._members))])
        return mapping_of(entries)

    def _padding(self, layout: Concatenated, rank: int) -> int:
        if not self._target.bf16_optimizer:
            return layout.padding_of(rank)
        # BF16_Optimizer counts all of it on the last rank.
        return layout.partition_numel * self._target.dp - layout.numel if rank == self._target.dp - 1 else 0

    def _base_state(self, rank: int) -> Node:
        state: dict[str | int, Node] = {}
        for index, (members, layout) in enumerate(zip(self._members, self._layouts, strict=True)):
            runs = {s: tuple(p[rank]) for s, p in self._pieces[index].items()}
            has_state = len(self._groups.states) > 1 or any(p.scalars for p in members)
            if members and has_state:
                state[index] = self._groups.state_entry(members, runs, (layout.partition_numel,))
        groups = self._groups.with_params([[index] for index in range(self._groups.count)])
        return mapping_of({"state": mapping_of(state), "param_groups": groups})

    def _master(self, index: int, rank: int) -> Node:
        layout = self._layouts[index]
        numel = layout.partition_numel
        if not self._target.bf16_optimizer:
            numel -= layout.padding_of(rank)
        runs = clipped(self._pieces[index]["fp32"][rank], 0, numel)
        return PRuns(self._groups.dtype_of("fp32", self._members[index]).name, (numel,), tuple(runs))

    def _fragments(self, index: int, rank: int) -> Node:
        layout = self._layouts[index]
        begin, end = rank * layout.partition_numel, (rank + 1) * layout.partition_numel
        found: dict[str, Node] = {}
        for parameter, start in self._placed(index):
            low, high = max(start, begin), min(start + parameter.numel, end)
            if low < high:
                found[parameter.fqn] = fragment_node(high - low, low - begin)
        return ordered_dict(found)

    def _placed(self, index: int) -> Iterator[tuple[LocalParameter, int]]:
        return zip(self._members[index], self._layouts[index].starts, strict=True)

    def shapes(self) -> list[list[LocalParameter]]:
        """What `param_shapes` lists: the members of each group, in flat order."""
        return self._members
