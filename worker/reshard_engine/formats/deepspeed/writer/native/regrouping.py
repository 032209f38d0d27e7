"""Groups of experts cut by size: fewer expert-parallel ranks hold more each, and DeepSpeed then makes more groups.

Loaders compare the number of groups. Groups of a source that obey DeepSpeed's limit are put together where the limit
alone had parted them, and cut again for the target's ranks; what obeys another limit is left as it is.

Source: deepspeed 0.19.8 `moe/utils.py` (`split_params_into_different_moe_groups_for_optimizer`: in order, up to a
number of elements; a larger parameter has a group of its own); verified by loading.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from reshard.errors import SourceError
from reshard_engine.checkpoint import Checkpoint, OptimizerState, Parameter
from reshard_engine.formats.deepspeed.writer.native.autoep import fused_experts
from reshard_engine.formats.deepspeed.writer.native.experts import expert_of, experts_by_layer, is_expert_group
from reshard_engine.pickles.nodes import Node, PList, is_mapping, mapping_items, mapping_of
from reshard_engine.pickles.plain import plain_value

MAX_GROUP_ELEMS = 178_956_971
"""Of one rank's part of a group of experts."""
_NAME = re.compile(r"ep_size_([1-9][0-9]{0,8})")


def regrouped(checkpoint: Checkpoint, ep: int) -> Checkpoint:
    """The checkpoint with the groups of experts that a run on so many expert-parallel ranks makes of them."""
    optimizer = checkpoint.optimizer
    if optimizer is None or not any(map(is_expert_group, optimizer.param_groups)):
        return checkpoint
    sizes = _Sizes(checkpoint)
    old = [[p for p in checkpoint.trained if p.group == g] for g in range(len(optimizer.param_groups))]
    spread = [_spread(node) for node in optimizer.param_groups]
    if not all(sizes.obeys(members, n) for members, n in zip(old, spread, strict=True) if n is not None):
        return checkpoint
    found: list[tuple[int, list[Parameter]]] = []
    for run in _runs(optimizer.param_groups, old, spread, sizes):
        members = [p for g in run for p in old[g]]
        cut = sizes.cut(members, ep) if spread[run[0]] is not None else [members]
        found += [(run[0], part) for part in cut]
    if [[p.fqn for p in part] for _, part in found] == [[p.fqn for p in part] for part in old]:
        return checkpoint
    origins = [origin for origin, _ in found]
    groups = [(optimizer.param_groups[origin], part) for origin, part in found]
    return with_groups(checkpoint, optimizer, groups, origins=origins)


def _spread(node: Node) -> int | None:
    """How many expert-parallel ranks a group of experts was spread over; None for other groups."""
    name = mapping_items(node, what="param_groups").get("name")
    match = _NAME.fullmatch(name) if is_expert_group(node) and isinstance(name, str) else None
    return int(match[1]) if match else None


class _Sizes:
    """What one rank holds of parameters of experts."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._fused = fused_experts(checkpoint)
        self._counts = experts_by_layer(p.fqn for p in checkpoint.trained)

    def _place(self, parameter: Parameter, ep: int) -> tuple[tuple[str, int, str], int]:
        """(how every rank calls its part, elements of a part)."""
        expert, numel = expert_of(parameter.fqn), prod(parameter.shape)
        if expert is None:
            return (parameter.fqn, 0, ""), numel // ep if parameter.fqn in self._fused else numel
        return (expert.head, expert.number % max(self._counts[expert.head] // ep, 1), expert.tail), numel

    def local(self, members: Sequence[Parameter], ep: int) -> dict[tuple[str, int, str], int]:
        """One rank's parts of a group in its order, and their elements."""
        return dict(self._place(p, ep) for p in members)

    def obeys(self, members: Sequence[Parameter], ep: int) -> bool:
        """Whether a group is as small as the limit wants it."""
        parts = self.local(members, ep)
        return len(parts) < 2 or sum(parts.values()) <= MAX_GROUP_ELEMS

    def cut(self, members: Sequence[Parameter], ep: int) -> list[list[Parameter]]:
        """The members of groups that the limit alone parted, in the model's order, cut for so many ranks."""
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
    nodes: Sequence[Node], members: Sequence[Sequence[Parameter]], spread: Sequence[int | None], sizes: _Sizes
) -> Iterator[list[int]]:
    """Groups that were one before the limit parted them."""
    run: list[int] = []
    for index, node in enumerate(nodes):
        ep = spread[index]
        together = bool(run) and ep is not None and spread[run[-1]] == ep and _same(nodes[run[-1]], node)
        if together and ep is not None:
            first = next(iter(sizes.local(members[index], ep).values()), 0)
            together = sum(sizes.local(members[run[-1]], ep).values()) + first > MAX_GROUP_ELEMS
        if run and not together:
            yield run
            run = []
        run.append(index)
    if run:
        yield run


def _same(a: Node, b: Node) -> bool:
    """Whether two groups have the same hyper-parameters, as far as these are plain values."""
    kept = [{k: v for k, v in mapping_items(n, what="param_groups").items() if k != "params"} for n in (a, b)]
    try:
        left, right = (plain_value(mapping_of(entries), what="param_groups") for entries in kept)
    except SourceError:
        return False
    return bool(left == right)


def with_groups(
    checkpoint: Checkpoint,
    optimizer: OptimizerState,
    groups: Sequence[tuple[Node, Sequence[Parameter]]],
    *,
    origins: Sequence[int],
) -> Checkpoint:
    """The checkpoint with other param groups: their hyper-parameters and their members, in order.

    Args:
        checkpoint: The source.
        optimizer: Its optimizer's state.
        groups: The new groups.
        origins: Per new group an old one that it comes from: its entries in the scheduler's lists are that one's.
    """
    parameters = [replace(p, group=index) for index, (_, members) in enumerate(groups) for p in members]
    return replace(
        checkpoint,
        parameters=(*parameters, *checkpoint.frozen),
        optimizer=replace(optimizer, param_groups=tuple(node for node, _ in groups)),
        model_state=_with_schedules(checkpoint.model_state, origins, len(optimizer.param_groups)),
    )


def _with_schedules(state: Node, origins: Sequence[int], before: int) -> Node:
    """Model states whose scheduler's lists, which have an entry for each group, have those of the new groups."""
    entries = mapping_items(state, what="model states") if is_mapping(state) else {}
    if not is_mapping(entries.get("lr_scheduler")):
        return state
    lists: Mapping[str | int, Node] = mapping_items(entries["lr_scheduler"], what="lr_scheduler")
    scheduler = {
        key: PList([value.items[o] for o in origins])
        if isinstance(value, PList) and len(value.items) == before
        else value
        for key, value in lists.items()
    }
    return mapping_of({**entries, "lr_scheduler": mapping_of(scheduler)})
