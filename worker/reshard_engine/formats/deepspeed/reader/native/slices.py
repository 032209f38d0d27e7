"""The tensors of one model-parallel rank, joined from the files of its data-parallel ranks.

Without model parallelism, these tensors are the whole checkpoint. With it, they are one rank's parts, under the
rank's own names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

from reshard.errors import SourceError, printable
from reshard_engine.checkpoint import Parameter, Scalar
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.formats.deepspeed.names import OPTIMIZER_STATE
from reshard_engine.formats.deepspeed.reader.native.autoep import FusedExperts, fused_experts
from reshard_engine.formats.deepspeed.reader.native.experts import (
    ExpertGroup,
    expert_groups,
    in_model_order,
)
from reshard_engine.formats.deepspeed.reader.native.flat_groups import Partition, add_flat_group
from reshard_engine.formats.deepspeed.reader.native.model_states import ModelStates, Shapes
from reshard_engine.formats.deepspeed.reader.native.optim_states import RankStates, read_scalar
from reshard_engine.formats.deepspeed.reader.native.order import shown_order, undealt
from reshard_engine.formats.deepspeed.reader.native.run_config import data_before_experts, uses_round_robin
from reshard_engine.formats.deepspeed.reader.native.shapes import shapes_by_group
from reshard_engine.formats.deepspeed.reader.native.sharded_params import add_sharded_params
from reshard_engine.formats.deepspeed.reader.native.swapped import swapped_partition
from reshard_engine.pickles.nodes import Node, PTensor, is_mapping, mapping_items, sequence_items
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.tensors.shard_map import ShardMapBuilder


@dataclass(frozen=True)
class Slice:
    """The content of one model-parallel rank. Tensor numbers index the shard map that is being built."""

    states: tuple[RankStates, ...]
    models: tuple[ModelStates, ...]
    trained: tuple[Parameter, ...]
    """The trained parameters in the optimizer's order, in the rank's own shapes."""
    ep: int
    """The number of expert-parallel ranks; 1 if no experts are spread over ranks."""
    dealt: bool
    """True if `round_robin_gradients` made a flat order that is not the optimizer's."""
    unproven: bool
    """True if neither the config nor the files say whether the flat order is the optimizer's."""
    fused: FusedExperts
    """Parameters in which AutoEP fused experts."""
    rank_numbers: frozenset[str]
    """Names of states that are one number for each data-parallel rank and differ between ranks."""

    @property
    def model(self) -> ModelStates:
        """Model states of data-parallel rank 0."""
        return self.models[0]


def add_slice(
    builder: ShardMapBuilder,
    states: Sequence[RankStates],
    models: Sequence[ModelStates],
    number: Mapping[SourceFile, int],
) -> Slice:
    """Register the masters and optimizer states of one model-parallel rank.

    Raises:
        SourceError: `checkpoint.*` if the files do not add up.
    """
    model, first = models[0], states[0]
    shapes = shapes_by_group(model, states)
    fused = fused_experts(model)
    parts = expert_groups(shapes, states, fused, data_first=data_before_experts(model))
    group_of = _groups_of(first, len(shapes))
    by_name: dict[str, dict[str, int]] = {}
    for key in ("fp32", *_positional_keys(states)):
        _add_state(builder, key, states, parts, number=number, by_name=by_name)
    trained: list[Parameter] = []
    rank_numbers: set[str] = set()
    may_deal = first.stage in (1, 2) and not first.bf16_optimizer and len(states) > 1
    said = uses_round_robin(model) if may_deal else False
    dealt, unproven = said is True, False
    for index, same in groupby(parts, key=lambda p: p.index):
        group: list[Parameter] = []
        spread = 1
        for part in same:
            ranks, spread = [states[r] for r in part.ranks], part.ep
            order: Sequence[int] = range(len(part.shapes))
            names = [n for n, _ in part.shapes]
            if said:
                order = undealt(names, len(ranks), list(model.module))
            elif said is None:
                shown = shown_order(names, len(ranks), list(model.module), _fragments(ranks, index))
                unproven |= shown is None
                dealt |= shown not in (None, [*order])
                order = order if shown is None else shown
            scalars = _scalars(ranks, index)
            rank_numbers |= scalars.keys() - (common := _common(ranks, index, scalars)).keys()
            members = [part.shapes[i] for i in order]
            group += [Parameter(n, shape, group_of[index], None, by_name[n], common) for n, shape in members]
        group = fused.joined(builder, group)
        if spread > 1:
            group = [group[i] for i in in_model_order([p.fqn for p in group])]
        trained += group
    ep = max((p.ep for p in parts), default=1)
    held = tuple(fused.without(m) for m in models)
    return Slice(tuple(states), held, tuple(trained), ep, dealt, unproven, fused, frozenset(rank_numbers))


