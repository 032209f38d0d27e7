"""Expert parallelism: which ranks partition a group, and the rank, the name and the file of each expert.

A group of experts is partitioned over the ranks that hold the same experts; the others hold other experts under the
same local names. Data-parallel rank d belongs to expert-parallel rank e = d mod EP, and holds the experts
[e * local, (e + 1) * local) of each layer; with `use_data_before_expert_parallelism` e is d over the number of ranks
that hold the same experts.

Source: deepspeed 0.19.8 `utils/groups.py` (`_create_expert_and_data_parallel`: E + D order, or D + E),
`moe/utils.py` (param groups with `moe`), `runtime/engine.py` (`_save_moe_checkpoint`: local to global numbers);
verified by running.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from reshard.errors import RequestError, SourceError, printable
from reshard_engine.checkpoint import Checkpoint, Parameter, ParamGroup
from reshard_engine.formats.deepspeed.facts import facts_of
from reshard_engine.formats.deepspeed.files import (
    EXPERT,
    FUSED_LAYERS,
    FUSED_LAYERS_LEGACY,
    FUSED_WEIGHTS,
    INFO,
    OPTIMIZER_STATE,
)
from reshard_engine.formats.deepspeed.native.target import LocalModel, LocalParameter, Target
from reshard_engine.formats.deepspeed.parallel.rules import as_count, as_items, as_lengths, as_mapping
from reshard_engine.formats.deepspeed.partitioning import Run, clipped
from reshard_engine.formats.deepspeed.rank_files import ModelStates, RankStates, Shapes
from reshard_engine.formats.model_weights import checked_name
from reshard_engine.pickles.nodes import (
    Node,
    PList,
    is_mapping,
    mapping_items,
    mapping_of,
    node_of,
    plain_value,
    sequence_items,
)
from reshard_engine.tensors.shard_map import ShardMapBuilder, packed_stride
from reshard_engine.tensors.views import Box, View

# AutoEP: a layer's experts fused along the first dimension of three tensors, and cut there over expert-parallel ranks.
#
# Each rank holds `experts.w1`, `w2` and `w3` of its own experts under the same names; `ds_autoep_layers` says which
# experts these are. Below stage 3, each expert's weights have a file of their own. At stage 3, only the optimizer's
# shares hold them, and each rank's file says which ranks share a sub-group.
#
# Source: deepspeed 0.19.8 `runtime/engine.py` (`_save_moe_checkpoint`), `checkpoint/autoep_affine.py` (placement),
# `checkpoint/autoep_zero3_metadata.py`, `runtime/zero/stage3.py` (`_zero3_partition_group_metadata`); verified by
# running.

_FOLDING = "folding"
_PARTITION_GROUPS = "ds_zero_partition_groups"
_PLACEMENT_VERSION = 1
MAX_EXPERTS = 1 << 16
_PART = re.compile(r"(?P<name>.+)@ep(?P<rank>0|[1-9][0-9]{0,8})")

Placement = tuple[tuple[int, ...], ...]
"""The experts of each expert-parallel rank, in the order in which they are stored."""


@dataclass(frozen=True)
class FusedExperts:
    """The parameters that hold fused experts, and the experts that each expert-parallel rank has of each."""

    placements: Mapping[str, Placement] = field(default_factory=dict[str, Placement])
    """By parameter name."""

    def __contains__(self, name: str) -> bool:
        """True if a parameter holds fused experts."""
        return name in self.placements

    def count(self, name: str) -> int:
        """The number of a parameter's experts on all ranks."""
        return sum(map(len, self.placements[name]))

    def whole(self, group: Shapes) -> Shapes:
        """The names and shapes of a group, where fused parameters have the experts of all ranks."""
        return tuple((n, (self.count(n), *shape[1:]) if n in self and shape else shape) for n, shape in group)

    def parts(self, group: Shapes, rank: int) -> Shapes:
        """The names and shapes of a group on one expert-parallel rank; parts of fused parameters get their own names.

        Args:
            group: As the first rank lists it.
            rank: Expert-parallel rank.

        Raises:
            SourceError: `checkpoint.mixed` if the listed shape is not that of the first rank's experts.
        """
        found: list[tuple[str, tuple[int, ...]]] = []
        for name, shape in group:
            if name in self:
                placement = self.placements[name]
                if rank >= len(placement) or not shape or shape[0] != len(placement[0]):
                    raise SourceError(
                        "checkpoint.mixed",
                        f"{printable(name)} {shape} on expert-parallel rank {rank}; {FUSED_LAYERS} gives it "
                        f"{[len(experts) for experts in placement[:8]]} experts",
                    )
                found.append((f"{name}@ep{rank}", (len(placement[rank]), *shape[1:])))
            else:
                found.append((name, shape))
        return tuple(found)

    def joined(self, builder: ShardMapBuilder, members: Sequence[Parameter]) -> list[Parameter]:
        """The parameters of a group with fused ones made whole; each takes the place of its first part.

        Raises:
            SourceError: `checkpoint.mixed` if ranks have different states or counters, `source.unsupported`.
        """
        parts: dict[str, list[Parameter]] = {}
        for parameter in members:
            match = _PART.fullmatch(parameter.fqn)
            parts.setdefault(match["name"] if match and match["name"] in self else parameter.fqn, []).append(parameter)
        return [
            self._whole(builder, name, same) if name in self and same[0].fqn != name else same[0]
            for name, same in parts.items()
        ]

    def _whole(self, builder: ShardMapBuilder, name: str, parts: Sequence[Parameter]) -> Parameter:
        first, placement = parts[0], self.placements[name]
        if len(parts) != len(placement):
            raise SourceError("checkpoint.mixed", f"{printable(name)} has {len(parts)} of {len(placement)} parts")
        for rank, part in enumerate(parts):
            if (part.scalars, list(part.states)) != (first.scalars, list(first.states)):
                raise SourceError(
                    "checkpoint.mixed",
                    f"{printable(name)}: expert-parallel rank {rank} has other states or counters",
                    fix="the files are of different steps: copy one whole save",
                )
        shape = (self.count(name), *first.shape[1:])
        states = {key: self._view(builder, name, key, shape, [p.states[key] for p in parts]) for key in first.states}
        return replace(first, fqn=name, shape=shape, states=states)

    def _view(
        self, builder: ShardMapBuilder, name: str, state: str, shape: tuple[int, ...], tensors: Sequence[int]
    ) -> int:
        boxes: list[Box] = []
        rest = shape[1:]
        zero = (0,) * len(rest)
        for tensor, experts in zip(tensors, self.placements[name], strict=True):
            for local, first, count in _stretches(experts):
                boxes.append(
                    Box(tensor, (len(experts), *rest), (local, *zero), (first, *zero), (count, *rest)),
                )
        return _added(builder, name, state, View(shape, tuple(boxes)))

    def whole_weights(self, builder: ShardMapBuilder, table: Mapping[str, int]) -> dict[str, int]:
        """A table of weights in which the weights of single experts are joined to fused parameters.

        Args:
            builder: Collects tensors.
            table: Tensor numbers by name; an expert's weight has its number behind the parameter's name.

        Raises:
            SourceError: `checkpoint.incomplete` if files of experts are missing.
        """
        found = dict(table)
        for name in self.placements:
            count = self.count(name)
            singles = [found.pop(f"{name}.{expert}", None) for expert in range(count)]
            present = [tensor for tensor in singles if tensor is not None]
            if not present:
                continue
            shapes = {builder.tensors[t].shape for t in present}
            if len(present) != count or len(shapes) != 1:
                raise SourceError(
                    "checkpoint.incomplete",
                    f"{printable(name)}: weights of {len(present)} of {count} experts in {len(shapes)} shapes",
                    fix="copy every layer_*_expert_*_model_states.pt of the tag",
                )
            rest = shapes.pop()
            zero = (0,) * len(rest)
            boxes = [Box(t, (1, *rest), (0, *zero), (i, *zero), (1, *rest)) for i, t in enumerate(present)]
            found[name] = _added(builder, name, "weight", View((count, *rest), tuple(boxes)))
        return found

    def without(self, model: ModelStates) -> ModelStates:
        """Model states without frozen fused experts: they hold only the first rank's; expert files hold all of them."""
        fragments = {n: t for n, t in model.frozen_fragments.items() if n not in self}
        return replace(
            model, frozen_fragments=fragments, frozen_shapes=tuple(s for s in model.frozen_shapes if s[0] not in self)
        )


