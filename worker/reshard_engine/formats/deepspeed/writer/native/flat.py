"""Optimizer files of stages 1 and 2 and of BF16_Optimizer: one flat partition per group and rank.

Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py` (`state_dict`, `load_state_dict`), `runtime/bf16_optimizer.py`.
The written `param_slice_mappings` are correct also under `round_robin_gradients`; those that DeepSpeed writes are not.
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard_engine.formats.deepspeed.names import VERSION, round_robin_order
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
    """One param group, cut over the ranks that share it."""

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
        """The runs of elements that make up each state of one rank's partition."""
        return {state: tuple(found[rank]) for state, found in self._pieces.items()}

    def fragments_of(self, rank: int) -> Node:
        """The elements of each parameter that a rank's partition holds, as `param_slice_mappings` has them."""
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
        """Lay out all groups, once for all ranks."""
        self._groups, self._target = groups, target
        self._flat: list[list[_FlatGroup]] = []
        for group, members in zip(groups.groups, trained_groups(model, groups.count), strict=True):
            ep = target.layout.ep if is_expert_group(group) else 1
            # Only experts are spread over expert-parallel ranks: each of these has a flat tensor of its own.
            self._flat.append(
                [_FlatGroup(held_by(members, model, ep, e), target.dp // ep, target, groups.states) for e in range(ep)]
            )

    def _of(self, rank: int) -> list[tuple[_FlatGroup, int]]:
        """For each param group, the flat tensor that a data-parallel rank shares, and its place among those ranks."""
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
            # Written only on request: loaders compare it with their own setting, and older loaders do not know it.
            entries["param_alignment_paddings"] = PList([PList(list(flat.layout.paddings)) for flat, _ in mine])
        entries["partition_count"] = PList([flat.ranks for flat, _ in mine])
        entries[VERSION] = target.version
        entries["param_slice_mappings"] = PList([flat.fragments_of(place) for flat, place in mine])
        return mapping_of(entries)

    def _padding(self, flat: _FlatGroup, place: int) -> int:
        if not self._target.bf16_optimizer:
            return flat.layout.padding_of(place)
        # BF16_Optimizer counts all padding on the last rank.
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
        """The content of `param_shapes`: the members of each group in flat order, as the first rank holds them."""
        return [list(flats[0].members) for flats in self._flat]
