"""Param groups as DeepSpeed makes them: of `ds_config`, of experts, and by weight decay as Megatron-DeepSpeed does.

Groups of experts depend on the number of expert-parallel ranks: with fewer ranks, each rank holds more experts, and
DeepSpeed makes more groups. Loaders compare the number of groups. So groups that only DeepSpeed's limit had separated
are joined, and cut again for the target's ranks. Groups that follow another limit are left as they are.

Source: deepspeed 0.19.8 `moe/utils.py` (`split_params_into_different_moe_groups_for_optimizer`: in order, up to a
number of elements; a larger parameter has a group of its own), `runtime/engine.py` (`_configure_optimizer`: groups
without members are removed); verified by loading.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from reshard.choices import OpaquePolicy, WeightDecayGroups
from reshard.errors import RequestError, SourceError, counted, printable
from reshard.models.jobs import NotCarried
from reshard_engine.checkpoint import Checkpoint, OptimizerState, Parameter, ParamGroup
from reshard_engine.formats.carried import named
from reshard_engine.formats.deepspeed.facts import ARGS, DeepSpeedFacts, facts_of
from reshard_engine.formats.deepspeed.files import PARAM_SHAPES
from reshard_engine.formats.deepspeed.native.target import Target
from reshard_engine.formats.deepspeed.optimizer import is_muons, muons_order
from reshard_engine.formats.deepspeed.parallel.experts import (
    expert_of,
    experts_by_layer,
    fuse_experts,
    is_expert_group,
    ranks_of_group,
)
from reshard_engine.formats.torch_archive import tree_template
from reshard_engine.pickles.nodes import (
    Node,
    PList,
    is_mapping,
    mapping_items,
    mapping_of,
    namespace_items,
    plain_value,
)
from reshard_engine.tensors.layout import TargetFile

MAX_GROUP_ELEMS = 178_956_971
"""The most elements of one rank's part of a group of experts."""
_SCHEDULER_FILE = re.compile(r"scheduler(?:_\d{1,4})?\.(?:bin|pt)")


def regrouped(checkpoint: Checkpoint, ep: int) -> Checkpoint:
    """The checkpoint with the groups of experts that a run on `ep` expert-parallel ranks makes."""
    optimizer = checkpoint.optimizer
    if optimizer is None or not any(map(is_expert_group, optimizer.groups)):
        return checkpoint
    sizes = _Sizes(checkpoint)
    old = [checkpoint.members(index) for index in range(len(optimizer.groups))]
    spread = [ranks_of_group(group) for group in optimizer.groups]
    if not all(sizes.obeys(members, n) for members, n in zip(old, spread, strict=True) if n is not None):
        return checkpoint
    found: list[tuple[int, list[Parameter]]] = []
    for run in _runs(optimizer.groups, old, spread, sizes):
        members = [p for g in run for p in old[g]]
        cut = sizes.cut(members, ep) if spread[run[0]] is not None else [members]
        found += [(run[0], part) for part in cut]
    if [[p.fqn for p in part] for _, part in found] == [[p.fqn for p in part] for part in old]:
        return checkpoint
    origins = [origin for origin, _ in found]
    groups = [(optimizer.groups[origin], part) for origin, part in found]
    return with_groups(checkpoint, optimizer, groups, origins=origins)


def without_empty_groups(checkpoint: Checkpoint) -> tuple[Checkpoint, tuple[NotCarried, ...]]:
    """The checkpoint without param groups that have no members, and what is lost with them.

    DeepSpeed removes such groups of a run's optimizer, also from what its scheduler sees, and compares the number of
    groups when it loads. A checkpoint of DeepSpeed's own has the groups that its run has.
    """
    optimizer = checkpoint.optimizer
    if optimizer is None or facts_of(checkpoint).order:
        return checkpoint, ()
    members = [checkpoint.members(index) for index in range(len(optimizer.groups))]
    kept = [index for index, found in enumerate(members) if found]
    if len(kept) == len(members) or not kept:
        return checkpoint, ()
    groups = [(optimizer.groups[index], members[index]) for index in kept]
    empty = (f"optimizer.param_groups[{index}]" for index, found in enumerate(members) if not found)
    lost = tuple(named(empty, "a group without members, which DeepSpeed removes from its optimizer"))
    return with_groups(checkpoint, optimizer, groups, origins=kept), lost


