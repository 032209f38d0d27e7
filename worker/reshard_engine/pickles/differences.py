"""Compares two trees of inert nodes: counters, hyper-parameters, schedulers, client state. Nothing is executed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from reshard.errors import counted, printable
from reshard_engine.pickles.nodes import (
    Global,
    Node,
    PBytearray,
    PDict,
    PList,
    PObject,
    PSet,
    PTensor,
    PTensorRef,
    PTuple,
    check_depth,
    is_mapping,
    kind_of,
)

_MAX_TEXT_CHARS = 80
_SHOWN_ITEMS = 4
_Entries = dict[tuple[str, bool], Node]
"""By the text of the key and whether it is one: an integer is not the text of the same digits."""


@dataclass(frozen=True, slots=True)
class TreeDifference:
    """Two different values at one place of two trees. None means that one tree has no value there."""

    path: str
    a: str | None
    b: str | None


@dataclass(frozen=True, slots=True)
class TensorsAt:
    """Two tensors at one place of two trees, which the caller compares."""

    path: str
    a: PTensor | PTensorRef
    b: PTensor | PTensorRef


def compare_trees(a: Node, b: Node, path: str) -> Iterator[TreeDifference | TensorsAt]:
    """Yield the differences of two trees. A list equals a tuple of the same items, and 1 equals 1.0.

    Raises:
        SourceError: `pickle.too_deep`.
    """
    yield from _Walk().compare(a, b, path, 0)


class _Walk:
    """One comparison. It walks each pair of nodes once, so that aliases and cycles end."""

    def __init__(self) -> None:
        self._met: set[tuple[int, int]] = set()

    def compare(self, a: Node, b: Node, path: str, depth: int) -> Iterator[TreeDifference | TensorsAt]:
        check_depth(depth)
        if not _inner(a) or not _inner(b):
            if not same_scalar(a, b):
                yield TreeDifference(path, text_of(a), text_of(b))
            return
        if isinstance(a, PTensor | PTensorRef) and isinstance(b, PTensor | PTensorRef):
            yield TensorsAt(path, a, b)
            return
        if (id(a), id(b)) in self._met:
            return
        self._met.add((id(a), id(b)))
        if is_mapping(a) and is_mapping(b):
            yield from self._mappings(_entries(a), _entries(b), path, depth)
        elif isinstance(a, PList | PTuple) and isinstance(b, PList | PTuple):
            yield from self._sequences(list(a.items), list(b.items), path, depth)
        elif isinstance(a, PObject) and isinstance(b, PObject):
            yield from self._objects(a, b, path, depth)
        elif not _same_plain(a, b):
            yield TreeDifference(path, text_of(a), text_of(b))

    def _mappings(self, a: _Entries, b: _Entries, path: str, depth: int) -> Iterator[TreeDifference | TensorsAt]:
        for key in dict.fromkeys((*a, *b)):
            shown = printable(key[0], max_chars=64)
            place = f"{path}.{shown}" if path else shown
            if key in a and key in b:
                yield from self.compare(a[key], b[key], place, depth + 1)
            else:
                yield TreeDifference(
                    place, text_of(a[key]) if key in a else None, text_of(b[key]) if key in b else None
                )

    def _sequences(self, a: list[Node], b: list[Node], path: str, depth: int) -> Iterator[TreeDifference | TensorsAt]:
        if len(a) != len(b):
            yield TreeDifference(path, f"{len(a)} items", f"{len(b)} items")
            return
        for number, (left, right) in enumerate(zip(a, b, strict=True)):
            yield from self.compare(left, right, f"{path}[{number}]", depth + 1)

    def _objects(self, a: PObject, b: PObject, path: str, depth: int) -> Iterator[TreeDifference | TensorsAt]:
        if not same_scalar(a.cls, b.cls) or a.how != b.how or a.has_state != b.has_state:
            yield TreeDifference(path, text_of(a), text_of(b))
            return
        # Users know the path of the object, not the names of its parts.
        yield from self.compare(a.args, b.args, path, depth + 1)
        yield from self.compare(a.kwargs, b.kwargs, path, depth + 1)
        yield from self.compare(a.state, b.state, path, depth + 1)
        yield from self._sequences(a.appends, b.appends, path, depth)
        yield from self._mappings(_pairs(a.items), _pairs(b.items), path, depth)


def _inner(node: Node) -> bool:
    """True if the node is compared by its parts."""
    return isinstance(node, PList | PTuple | PSet | PDict | PObject | PTensor | PTensorRef | PBytearray)


def same_scalar(a: Node, b: Node) -> bool:
    """True if two leaves are the same value; 3 equals 3.0, and a NaN equals a NaN."""
    if isinstance(a, int | float) and isinstance(b, int | float) and isinstance(a, bool) == isinstance(b, bool):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, Global) and isinstance(b, Global):
        return _name(a) == _name(b)
    return type(a) is type(b) and (a is None or isinstance(a, str | bytes | bool)) and a == b


def _name(name: Global) -> str:
    """The name in the form that numpy used before 2.0."""
    return (
        name.dotted.replace("numpy._core.", "numpy.core.", 1) if name.module.startswith("numpy._core.") else name.dotted
    )


def _same_plain(a: Node, b: Node) -> bool:
    """True if two sets or two bytearrays have equal contents."""
    if isinstance(a, PSet) and isinstance(b, PSet):
        return sorted(map(text_of, a.items)) == sorted(map(text_of, b.items))
    return isinstance(a, PBytearray) and isinstance(b, PBytearray) and a.data == b.data


def _entries(node: Node) -> _Entries:
    return _pairs(node.pairs if isinstance(node, PDict) else node.items)


def _pairs(flat: list[Node]) -> _Entries:
    found: _Entries = {}
    for at in range(0, len(flat), 2):
        key = flat[at]
        found[(key, True) if isinstance(key, str) else (text_of(key), False)] = flat[at + 1]
    return found


def text_of(node: Node) -> str:
    """A value in a few safe characters."""
    text = _text(node, 0)
    return text if len(text) <= _MAX_TEXT_CHARS else text[: _MAX_TEXT_CHARS - 3] + "..."


def _text(node: Node, depth: int) -> str:
    if node is None or isinstance(node, bool | int | float):
        return repr(node)
    if isinstance(node, str):
        return printable(repr(node), max_chars=_MAX_TEXT_CHARS)
    if isinstance(node, bytes):
        return f"{len(node)} bytes"
    if isinstance(node, Global):
        return printable(node.dotted, max_chars=_MAX_TEXT_CHARS)
    if isinstance(node, PList | PTuple | PSet) and depth < 2:
        shown = ", ".join(_text(i, depth + 1) for i in list(node.items)[:_SHOWN_ITEMS])
        return f"[{shown}{', ...' if len(node.items) > _SHOWN_ITEMS else ''}]"
    if is_mapping(node):
        return f"a mapping of {counted(len(_entries(node)), 'entry', 'entries')}"
    return "a tensor" if isinstance(node, PTensor | PTensorRef) else kind_of(node)