def _fragments(ranks: Sequence[RankStates], index: int) -> list[str]:
    """The names in the `param_slice_mappings` of a group over all ranks, each where it comes first."""
    found: dict[str, None] = {}
    for rank in ranks:
        outer = mapping_items(rank.torch_file.root, what=printable(rank.torch_file.file.name))
        node = mapping_items(outer[OPTIMIZER_STATE], what=OPTIMIZER_STATE).get("param_slice_mappings")
        groups = sequence_items(node, what="param_slice_mappings") if node is not None else ()
        names = groups[index] if index < len(groups) else None
        found |= dict.fromkeys(map(str, mapping_items(names, what="param_slice_mappings")) if is_mapping(names) else ())
    return list(found)


def _groups_of(first: RankStates, count: int) -> list[int]:
    """The optimizer param group of each entry of `param_shapes`, whose entries are sub-groups at ZeRO-3."""
    if first.elastic:
        return list(range(count)) if first.stage != 3 else [0] * count
    return group_of_subgroup(first.param_groups, count)


def group_of_subgroup(param_groups: Sequence[Mapping[str | int, Node]], count: int) -> list[int]:
    """For each flat (sub-)group, the param group whose `params` lists the (sub-)group's number.

    Raises:
        SourceError: `checkpoint.malformed` if no param group lists a (sub-)group.
    """
    found: dict[int, int] = {}
    for index, group in enumerate(param_groups):
        params = group.get("params")
        for item in params.items if params is not None and hasattr(params, "items") else ():
            if type(item) is int:
                found[item] = index
    missing = [i for i in range(count) if i not in found]
    if missing:
        raise SourceError("checkpoint.malformed", f"flat groups {missing[:8]} belong to no optimizer param group")
    return [found[i] for i in range(count)]