def _added(builder: ShardMapBuilder, name: str, state: str, view: View) -> int:
    try:
        return builder.view(name, state, view, view.grid)
    except ValueError as error:
        raise SourceError("source.unsupported", f"{printable(state)} of {printable(name)}: {error}") from None


def _stretches(experts: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first place, first expert, count) of each run of consecutive experts."""
    found: list[tuple[int, int, int]] = []
    for place, expert in enumerate(experts):
        if found and found[-1][1] + found[-1][2] == expert:
            found[-1] = (found[-1][0], found[-1][1], found[-1][2] + 1)
        else:
            found.append((place, expert, 1))
    return found


def fused_experts(model: ModelStates) -> FusedExperts:
    """The fused experts that model states describe.

    Raises:
        SourceError: `checkpoint.malformed`, `source.unsupported` for experts that tensor parallelism cuts too, or that
            several ranks hold, `source.unsupported_version`.
    """
    node = model.entries.get(FUSED_LAYERS, model.entries.get(FUSED_LAYERS_LEGACY))
    if node is None:
        return FusedExperts()
    if model.entries.get(_FOLDING) is not None:
        raise SourceError(
            "source.unsupported",
            "AutoEP and AutoTP shared their ranks (`folding`), which this version does not read",
            fix="save it without AutoTP, or with an own group of ranks for the experts",
        )
    placements: dict[str, Placement] = {}
    for item in as_items(plain_value(node, what=FUSED_LAYERS), FUSED_LAYERS):
        entry = as_mapping(item, FUSED_LAYERS)
        prefix = entry.get("expert_key_prefix")
        if not isinstance(prefix, str):
            raise SourceError("checkpoint.malformed", f"{FUSED_LAYERS}: an entry has no `expert_key_prefix`")
        placement = _placement(entry)
        for weight in FUSED_WEIGHTS:
            if placements.setdefault(checked_name(f"{prefix}.{weight}"), placement) is not placement:
                raise SourceError("checkpoint.ambiguous", f"{FUSED_LAYERS}: {printable(prefix)} comes twice")
    return FusedExperts(placements)


def _placement(entry: Mapping[str, Any]) -> Placement:
    count, ranks = (as_count(entry.get(key), f"{FUSED_LAYERS}: {key}") for key in ("num_experts", "ep_size"))
    if count > MAX_EXPERTS or ranks > count:
        raise SourceError("checkpoint.malformed", f"{FUSED_LAYERS}: {count} experts over {ranks} ranks")
    stated = entry.get("expert_placement")
    if stated is None:
        local = count // ranks
        placement = tuple(tuple(range(r * local, (r + 1) * local)) for r in range(ranks))
    else:
        facts = as_mapping(stated, f"{FUSED_LAYERS}: expert_placement")
        if facts.get("version") != _PLACEMENT_VERSION:
            raise SourceError("source.unsupported_version", f"{FUSED_LAYERS}: a placement of another version than 1")
        by_rank = {
            rank.get("rank"): as_lengths(rank.get("experts"), f"{FUSED_LAYERS}: experts", max_items=count)
            for rank in (
                as_mapping(r, f"{FUSED_LAYERS}: ranks") for r in as_items(facts.get("ranks"), f"{FUSED_LAYERS}: ranks")
            )
        }
        if set(by_rank) != set(range(ranks)):
            raise SourceError("checkpoint.malformed", f"{FUSED_LAYERS}: ranks {list(by_rank)[:8]} of {ranks}")
        placement = tuple(by_rank[r] for r in range(ranks))
    experts = sorted(expert for held in placement for expert in held)
    if experts != list(range(count)):
        raise SourceError(
            "source.unsupported",
            f"{FUSED_LAYERS}: {count} experts are held {len(experts)} times: an expert on several ranks is not read",
        )
    return placement


def sharing_ranks(states: Sequence[RankStates], index: int) -> list[tuple[int, ...]]:
    """The ranks that share a sub-group of stage 3, for each expert-parallel rank.

    Raises:
        SourceError: `checkpoint.mixed` if the ranks' statements contradict one another.
    """
    world = len(states)
    found: dict[tuple[int, ...], None] = {}
    for rank, state in enumerate(states):
        outer = mapping_items(state.torch_file.root, what=printable(state.torch_file.file.name))
        inner = mapping_items(outer.get(OPTIMIZER_STATE), what=OPTIMIZER_STATE)
        groups = as_items(plain_value(inner.get(_PARTITION_GROUPS), what=_PARTITION_GROUPS), _PARTITION_GROUPS)
        stated = [g.get("partition_ranks") for g in (as_mapping(g, _PARTITION_GROUPS) for g in groups)]
        ranks = as_lengths(stated[index], "partition_ranks", max_items=world) if index < len(stated) else ()
        if rank not in ranks:
            raise SourceError(
                "checkpoint.mixed", f"rank {rank} does not say that it shares sub-group {index} ({_PARTITION_GROUPS})"
            )
        found[ranks] = None
    if sorted(r for ranks in found for r in ranks) != list(range(world)):
        raise SourceError("checkpoint.mixed", f"the ranks disagree about which of them share sub-group {index}")
    # The lowest data-parallel rank of expert-parallel rank e rises with e in both orders (E + D and D + E).
    return sorted(found, key=min)


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """A flat (sub-)group as the ranks that share it hold it."""

    index: int
    """The number of the (sub-)group."""
    shapes: Shapes
    """Names and shapes, with global expert numbers in the names."""
    ranks: tuple[int, ...]
    """Data-parallel ranks, in the order of their pieces."""
    ep: int
    """Expert-parallel ranks that the group's experts are spread over; 1 for a group without experts."""


