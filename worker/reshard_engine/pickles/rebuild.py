"""Turns allow-listed calls into nodes: tensors, storages and plain values.

Source: torch 2.13.0 `torch/_utils.py` (`_rebuild_tensor_v2`, `_rebuild_parameter`),
`torch/_tensor.py` (`_rebuild_from_type_v2`), `torch/serialization.py` (persistent ids).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from reshard.errors import SourceError, printable
from reshard_engine.pickles import arrays, calls, stdlib
from reshard_engine.pickles.limits import DEFAULT_LIMITS, PickleLimits
from reshard_engine.pickles.nodes import (
    FROM_TYPE,
    Global,
    Node,
    PDict,
    PList,
    PObject,
    PSet,
    PStorage,
    PTensor,
    PTuple,
)
from reshard_engine.tensors.dtypes import BY_NAME, BY_STORAGE_CLASS

MAX_ELEMS = 1 << 62
_ATTRIBUTES, _ATTRIBUTE_CHARS = 8, 64
_KEY = re.compile(r"(?!.*\.\.)[0-9A-Za-z_.-]{1,64}")
_STORAGES = {name: dtype.name for name, dtype in BY_STORAGE_CLASS.items()} | {"UntypedStorage": "uint8"}
"""Element types of storages by the class that a persistent id names."""


@dataclass(frozen=True, slots=True)
class MadeOfTensors:
    """A tensor that is made of others, by a class of its own."""

    kind: Global
    dtype: str
    shape: tuple[int, ...]


def _confused(message: str) -> SourceError:
    return SourceError("pickle.type_confusion", message)


def _count(value: Node, what: str) -> int:
    if type(value) is not int:
        raise _confused(f"{what} is not an integer")
    if not 0 <= value < MAX_ELEMS:
        raise SourceError("tensor.bad_extent", f"{what} is {printable(str(value), max_chars=40)}")
    return value


def _counts(node: Node, what: str, limits: PickleLimits) -> tuple[int, ...]:
    if isinstance(node, PObject) and isinstance(node.cls, Global) and node.cls.dotted == "torch.Size":
        node = node.args.items[0] if len(node.args.items) == 1 else None
    if not isinstance(node, PTuple | PList):
        raise _confused(f"{what} is not a tuple")
    if len(node.items) > limits.dims:
        raise SourceError("tensor.bad_extent", f"{what} has {len(node.items)} dimensions, the limit is {limits.dims}")
    for item in node.items:
        if type(item) is not int or not 0 <= item < MAX_ELEMS:
            _count(item, what)
    return tuple(node.items)


def storage_of(pid: Node) -> PStorage:
    """The storage that a persistent id names.

    Raises:
        SourceError: `pickle.bad_persistent_id` for anything but torch's own form.
    """
    items: tuple[Node, ...] = pid.items if isinstance(pid, PTuple) else ()
    if len(items) not in (5, 6) or items[0] != "storage" or not isinstance(items[1], Global):
        raise SourceError("pickle.bad_persistent_id", "a persistent id that is not torch's storage tuple")
    _, kind, key, location, numel, *view = items
    ours = kind.module in ("torch", "torch.storage")
    dtype = _STORAGES.get(kind.name) if ours else None
    if ours and dtype is None and kind.name.endswith("Storage"):
        raise SourceError("tensor.unsupported", f"storages of type {printable(kind.dotted)} are not supported")
    good_key = type(key) is str and _KEY.fullmatch(key) is not None
    good_location = type(location) is str and len(location) <= 64
    good_numel = type(numel) is int and 0 <= numel < MAX_ELEMS
    if dtype is None or not (good_key and good_location and good_numel):
        raise SourceError(
            "pickle.bad_persistent_id",
            f"storage of {printable(kind.dotted)} with key {printable(key)}, location {printable(location)}, "
            f"{printable(str(numel), max_chars=40)} elements",
        )
    offset, length = 0, numel
    if view and view[0] is not None:
        # Legacy streams only: (view key, first element, elements); torch 2.13 `_legacy_load.persistent_load`.
        parts = view[0].items if isinstance(view[0], PTuple) else ()
        if len(parts) != 3 or type(parts[1]) is not int or type(parts[2]) is not int:
            raise SourceError("pickle.bad_persistent_id", "a storage view that is not (key, offset, size)")
        offset, length = parts[1], parts[2]
        if offset < 0 or length < 0 or offset + length > numel:
            raise SourceError("tensor.bad_extent", f"a view of {length} elements at {offset} in a storage of {numel}")
    return PStorage(dtype, key, location, length, kind.name == "UntypedStorage", offset, numel)


def _tensor(storage: Node, rest: tuple[Node, ...], dtype: str | None, limits: PickleLimits) -> PTensor:
    if not isinstance(storage, PStorage):
        raise _confused("a tensor over something that is not a storage")
    offset = _count(rest[0], "a tensor's offset")
    shape = _counts(rest[1], "a tensor's size", limits)
    stride = _counts(rest[2], "a tensor's stride", limits)
    if len(shape) != len(stride):
        raise _confused(f"a tensor with {len(shape)} sizes and {len(stride)} strides")
    name = dtype or storage.dtype
    if storage.untyped and dtype is None:
        raise _confused("a tensor over an untyped storage without a dtype")
    numel, last = 1, offset
    for length, step in zip(shape, stride, strict=True):
        numel *= length
        last += (length - 1) * step
    if numel >= MAX_ELEMS or (numel and last >= MAX_ELEMS):
        raise SourceError("tensor.bad_extent", "a tensor with more elements than 2**62")
    room = storage.numel * BY_NAME[storage.dtype].itemsize_bytes // BY_NAME[name].itemsize_bytes
    if numel and last + 1 > room:
        raise SourceError(
            "tensor.bad_extent",
            f"a tensor reaches element {last} of a storage that holds {room} ({printable(storage.key)})",
        )
    if 0 in stride and numel > max(1, room) * 4:
        raise SourceError("tensor.amplification", f"a tensor of {numel} elements repeats a storage of {room} elements")
    requires_grad = bool(rest[3]) if len(rest) > 3 and isinstance(rest[3], bool) else False
    return PTensor(storage, name, offset, shape, stride, requires_grad)


def apply(func: Node, args: PTuple, limits: PickleLimits) -> Node:
    """The node for a call of an allow-listed name; an inert object for names without a special meaning.

    Raises:
        SourceError: `pickle.type_confusion` for arguments of the wrong number or kind,
            `tensor.bad_extent` for tensors that reach outside their storage.
    """
    name = func.dotted
    items = args.items
    if (tensor := _rebuilt(name, items, limits)) is not None:
        return tensor
    if name == "torch._utils._rebuild_parameter":
        if len(items) != 3 or not isinstance(items[0], PTensor) or not isinstance(items[1], bool):
            raise _confused(f"{name} with unexpected arguments")
        inner = items[0]
        return PTensor(inner.storage, inner.dtype, inner.offset, inner.shape, inner.stride, items[1], parameter=True)
    if name == FROM_TYPE:
        return _from_type(func, args, limits)
    if name in ("builtins.set", "__builtin__.set", "builtins.frozenset", "__builtin__.frozenset"):
        return _set(items, frozen=name.endswith("frozenset"))
    calls.check_call(func, args)
    return stdlib.normal_form(func, args) or PObject("reduce", func, args, depth=args.depth + 1)


def _rebuilt(name: str, items: tuple[Node, ...], limits: PickleLimits) -> PTensor | None:
    """The tensor that a rebuild function of torch makes; None for any other function."""
    if name in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor"):
        low, high = (4, 4) if name.endswith("tensor") else (6, 7)
        if not low <= len(items) <= high:
            raise _confused(f"{name} with {len(items)} arguments")
        return _tensor(items[0], items[1:], None, limits)
    if name == "torch._utils._rebuild_tensor_v3":
        if len(items) not in (7, 8) or not isinstance(items[6], Global) or items[6].module != "torch":
            raise _confused(f"{name} with {len(items)} arguments")
        if items[6].name not in BY_NAME:
            raise SourceError("tensor.unsupported", f"element type {printable(items[6].name)}")
        return _tensor(items[0], items[1:], items[6].name, limits)
    return None


def _from_type(call: Global, args: PTuple, limits: PickleLimits) -> PTensor | PObject:
    items = args.items
    if len(items) != 4 or not isinstance(items[0], Global) or not isinstance(items[2], PTuple):
        raise _confused("_rebuild_from_type_v2 with unexpected arguments")
    func, kind = items[0], items[1]
    if not isinstance(kind, Global) or kind.dotted not in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        found = PObject("reduce", call, args, depth=args.depth + 1)
        if isinstance(kind, Global) and made_of_tensors(found) is not None:
            check_state(found, items[3])
            return found
        raise SourceError("pickle.forbidden_call", "_rebuild_from_type_v2 of a type that is not a torch tensor")
    tensor = _rebuilt(func.dotted, items[2].items, limits)
    if tensor is None:
        raise SourceError("pickle.forbidden_call", f"_rebuild_from_type_v2 of {printable(func.dotted)}")
    return replace(tensor, attributes=_texts(items[3]))


def made_of_tensors(node: Node) -> MadeOfTensors | None:
    """The class, element type and shape of a tensor that is made of others, as quantized ones are; None for all else.

    Source: torch 2.13.0 `_tensor.py` (`_reduce_ex_internal`: a class with `__torch_dispatch__`), `_utils.py`
    (`_rebuild_wrapper_subclass`); torchao 0.18.0 `optim/subclass_8bit.py`; verified by running.
    """
    if not isinstance(node, PObject) or not isinstance(node.cls, Global) or node.cls.dotted != FROM_TYPE:
        return None
    func, kind, inner, state = node.args.items if len(node.args.items) == 4 else (None,) * 4
    if not isinstance(func, Global) or func.dotted != "torch._utils._rebuild_wrapper_subclass":
        return None
    same, dtype, size = inner.items[:3] if isinstance(inner, PTuple) and len(inner.items) > 2 else (None,) * 3
    if not isinstance(dtype, Global) or dtype.module != "torch" or dtype.name not in BY_NAME:
        return None
    if not isinstance(kind, Global) or same != kind or not isinstance(state, PDict):
        return None
    return MadeOfTensors(kind, dtype.name, _counts(size, "a tensor's size", DEFAULT_LIMITS))


def _texts(state: Node) -> tuple[tuple[str, str], ...]:
    """The short texts among the first attributes of a tensor, such as the name of a tensor that it is a part of."""
    # Only the first attributes: a state may be long, and many tensors may share it.
    pairs = state.pairs[: 2 * _ATTRIBUTES] if isinstance(state, PDict) else []
    entries = zip(pairs[::2], pairs[1::2], strict=True)
    return tuple((k, v) for k, v in entries if type(k) is str and type(v) is str and len(v) <= _ATTRIBUTE_CHARS)


def _set(items: tuple[Node, ...], *, frozen: bool) -> PSet:
    if not items:
        return PSet(frozen=frozen)
    if len(items) != 1 or not isinstance(items[0], PList | PTuple):
        raise _confused("a set from something that is not a list")
    return PSet(list(items[0].items), frozen=frozen, depth=items[0].depth + 1)


def check_state(target: PObject, state: Any) -> int:
    """Refuse state that no class on the allow-list writes; returns the number of steps of the check.

    Raises:
        SourceError: `pickle.forbidden_build` for state on an OrderedDict that is not plain attributes,
            or for names with two leading underscores; `pickle.type_confusion` as `arrays.check_state`.
    """
    steps = 1
    dicts = [state] if isinstance(state, PDict) else list(state.items) if isinstance(state, PTuple) else []
    for part in dicts:
        if not isinstance(part, PDict):
            continue
        steps += len(part.pairs)
        for key in part.pairs[::2]:
            if type(key) is str and key.startswith("__"):
                raise SourceError("pickle.forbidden_build", f"state that sets {printable(key)}")
    if isinstance(target.cls, Global):
        if target.cls.dotted == "collections.OrderedDict" and not isinstance(state, PDict):
            raise SourceError("pickle.forbidden_build", "state of an OrderedDict that is not a dict")
        arrays.check_state(target.cls, state)
    return steps
