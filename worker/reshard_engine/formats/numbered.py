"""Optimizers as `Optimizer.state_dict()` saves them, and names of the parameters that they number.

Names are proven as far as the shapes of the states leave one way to give them.

Source: torch 2.13.0 `optim/optimizer.py` (`state_dict`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from reshard.errors import SourceError
from reshard_engine.pickles.nodes import Node, PList, PTuple, mapping_items

Shape = tuple[int, ...]
STATE, GROUPS, PARAMS = "state", "param_groups", "params"


def entries_of(node: Node) -> dict[str | int, Node]:
    """The entries of a mapping with plain keys; none of any other value, such as a script's mapping of tuples."""
    try:
        return mapping_items(node, what="a value")
    except SourceError:
        return {}


def below(key: str | int, node: Node) -> Iterator[tuple[str, Node]]:
    """The items of a list or a mapping, each with its place."""
    if isinstance(node, PList | PTuple):
        yield from ((f"{key}.{number}", item) for number, item in enumerate(node.items))
    else:
        yield from ((f"{key}.{k}", item) for k, item in entries_of(node).items())


def is_optimizer(node: Node) -> bool:
    """True for the state dict of an optimizer: a mapping with `state` and `param_groups`."""
    return {STATE, GROUPS} <= entries_of(node).keys()


def optimizers_in(root: Node) -> list[Node]:
    """The state dicts of optimizers in a file's mapping: its entries, and the items of lists and mappings in it."""
    found: list[Node] = []
    for key, node in entries_of(root).items():
        found += [node] if is_optimizer(node) else [item for _, item in below(key, node) if is_optimizer(item)]
    return found


def numbers_parameters(optimizer: Node) -> bool:
    """True if an optimizer's states are keyed by numbers, as `Optimizer.state_dict()` keys them."""
    states = entries_of(entries_of(optimizer)[STATE])
    return bool(states) and all(type(key) is int for key in states)


def only_way(wanted: Sequence[Shape | None], shapes: Mapping[str, Shape]) -> list[str] | None:
    """The names of numbered parameters if each has a shape that one tensor of the model alone has; else None."""
    by_shape: dict[Shape, list[str]] = {}
    for name, shape in shapes.items():
        by_shape.setdefault(shape, []).append(name)
    held = Counter(wanted)
    found = [by_shape.get(shape, []) if shape is not None and held[shape] == 1 else [] for shape in wanted]
    return [names[0] for names in found] if all(len(names) == 1 for names in found) else None


def in_models_order(
    wanted: Sequence[Shape | None], spans: Sequence[int], model: Sequence[tuple[str, Shape]]
) -> list[str] | None:
    """The names of parameters that come in the model's order within each span; None unless shapes leave one way."""
    found: list[str] = []
    shapes = [shape for _, shape in model]
    for begin, length in zip(_starts(spans), spans, strict=True):
        some = list(wanted[begin : begin + length])
        first = _matched(some, shapes)
        last = _matched(some[::-1], shapes[::-1])
        if first is None or last is None or first != [len(shapes) - 1 - i for i in reversed(last)]:
            return None
        found += [model[i][0] for i in first]
    return found if len(set(found)) == len(found) else None


def _starts(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]


def _matched(wanted: Sequence[Shape | None], shapes: Sequence[Shape]) -> list[int] | None:
    """The first places of these shapes in order; None if there are none. A shape that is None fits everywhere."""
    found: list[int] = []
    at = 0
    for shape in wanted:
        while at < len(shapes) and shape is not None and shapes[at] != shape:
            at += 1
        if at == len(shapes):
            return None
        found.append(at)
        at += 1
    return found
