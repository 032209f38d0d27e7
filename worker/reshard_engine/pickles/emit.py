"""Writes inert nodes as pickle bytes: protocol 2, as in `torch.save`, with only allow-listed names.

Output is a pure function of the nodes: equal trees give equal bytes.

Source: torch 2.13.0 `torch/serialization.py` (`DEFAULT_PROTOCOL = 2`, persistent ids),
CPython 3.11 `Lib/pickle.py` (opcode choice, so that every unpickler reads it).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from reshard.errors import SourceError
from reshard_engine.pickles.nodes import (
    Global,
    Node,
    PBytearray,
    PDict,
    PList,
    PObject,
    PSet,
    PStorage,
    PTensor,
    PTuple,
    check_depth,
    kind_of,
)
from reshard_engine.pickles.policy import is_listed
from reshard_engine.tensors.dtypes import BY_NAME

_BATCH = 1_000
_UINT, _FLOAT = struct.Struct("<I"), struct.Struct(">d")
_BYTES_OPS = [b"K" + bytes([value]) for value in range(256)]
_ORDERED_DICT = Global("collections", "OrderedDict")
_REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
_REBUILD_V3 = Global("torch._utils", "_rebuild_tensor_v3")
_REBUILD_PARAMETER = Global("torch._utils", "_rebuild_parameter")


class _Emitter:
    """Writes one pickle; memoises by node identity, so that aliases stay aliases."""

    def __init__(self, *, keep_foreign: bool) -> None:
        self._out: list[bytes] = [b"\x80\x02"]
        self._memo: dict[int, int] = {}
        self._texts: dict[str, int] = {}
        self._globals: dict[str, int] = {}
        self._storages: dict[str, PTuple] = {}
        self._alive: list[Any] = []
        self._next = 0
        self._depth = 0
        self._keep_foreign = keep_foreign

    def finish(self, node: Node) -> bytes:
        """The whole stream."""
        self.write(node)
        self._out.append(b".")
        return b"".join(self._out)

    def write(self, node: Node) -> None:
        """Append the opcodes that push `node`."""
        kind: type[Any] = type(node)  # pyright: ignore[reportUnknownVariableType]
        simple = _LEAVES.get(kind)
        if simple is not None:
            simple(self, node)
            return
        known = self._memo.get(id(node))
        if known is not None:
            self._get(known)
            return
        emit = _EMITTERS.get(kind)
        if emit is None:
            if isinstance(node, PStorage):
                raise SourceError(
                    "source.unsupported",
                    "an object holds a bare storage, as quantized tensors do: it cannot be written out again",
                    fix="--opaque drop writes None in its place and names it",
                )
            raise SourceError("checkpoint.malformed", f"cannot write {kind_of(node)}")
        # Values grow after they are put into others, so only the walk itself knows how deep they nest.
        self._depth += 1
        check_depth(self._depth)
        emit(self, node)
        self._depth -= 1

    def list_(self, node: PList) -> None:
        """A list, in batches."""
        self._out.append(b"]")
        self._put(node)
        self._batches(node.items, b"e", step=1)

    def dict_(self, node: PDict) -> None:
        """A dict, in batches."""
        self._out.append(b"}")
        self._put(node)
        if any(isinstance(key, PList | PDict | PBytearray) for key in node.pairs[::2]):
            raise SourceError("pickle.type_confusion", "a dict key that Python cannot hash")
        self._batches(node.pairs, b"u", step=2)

    def bytearray_(self, node: PBytearray) -> None:
        """A bytearray, as a call."""
        self._call(Global("__builtin__", "bytearray"), (node.data,))
        self._put(node)

    def _get(self, index: int) -> None:
        self._out.append(b"h" + bytes([index]) if index < 256 else b"j" + _UINT.pack(index))

    def _put_index(self) -> int:
        index = self._next
        self._next = index + 1
        self._out.append(b"q" + bytes([index]) if index < 256 else b"r" + _UINT.pack(index))
        return index

    def _put(self, node: Node) -> None:
        self._memo[id(node)] = self._put_index()
        # Keys of the memo are addresses: keep the node alive so that no other takes its place.
        self._alive.append(node)

    def none_(self, _: None) -> None:
        self._out.append(b"N")

    def bool_(self, value: bool) -> None:  # noqa: FBT001 - one of a table of functions
        self._out.append(b"\x88" if value else b"\x89")

    def int_(self, value: int) -> None:
        self._out.append(_BYTES_OPS[value] if 0 <= value < 256 else _integer(value))

    def float_(self, value: float) -> None:
        self._out.append(b"G" + _FLOAT.pack(value))

    def bytes_(self, value: bytes) -> None:
        self._call(Global("_codecs", "encode"), (value.decode("latin-1"), "latin1"))

    def text_(self, value: str) -> None:
        known = self._texts.get(value)
        if known is not None:
            self._get(known)
            return
        raw = value.encode("utf-8", "surrogatepass")
        self._out.append(b"X" + _UINT.pack(len(raw)) + raw)
        self._texts[value] = self._put_index()

    def global_(self, name: Global) -> None:
        if not self._keep_foreign and not is_listed(name):
            raise SourceError(
                "pickle.forbidden_global",
                f"{name.dotted} would be written out, and is not on the allow-list",
                fix="--opaque keep writes such objects out again, unexecuted; --opaque drop writes None instead",
            )
        owner, _, attribute = name.name.rpartition(".")
        key = f"{name.module}\n{name.name}" if owner else name.dotted
        known = self._globals.get(key)
        if known is not None:
            self._get(known)
            return
        if owner:
            # Before protocol 4 no unpickler follows dots: Python's pickler writes nested classes so too.
            self._call(Global("__builtin__", "getattr"), (Global(name.module, owner), attribute))
        else:
            self._out.append(b"c" + name.module.encode() + b"\n" + name.name.encode() + b"\n")
        self._globals[key] = self._put_index()

    def tuple_(self, node: PTuple) -> None:
        """A tuple; one that contains itself through a list is fetched from the memo."""
        count = len(node.items)
        if count > 3:
            self._out.append(b"(")
        for item in node.items:
            self.write(item)
        known = self._memo.get(id(node))
        if known is not None:  # The tuple holds a list that holds the tuple: it exists by now.
            self._out.append(b"1" if count > 3 else b"0" * count)
            self._get(known)
            return
        self._out.append((b")", b"\x85", b"\x86", b"\x87")[count] if count <= 3 else b"t")
        if count:
            self._put(node)

    def _batches(self, values: list[Node], opcode: bytes, *, step: int) -> None:
        for start in range(0, len(values), _BATCH * step):
            self._out.append(b"(")
            for value in values[start : start + _BATCH * step]:
                self.write(value)
            self._out.append(opcode)

    def _call(self, func: Global, args: tuple[Node, ...]) -> None:
        self.global_(func)
        self.tuple_(PTuple(args))
        self._out.append(b"R")

    def set_(self, node: PSet) -> None:
        """A set, as a call."""
        self._call(Global("__builtin__", "frozenset" if node.frozen else "set"), (PList(node.items),))
        self._put(node)

    def object_(self, node: PObject) -> None:
        """An object, by the opcode family that made it."""
        cls = node.cls
        if not isinstance(cls, Global):
            raise SourceError("checkpoint.malformed", "cannot write an object of no named class")
        if node.how == "inst":
            self._out.append(b"(")
            self.global_(cls)
            for item in node.args.items:
                self.write(item)
            self._out.append(b"o")
        else:
            self.global_(cls)
            self.write(node.args)
            if node.how == "newobj_ex":
                self.write(node.kwargs)
            self._out.append({"reduce": b"R", "newobj": b"\x81", "newobj_ex": b"\x92"}[node.how])
        self._put(node)
        self._batches(node.items, b"u", step=2)
        self._batches(node.appends, b"e", step=1)
        if node.has_state:
            self.write(node.state)
            self._out.append(b"b")

    def tensor_(self, node: PTensor) -> None:
        """A tensor over a storage of its archive."""
        self.global_(_REBUILD_PARAMETER) if node.parameter else None
        dtype = BY_NAME[node.dtype]
        typed = dtype.storage_class is not None
        args: tuple[Node, ...] = (node.offset, PTuple(node.shape), PTuple(node.stride), node.requires_grad)
        self.global_(_REBUILD if typed else _REBUILD_V3)
        self._out.append(b"(")
        self._storage(node.storage, dtype.storage_class)
        for item in args:
            self.write(item)
        self._empty_hooks()
        if not typed:
            self.global_(Global("torch", node.dtype))
        self._out.append(b"tR")
        if node.parameter:
            self._out.append(b"\x88" if node.requires_grad else b"\x89")
            self._empty_hooks()
            self._out.append(b"\x87R")
        self._put(node)

    def _empty_hooks(self) -> None:
        self.global_(_ORDERED_DICT)
        self._out.append(b")R")

    def _storage(self, storage: PStorage, storage_class: str | None) -> None:
        # A fresh tuple for each reference, as torch writes it: unpicklers cache storages by key.
        cls = Global("torch", storage_class) if storage_class else Global("torch.storage", "UntypedStorage")
        known = self._storages.get(storage.key)
        if known is None:
            known = PTuple(("storage", cls, storage.key, storage.location, storage.numel))
            self._storages[storage.key] = known
        self.write(known)
        self._out.append(b"Q")


# By exact type: nothing that a pickle makes, or that a writer puts into a tree, is a subclass of one of these.
_LEAVES: dict[type, Callable[[_Emitter, Any], None]] = {
    type(None): _Emitter.none_,
    bool: _Emitter.bool_,
    int: _Emitter.int_,
    float: _Emitter.float_,
    str: _Emitter.text_,
    bytes: _Emitter.bytes_,
    Global: _Emitter.global_,
}
_EMITTERS: dict[type, Callable[[_Emitter, Any], None]] = {
    PTuple: _Emitter.tuple_,
    PList: _Emitter.list_,
    PDict: _Emitter.dict_,
    PTensor: _Emitter.tensor_,
    PObject: _Emitter.object_,
    PSet: _Emitter.set_,
    PBytearray: _Emitter.bytearray_,
}


def _integer(value: int) -> bytes:
    if 0 <= value < 65536:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    if len(raw) < 256:
        return b"\x8a" + bytes([len(raw)]) + raw
    return b"\x8b" + struct.pack("<i", len(raw)) + raw


def emit_pickle(node: Node, *, keep_foreign: bool = False) -> bytes:
    """The pickle stream (protocol 2) whose value is `node`.

    Raises:
        SourceError: `pickle.forbidden_global` if a name is not on the allow-list and `keep_foreign` is False.
    """
    return _Emitter(keep_foreign=keep_foreign).finish(node)
