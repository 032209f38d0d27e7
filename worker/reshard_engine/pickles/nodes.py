"""Inert nodes: the contents of a pickle as data. No node can run code, and no untrusted value is hashed.

Scalars are Python's own `None`, `bool`, `int`, `float`, `str` and `bytes` (bounded when parsed).
Identity matters: the same node reached twice is an alias, and is written back as one.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias, cast

from reshard.errors import RequestError, SourceError, printable

# Bounds of the pickle interpreter. Real checkpoints need less than a tenth of each; the environment can set some.


@dataclass(frozen=True, slots=True)
class PickleLimits:
    """The bounds on the work, memory and nesting of one pickle."""

    stream_bytes: int = 256 << 20
    opcodes: int = 50_000_000
    node_bytes: int = 2 << 30
    """Bytes, counted when values are made, freed or not. The pickle of a mixture of experts with a trillion parameters
    counts 192 MiB."""
    mark_depth: int = 1_000
    value_depth: int = 200
    """Levels of nesting, also of walks over finished values: 200 levels take 600 frames of Python's stack of 1,000."""
    text_bytes: int = 64 << 20
    line_bytes: int = 4 << 10
    name_chars: int = 1 << 10
    name_dots: int = 64
    foreign_names: int = 10_000
    """Number of different names that are not on the allow-list; manifests and inspections list all of them."""
    long_bytes: int = 1 << 10
    digits: int = 4_300
    dims: int = 64


DEFAULT_LIMITS = PickleLimits()


_SETTINGS = {
    "RESHARD_PICKLE_STREAM_BYTES": "stream_bytes",
    "RESHARD_PICKLE_OPCODES": "opcodes",
    "RESHARD_PICKLE_NODE_BYTES": "node_bytes",
}
"""The bounds that decide time and memory, by environment variable. The other bounds are fixed."""


def configured_limits(environ: Mapping[str, str] = os.environ) -> PickleLimits:
    """The bounds with the values of the environment. Probes and engine processes inherit the environment.

    Raises:
        RequestError: `request.invalid` for a value that is not a positive number.
    """
    chosen: dict[str, int] = {}
    for key, bound in _SETTINGS.items():
        text = environ.get(key)
        if text is None:
            continue
        if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) == 0:
            raise RequestError("request.invalid", f"{key} is {printable(text)!r}", fix=f"set {key} to a whole number")
        chosen[bound] = int(text)
    return PickleLimits(**chosen)


FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
"""The function that rebuilds tensors with attributes, and those of classes of their own: its second argument."""
Node: TypeAlias = Any
"""A scalar or one of the classes below. It is `Any`, because untrusted data has no better static type."""


@dataclass(slots=True, eq=False, repr=False)
class PList:
    """A list."""

    items: list[Node] = field(default_factory=list[Any])
    depth: int = 1


@dataclass(slots=True, eq=False, repr=False)
class PTuple:
    """A tuple."""

    items: tuple[Node, ...] = ()
    depth: int = 1


@dataclass(slots=True, eq=False, repr=False)
class PSet:
    """A set (or frozenset), in stream order, not de-duplicated."""

    items: list[Node] = field(default_factory=list[Any])
    frozen: bool = False
    depth: int = 1


@dataclass(slots=True, eq=False, repr=False)
class PDict:
    """A dict as the ordered pairs of the stream: `pairs[2k]` is a key, `pairs[2k+1]` its value."""

    pairs: list[Node] = field(default_factory=list[Any])
    depth: int = 1


@dataclass(slots=True, eq=False, repr=False)
class PBytearray:
    """A bytearray."""

    data: bytes


@dataclass(slots=True, frozen=True)
class Global:
    """A name that Python's unpickler would import; this one never does. Names are bounded, checked strings."""

    module: str
    name: str
    dotted: str = field(init=False, repr=False, compare=False)
    """`module.name`, stored because every call of the name uses it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dotted", f"{self.module}.{self.name}")


@dataclass(slots=True, eq=False, repr=False)
class PObject:
    """An object: the callable or class, its arguments, and the operations on the object afterwards.

    `how` is the opcode family: `reduce` (callable applied to args), `newobj`, `newobj_ex`, `inst`.
    """

    how: str
    cls: Node
    args: PTuple
    kwargs: Node = None
    state: Node = None
    has_state: bool = False
    items: list[Node] = field(default_factory=list[Any])
    """Pairs of SETITEM(S), flat."""
    appends: list[Node] = field(default_factory=list[Any])
    depth: int = 1

    @property
    def known_by(self) -> Node:
        """The class or function that decides whether the object is known: of a tensor, the class that it is of."""
        of_type = isinstance(self.cls, Global) and self.cls.dotted == FROM_TYPE
        return next(iter(self.args.items[1:]), self.cls) if of_type else self.cls


@dataclass(slots=True, eq=False, repr=False)
class PStorage:
    """A storage reference. `numel` counts elements of `dtype`; untyped storages count bytes (uint8)."""

    dtype: str
    key: str
    location: str
    numel: int
    untyped: bool = False
    view_offset: int = 0
    """Legacy streams: first element of this view in the root storage `key`."""
    root_numel: int = 0
    """Legacy streams: elements of the root storage; equals `numel` elsewhere."""


@dataclass(slots=True, eq=False, repr=False)
class PTensor:
    """A tensor over a storage. Offsets and strides count elements of `dtype`."""

    storage: PStorage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False
    parameter: bool = False
    attributes: tuple[tuple[str, str], ...] = ()
    """Short text attributes that were set on the tensor."""

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return prod(self.shape)


@dataclass(slots=True, frozen=True)
class PTensorRef:
    """A tensor of the checkpoint's shard map, in a tree that will be written again."""

    index: int