def trainers_scheduler(source: Checkpoint, target: Checkpoint, opaque: OpaquePolicy) -> tuple[TargetFile, ...]:
    """The file of a trainer's scheduler with one entry for each of the target's groups; none if they are the source's.

    A trainer that brings its own scheduler loads the file beside the tag, and not what DeepSpeed's files hold. The file
    here is to take the place of that one.

    Args:
        source: The checkpoint with its groups as they were.
        target: The checkpoint with the groups to write.
        opaque: The policy for objects whose classes are not on the allow-list.

    Source: transformers 5.23.0 `trainer.py` (`_load_optimizer_and_scheduler`), accelerate 1.15.0 `accelerator.py`
    (`load_state`); torch 2.13.0 `optim/lr_scheduler.py` (`LambdaLR.load_state_dict` and `get_lr` count the groups).
    """
    own = target.own_scheduler
    if own is None or target.schedulers == source.schedulers or len(target.scheduler_keys) <= own:
        return ()
    name = target.scheduler_keys[own]
    if _SCHEDULER_FILE.fullmatch(name) is None:
        return ()
    template, slots = tree_template("scheduler", target.schedulers[own], target.shard_map, opaque=opaque)
    return (TargetFile(name, template, slots),)


class _Sizes:
    """The sizes of one rank's parts of experts' parameters."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._fused = fuse_experts(checkpoint)
        self._counts = experts_by_layer(p.fqn for p in checkpoint.trained)

    def _place(self, parameter: Parameter, ep: int) -> tuple[tuple[str, int, str], int]:
        """(local name of a rank's part, elements of a part); the name is the same on every rank."""
        expert, numel = expert_of(parameter.fqn), prod(parameter.shape)
        if expert is None:
            return (parameter.fqn, 0, ""), numel // ep if parameter.fqn in self._fused else numel
        return (expert.head, expert.number % max(self._counts[expert.head] // ep, 1), expert.tail), numel

    def local(self, members: Sequence[Parameter], ep: int) -> dict[tuple[str, int, str], int]:
        """One rank's parts of a group in the group's order, each with its number of elements."""
        return dict(self._place(p, ep) for p in members)

    def obeys(self, members: Sequence[Parameter], ep: int) -> bool:
        """True if the size of a group is within the limit, or the group has a single part."""
        parts = self.local(members, ep)
        return len(parts) < 2 or sum(parts.values()) <= MAX_GROUP_ELEMS

    def cut(self, members: Sequence[Parameter], ep: int) -> list[list[Parameter]]:
        """The members of joined groups in the model's order, cut into groups for `ep` ranks."""
        heads: dict[str, int] = {}

        def order(parameter: Parameter) -> tuple[int, int]:
            expert = expert_of(parameter.fqn)
            head, number = (expert.head, expert.number) if expert else (parameter.fqn, 0)
            return heads.setdefault(head, len(heads)), number

        ordered = sorted(members, key=order)
        group_of: dict[tuple[str, int, str], int] = {}
        group = held = 0
        for part, numel in self.local(ordered, ep).items():
            if held and held + numel > MAX_GROUP_ELEMS:
                group, held = group + 1, 0
            group_of[part] = group
            held += numel
        found: list[list[Parameter]] = [[] for _ in range(group + 1)]
        for parameter in ordered:
            found[group_of[self._place(parameter, ep)[0]]].append(parameter)
        return found


def _runs(
    groups: Sequence[ParamGroup], members: Sequence[Sequence[Parameter]], spread: Sequence[int | None], sizes: _Sizes
) -> Iterator[list[int]]:
    """The numbers of consecutive groups that only the limit separated, joined to lists."""
    run: list[int] = []
    for index, group in enumerate(groups):
        ep = spread[index]
        together = bool(run) and ep is not None and spread[run[-1]] == ep and _same(groups[run[-1]], group)
        if together and ep is not None:
            first = next(iter(sizes.local(members[index], ep).values()), 0)
            together = sum(sizes.local(members[run[-1]], ep).values()) + first > MAX_GROUP_ELEMS
        if run and not together:
            yield run
            run = []
        run.append(index)
    if run:
        yield run


def _same(a: ParamGroup, b: ParamGroup) -> bool:
    """True if two groups have the same hyper-parameters, and all of these are plain values."""
    try:
        left, right = (plain_value(mapping_of({**g.hyper_parameters}), what="param_groups") for g in (a, b))
    except SourceError:
        return False
    return bool(left == right)


def in_muons_order(checkpoint: Checkpoint, target: Target) -> Checkpoint:
    """The checkpoint with the matrices of Muon's groups in the order in which the target's run keeps them.

    DeepSpeed's Muon sorts them by shape. Where the model is made under `zero.Init`, every parameter is empty then, and
    the groups keep the model's order; only a source at ZeRO-3 shows which of the two it is.

    Raises:
        RequestError: `request.unsatisfiable` where the order is not known, and under tensor or pipeline parallelism,
            which change shapes and order.
    """
    optimizer = checkpoint.optimizer
    if optimizer is None or not any(is_muons(g.hyper_parameters) for g in optimizer.groups):
        return checkpoint
    layout, world = target.layout, checkpoint.world
    if max(layout.tp, layout.pp, layout.ep, *(world.get(axis, 1) for axis in ("tp", "pp", "ep"))) > 1:
        raise RequestError(
            "request.unsatisfiable",
            "DeepSpeed's Muon orders matrices by the shapes that a rank holds, and this version writes no order for "
            "tensor, pipeline or expert parallelism",
            fix="write all of it by name: --to universal, or --to dcp",
        )
    groups: list[tuple[ParamGroup, Sequence[Parameter]]] = []
    for index, group in enumerate(optimizer.groups):
        members = list(checkpoint.members(index))
        groups.append((group, _in_order(members, checkpoint, target) if is_muons(group.hyper_parameters) else members))
    if [p.fqn for _, held in groups for p in held] == [p.fqn for p in checkpoint.trained]:
        return checkpoint
    return with_groups(checkpoint, optimizer, groups, origins=range(len(groups)))


def _in_order(members: Sequence[Parameter], checkpoint: Checkpoint, target: Target) -> list[Parameter]:
    """The matrices of one group in the target's order."""
    if target.stage == 3 and facts_of(checkpoint).zero_stage == 3:
        return list(members)
    by_name = {p.fqn: p for p in members}
    in_model = [name for name in checkpoint.module_names if name in by_name]
    by_shape = muons_order(((p.fqn, p.shape) for p in members), in_model)
    if len(in_model) != len(members) or (target.stage == 3 and by_shape != in_model):
        raise RequestError(
            "request.unsatisfiable",
            f"DeepSpeed's Muon keeps {counted(len(members), 'matrix', 'matrices')} in the order of their shapes, and "
            "at ZeRO-3 under zero.Init in the model's order: the source does not say which one the target's run has",
            fix="--zero-stage 1, 2 or bf16; or convert a save of ZeRO-3, whose files have the order",
        )
    return [by_name[name] for name in by_shape]


def with_groups(
    checkpoint: Checkpoint,
    optimizer: OptimizerState,
    groups: Sequence[tuple[ParamGroup, Sequence[Parameter]]],
    *,
    origins: Sequence[int],
) -> Checkpoint:
    """The checkpoint with new param groups, each given with its members in order.

    Args:
        checkpoint: The source.
        optimizer: Its optimizer's state.
        groups: The new groups, and their members.
        origins: For each new group, an old group: the new one gets the entries of this group in a scheduler's lists.
    """
    facts = checkpoint.facts
    parameters = [replace(p, group=index) for index, (_, members) in enumerate(groups) for p in members]
    return replace(
        checkpoint,
        parameters=(*parameters, *checkpoint.frozen),
        optimizer=replace(optimizer, groups=tuple(group for group, _ in groups)),
        schedulers=tuple(_regrouped(s, origins, len(optimizer.groups)) for s in checkpoint.schedulers),
        facts=replace(facts, params=()) if isinstance(facts, DeepSpeedFacts) else facts,
    )


def _regrouped(scheduler: Node, origins: Sequence[int], before: int) -> Node:
    """A scheduler's state in which lists with one entry per group have one entry per new group."""
    if not is_mapping(scheduler):
        return scheduler
    lists: Mapping[str | int, Node] = mapping_items(scheduler, what="schedulers")
    found = {
        key: PList([value.items[o] for o in origins])
        if isinstance(value, PList) and len(value.items) == before
        else value
        for key, value in lists.items()
    }
    return mapping_of(found)


# Param groups as Megatron-DeepSpeed makes them: by weight decay, and at ZeRO-3 without weight decay.
#
# Megatron's rule gives biases and vectors no weight decay. At ZeRO-3 every parameter is an empty vector when the rule
# looks at it, so all parameters are in groups without weight decay. At other stages, matrices have groups of their own.
# Loaders compare the number of groups, or pair groups by place. So a source with groups of one kind gets the groups of
# the other kind where the target needs them, in the model's order. A run with code of its own may make one kind of
# groups at every stage: a source at ZeRO-3 whose groups have weight decay shows that, and `WeightDecayGroups.KEEP` says
# it.
#
# Source: Megatron-DeepSpeed (main, July 2025) `megatron/optimizer/__init__.py` (`get_param_groups`: names, order and
# rule), `megatron/optimizer_param_scheduler.py` (`get_wd`); checked against real checkpoints of both kinds.

_NAMES = ("wd_no_scale_lr", "wd_scale_lr", "no_wd_no_scale_lr", "no_wd_scale_lr")
"""Names of the groups in their order; a group without parameters does not exist."""
_WITHOUT = "no_"
_BY_SHAPE = "Megatron-DeepSpeed's code takes every parameter for a vector at ZeRO-3, and vectors have no weight decay"
_KEEP = "If your run groups parameters in one way at every stage: --weight-decay-groups keep"


def follows_stage(checkpoint: Checkpoint, wanted: WeightDecayGroups) -> bool:
    """True if the source's param groups are Megatron's, and are other ones at ZeRO-3 than below it."""
    names, facts = _group_names(checkpoint.optimizer), facts_of(checkpoint)
    own_code = facts.groups_kept or (facts.zero_stage == 3 and any(map(_decays, names)))
    return bool(names) and wanted is not WeightDecayGroups.KEEP and not own_code


def is_grouped_by_decay(checkpoint: Checkpoint) -> bool:
    """True if all param groups are Megatron's."""
    return bool(_group_names(checkpoint.optimizer))


def megatron_grouped(
    checkpoint: Checkpoint, *, sharded: bool, wanted: WeightDecayGroups = WeightDecayGroups.STAGE
) -> Checkpoint:
    """The checkpoint with Megatron's param groups for ZeRO-3 (`sharded`) or other stages; other runs keep theirs.

    Raises:
        RequestError: `request.unsatisfiable` if the groups follow another rule, or the order or the weight decay is
            not known.
    """
    optimizer = checkpoint.optimizer
    names = _group_names(optimizer)
    if optimizer is None or not follows_stage(checkpoint, wanted):
        return checkpoint
    members = {name: checkpoint.members(index) for index, name in enumerate(names)}
    if sharded:
        return _merged(checkpoint, optimizer, members) if any(_decays(n) for n in names) else checkpoint
    whole = all(not _decays(n) for n in names) and any(map(_has_decay, checkpoint.trained))
    return _split(checkpoint, optimizer, members) if whole else checkpoint


def group_changes(before: Checkpoint, after: Checkpoint) -> list[str]:
    """The warning about new groups, with the parameters whose weight decay changes; none where groups are the same."""
    names, were = _group_names(after.optimizer), _group_names(before.optimizer)
    if names == were:
        return []
    count = f"param groups: {len(were)} became {len(names)}: {_BY_SHAPE}"
    if any(map(_decays, names)):
        return [f"{count}; {_decayed(after)} from now on, and none had it in the source. {_KEEP}"]
    return [f"{count}; {_decayed(before)} in the source, and none has it from now on. {_KEEP}"]


def groups_by_stage(source: Checkpoint, checkpoint: Checkpoint) -> list[str]:
    """The warning that a universal checkpoint has other groups for ZeRO-3 than for the stages below it.

    Args:
        source: The checkpoint as it was read.
        checkpoint: The same with the groups of the stages below ZeRO-3.
    """
    if not any(map(_decays, _group_names(checkpoint.optimizer))):
        return []
    ran = " The source ran at ZeRO-3." if checkpoint is not source else ""
    text = f"param groups are written twice: {_BY_SHAPE}. {_decayed(checkpoint)} in runs at stages 1 and 2"
    return [f"{text}, and none has it in runs at ZeRO-3.{ran} {_KEEP}"]


def _decayed(checkpoint: Checkpoint) -> str:
    """The parameters with weight decay, and how much: a part of a sentence."""
    groups = checkpoint.optimizer.groups if checkpoint.optimizer is not None else ()
    decaying = [i for i, group in enumerate(groups) if _decays(group.name or _WITHOUT)]
    values = dict.fromkeys(str(groups[i].hyper_parameters.get("weight_decay")) for i in decaying)
    count = sum(len(checkpoint.members(i)) for i in decaying)
    return f"{count} of {len(checkpoint.trained)} parameters have weight decay {' or '.join(map(printable, values))}"


def sharded_groups(checkpoint: Checkpoint) -> list[ParamGroup]:
    """The groups for ZeRO-3, made from the groups of other stages; empty if the run is not Megatron's."""
    optimizer = checkpoint.optimizer
    names = _group_names(optimizer)
    if optimizer is None or not names:
        return []
    wanted = [name for name in _NAMES if name in map(_undecayed, names) and not _decays(name)]
    return [_without_decay(optimizer, names, name) for name in wanted]


def _group_names(optimizer: OptimizerState | None) -> list[str]:
    """The names of the groups if all groups are Megatron's; empty otherwise."""
    found = optimizer.groups if optimizer is not None else ()
    names = [g.name for g in found]
    known = all(n in _NAMES for n in names) and all("wd_mult" in g.hyper_parameters for g in found)
    return [str(n) for n in names] if known and len(set(map(str, names))) == len(names) else []


def _decays(name: str) -> bool:
    return not name.startswith(_WITHOUT)


def _undecayed(name: str) -> str:
    return f"{_WITHOUT}{name.removeprefix(_WITHOUT)}"


def _has_decay(parameter: Parameter) -> bool:
    """True if Megatron's rule gives a parameter of this shape weight decay."""
    return not parameter.fqn.endswith(".bias") and len(parameter.shape) != 1


def _merged(
    checkpoint: Checkpoint, optimizer: OptimizerState, members: Mapping[str, Sequence[Parameter]]
) -> Checkpoint:
    strangers = [p for name, group in members.items() for p in group if _has_decay(p) is not _decays(name)]
    if strangers:
        raise RequestError(
            "request.unsatisfiable",
            f"{printable(strangers[0].fqn)} is not in the param group of Megatron-DeepSpeed's own rule: the groups of "
            "the model at ZeRO-3 are not known",
            fix="--zero-stage 1, or 2",
        )
    place = _model_order(checkpoint, members)
    groups: list[tuple[ParamGroup, list[Parameter]]] = []
    for name in (n for n in _NAMES if not _decays(n)):
        joined = sorted((p for n, g in members.items() if _undecayed(n) == name for p in g), key=lambda p: place[p.fqn])
        if joined:
            groups.append((_without_decay(optimizer, list(members), name), joined))
    return _with(checkpoint, optimizer, members, groups)


def _split(checkpoint: Checkpoint, optimizer: OptimizerState, members: Mapping[str, Sequence[Parameter]]) -> Checkpoint:
    groups: list[tuple[ParamGroup, list[Parameter]]] = []
    for name in _NAMES:
        mine = [p for p in members.get(_undecayed(name), ()) if _has_decay(p) is _decays(name)]
        if not mine:
            continue
        group = optimizer.groups[list(members).index(_undecayed(name))]
        if _decays(name):
            group = _changed(group, name, 1.0, _weight_decay(checkpoint))
        groups.append((group, mine))
    return _with(checkpoint, optimizer, members, groups)


def _with(
    checkpoint: Checkpoint,
    optimizer: OptimizerState,
    members: Mapping[str, Sequence[Parameter]],
    groups: Sequence[tuple[ParamGroup, list[Parameter]]],
) -> Checkpoint:
    origins = [next(i for i, g in enumerate(members.values()) if new[0] in g) for _, new in groups]
    found = with_groups(checkpoint, optimizer, groups, origins=origins)
    # `param_shapes` lists shapes by group: the source's list has the old groups.
    facts = facts_of(found)
    entries = {k: v for k, v in facts.entries.items() if k != PARAM_SHAPES}
    return replace(found, facts=replace(facts, entries=entries))


def _changed(group: ParamGroup, name: str, wd_mult: float, decay: float) -> ParamGroup:
    return ParamGroup({**group.hyper_parameters, "name": name, "wd_mult": wd_mult, "weight_decay": decay})


def _without_decay(optimizer: OptimizerState, names: Sequence[str], name: str) -> ParamGroup:
    """The group `name`, which has no weight decay, made from a group that the source has."""
    source = name if name in names else name.removeprefix(_WITHOUT)
    return _changed(optimizer.groups[list(names).index(source)], name, 0.0, 0.0)


def _model_order(checkpoint: Checkpoint, members: Mapping[str, Sequence[Parameter]]) -> dict[str, int]:
    """The place of each parameter in the state dict, which must also order every group.

    Raises:
        RequestError: `request.unsatisfiable` if a group has another order.
    """
    place = {name: i for i, name in enumerate(checkpoint.module_names)}
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
    found = checkpoint.scheduler
    scheduler = mapping_items(found, what="a scheduler") if is_mapping(found) else {}
    keys = ("start_wd", "end_wd", "num_steps", "wd_incr_steps")
    start, end, step, steps = (v if isinstance(v := scheduler.get(k), int | float) else None for k in keys)
    if start is not None and end is not None:
        if start == end or step is None or steps is None or step > steps or steps <= 0:
            return float(end)
        part = step / steps
        if scheduler.get("wd_incr_style") == "cosine":
            part = 0.5 * (math.cos(math.pi * (1 - part)) + 1.0)
        return float(start + part * (end - start))
    decay = namespace_items(checkpoint.client_state.get(ARGS)).get("weight_decay")
    if isinstance(decay, int | float):
        return float(decay)
    raise RequestError(
        "request.unsatisfiable",
        "Megatron-DeepSpeed gives matrices weight decay below ZeRO-3, and neither scheduler nor `args` gives a value",
        fix="--zero-stage 3",
    )
