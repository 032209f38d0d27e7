"""Param groups as Megatron-DeepSpeed makes them: by weight decay, and at ZeRO-3 without any.

Its rule gives biases and vectors no weight decay. At ZeRO-3 every parameter is an empty vector when it is asked, so all
are in groups without; elsewhere matrices have groups of their own. Loaders compare the number of groups, or pair them
by their place: a source of one kind is put into the other kind's groups, in the model's order.

Source: Megatron-DeepSpeed (main, July 2025) `megatron/optimizer/__init__.py` (`get_param_groups`: names, order and
rule), `megatron/optimizer_param_scheduler.py` (`get_wd`); checked against real checkpoints of both kinds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from reshard.errors import RequestError, printable
from reshard_engine.checkpoint import Checkpoint, OptimizerState, Parameter
from reshard_engine.formats.deepspeed.megatron import ARGS, namespace_items
from reshard_engine.formats.deepspeed.writer.native.regrouping import with_groups
from reshard_engine.pickles.nodes import Node, PList, is_mapping, mapping_items, mapping_of

_NAMES = ("wd_no_scale_lr", "wd_scale_lr", "no_wd_no_scale_lr", "no_wd_scale_lr")
"""In the order in which the groups come; those without parameters are left out."""
_WITHOUT = "no_"
FOR_EVERY_STAGE = (
    "param groups are written as Megatron-DeepSpeed makes them for stages 1 and 2, where matrices have weight decay, "
    "and for stage 3, where nothing has: the source, of stage 3, has the latter only"
)


def megatron_grouped(checkpoint: Checkpoint, *, sharded: bool) -> Checkpoint:
    """The checkpoint in the groups of Megatron-DeepSpeed at ZeRO-3 (`sharded`), or elsewhere; others keep theirs.

    Raises:
        RequestError: `request.unsatisfiable` if the groups follow another rule, or the order or the weight decay is
            not known.
    """
    optimizer = checkpoint.optimizer
    names = _group_names(optimizer)
    if optimizer is None or not names:
        return checkpoint
    members = {name: [p for p in checkpoint.trained if p.group == i] for i, name in enumerate(names)}
    if sharded:
        return _merged(checkpoint, optimizer, members) if any(_decays(n) for n in names) else checkpoint
    whole = all(not _decays(n) for n in names) and any(map(_has_decay, checkpoint.trained))
    return _split(checkpoint, optimizer, members) if whole else checkpoint


def group_changes(before: Checkpoint, after: Checkpoint) -> list[str]:
    """Warnings about new groups; none where they are the source's."""
    names, were = _group_names(after.optimizer), _group_names(before.optimizer)
    if names == were:
        return []
    decays = any(map(_decays, names))
    effect = (
        f"{sum(map(_has_decay, after.trained))} of {len(after.trained)} parameters have weight decay from now on"
        if decays
        else "no parameter has weight decay from now on"
    )
    text = (
        f"param groups: {len(were)} became {len(names)}, as Megatron-DeepSpeed groups parameters: one without weight "
        f"decay at ZeRO-3, matrices apart from biases and vectors elsewhere; {effect}"
    )
    return [text]


def sharded_nodes(checkpoint: Checkpoint) -> list[Node]:
    """The hyper-parameters of the groups at ZeRO-3, of a checkpoint in the groups of other stages; none of others."""
    optimizer = checkpoint.optimizer
    names = _group_names(optimizer)
    if optimizer is None or not names:
        return []
    wanted = [name for name in _NAMES if name in map(_undecayed, names) and not _decays(name)]
    found = [mapping_items(_without_decay(optimizer, names, name), what="param_groups") for name in wanted]
    return [mapping_of({**entries, "params": PList([i])}) for i, entries in enumerate(found)]


def _group_names(optimizer: OptimizerState | None) -> list[str]:
    """The names of the groups, if all are Megatron's; none otherwise."""
    found = [mapping_items(g, what="param_groups") for g in optimizer.param_groups] if optimizer is not None else []
    names = [g.get("name") for g in found]
    known = all(isinstance(n, str) and n in _NAMES for n in names) and all("wd_mult" in g for g in found)
    return [str(n) for n in names] if known and len(set(map(str, names))) == len(names) else []


def _decays(name: str) -> bool:
    return not name.startswith(_WITHOUT)


def _undecayed(name: str) -> str:
    return f"{_WITHOUT}{name.removeprefix(_WITHOUT)}"


def _has_decay(parameter: Parameter) -> bool:
    """Megatron's rule where shapes are there to be seen."""
    return not parameter.fqn.endswith(".bias") and len(parameter.shape) != 1