@dataclass(slots=True, frozen=True)
class PLiteral:
    """A packed tensor whose bytes are known, in a tree that will be written."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(slots=True, frozen=True)
class PRuns:
    """A packed tensor put together from runs of other tensors, in a tree that will be written."""

    dtype: str
    shape: tuple[int, ...]
    runs: tuple[tuple[int, int, int], ...]
    """(tensor of the shard map or `tensors.layout.ZEROS`, first element, last element + 1), in row-major order."""


@dataclass(slots=True, frozen=True)
class PRunsPart:
    """A packed tensor over a part of another one's storage, in a tree that will be written."""

    whole: PRuns
    """The whole tensor. All parts refer to one object and share its storage."""
    offset: int
    """In elements."""
    shape: tuple[int, ...]


def check_depth(depth: int) -> None:
    """Refuse a depth beyond the limit.

    Raises:
        SourceError: `pickle.too_deep`, also for sets and tuples that contain themselves.
    """
    if depth > DEFAULT_LIMITS.value_depth:
        raise SourceError("pickle.too_deep", f"values nested deeper than {DEFAULT_LIMITS.value_depth}")


def is_mapping(node: Node) -> bool:
    """True if the node is a dict or an OrderedDict."""
    return isinstance(node, PDict) or (
        isinstance(node, PObject) and isinstance(node.cls, Global) and node.cls.dotted == "collections.OrderedDict"
    )


def mapping_items(node: Node, *, what: str) -> dict[str | int, Node]:
    """The mapping as a Python dict with `str` or `int` keys, in order.

    Raises:
        SourceError: `checkpoint.malformed` if the node is not a mapping, or a key is neither `str` nor `int`;
            `pickle.ambiguous_key`
            if Python would merge two keys.
    """
    if not is_mapping(node):
        raise SourceError("checkpoint.malformed", f"{what} is not a mapping but {kind_of(node)}")
    pairs: list[Node] = node.pairs if isinstance(node, PDict) else node.items
    found: dict[str | int, Node] = {}
    for at in range(0, len(pairs), 2):
        key = pairs[at]
        # Python hashes integers modulo 2**61 - 1: an attacker could choose unbounded integers that collide.
        if type(key) is not str and not (type(key) is int and -(1 << 62) < key < 1 << 62):
            raise SourceError("checkpoint.malformed", f"{what} has a key that is {kind_of(key)}")
        if key in found:
            raise SourceError("pickle.ambiguous_key", f"{what} has the key {printable(str(key))!r} twice")
        found[key] = pairs[at + 1]
    return found


_MOST_INTEGER = 1 << 62
"""Python prints integers of thousands of digits slowly, or refuses them; no run counts this far."""


def text_items(node: Node, *, what: str) -> dict[str, Node]:
    """The mapping with the texts that `str` makes of its keys, in order, as torch flattens a state dict.

    Source: torch 2.13.0 `distributed/checkpoint/_traverse.py` (`traverse_state_dict`: `str(k)`); verified by running.

    Raises:
        SourceError: `checkpoint.malformed` if the node is not a mapping; `checkpoint.ambiguous` if two keys have one
            text; `pickle.ambiguous_key` if Python would merge two keys; `source.unsupported` for a key that is an
            object, whose text only its class knows.
    """
    if not is_mapping(node):
        raise SourceError("checkpoint.malformed", f"{what} is not a mapping but {kind_of(node)}")
    pairs: list[Node] = node.pairs if isinstance(node, PDict) else node.items
    found: dict[str, Node] = {}
    shown: dict[str, str] = {}
    values: set[str] = set()  # texts, as hashes of an attacker's numbers and tuples collide
    for at in range(0, len(pairs), 2):
        key = pairs[at]
        text = key if isinstance(key, str) else _literal(key, what)
        own = printable(repr(key) if isinstance(key, str) else text)
        value = _literal(key, what, as_integers=True)
        if value in values:
            raise SourceError("pickle.ambiguous_key", f"{what} has the key {own} twice")
        if text in found:
            raise SourceError(
                "checkpoint.ambiguous",
                f"{what} has the keys {shown[text]} and {own}, and torch makes one text of both",
                fix="rename one of the two keys where the run saves them, and save again",
            )
        values.add(value)
        found[text], shown[text] = pairs[at + 1], own
    return found


