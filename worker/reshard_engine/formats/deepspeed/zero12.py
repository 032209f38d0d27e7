"""Flat groups of ZeRO-1, ZeRO-2 and BF16_Optimizer: parameters concatenated, padded, and cut into equal partitions.

One rule is right for every run: concatenate the ranks' partitions of a group, walk `param_shapes` in its
order (this is the flat order, also under `round_robin_gradients`), and add the alignment padding after each
parameter. The reader ignores `param_slice_mappings`, which are wrong under `round_robin_gradients`.

Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py` (`_configure_distributed_optimizer`,
`get_data_parallel_partitions`), `runtime/bf16_optimizer.py`; verified by running.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from reshard.errors import RequestError, SourceError
from reshard_engine.checkpoint import Agreement
from reshard_engine.formats.deepspeed.files import PARAM_SHAPES, VERSION, round_robin_order
from reshard_engine.formats.deepspeed.native.target import LocalModel, LocalParameter, Target
from reshard_engine.formats.deepspeed.optimizer import (
    MOMENTUM,
    Groups,
    clip_grad_of,
    flat_runs,
    fragment_node,
    is_muons,
    scaler_entries,
    state_runs,
    trained_groups,
    zero_stage_node,
)
from reshard_engine.formats.deepspeed.parallel.experts import held_by, is_expert_group
from reshard_engine.formats.deepspeed.partitioning import (
    NCCL_START_ALIGNMENT,
    Run,
    alignment_elems,
    clipped,
    concatenate,
    pieces,
)
from reshard_engine.formats.deepspeed.rank_files import ModelStates, RankStates, Shapes, parse_param_shapes
from reshard_engine.pickles.nodes import Node, PList, PRuns, is_mapping, mapping_of, ordered_dict
from reshard_engine.tensors.dtypes import Dtype
from reshard_engine.tensors.shard_map import Column, ShardMapBuilder


@dataclass(frozen=True, slots=True)
class Partition:
    """One rank's flat tensor: elements and where they begin in its file."""

    file: int
    offset: int
    numel: int


def add_flat_group(
    builder: ShardMapBuilder,
    tensors: Sequence[int],
    shapes: Shapes,
    *,
    partitions: Sequence[Partition],
    paddings: Sequence[int],
    itemsize_bytes: int,
    what: str,
) -> None:
    """Register the pieces of one group and one state.

    Args:
        builder: Collects the pieces.
        tensors: The tensor number of each parameter of the group, in flat order.
        shapes: Names and shapes of the group, in flat order.
        partitions: One flat tensor per rank, in rank order.
        paddings: Alignment padding after each parameter, in elements; empty for none.
        itemsize_bytes: Bytes per element of the flat tensors.
        what: The group and state, for messages.

    Raises:
        SourceError: `checkpoint.coverage` if the partitions do not add up to the shapes.
    """
    numel = np.array([prod(s) for _, s in shapes], dtype=np.int64)
    pads = np.array(paddings, dtype=np.int64) if paddings else np.zeros_like(numel)
    if len(pads) != len(numel):
        raise SourceError("checkpoint.malformed", f"{what}: {len(pads)} alignment paddings for {len(numel)} parameters")
    starts = np.concatenate(([0], np.cumsum(numel + pads)))[:-1].astype(np.int64)
    ends = starts + numel
    total = int(starts[-1] + numel[-1] + pads[-1]) if len(numel) else 0
    lengths = np.array([p.numel for p in partitions], dtype=np.int64)
    held = int(lengths.sum())
    _check_sizes(lengths, total, held, len(partitions), what)
    rank_starts = np.concatenate(([0], np.cumsum(lengths)))[:-1].astype(np.int64)
    begin, end = _segments(starts, ends, rank_starts, lengths)
    owner = np.searchsorted(starts, begin, side="right") - 1
    # Zero-element parameters share their start with the next one; the last of them owns the segment.
    inside = (owner >= 0) & (begin < ends[owner]) if len(numel) else np.zeros(0, dtype=bool)
    begin, end, owner = begin[inside], end[inside], owner[inside]
    rank = np.searchsorted(rank_starts, begin, side="right") - 1
    files = np.array([p.file for p in partitions], dtype=np.int64)
    offsets = np.array([p.offset for p in partitions], dtype=np.int64)
    builder.pieces(
        np.array(tensors, dtype=np.int64)[owner],
        begin - starts[owner],
        end - starts[owner],
        file=files[rank],
        offset=offsets[rank] + (begin - rank_starts[rank]) * itemsize_bytes,
    )