def _merged(checkpoint: Checkpoint, optimizer: OptimizerState, members: Mapping[str, list[Parameter]]) -> Checkpoint:
    strangers = [p for name, group in members.items() for p in group if _has_decay(p) is not _decays(name)]
    if strangers:
        raise RequestError(
            "request.unsatisfiable",
            f"{printable(strangers[0].fqn)} is in a param group that Megatron-DeepSpeed's own rule does not put it in: "
            "which groups the model has at ZeRO-3 is not known",
            fix="--zero-stage 1, or 2",
        )
    place = _model_order(checkpoint, members)
    groups: list[tuple[Node, list[Parameter]]] = []
    for name in (n for n in _NAMES if not _decays(n)):
        joined = sorted((p for n, g in members.items() if _undecayed(n) == name for p in g), key=lambda p: place[p.fqn])
        if joined:
            groups.append((_without_decay(optimizer, list(members), name), joined))
    return _with(checkpoint, optimizer, members, groups)


def _split(checkpoint: Checkpoint, optimizer: OptimizerState, members: Mapping[str, list[Parameter]]) -> Checkpoint:
    groups: list[tuple[Node, list[Parameter]]] = []
    for name in _NAMES:
        mine = [p for p in members.get(_undecayed(name), ()) if _has_decay(p) is _decays(name)]
        if not mine:
            continue
        node = optimizer.param_groups[list(members).index(_undecayed(name))]
        if _decays(name):
            entries = mapping_items(node, what="param_groups")
            decay = _weight_decay(checkpoint)
            node = mapping_of({**entries, "name": name, "wd_mult": 1.0, "weight_decay": decay})
        groups.append((node, mine))
    return _with(checkpoint, optimizer, members, groups)


def _with(
    checkpoint: Checkpoint,
    optimizer: OptimizerState,
    members: Mapping[str, list[Parameter]],
    groups: Sequence[tuple[Node, list[Parameter]]],
) -> Checkpoint:
    origins = [next(i for i, g in enumerate(members.values()) if new[0] in g) for _, new in groups]
    numbered = [
        (mapping_of({**mapping_items(node, what="param_groups"), "params": PList([i])}), new)
        for i, (node, new) in enumerate(groups)
    ]
    found = with_groups(checkpoint, optimizer, numbered, origins=origins)
    # Shapes are listed by group: the source's list is of its own groups.
    entries = mapping_items(found.model_state, what="model states") if is_mapping(found.model_state) else {}
    return replace(found, model_state=mapping_of({k: v for k, v in entries.items() if k != "param_shapes"}))


def _without_decay(optimizer: OptimizerState, names: Sequence[str], name: str) -> Node:
    """The hyper-parameters of the group `name`, which has none of weight decay, made of one that is there."""
    source = name if name in names else name.removeprefix(_WITHOUT)
    entries = mapping_items(optimizer.param_groups[list(names).index(source)], what="param_groups")
    return mapping_of({**entries, "name": name, "wd_mult": 0.0, "weight_decay": 0.0})


def _model_order(checkpoint: Checkpoint, members: Mapping[str, Sequence[Parameter]]) -> dict[str, int]:
    """The place of each parameter among all: the state dict's order, of which every group must be a part.

    Raises:
        RequestError: `request.unsatisfiable` if it is not.
    """
    place = {name: i for i, name in enumerate(checkpoint.module_names())}
    numbers = [[place.get(p.fqn, -1) for p in group] for group in members.values()]
    if any(-1 in group or group != sorted(group) for group in numbers):
        raise RequestError(
            "request.unsatisfiable",
            "the param groups of ZeRO-3 hold the parameters in the model's order, which this source does not show",
            fix="--zero-stage 1, or 2",
        )
    return place


def _weight_decay(checkpoint: Checkpoint) -> float:
    """The weight decay that Megatron's scheduler gives a group at the step of the checkpoint.

    Raises:
        RequestError: `request.unsatisfiable` if neither the scheduler nor the arguments say it.
    """
    state = checkpoint.model_state
    entries = mapping_items(state, what="model states") if is_mapping(state) else {}
    found = entries.get("lr_scheduler")
    scheduler = mapping_items(found, what="lr_scheduler") if is_mapping(found) else {}
    keys = ("start_wd", "end_wd", "num_steps", "wd_incr_steps")
    start, end, step, steps = (v if isinstance(v := scheduler.get(k), int | float) else None for k in keys)
    if start is not None and end is not None:
        if start == end or step is None or steps is None or step > steps or steps <= 0:
            return float(end)
        part = step / steps
        if scheduler.get("wd_incr_style") == "cosine":
            part = 0.5 * (math.cos(math.pi * (1 - part)) + 1.0)
        return float(start + part * (end - start))
    decay = namespace_items(entries.get(ARGS)).get("weight_decay")
    if isinstance(decay, int | float):
        return float(decay)
    raise RequestError(
        "request.unsatisfiable",
        "Megatron-DeepSpeed gives matrices weight decay below ZeRO-3, and neither scheduler nor `args` says how much",
        fix="--zero-stage 3",
    )