def expert_groups(
    shapes: Sequence[Shapes], states: Sequence[RankStates], fused: FusedExperts, *, data_first: bool
) -> list[ExpertGroup]:
    """One `ExpertGroup` for each (sub-)group and each set of ranks that partitions it.

    Args:
        shapes: Names and shapes of each (sub-)group, as the first rank lists them.
        states: All data-parallel ranks.
        fused: Experts that AutoEP fused.
        data_first: See `data_before_experts`.

    Raises:
        SourceError: `checkpoint.mixed` if the sizes of partitions contradict one another, `source.unsupported`.
    """
    world = len(states)
    found: list[ExpertGroup] = []
    for index, group in enumerate(shapes):
        count = states[0].partition_counts[index] if index < len(states[0].partition_counts) else world
        if states[0].stage == 3 and any(name in fused for name, _ in group):
            sharing = sharing_ranks(states, index)
            found += [ExpertGroup(index, fused.parts(group, r), s, len(sharing)) for r, s in enumerate(sharing)]
            continue
        if count == world or states[0].stage == 3:
            found.append(ExpertGroup(index, fused.parts(group, 0), tuple(range(world)), 1))
            continue
        if world % count:
            raise SourceError("checkpoint.mixed", f"group {index} is partitioned over {count} of {world} ranks")
        ep = world // count
        if not all(EXPERT.fullmatch(name) or name in fused for name, _ in group):
            raise SourceError(
                "source.unsupported", f"group {index} is partitioned over {count} of {world} ranks and holds no experts"
            )
        for r in range(ep):
            ranks = range(r * count, (r + 1) * count) if data_first else range(r, world, ep)
            found.append(ExpertGroup(index, fused.parts(_numbered(group, r), r), tuple(ranks), ep))
    return found


