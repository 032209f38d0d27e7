"""The names of parameters that an optimizer numbers, as far as the shapes of its states leave one way to name them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

Shape = tuple[int, ...]


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
