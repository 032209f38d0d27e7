"""Optimizer files of stages 1 and 2 and of BF16_Optimizer: one flat partition per group and rank.

Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py` (`state_dict`, `load_state_dict`), `runtime/bf16_optimizer.py`.
`param_slice_mappings` say what is so, also under `round_robin_gradients`, where DeepSpeed's own do not.
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard_engine.formats.deepspeed.names import round_robin_order
from reshard_engine.formats.deepspeed.partitioning import (
    Run,
    alignment_elems,
    clipped,
    concatenate,
    pieces,
)
from reshard_engine.formats.deepspeed.writer.native.experts import held_by, is_expert_group
from reshard_engine.formats.deepspeed.writer.native.model import LocalModel, LocalParameter
from reshard_engine.formats.deepspeed.writer.native.optimizer import (
    Groups,
    clip_grad_of,
    flat_runs,
    fragment_node,
    trained_groups,
    zero_stage_node,
)
from reshard_engine.formats.deepspeed.writer.native.scaling import scaler_entries
from reshard_engine.formats.deepspeed.writer.native.target import Target
from reshard_engine.pickles.nodes import Node, PList, PRuns, mapping_of, ordered_dict


class _FlatGroup:
    """One param group as the ranks that share it hold it."""

    def __init__(self, members: Sequence[LocalParameter], ranks: int, target: Target, states: Sequence[str]) -> None:
        self.members = members
        if target.round_robin:
            self.members = [members[i] for i in round_robin_order(len(members), ranks)]
        alignment = alignment_elems(target.dtype.itemsize_bytes) if target.aligned else 1
        self.ranks = ranks
        self.layout = concatenate([p.numel for p in self.members], ranks, alignment=alignment)
        self._pieces = {
            state: pieces(flat_runs(self.members, self.layout.paddings, state), self.layout.partition_numel, ranks)
            for state in states
        }

    def runs_of(self, rank: int) -> dict[str, tuple[Run, ...]]:
        """What each state of one rank's partition is made of."""
        return {state: tuple(found[rank]) for state, found in self._pieces.items()}

    def fragments_of(self, rank: int) -> Node:
        """Which elements of which parameter a rank's partition holds."""
        begin, end = rank * self.layout.partition_numel, (rank + 1) * self.layout.partition_numel
        found: dict[str, Node] = {}
        for parameter, start in zip(self.members, self.layout.starts, strict=True):
            low, high = max(start, begin), min(start + parameter.numel, end)
            if low < high:
                found[parameter.fqn] = fragment_node(high - low, low - begin)
        return ordered_dict(found)


class FlatStates:
    """The optimizer's state of one model-parallel rank, cut over its data-parallel ranks."""

    def __init__(self, groups: Groups, model: LocalModel, target: Target) -> None:
        """Lay the groups out once for all ranks."""
        self._groups, self._target = groups, target
        self._flat: list[list[_FlatGroup]] = []
        for node, members in zip(groups.nodes, trained_groups(model, groups.count), strict=True):
            ep = target.layout.ep if is_expert_group(node) else 1
            # Only experts are spread over expert-parallel ranks: each of these has a flat tensor of its own.
            self._flat.append(
                [_FlatGroup(held_by(members, model, ep, e), target.dp // ep, target, groups.states) for e in range(ep)]
            )

    def _of(self, rank: int) -> list[tuple[_FlatGroup, int]]:
        """Per param group the flat tensor that a data-parallel rank shares, and its place among those that do."""
        ep, place = self._target.expert_place(rank)
        return [(flats[ep], place) if len(flats) > 1 else (flats[0], rank) for flats in self._flat]

    def optimizer_of(self, rank: int) -> Node:
        """`optimizer_state_dict` of one data-parallel rank."""
        target, mine = self._target, self._of(rank)
        entries: dict[str | int, Node] = {}
        if not target.bf16_optimizer:
            entries |= scaler_entries(target)
        if (clipping := clip_grad_of(target)) is not None:
            entries["clip_grad"] = clipping
        entries["base_optimizer_state"] = self._base_state(mine)
        entries["single_partition_of_fp32_groups"] = PList([self._master(flat, place) for flat, place in mine])
        if not target.bf16_optimizer:
            entries["zero_stage"] = zero_stage_node(target.stage)
        entries["group_paddings"] = PList([self._padding(flat, place) for flat, place in mine])
        if target.aligned:
            # Absent unless asked for: loaders compare it with their own, and older ones do not know it.
            entries["param_alignment_paddings"] = PList([PList(list(flat.layout.paddings)) for flat, _ in mine])
        entries["partition_count"] = PList([flat.ranks for flat, _ in mine])
        entries["ds_version"] = target.version
        entries["param_slice_mappings"] = PList([flat.fragments_of(place) for flat, place in mine])
        return mapping_of(entries)

    def _padding(self, flat: _FlatGroup, place: int) -> int:
        if not self._target.bf16_optimizer:
            return flat.layout.padding_of(place)
        # BF16_Optimizer counts all of it on the last rank.
        return flat.layout.partition_numel * flat.ranks - flat.layout.numel if place == flat.ranks - 1 else 0

    def _base_state(self, mine: Sequence[tuple[_FlatGroup, int]]) -> Node:
        state: dict[str | int, Node] = {}
        for index, (flat, place) in enumerate(mine):
            has_state = len(self._groups.states) > 1 or any(p.scalars for p in flat.members)
            if flat.members and has_state:
                shape = (flat.layout.partition_numel,)
                state[index] = self._groups.state_entry(flat.members, flat.runs_of(place), shape)
        groups = self._groups.with_params([[index] for index in range(self._groups.count)], ep=self._target.layout.ep)
        return mapping_of({"state": mapping_of(state), "param_groups": groups})

    def _master(self, flat: _FlatGroup, place: int) -> Node:
        numel = flat.layout.partition_numel
        if not self._target.bf16_optimizer:
            numel -= flat.layout.padding_of(place)
        runs = clipped(flat.runs_of(place)["fp32"], 0, numel)
        return PRuns(self._groups.dtype_of("fp32", flat.members).name, (numel,), tuple(runs))

    def shapes(self) -> list[list[LocalParameter]]:
        """What `param_shapes` lists: the members of each group, in flat order, as the first rank holds them."""
        return [list(flats[0].members) for flats in self._flat]