def _segments(starts: Column, ends: Column, rank_starts: Column, lengths: Column) -> tuple[Column, Column]:
    """The flat interval cut at every parameter's and every rank's boundary."""
    cuts = np.unique(np.concatenate((starts, ends, rank_starts, rank_starts + lengths)))
    limit = int(ends.max(initial=0))
    cuts = cuts[cuts <= limit]
    return cuts[:-1], cuts[1:]


def _check_sizes(lengths: Column, total: int, held: int, ranks: int, what: str) -> None:
    # The engine pads a group to a multiple of 2 * ranks; older versions aligned differently, hence the slack.
    room = held - total
    if room < 0 or room >= 2 * NCCL_START_ALIGNMENT * ranks:
        raise SourceError(
            "checkpoint.coverage",
            f"{what}: {ranks} ranks hold {held} elements, the parameters need {total}",
            fix="the files are of runs with different models or world sizes",
        )
    longest = int(lengths.max(initial=0))
    short = np.flatnonzero(lengths < longest)
    # All ranks hold equal partitions, but files lack the padding at the end: it may cover one rank or several.
    if len(short) and bool((lengths[short[0] + 1 :] > 0).any()):
        raise SourceError("checkpoint.coverage", f"{what}: rank {short[0]} of {ranks} holds a short partition")


# Muon's momentum at stages 1 and 2: whole matrices, where all other states are cut into partitions.
#
# DeepSpeed orthogonalizes whole matrices. So a rank keeps the momentum of every matrix of which its partition holds
# elements, one matrix after another, and a matrix on the border of two partitions is on both of their ranks. Where the
# optimizer is offloaded, the momentum is cut as the masters are, and so it is in BF16_Optimizer.
#
# Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py` (`get_partition_info`, `_muon_momentum_buffer`,
# `_get_flat_partition_unpadded`, `_apply_muon_updates_cpu_offload`), `runtime/bf16_optimizer.py`
# (`_prepare_muon_updates`), `runtime/engine.py` (`_muon_param_groups`: `use_muon`); verified by running.


