"""Turns inert nodes into plain Python values, for metadata of numbers, texts and containers of them."""

from __future__ import annotations

from typing import Any, cast

from reshard.errors import SourceError
from reshard_engine.pickles.nodes import (
    Global,
    Node,
    PDict,
    PList,
    PObject,
    PTuple,
    check_depth,
    is_mapping,
    kind_of,
    mapping_items,
    mapping_of,
)

MAX_VALUES = 1 << 22


def plain_value(node: Node, *, what: str) -> Any:
    """The value as dicts, lists, tuples, numbers, texts and None.

    Raises:
        SourceError: `checkpoint.malformed` for anything else, `pickle.too_deep`, `checkpoint.too_large`.
    """
    return _Plain(what).value(node, 0)


class _Plain:
    def __init__(self, what: str) -> None:
        self._what = what
        self._left = MAX_VALUES

    def value(self, node: Node, depth: int) -> Any:
        check_depth(depth)
        self._left -= 1
        if self._left < 0:
            raise SourceError("checkpoint.too_large", f"{self._what} has more than {MAX_VALUES} values")
        if node is None or isinstance(node, bool | int | float | str):
            return node
        if isinstance(node, PList):
            return [self.value(i, depth + 1) for i in node.items]
        if isinstance(node, PTuple):
            return tuple(self.value(i, depth + 1) for i in node.items)
        if isinstance(node, PObject) and isinstance(node.cls, Global) and node.cls.dotted == "torch.Size":
            return self.value(node.args.items[0], depth + 1) if node.args.items else ()
        if isinstance(node, PDict) or is_mapping(node):
            return {k: self.value(v, depth + 1) for k, v in mapping_items(node, what=self._what).items()}
        raise SourceError("checkpoint.malformed", f"{self._what} holds {kind_of(node)}")


def node_of(value: Any) -> Node:
    """Plain values as nodes."""
    if isinstance(value, dict):
        items = cast("dict[str | int, Any]", value)
        return mapping_of({k: node_of(v) for k, v in items.items()})
    if isinstance(value, list):
        return PList([node_of(v) for v in cast("list[Any]", value)])
    if isinstance(value, tuple):
        return PTuple(tuple(node_of(v) for v in cast("tuple[Any, ...]", value)))
    return value
