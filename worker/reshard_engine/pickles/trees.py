"""Trees of inert nodes: copied with other tensors, compared, as canonical text, and as state dicts with key paths."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from reshard.errors import SourceError, counted, printable
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
    is_mapping,
    kind_of,
    mapping_items,
    ordered_dict,
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


def foreign_names(node: Node) -> set[str]:
    """The printable names in a tree that are not on the allow-list, those within objects of unlisted classes included.

    Raises:
        SourceError: `pickle.too_deep`.
    """
    found: set[str] = set()
    met: set[int] = set()

    def walk(part: Node, depth: int) -> None:
        if type(part) in _SCALARS or id(part) in met:
            return
        met.add(id(part))
        check_depth(depth)
        if isinstance(part, Global) and not is_listed(part):
            found.add(printable(part.dotted))
        if isinstance(part, PObject):
            walk(part.cls, depth + 1)
        for inner, _ in _parts(part, ""):
            walk(inner, depth + 1)

    walk(node, 0)
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


# Compares two trees of inert nodes: counters, hyper-parameters, schedulers, client state. Nothing is executed.

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


# The canonical text of a tree, which is the same for two trees exactly if `compare_trees` finds no difference in them.

_MOST_CHARS = 64 << 20
"""The longest text of a tree. Aliases within aliases could make it as long as a power of two."""


def canonical(node: Node, tensor: Callable[[Any], Node]) -> str:
    """The tree as JSON without spaces, in ASCII. `tensor` turns a tensor of the tree into values that JSON has.

    A number without a fraction is written as an integer; a list and a tuple as an array; a mapping as an object with
    sorted keys. Other values are objects with one key that begins with a dollar sign.

    Raises:
        SourceError: `pickle.too_deep`, also for lists and mappings that contain themselves; `pickle.too_much_memory`
            for a text of more than 64 MiB; `checkpoint.malformed` for a value of another kind.
    """
    return _Writer(tensor).text(node, 0)


class _Writer:
    """The canonical text of one tree. It writes each node once, so that aliases cost nothing.

    A level of nesting takes three frames of Python's stack, as in other walks: `PickleLimits.value_depth`.
    """

    def __init__(self, tensor: Callable[[Any], Node]) -> None:
        self._tensor = tensor
        self._memo: dict[int, str] = {}

    def text(self, node: Node, depth: int) -> str:
        check_depth(depth)
        if type(node) in _SCALARS or isinstance(node, Global):
            return _leaf(node)
        if (known := self._memo.get(id(node))) is not None:
            return known
        made = self._memo[id(node)] = self._inner(node, depth + 1)
        if len(made) > _MOST_CHARS:
            raise SourceError("pickle.too_much_memory", f"a value has {len(made):,} characters when it is written out")
        return made

    def _inner(self, node: Node, depth: int) -> str:
        match node:
            case PTensor() | PTensorRef() | PLiteral():
                return self._tagged("tensor", json.dumps(self._tensor(node), separators=(",", ":")))
            case PBytearray():
                return self._tagged("bytearray", f'"{node.data.hex()}"')
            case PSet():
                return self._tagged("set", self._array(sorted([self.text(i, depth) for i in node.items])))
            case PList() | PTuple():
                return self._array([self.text(i, depth) for i in node.items])
            case _ if is_mapping(node):
                return self._mapping(_entries(node), depth)
            case PObject():
                parts = (node.cls, node.how, node.has_state, node.args, node.kwargs, node.state)
                texts = [self.text(part, depth) for part in parts]
                texts.append(self._array([self.text(item, depth) for item in node.appends]))
                return self._tagged("object", self._array([*texts, self._mapping(_pairs(node.items), depth)]))
            case _:
                raise SourceError("checkpoint.malformed", f"{kind_of(node)} stands where a plain value is expected")

    def _mapping(self, entries: _Entries, depth: int) -> str:
        texts: dict[tuple[str, bool], str] = {}
        for key, value in entries.items():
            texts[key] = self.text(value, depth)
        if all(is_text and not key.startswith("$") for key, is_text in texts):
            return "{" + ",".join(f"{json.dumps(key)}:{text}" for (key, _), text in sorted(texts.items())) + "}"
        pairs = sorted(f"[{json.dumps(key)},{_leaf(is_text)},{text}]" for (key, is_text), text in texts.items())
        return self._tagged("mapping", self._array(pairs))

    @staticmethod
    def _array(texts: Iterable[str]) -> str:
        return f"[{','.join(texts)}]"

    @staticmethod
    def _tagged(kind: str, text: str) -> str:
        return f'{{"${kind}":{text}}}'


def _leaf(node: Node) -> str:
    """The text of a scalar or a name. Equal numbers have one text, whatever their types: 3 and 3.0, 0 and -0.0."""
    if isinstance(node, float):
        whole = math.isfinite(node) and node.is_integer()
        return str(int(node)) if whole else json.dumps(node)
    if isinstance(node, bytes):
        return f'{{"$bytes":"{node.hex()}"}}'
    return f'{{"$name":{json.dumps(_name(node))}}}' if isinstance(node, Global) else json.dumps(node)


# A model's state dict as entries with key paths: flat as torch makes it, or nested as Megatron nests it.
#
# Source: torch 2.13.0 `nn/modules/module.py` (`_EXTRA_STATE_KEY_SUFFIX`; `get_extra_state` may return any picklable
# value, and strict loading misses the entry of a module that has the method); Megatron-DeepSpeed (July 2025)
# `megatron/model/language_model.py` (`state_dict_for_save_checkpoint` nests one dict per submodule).

KeyPath = tuple[str | int, ...]
_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a state dict: no mapping within it is a state dict of its own."""

    path: KeyPath
    value: Node

    @property
    def name(self) -> str:
        """The keys joined by dots, as in `state_dict()` of the whole model."""
        return name_of(self.path)