def matrices_of(starts: Sequence[int], numels: Sequence[int], partition_numel: int, ranks: int) -> list[list[int]]:
    """For each rank the parameters of which its partition of a flat group holds elements, in flat order.

    Args:
        starts: The first element of each parameter in the flat group.
        numels: The elements of each parameter.
        partition_numel: The elements of a rank's partition, padding included.
        ranks: The number of partitions.
    """
    found: list[list[int]] = [[] for _ in range(ranks)]
    for index, (start, numel) in enumerate(zip(starts, numels, strict=True)):
        if numel:
            last = (start + numel - 1) // partition_numel
            for rank in range(start // partition_numel, min(last, ranks - 1) + 1):
                found[rank].append(index)
    return found


@dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices of which each rank keeps the whole momentum."""

    by_rank: tuple[tuple[int, ...], ...]
    """Positions in the group's flat order."""
    numels: tuple[int, ...]
    """The elements of each matrix."""

    @classmethod
    def of(cls, shapes: Shapes, paddings: Sequence[int], masters: Sequence[int]) -> Matrices:
        """The matrices of a group.

        Args:
            shapes: Names and shapes in flat order.
            paddings: Alignment padding after each parameter, in elements; empty for none.
            masters: The elements of each rank's masters. The file has them without the padding at the end.
        """
        numels = [prod(shape) for _, shape in shapes]
        pads = list(paddings) or [0] * len(numels)
        ends = np.cumsum([n + p for n, p in zip(numels, pads, strict=True)], dtype=np.int64).tolist()
        starts = [0, *ends[:-1]] if ends else []
        found = matrices_of(starts, numels, max(max(masters, default=0), 1), len(masters))
        return cls(tuple(map(tuple, found)), tuple(numels))

    def fit(self, lengths: Sequence[int]) -> bool:
        """True if each rank's tensor has as many elements as its matrices."""
        return [sum(self.numels[i] for i in held) for held in self.by_rank] == list(lengths)

    def are_partitions(self, partition_numel: int) -> bool:
        """True if each rank's matrices are its partition, so that both layouts are the same."""
        seen = [i for held in self.by_rank for i in held]
        return len(seen) == len(set(seen)) and self.fit([partition_numel] * len(self.by_rank))

    def are_kept(self, lengths: Sequence[int], *, offloads: bool | None, what: str) -> bool:
        """True if the ranks keep whole matrices of Muon's momentum, False if they keep their partitions.

        Args:
            lengths: The elements of each rank's momentum.
            offloads: True if the optimizer is offloaded; None where the config does not say.
            what: The group and state, for messages.

        Raises:
            SourceError: `checkpoint.coverage` if the lengths are those of no layout, `checkpoint.ambiguous` if they are
                those of both and nothing says which it is.
        """
        fits = self.fit(lengths)
        if offloads is None and fits and len({*lengths}) == 1 and not self.are_partitions(lengths[0]):
            raise SourceError(
                "checkpoint.ambiguous",
                f"{what}: the ranks' lengths fit whole matrices and partitions, and its ds_config is a path, which "
                "does not say whether the optimizer was offloaded",
                fix="load it once on as many ranks, with the config as a dict, and save it again",
            )
        whole = fits if offloads is None else not offloads
        if whole and not fits:
            raise SourceError(
                "checkpoint.coverage",
                f"{what}: the ranks hold {', '.join(map(str, lengths[:8]))} elements, and the matrices in their "
                "partitions have others: DeepSpeed's Muon keeps whole matrices at ZeRO-1 and 2",
                fix="the files are of different saves, or the run loaded a universal checkpoint and took no step yet: "
                "copy one whole save, or take an older one",
            )
        return whole

    def add(
        self,
        builder: ShardMapBuilder,
        name: str,
        shapes: Shapes,
        *,
        dtype: Dtype,
        partitions: Sequence[Partition | None],
    ) -> tuple[list[int], list[Agreement]]:
        """Register the matrices of all ranks: a tensor for each parameter, and the pairs of copies that must agree.

        Args:
            builder: Collects tensors and pieces.
            name: The state.
            shapes: Names and shapes of the group, in flat order.
            dtype: Its element type.
            partitions: The tensor of each rank; None for a rank without matrices.
        """
        tensors: dict[int, int] = {}
        agreements: list[Agreement] = []
        for rank, (held, partition) in enumerate(zip(self.by_rank, partitions, strict=True)):
            if partition is None:
                continue
            at = partition.offset
            for index in held:
                fqn, shape = shapes[index]
                tensor = builder.tensor(fqn, name, dtype, shape)
                builder.whole(tensor, file=partition.file, offset=at)
                at += self.numels[index] * dtype.itemsize_bytes
                if (first := tensors.setdefault(index, tensor)) != tensor:
                    agreements.append(Agreement(fqn, name, first, tensor, f"rank {rank}", fix=_SPLIT))
        for index, (fqn, shape) in enumerate(shapes):
            if index not in tensors:  # no elements
                tensors[index] = builder.tensor(fqn, name, dtype, shape)
        return [tensors[index] for index in range(len(shapes))], agreements


_SPLIT = (
    "the ranks computed different momenta for a matrix on the border of their partitions, so that their run was not "
    "one: save it again with reduce_scatter off, or write the weights alone: --to safetensors"
)


# The parameters of each flat group, from `param_shapes`, which versions of DeepSpeed store in different files.
#
# Source: deepspeed 0.19.8 `runtime/engine.py` (`_get_zero_param_shapes`: a list, in the model file); before 0.6.0
# in every optimizer file, before 0.5.4 one mapping over all groups.


def shapes_by_group(model: ModelStates, states: Sequence[RankStates]) -> tuple[Shapes, ...]:
    """Names and shapes of each group (ZeRO-1/2, BF16) or sub-group (ZeRO-3), in flat order.

    Raises:
        SourceError: `source.unsupported_version` if the files do not say, `checkpoint.mixed` if they contradict
            one another.
    """
    first, node = states[0], model.entries.get(PARAM_SHAPES)
    shapes = model.param_shapes
    if shapes is None and first.legacy_param_shapes is not None:
        node = first.legacy_param_shapes
        shapes = parse_param_shapes(node, what="param_shapes of the optimizer file")
    if shapes is None:
        raise SourceError(
            "source.unsupported_version",
            "neither the model file nor the optimizer file has `param_shapes` "
            f"(deepspeed {model.version or 'of unknown version'})",
            fix="load it once with a DeepSpeed of 0.5 or later at the old world size, and save again",
        )
    if is_mapping(node) and len(first.fp32) > 1:
        return _cut_into_groups(shapes[0], states)
    if len(shapes) != len(first.fp32):
        raise SourceError(
            "checkpoint.mixed", f"{len(shapes)} groups of parameter shapes, {len(first.fp32)} groups of flat tensors"
        )
    return shapes


def _cut_into_groups(shapes: Shapes, states: Sequence[RankStates]) -> tuple[Shapes, ...]:
    """The (sub-)groups of one mapping over all groups (before 0.5.4), told apart by the sizes of their flat tensors.

    Source: deepspeed 0.5.3 `runtime/engine.py` (`_get_zero_param_shapes` walks the groups into one mapping).
    """
    ranks, sharded = len(states), states[0].stage == 3
    groups: list[Shapes] = []
    begin = end = 0
    for index, flat in enumerate(states[0].fp32):
        room = flat.numel if sharded else sum(s.fp32[index].numel for s in states)
        while room > 0 and end < len(shapes):
            numel = prod(shapes[end][1])
            room -= -(-numel // ranks) if sharded else numel
            end += 1
        if room:
            break
        groups.append(shapes[begin:end])
        begin = end
    if len(groups) != len(states[0].fp32) or end != len(shapes):
        raise SourceError(
            "source.unsupported_version",
            "`param_shapes` does not tell parameter groups apart, and the groups' sizes do not either",
            fix="load it once with a DeepSpeed of 0.5.4 or later at the old world size, and save again",
        )
    return tuple(groups)


# The optimizer's order of a group's parameters, also where the flat order is another one.
#
# Under `round_robin_gradients` the flat order, which `param_shapes` lists, deals a group's parameters out over the
# ranks. The next run needs the order before that, because another number of ranks deals the parameters out differently.
#
# Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py` (`_round_robin_reorder`); verified by running.


def undealt(names: Sequence[str], ranks: int, model_order: Sequence[str]) -> list[int]:
    """Positions of a group's parameters in its flat order, listed in the order before it was dealt out.

    The config may say `round_robin_gradients` where DeepSpeed does not do it (pipelines, BF16_Optimizer): a flat
    order that already is the model's own is left alone.

    Args:
        names: The group in flat order.
        ranks: Data-parallel ranks that it was dealt out over.
        model_order: All names of `module`.
    """
    flat, back = list(range(len(names))), _back(len(names), ranks)
    return flat if _rising(flat, names, model_order) and not _rising(back, names, model_order) else back


def shown_order(
    names: Sequence[str], ranks: int, model_order: Sequence[str], fragments: Sequence[str]
) -> list[int] | None:
    """Like `undealt`, for a run whose config is not known; None if the files do not show the order.

    `param_slice_mappings` walks a group's parameters in the order before it was dealt out, rank by rank, also under
    `round_robin_gradients`; `param_shapes` has the flat order. Without it (before 0.7), the model's order shows it.

    Args:
        names: The group in flat order.
        ranks: Data-parallel ranks that share it.
        model_order: All names of `module`.
        fragments: The names in `param_slice_mappings` of all ranks, each where it comes first.

    Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py` (`_create_param_mapping`, `_link_all_hp_params`).
    """
    flat, back = list(range(len(names))), _back(len(names), ranks)
    for order in (flat, back):
        if [names[i] for i in order] == [*fragments]:
            return order
    if fragments:
        return None
    return next((order for order in (flat, back) if _rising(order, names, model_order)), None)


def _back(count: int, ranks: int) -> list[int]:
    dealt = round_robin_order(count, ranks)
    return sorted(range(count), key=dealt.__getitem__)


def _rising(order: Sequence[int], names: Sequence[str], model_order: Sequence[str]) -> bool:
    place = {name: i for i, name in enumerate(model_order)}
    places = [place[names[i]] for i in order if names[i] in place]
    return places == sorted(places)


# Optimizer files of stages 1 and 2 and of BF16_Optimizer: one flat partition per group and rank.
#
# Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py` (`state_dict`, `load_state_dict`),
# `runtime/bf16_optimizer.py`. The written `param_slice_mappings` are correct also under `round_robin_gradients`; those
# that DeepSpeed writes are not.


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

    @cached_property
    def _matrices(self) -> list[list[int]]:
        numels = [p.numel for p in self.members]
        return matrices_of(self.layout.starts, numels, max(self.layout.partition_numel, 1), self.ranks)

    def momentum_of(self, rank: int) -> tuple[Run, ...]:
        """The runs of the whole matrices of which a rank's partition holds elements, for Muon."""
        return tuple(run for i in self._matrices[rank] for run in state_runs(self.members[i], MOMENTUM))

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
        self._whole = [_keeps_matrices(g.hyper_parameters, target) for g in groups.groups]
        for index, (group, members) in enumerate(zip(groups.groups, trained_groups(model, groups.count), strict=True)):
            ep = target.layout.ep if is_expert_group(group) else 1
            states = groups.states_of(index)
            # Only experts are spread over expert-parallel ranks: each of these has a flat tensor of its own.
            self._flat.append(
                [_FlatGroup(held_by(members, model, ep, e), target.dp // ep, target, states) for e in range(ep)]
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
            if not self._groups.has_state(flat.members):
                continue
            runs, shape = flat.runs_of(place), (flat.layout.partition_numel,)
            if self._whole[index] and MOMENTUM in runs:
                runs[MOMENTUM] = flat.momentum_of(place)
                shape = (sum(end - begin for _, begin, end in runs[MOMENTUM]),)
                if not shape[0]:
                    continue  # DeepSpeed keeps no momentum on a rank whose partition is all padding
            state[index] = self._groups.state_entry(flat.members, runs, shape)
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


def _keeps_matrices(group: Mapping[str | int, Node], target: Target) -> bool:
    """True if the target's run keeps whole matrices of a group's momentum.

    Raises:
        RequestError: `request.unsatisfiable` where nothing says whether the run offloads its optimizer.
    """
    if not is_muons(group) or target.bf16_optimizer:
        return False
    if target.offloads is None:
        raise RequestError(
            "request.unsatisfiable",
            f"at ZeRO-{target.stage} DeepSpeed's Muon keeps whole matrices on each rank, or parts of them with "
            "offload_optimizer, and the source's ds_config is a path or absent, so that nothing says which",
            fix="--zero-stage 3, or bf16, where the layout is one in either case",
        )
    return not target.offloads
