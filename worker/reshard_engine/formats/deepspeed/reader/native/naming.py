"""Names for the optimizer's numbered parameters: by the user's list, or by the only assignment in the model's order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, TypeAlias

from reshard.errors import RequestError, SourceError, counted, printable

_MANY = 2
_LIST = "list each parameter of the optimizer once, in its order"
_MAX_STATES = 20_000
_Path: TypeAlias = Any  # None, or (path before, choice): shared tails keep it linear
Named = tuple[str, tuple[int, ...]]


def _refused(ways: int, owned: int, candidates: int) -> SourceError:
    found = "no way" if ways == 0 else "more than one way"
    return SourceError(
        "source.unsupported",
        f"stage 0 stores no names for optimizer states, and there is {found} to give {owned} of them "
        f"the names of {candidates} tensors",
        fix="convert the weights alone (--to safetensors), or save once with ZeRO stage 1, which stores names",
    )


def _choices(
    placed: tuple[int, ...], shape: tuple[int, ...], groups: Sequence[Sequence[tuple[int, ...] | None]]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The groups that a candidate of this shape can join: none (-1), or each whose next member it can be."""
    yield -1, placed
    for choice, members in enumerate(groups):
        if placed[choice] < len(members) and members[placed[choice]] in (shape, None):
            yield choice, tuple(n + (i == choice) for i, n in enumerate(placed))


def assign_names(candidates: Sequence[Named], groups: Sequence[Sequence[tuple[int, ...] | None]]) -> list[list[str]]:
    """Per group the names of its parameters, in the optimizer's order.

    Args:
        candidates: Names and shapes in the model's order; some may be frozen and belong to no group.
        groups: Per group the shapes in the optimizer's order, None where the optimizer shows none.

    Raises:
        SourceError: `source.unsupported` unless exactly one assignment keeps the model's order in each group.
    """
    owned = sum(len(g) for g in groups)
    # Per reachable state (how many of each group are placed): ways to reach it, and one predecessor.
    layer: dict[tuple[int, ...], tuple[int, _Path]] = {tuple(0 for _ in groups): (1, None)}
    goal = tuple(len(g) for g in groups)
    for position, (_, shape) in enumerate(candidates):
        left = len(candidates) - position - 1
        following: dict[tuple[int, ...], tuple[int, _Path]] = {}
        for placed, (ways, path) in layer.items():
            for choice, after in _choices(placed, shape, groups):
                if owned - sum(after) <= left:
                    known = following.get(after)
                    following[after] = (min(_MANY, ways + (known[0] if known else 0)), (path, choice))
        if len(following) > _MAX_STATES:
            raise _refused(_MANY, owned, len(candidates))
        layer = following
    ways, path = layer.get(goal, (0, None))
    if ways != 1:
        raise _refused(ways, owned, len(candidates))
    choices: list[int] = []
    while path is not None:
        path, choice = path
        choices.append(choice)
    names: list[list[str]] = [[] for _ in groups]
    for (name, _), choice in zip(candidates, reversed(choices), strict=True):
        if choice >= 0:
            names[choice].append(name)
    return names


def shapes_prove(candidates: Sequence[Named], groups: Sequence[Sequence[tuple[int, ...] | None]]) -> bool:
    """True if every number has a shape that no other number and one candidate only has: then no order is assumed."""
    there = Counter(shape for _, shape in candidates)
    wanted = Counter(shape for group in groups for shape in group)
    return None not in wanted and all(count == 1 == there[shape] for shape, count in wanted.items() if shape)


def names_as_said(
    candidates: Sequence[Named], groups: Sequence[Sequence[tuple[int, ...] | None]], names: Sequence[str]
) -> list[list[str]]:
    """The names that the user listed in the optimizer's order, by group.

    Raises:
        RequestError: `request.invalid` if they are not those of parameters with these shapes.
    """
    shapes, wanted = dict(candidates), [shape for group in groups for shape in group]
    if len(names) != len(wanted) or len(set(names)) != len(names):
        own = counted(len(wanted), "parameter")
        text = f"--param-order has {counted(len(set(names)), 'name')}, and the optimizer has {own}"
        raise RequestError("request.invalid", text, fix=_LIST)
    for number, (name, shape) in enumerate(zip(names, wanted, strict=True)):
        held = shapes.get(name)
        if held is None or shape not in (held, None):
            there = "which the model does not have" if held is None else f"which is {held}"
            text = f"--param-order gives number {number}, whose states are {shape}, the name {printable(name)}, {there}"
            raise RequestError("request.invalid", text, fix=_LIST)
    found, left = list[list[str]](), list(names)
    for group in groups:
        found.append(left[: len(group)])
        left = left[len(group) :]
    return found


def assign_names_flat(candidates: Sequence[Named], totals: Sequence[int]) -> list[list[str]]:
    """The names of the parameters in each group's flat tensor, of which only the numbers of elements are known.

    The order is proven only for one group that holds every candidate. Several groups could share the candidates in
    many ways.

    Raises:
        SourceError: `source.unsupported` otherwise.
    """
    numel = sum(prod(shape) for _, shape in candidates)
    if len(totals) == 1 and totals[0] == numel:
        return [[name for name, _ in candidates]]
    raise _refused(0 if len(totals) == 1 else _MANY, sum(totals), len(candidates))


def names_by_sizes(candidates: Sequence[Named], totals: Sequence[int], names: Sequence[str]) -> list[list[str]]:
    """The names that the user listed in the optimizer's order, by flat group: each group is full before the next.

    Raises:
        RequestError: `request.invalid` if they are not those of parameters, or do not fill the groups.
    """
    shapes = dict(candidates)
    if missing := [n for n in names if n not in shapes]:
        text = f"--param-order has {printable(missing[0])}, which the model does not have"
        raise RequestError("request.invalid", text, fix=_LIST)
    found: list[list[str]] = []
    left = list(dict.fromkeys(names))
    for total in totals:
        held: list[str] = []
        room = total
        while left and prod(shapes[left[0]]) <= room:
            room -= prod(shapes[left[0]])
            held.append(left.pop(0))
        found.append(held if room == 0 else [])
    if left or len(set(names)) != len(names) or not all(found):
        text = f"the parameters of --param-order do not fill the optimizer's {len(totals)} groups of {list(totals)}"
        raise RequestError("request.invalid", f"{text} elements", fix=_LIST)
    return found
