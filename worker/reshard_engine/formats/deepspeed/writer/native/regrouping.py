"""Param groups as DeepSpeed makes them: groups of experts cut by its limit of their size, and none without members.

With fewer expert-parallel ranks, each rank holds more experts, and DeepSpeed makes more groups. Loaders compare the
number of groups. So groups that only DeepSpeed's limit had separated are joined, and cut again for the target's ranks.
Groups that follow another limit are left as they are.

Source: deepspeed 0.19.8 `moe/utils.py` (`split_params_into_different_moe_groups_for_optimizer`: in order, up to a
number of elements; a larger parameter has a group of its own), `runtime/engine.py` (`_configure_optimizer`: groups
without members are removed); verified by loading.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from reshard.choices import OpaquePolicy
from reshard.errors import SourceError
from reshard.models import NotCarried
from reshard_engine.checkpoint import Checkpoint, OptimizerState, Parameter, ParamGroup
from reshard_engine.formats.deepspeed.facts import DeepSpeedFacts, facts_of
from reshard_engine.formats.deepspeed.writer.native.autoep import fused_experts
from reshard_engine.formats.deepspeed.writer.native.experts import expert_of, experts_by_layer, is_expert_group
from reshard_engine.formats.not_written import named
from reshard_engine.formats.torch_archive import tree_template
from reshard_engine.pickles.nodes import Node, PList, is_mapping, mapping_items, mapping_of
from reshard_engine.pickles.plain import plain_value
from reshard_engine.tensors.layout import TargetFile

MAX_GROUP_ELEMS = 178_956_971
"""The most elements of one rank's part of a group of experts."""
_SCHEDULER_FILE = re.compile(r"scheduler(?:_\d{1,4})?\.(?:bin|pt)")
_NAME = re.compile(r"ep_size_([1-9][0-9]{0,8})")


def regrouped(checkpoint: Checkpoint, ep: int) -> Checkpoint:
    """The checkpoint with the groups of experts that a run on `ep` expert-parallel ranks makes."""
    optimizer = checkpoint.optimizer
    if optimizer is None or not any(map(is_expert_group, optimizer.groups)):
        return checkpoint
    sizes = _Sizes(checkpoint)
    old = [checkpoint.members(index) for index in range(len(optimizer.groups))]
    spread = [_spread(group) for group in optimizer.groups]
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


def _spread(group: ParamGroup) -> int | None:
    """The number of expert-parallel ranks over which a group of experts was spread; None for other groups."""
    match = _NAME.fullmatch(group.name or "") if is_expert_group(group) else None
    return int(match[1]) if match else None


class _Sizes:
    """The sizes of one rank's parts of experts' parameters."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._fused = fused_experts(checkpoint)
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