def in_model_order(names: Sequence[str]) -> list[int]:
    """Positions of a group's experts in the order of a model that holds all of them: by layer, then by number."""
    heads: dict[str, int] = {}
    keys: list[tuple[int, int]] = []
    for name in names:
        match = EXPERT.fullmatch(name)
        head, number = (match["head"], int(match["number"])) if match else (name, 0)
        keys.append((heads.setdefault(head, len(heads)), number))
    return sorted(range(len(names)), key=keys.__getitem__)


def _numbered(group: Shapes, rank: int) -> Shapes:
    """The group with the global numbers of the experts of one expert-parallel rank."""
    local: dict[str, int] = {}
    for name, _ in group:
        if (match := EXPERT.fullmatch(name)) is not None:
            local[match["head"]] = max(local.get(match["head"], 0), int(match["number"]) + 1)
    renamed: list[tuple[str, tuple[int, ...]]] = []
    for name, shape in group:
        match = EXPERT.fullmatch(name)
        if match is None:
            renamed.append((name, shape))
            continue
        number = rank * local[match["head"]] + int(match["number"])
        renamed.append((f"{match['head']}{number}{match['tail']}", shape))
    return tuple(renamed)


# AutoEP: experts fused along the first dimension of a parameter, cut there over the target's expert-parallel ranks.
#
# The source's model states name these parameters (`ds_autoep_layers`). The writer writes these entries for the target's
# ranks, because loaders compare them with their own.
#
# Source: deepspeed 0.19.8 `runtime/engine.py` (`_save_moe_checkpoint`, `load_moe_state_dict`),
# `checkpoint/autoep_affine.py` (`legacy_uniform_autoep_placement_descriptor`, `autoep_placement_to_affine_map`),
# `runtime/zero/stage3.py` (`_zero3_partition_group_metadata`); verified by loading.

