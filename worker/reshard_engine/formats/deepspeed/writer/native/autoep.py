"""AutoEP: experts fused along the first dimension of a parameter, cut there over the target's expert-parallel ranks.

The source's model states name these parameters (`ds_autoep_layers`). The writer writes these entries for the target's
ranks, because loaders compare them with their own.

Source: deepspeed 0.19.8 `runtime/engine.py` (`_save_moe_checkpoint`, `load_moe_state_dict`),
`checkpoint/autoep_affine.py` (`legacy_uniform_autoep_placement_descriptor`, `autoep_placement_to_affine_map`),
`runtime/zero/stage3.py` (`_zero3_partition_group_metadata`); verified by loading.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from reshard.errors import RequestError, printable
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.deepspeed.facts import facts_of
from reshard_engine.formats.deepspeed.names import FUSED_LAYERS, FUSED_LAYERS_LEGACY, FUSED_WEIGHTS, INFO
from reshard_engine.formats.deepspeed.partitioning import Run, clipped
from reshard_engine.formats.deepspeed.writer.native.model import LocalModel, LocalParameter
from reshard_engine.formats.deepspeed.writer.native.target import Target
from reshard_engine.pickles.nodes import Node, PList, is_mapping, mapping_items, mapping_of, sequence_items
from reshard_engine.pickles.plain import node_of
from reshard_engine.tensors.shard_map import packed_stride

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


def fused_experts(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
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