def name_of(path: KeyPath) -> str:
    """The keys of a path joined by dots."""
    return ".".join(map(str, path))


def is_extra_state(name: str) -> bool:
    """True if torch keeps a module's extra state under this name."""
    return name == _EXTRA_STATE or name.endswith(f".{_EXTRA_STATE}")


def state_dict_entries(node: Node, *, what: str) -> tuple[Entry, ...]:
    """Every entry of a state dict, in its order. Empty mappings within it are entries: Megatron looks for their keys.

    Raises:
        SourceError: `checkpoint.malformed`, `pickle.too_deep`, `checkpoint.ambiguous` if two entries have one name.
    """
    found: dict[str, Entry] = {}
    for entry in _state_dict_entries(node, (), what):
        if found.setdefault(entry.name, entry) is not entry:
            raise SourceError("checkpoint.ambiguous", f"{what}: {printable(entry.name)} comes twice")
    return tuple(found.values())


def _state_dict_entries(node: Node, path: KeyPath, what: str) -> Iterator[Entry]:
    check_depth(len(path))
    for key, value in mapping_items(node, what=what).items():
        inner = (*path, key)
        if is_mapping(value) and not is_extra_state(str(key)) and mapping_items(value, what=what):
            yield from _state_dict_entries(value, inner, what)
        else:
            yield Entry(inner, value)


def tensors_of(entries: Iterable[Entry]) -> dict[str, PTensor]:
    """The entries that are tensors, by name."""
    return {e.name: e.value for e in entries if isinstance(e.value, PTensor)}


def nested_dict(entries: Iterable[tuple[KeyPath, Node]]) -> PObject:
    """A state dict with these entries, nested as their paths say."""
    tree = ordered_dict({})
    levels: dict[KeyPath, PObject] = {(): tree}
    for path, value in entries:
        for depth in range(1, len(path)):
            if path[:depth] not in levels:
                levels[path[:depth]] = ordered_dict({})
                levels[path[: depth - 1]].items += (path[depth - 1], levels[path[:depth]])
        levels[path[:-1]].items += (path[-1], value)
    return tree