_OTHER_MODEL = "resume from an older checkpoint: its fused layers and its parameters are of different models"


def _layers(entries: Mapping[str | int, Node]) -> list[dict[str | int, Node]]:
    node = entries.get(FUSED_LAYERS, entries.get(FUSED_LAYERS_LEGACY))
    return (
        [mapping_items(i, what=FUSED_LAYERS) for i in sequence_items(node, what=FUSED_LAYERS)]
        if node is not None
        else []
    )


def _names(entry: Mapping[str | int, Node]) -> list[str]:
    return [f"{entry.get('expert_key_prefix')}.{weight}" for weight in FUSED_WEIGHTS]


def fuse_experts(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """The whole shapes of the parameters in which AutoEP fused experts; empty for a run without AutoEP.

    Raises:
        RequestError: `request.unsatisfiable` if a parameter is not there, or has another number of experts than the
            model states say.
    """
    sizes = {p.fqn: p.shape for p in checkpoint.parameters}
    found: dict[str, tuple[int, ...]] = {}
    for entry in _layers(facts_of(checkpoint).entries):
        for name in _names(entry):
            if sizes.get(name, ())[:1] != (entry.get("num_experts"),):
                raise RequestError(
                    "request.unsatisfiable",
                    f"{printable(name)} is {sizes.get(name, 'nowhere')}, and {FUSED_LAYERS} says that it fuses experts",
                    fix=_OTHER_MODEL,
                )
            found[name] = sizes[name]
    return found


def expert_keys(fused: Mapping[str, tuple[int, ...]], name: str) -> dict[str | int, Node]:
    """The entries of a universal atom for a parameter that fuses experts; empty for other parameters."""
    if name not in fused:
        return {}
    return {"cat_dim": 0, "is_expert_param": True, "ep_num_experts": fused[name][0]}


def refuse_impossible(fused: Mapping[str, tuple[int, ...]], target: Target, frozen: Sequence[str]) -> None:
    """Refuse targets on which AutoEP does not run, or whose fused experts its loader restores wrongly.

    Args:
        fused: See `fused_experts`.
        target: The target.
        frozen: Parameters that the optimizer does not own.

    Raises:
        RequestError: `request.unsatisfiable`, saying what would work.
    """
    if not fused:
        return
    if target.layout.tp * target.layout.pp > 1:
        raise RequestError(
            "request.unsatisfiable",
            "experts that AutoEP fused, under tensor or pipeline parallelism, are not written",
            fix="--tp 1 --pp 1",
        )
    if target.stage == 0:
        raise RequestError(
            "request.unsatisfiable",
            "ZeRO stage 0 does not hold the groups of experts that DeepSpeed partitions on their own",
            fix="--zero-stage 1, 2, 3 or bf16",
        )
    still = [name for name in frozen if name in fused]
    if still and (target.stage == 3 or (target.stage == 2 and target.layout.ep > 1)):
        # Stage 3 refuses to save them; stage 2 gives all ranks the frozen experts of the first (0.19.8).
        raise RequestError(
            "request.unsatisfiable",
            f"{printable(still[0])} is frozen, and ZeRO stage {target.stage} does not load frozen experts correctly",
            fix="--zero-stage 1",
        )


def slice_of(parameter: LocalParameter, ep: int, rank: int) -> LocalParameter:
    """The part of a whole fused parameter that one of `ep` expert-parallel ranks holds."""
    local, step = parameter.shape[0] // ep, parameter.numel // parameter.shape[0]
    begin, end = rank * local * step, (rank + 1) * local * step

    def cut(runs: Sequence[Run]) -> tuple[Run, ...]:
        return tuple(clipped(runs, begin, end))

    states = {state: cut(runs) for state, runs in parameter.states.items()}
    return replace(parameter, shape=(local, *parameter.shape[1:]), states=states, weight=cut(parameter.weight))


def expert_weights(model: LocalModel, checkpoint: Checkpoint) -> Iterator[tuple[int, int, list[LocalParameter]]]:
    """(number of the MoE layer, expert, the expert's weights) for the file of every fused expert."""
    by_name = {p.fqn: p for p in model.parameters if p.fqn in model.fused}
    for entry in _layers(facts_of(checkpoint).entries):
        number, members = entry.get("moe_layer_id"), [by_name[name] for name in _names(entry) if name in by_name]
        if type(number) is not int or len(members) != len(FUSED_WEIGHTS):
            raise RequestError(
                "request.unsatisfiable",
                f"{FUSED_LAYERS} does not describe the experts that the model has",
                fix=_OTHER_MODEL,
            )
        for expert in range(members[0].shape[0]):
            parts = [slice_of(p, p.shape[0], expert) for p in members]
            yield number, expert, [replace(p, fqn=f"{p.fqn}.{expert}", shape=p.shape[1:]) for p in parts]


def layer_numbers(checkpoint: Checkpoint) -> set[int]:
    """The numbers of AutoEP's layers among the model's MoE layers."""
    layers = _layers(facts_of(checkpoint).entries)
    return {number for entry in layers if type(number := entry.get("moe_layer_id")) is int}


def entries_for(
    run_state: Mapping[str | int, Node], target: Target, fused: Mapping[str, tuple[int, ...]], rank: int
) -> dict[str | int, Node]:
    """The entries of a data-parallel rank's model states for fused experts; empty without fused experts.

    Args:
        run_state: The source's model states.
        target: The target.
        fused: See `fused_experts`.
        rank: Data-parallel rank.
    """
    if not fused:
        return {}
    layers = PList([_entry(entry, target, fused, rank) for entry in _layers(run_state)])
    found: dict[str | int, Node] = {FUSED_LAYERS: layers}
    if is_mapping(run_state.get(INFO)):
        found[INFO] = mapping_of({**mapping_items(run_state[INFO], what=INFO), FUSED_LAYERS: layers})
    return found


def _entry(entry: Mapping[str | int, Node], target: Target, fused: Mapping[str, tuple[int, ...]], rank: int) -> Node:
    ep, names = target.layout.ep, [name for name in _names(entry) if name in fused]
    count = fused[names[0]][0]
    local = count // ep
    mine, place = target.expert_place(rank)
    sharded = target.stage == 3
    ranks = [{"rank": r, "experts": list(range(r * local, (r + 1) * local))} for r in range(ep)]
    facts: dict[str, Any] = {
        "num_local_experts": local,
        "ep_size": ep,
        "expert_placement": {"version": 1, "num_experts": count, "ep_size": ep, "ranks": ranks},
        "affine_maps": {"version": 1, "params": {name: _affine(fused[name], ep) for name in names}},
        "checkpoint_format": "zero3_partitioned" if sharded else "per_expert_files",
        "checkpoint_format_version": 1 if sharded else None,
        "ep_group_name": f"ep_size_{ep}",
        "ep_rank": mine,
        "expert_data_parallel_rank": place,
        "expert_data_parallel_world_size": target.dp // ep,
        "global_expert_start": mine * local,
        "global_expert_end": (mine + 1) * local,
    }
    return mapping_of({**entry, **{key: node_of(value) for key, value in facts.items()}})


def _affine(shape: tuple[int, ...], ep: int) -> dict[str, Any]:
    """The affine map of a parameter whose experts are spread evenly over the ranks."""
    part = (shape[0] // ep, *shape[1:])
    strides = list(packed_stride(part))

    def piece(rank: int) -> dict[str, Any]:
        begin = rank * prod(part)
        return {"shape": list(part), "source": [begin, strides], "dest": [0, strides], "locations": [rank]}

    ranks = {rank: {"shard_shape": list(part), "pieces": [piece(rank)]} for rank in range(ep)}
    return {"logical_shape": list(shape), "ranks": ranks}


def partition_groups(members: Sequence[tuple[bool, Sequence[int]]], target: Target, rank: int) -> Node:
    """The entry `ds_zero_partition_groups` of a rank at stage 3: the ranks that share each sub-group.

    Args:
        members: For each sub-group, True if it holds fused experts, and the ranks that share it, this one included.
        target: The target.
        rank: Data-parallel rank.
    """
    return node_of(
        [
            {
                "sub_group": number,
                "partition_count": len(ranks),
                "partition_rank": list(ranks).index(rank),
                "partition_ranks": list(ranks),
                "families": ["autoep_expert" if experts else "replicated"],
                "group_names": [f"ep_size_{target.layout.ep}" if experts else "replicated"],
            }
            for number, (experts, ranks) in enumerate(members)
        ]
    )


# Experts of MoE layers: the expert-parallel rank, the local name and the file of each.
#
# Expert-parallel rank e of EP holds the experts [e * local, (e + 1) * local) of each layer and counts them from 0;
# data-parallel rank d is expert-parallel rank d mod EP, and the ranks of one e share its experts' optimizer state.
# Files of weights carry global numbers.
#
# Source: deepspeed 0.19.8 `utils/groups.py` (E + D order), `runtime/engine.py` (`_save_moe_checkpoint`,
# `_get_expert_ckpt_name`), `moe/utils.py` (param groups named `ep_size_N`); verified by loading.

_GROUP_NAME = re.compile(r"ep_size_([1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True)
class Expert:
    """The parts of the name of an expert's parameter."""

    head: str
    """The prefix that the names of a layer's experts share."""
    number: int
    tail: str


def expert_of(name: str) -> Expert | None:
    """The expert that a parameter belongs to; None for all others."""
    match = EXPERT.fullmatch(name)
    return Expert(match["head"], int(match["number"]), match["tail"]) if match else None


def is_expert_group(group: ParamGroup) -> bool:
    """True if a param group holds experts."""
    return group.hyper_parameters.get("moe") is True


def ranks_of_group(group: ParamGroup) -> int | None:
    """The number of expert-parallel ranks in the name of a group of experts; None for all other groups."""
    match = _GROUP_NAME.fullmatch(group.name or "") if is_expert_group(group) else None
    return int(match[1]) if match else None


def renamed_group(group: ParamGroup, ep: int) -> ParamGroup:
    """A param group of experts under the name for `ep` expert-parallel ranks; other groups unchanged."""
    if ranks_of_group(group) is not None:
        return ParamGroup({**group.hyper_parameters, "name": f"ep_size_{ep}"})
    return group


def experts_by_layer(names: Iterable[str]) -> dict[str, int]:
    """The number of experts in each layer, by the prefix of their names, in the model's order.

    Raises:
        RequestError: `request.unsatisfiable` if a layer lacks some of its experts.
    """
    seen: dict[str, set[int]] = {}
    for expert in filter(None, map(expert_of, names)):
        seen.setdefault(expert.head, set()).add(expert.number)
    for head, numbers in seen.items():
        if numbers != set(range(len(numbers))):
            raise RequestError(
                "request.unsatisfiable",
                f"{printable(head)} has only experts {sorted(numbers)[:8]}: others are missing",
                fix="copy the files of all experts of the tag, then run the same command again",
            )
    return {head: len(numbers) for head, numbers in seen.items()}


def require_divisible(counts: Iterable[int], ep: int, dp: int) -> None:
    """Refuse a number of expert-parallel ranks that does not divide experts or ranks.

    Raises:
        RequestError: `request.unsatisfiable`, with a number that divides both.
    """
    wanted = set(counts)
    if ep > 1 and not wanted:
        raise RequestError("request.unsatisfiable", f"--ep {ep}: the model has no experts", fix="--ep 1")
    wrong = [n for n in wanted if n % ep]
    if wrong or dp % ep:
        works = max(e for e in range(1, ep + 1) if dp % e == 0 and all(n % e == 0 for n in wanted))
        what = f"{wrong[0]} experts" if wrong else f"{dp} data-parallel ranks"
        raise RequestError("request.unsatisfiable", f"{what} do not divide by --ep {ep}", fix=f"--ep {works}")


def held_by(members: Sequence[LocalParameter], model: LocalModel, ep: int, rank: int) -> list[LocalParameter]:
    """A group's parameters on one expert-parallel rank: experts under local numbers, fused parameters cut."""
    counts = experts_by_layer(p.fqn for p in model.parameters)
    found: list[LocalParameter] = []
    for parameter in members:
        expert = expert_of(parameter.fqn)
        if expert is None:
            found.append(slice_of(parameter, ep, rank) if parameter.fqn in model.fused else parameter)
            continue
        local = counts[expert.head] // ep
        if expert.number // local == rank:
            found.append(replace(parameter, fqn=f"{expert.head}{expert.number % local}{expert.tail}"))
    return found