def _flats(
    states: Sequence[RankStates], tensors: Sequence[PTensor], shapes: Shapes, number: Mapping[SourceFile, int]
) -> Iterator[Partition]:
    """The place of each rank's flat tensor of one (sub-)group."""
    elsewhere = states[0].stage == 3 and not all(t.numel for t in tensors)
    # The elements of a rank's flat tensor, padding included. Needed only where the rank file lacks some.
    numel = sum(-(-prod(shape) // len(states)) for _, shape in shapes) if elsewhere else 0
    for rank, tensor in zip(states, tensors, strict=True):
        if numel and not tensor.numel:
            yield swapped_partition(rank, tensor, numel, number)
        else:
            yield Partition(number[rank.torch_file.file], rank.torch_file.tensor_offset(tensor), tensor.numel)


def _positional_keys(states: Sequence[RankStates]) -> list[str]:
    keys: dict[str, None] = {}
    for group in (g for rank in states for g in rank.states):
        for key, value in group.items():
            if isinstance(value, PTensor) and len(value.shape) == 1:
                keys[key] = None
    return list(keys)


@dataclass(frozen=True, slots=True)
class _Wide:
    """The sub-groups of stage 3 that one set of ranks shares, joined end to end."""

    tensors: list[int]
    shapes: list[tuple[str, tuple[int, ...]]]
    partitions: list[list[Partition]]
    """By rank."""
    itemsize_bytes: int


def _add_state(
    builder: ShardMapBuilder,
    key: str,
    states: Sequence[RankStates],
    parts: Sequence[ExpertGroup],
    *,
    number: Mapping[SourceFile, int],
    by_name: dict[str, dict[str, int]],
) -> None:
    """Register one state of every (sub-)group that has it."""
    wide: dict[tuple[int, ...], _Wide] = {}
    for part in parts:
        index, group, ranks = part.index, part.shapes, [states[r] for r in part.ranks]
        flats = [s.fp32[index] if key == "fp32" else s.states[index].get(key) for s in ranks]
        if all(f is None for f in flats):
            continue
        found = [f for f in flats if isinstance(f, PTensor) and len(f.shape) == 1]
        if len(found) != len(ranks):
            raise SourceError(
                "checkpoint.incomplete", f"group {index}: {printable(key)} is on {len(found)} of {len(ranks)} ranks"
            )
        if len({f.dtype for f in found}) != 1:
            raise SourceError("checkpoint.mixed", f"group {index}: {printable(key)} has several element types")
        dtype = BY_NAME[found[0].dtype]
        tensors = [builder.tensor(name, key, dtype, shape) for name, shape in group]
        for (name, _), tensor in zip(group, tensors, strict=True):
            by_name.setdefault(name, {})[key] = tensor
        partitions = list(_flats(ranks, found, group, number))
        what = f"group {index}, {printable(key)}"
        if states[0].stage != 3:
            pads = states[0].alignment_paddings[index] if index < len(states[0].alignment_paddings) else ()
            add_flat_group(
                builder,
                tensors,
                group,
                partitions=partitions,
                paddings=pads,
                itemsize_bytes=dtype.itemsize_bytes,
                what=what,
            )
            continue
        found_wide = wide.setdefault(part.ranks, _Wide([], [], [[] for _ in ranks], dtype.itemsize_bytes))
        found_wide.tensors.extend(tensors)
        found_wide.shapes.extend(group)
        for held, partition in zip(found_wide.partitions, partitions, strict=True):
            held.append(partition)
    for group in wide.values():
        add_sharded_params(
            builder,
            group.tensors,
            tuple(group.shapes),
            partitions=group.partitions,
            itemsize_bytes=group.itemsize_bytes,
            what=printable(key),
        )


def _scalars(states: Sequence[RankStates], index: int) -> Mapping[str, Scalar]:
    """The one-number states of a (sub-)group on its first rank. Counters must be equal on all ranks.

    Raises:
        SourceError: `checkpoint.mixed` if a rank counts differently, or has other states.
    """
    mine: dict[str, Scalar] = {}
    for rank, state in enumerate(states):
        theirs = _group_scalars(state, index)
        if rank == 0:
            mine = theirs
        elif counters(theirs) != counters(mine) or theirs.keys() != mine.keys():
            text = ", ".join(f"{printable(k)}={v.value}" for k, v in theirs.items())
            raise SourceError(
                "checkpoint.mixed",
                f"rank {rank} has {text or 'no counters'}, rank 0 has "
                + (", ".join(f"{printable(k)}={v.value}" for k, v in mine.items()) or "none"),
                fix="the files are of different steps: copy one whole save",
            )
    return mine


def counters(scalars: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The one-number states that count steps: `step`, and every integer.

    The other one-number states are computed from a tensor, such as Adafactor's RMS: each partition has its own value.
    """
    return {k: s for k, s in scalars.items() if k == "step" or not isinstance(s.value, float)}


def _common(states: Sequence[RankStates], index: int, first: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The one-number states that are the same on all ranks."""
    if len(counters(first)) == len(first):
        return dict(first)
    others = [_group_scalars(s, index) for s in states[1:]]
    return {k: s for k, s in first.items() if all(o[k] == s for o in others)}


def _group_scalars(state: RankStates, index: int) -> dict[str, Scalar]:
    entries = state.states[index]
    name = state.torch_file.file.name
    scalars = {
        key: read_scalar(value, state.torch_file, what=f"{printable(name)}: {printable(key)}")
        for key, value in entries.items()
        if value is not None and not (isinstance(value, PTensor) and len(value.shape) == 1)
    }
    if "step" not in scalars and entries and state.param_groups:
        # Fused optimizers, and all optimizers before 0.6, keep the step in the param group.
        for group in state.param_groups:
            params = group.get("params")
            if group.get("step") is not None and params is not None and index in getattr(params, "items", ()):
                scalars["step"] = read_scalar(group["step"], state.torch_file, what="param_groups: step")
    return scalars