def script_items(node: Node, *, what: str) -> dict[str | int, Node]:
    """The mapping of a script: texts and integers are keys as they are; of any other key, `str` makes the text.

    Raises:
        SourceError: As `mapping_items` where all keys are texts or integers, else as `text_items`.
    """
    pairs: list[Node] = node.pairs if isinstance(node, PDict) else node.items if isinstance(node, PObject) else []
    keys = pairs[::2]
    if all(type(key) in (str, int) for key in keys):
        return mapping_items(node, what=what)
    found: dict[str | int, Node] = {}
    for key, (text, value) in zip(keys, text_items(node, what=what).items(), strict=True):
        found[key if isinstance(key, str) or type(key) is int else text] = value
    return found


def _literal(key: Node, what: str, depth: int = 0, *, as_integers: bool = False) -> str:
    """The text that `repr` makes of a key: None, a truth value, a number, a text, or a tuple of these.

    Args:
        key: The key.
        what: The mapping, for messages.
        depth: Levels of tuples around the key.
        as_integers: True for one text of all numbers that Python takes for the same key, such as 1, 1.0 and True.
    """
    check_depth(depth)
    if isinstance(key, PTuple):
        parts = [_literal(item, what, depth + 1, as_integers=as_integers) for item in key.items]
        return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
    if isinstance(key, bool | float):
        return repr(int(key)) if as_integers and float(key).is_integer() else repr(key)
    if key is None or isinstance(key, str) or (type(key) is int and abs(key) < _MOST_INTEGER):
        return repr(key)
    raise SourceError(
        "source.unsupported",
        f"{what} has a key that is {kind_of(key)}, of which torch makes a text that its class decides",
        fix="use texts, numbers or tuples of them as keys where the run saves them, and save again",
    )


def namespace_items(node: Node, *, what: str = "args") -> Mapping[str | int, Node]:
    """The attributes of an `argparse.Namespace`; an empty mapping for any other node.

    Raises:
        SourceError: As `mapping_items`.
    """
    if isinstance(node, PObject) and isinstance(node.cls, Global) and node.cls.dotted == "argparse.Namespace":
        return mapping_items(node.state, what=what) if is_mapping(node.state) else {}
    return {}


def ordered_dict(items: Mapping[str, Node]) -> PObject:
    """An OrderedDict node with these entries."""
    node = PObject("reduce", Global("collections", "OrderedDict"), PTuple(), depth=3)
    for key, value in items.items():
        node.items += (key, value)
    return node


def sequence_items(node: Node, *, what: str) -> list[Node]:
    """The items of a list or tuple.

    Raises:
        SourceError: `checkpoint.malformed` otherwise.
    """
    if isinstance(node, PList):
        return node.items
    if isinstance(node, PTuple):
        return list(node.items)
    raise SourceError("checkpoint.malformed", f"{what} is not a list but {kind_of(node)}")


def kind_of(node: Node) -> str:
    """A short, safe description of the node's kind for messages."""
    if isinstance(node, Global):
        return f"the name {printable(node.dotted)}"
    if isinstance(node, PObject):
        return f"an object of {printable(node.cls.dotted) if isinstance(node.cls, Global) else 'no named class'}"
    for cls, text in (
        (PList, "a list"),
        (PTuple, "a tuple"),
        (PDict, "a dict"),
        (PSet, "a set"),
        (PTensor, "a tensor"),
    ):
        if isinstance(node, cls):
            return text
    return "a value of another kind"


def mapping_of(pairs: dict[str | int, Node]) -> PDict:
    """A dict node with these keys and values."""
    flat: list[Node] = []
    for key, value in pairs.items():
        flat += (key, value)
    return PDict(flat)


# Turns inert nodes into plain Python values, for metadata of numbers, texts and containers of them.

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


# Pauses Python's cycle collector while many values are made that are all kept.

_lock = threading.Lock()
_pauses: list[bool] = []
"""One entry for each open pause, in any thread. The first one is True if the collector was on before."""


@contextmanager
def collector_paused() -> Generator[None]:
    """Stop the collection of cycles until the last pause ends.

    The collector visits every node repeatedly while the interpreter makes nodes by the million: 30 % of the time of a
    parse, measured with 20,000 parameters. No node is garbage, and the size of a parse is bounded.
    """
    with _lock:
        _pauses.append(gc.isenabled() if not _pauses else _pauses[0])
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            if _pauses.pop() and not _pauses:
                gc.enable()
