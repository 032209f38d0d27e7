"""Copies trees with their tensors and foreign objects replaced; aliases and cycles are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from reshard_engine.pickles.nodes import (
    Global,
    Node,
    PBytearray,
    PDict,
    PList,
    PLiteral,
    PObject,
    PRuns,
    PRunsPart,
    PSet,
    PTensor,
    PTensorRef,
    PTuple,
    check_depth,
)
from reshard_engine.pickles.policy import is_listed

_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
_UNKNOWN = object()


class _Rewriter:
    """One copy of a tree. It maps each copied node, by identity, to its copy."""

    def __init__(self, tensor: Callable[[Any], Node], foreign: Callable[[Node], Node]) -> None:
        self._tensor = tensor
        self._foreign = foreign
        self._memo: dict[int, Node] = {}
        self._depth = 0

    def copy(self, node: Node) -> Node:
        """The copy of a node."""
        if type(node) in _SCALARS:
            return node
        known = self._memo.get(id(node), _UNKNOWN)
        if known is not _UNKNOWN:
            return known
        self._depth += 1
        check_depth(self._depth)
        result = self._copy_new(node)
        self._depth -= 1
        return result

    def _copy_new(self, node: Node) -> Node:
        match node:
            case PList():
                return self._list(node)
            case PDict():
                return self._dict(node)
            case PObject():
                return self._object(node)
            case PTensor() | PTensorRef() | PLiteral() | PRuns() | PRunsPart():
                result: Node = self._tensor(node)
            case PTuple():
                result = PTuple(tuple(map(self.copy, node.items)), node.depth)
            case PSet():
                result = PSet(list(map(self.copy, node.items)), node.frozen, node.depth)
            case PBytearray():
                # Files with equal pickles share nodes. The output must not: each of its files has values of its own.
                result = PBytearray(node.data)
            case Global():
                result = node if is_listed(node) else self._foreign(node)
            case _:
                return node
        self._memo[id(node)] = result
        return result

    # Lists, dicts and objects can contain themselves: they are remembered before their content is copied.

    def _list(self, node: PList) -> PList:
        result = self._memo[id(node)] = PList(depth=node.depth)
        result.items.extend(map(self.copy, node.items))
        return result

    def _dict(self, node: PDict) -> PDict:
        result = self._memo[id(node)] = PDict(depth=node.depth)
        result.pairs.extend(map(self.copy, node.pairs))
        return result

    def _object(self, node: PObject) -> Node:
        name = node.known_by
        if not (isinstance(name, Global) and is_listed(name)):
            replaced = self._foreign(node)
            if replaced is not node:
                self._memo[id(node)] = replaced
                return replaced
        result = PObject(node.how, node.cls, PTuple(), depth=node.depth, has_state=node.has_state)
        self._memo[id(node)] = result
        result.args = self.copy(node.args)
        result.kwargs, result.state = self.copy(node.kwargs), self.copy(node.state)
        result.items = list(map(self.copy, node.items))
        result.appends = list(map(self.copy, node.appends))
        return result


def foreign_paths(node: Node, path: str) -> list[str]:
    """The paths of the entries of a tree that name classes or functions which are not on the allow-list.

    Raises:
        SourceError: `pickle.too_deep`.
    """
    found: list[str] = []
    met: set[int] = set()

    def walk(part: Node, where: str, depth: int) -> None:
        if type(part) in _SCALARS or id(part) in met:
            return
        met.add(id(part))
        check_depth(depth)
        name = part.known_by if isinstance(part, PObject) else part
        if isinstance(part, PObject | Global) and not (isinstance(name, Global) and is_listed(name)):
            found.append(where)
            return
        for inner, place in _parts(part, where):
            walk(inner, place, depth + 1)

    walk(node, path, 0)
    return found


def _parts(node: Node, where: str) -> Iterator[tuple[Node, str]]:
    """The parts of a node, each with the path that leads to it."""
    if isinstance(node, PObject):
        yield from ((inner, where) for inner in (node.args, node.kwargs, node.state, *node.appends))
    elif isinstance(node, PList | PTuple | PSet):
        yield from ((item, f"{where}[{number}]") for number, item in enumerate(node.items))
    flat: list[Node] = node.pairs if isinstance(node, PDict) else node.items if isinstance(node, PObject) else []
    for at in range(0, len(flat), 2):
        yield flat[at], where
        key = str(flat[at]) if isinstance(flat[at], str | int) else "?"
        yield flat[at + 1], f"{where}.{key}" if where else key


def rewrite(node: Node, tensor: Callable[[Any], Node], foreign: Callable[[Node], Node]) -> Node:
    """A copy of the tree with each tensor replaced by `tensor(node)` and each foreign object by `foreign(node)`.

    `foreign` gets the `PObject`s and `Global`s whose names are not on the allow-list and returns their replacements.
    """
    return _Rewriter(tensor, foreign).copy(node)
