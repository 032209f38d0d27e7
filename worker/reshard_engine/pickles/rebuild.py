"""Checks allow-listed calls and turns them into nodes: tensors, storages, arrays and plain values.

Source: torch 2.13.0 `torch/_utils.py` (`_rebuild_tensor_v2`, `_rebuild_parameter`),
`torch/_tensor.py` (`_rebuild_from_type_v2`), `torch/serialization.py` (persistent ids).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from reshard.errors import SourceError, counted, listed, printable
from reshard_engine.pickles import policy
from reshard_engine.pickles.nodes import (
    DEFAULT_LIMITS,
    FROM_TYPE,
    Global,
    Node,
    PBytearray,
    PDict,
    PickleLimits,
    PList,
    PObject,
    PSet,
    PStorage,
    PTensor,
    PTuple,
)
from reshard_engine.tensors.dtypes import BY_NAME, BY_STORAGE_CLASS

# Checks numpy arrays, scalars and dtypes in pickles: only numbers and texts pass, with sizes that match their data.
#
# They are never built here, but a program that unpickles our output does. An object dtype makes numpy unpickle its
# contents, and the state of a dtype sets sizes that numpy trusts.
#
# Source: numpy 2.4 `ndarray.__reduce__`, `dtype.__reduce__` (`_core/src/multiarray/methods.c`, `descriptor.c`), the
# same since 1.0 but for the module's name.

_DTYPE = re.compile(r"[<>|=]?(?P<kind>[biufcSUVMm])(?P<size>[0-9]{1,5})")
_MAX_ITEMSIZE_BYTES = 4 * 99_999  # five digits of UCS-4 characters
_MAX_ALIGNMENT_BYTES = 64


def is_dtype_call(items: tuple[Node, ...]) -> bool:
    """True if these are arguments of `numpy.dtype` for a dtype without objects and without structure."""
    return 1 <= len(items) <= 3 and isinstance(items[0], str) and _DTYPE.fullmatch(items[0]) is not None


def is_empty_array_call(items: tuple[Node, ...]) -> bool:
    """True if these are arguments of `_reconstruct`: numpy makes an empty array and sets its content as state."""
    if len(items) != 3 or not isinstance(items[0], Global) or items[0].dotted != "numpy.ndarray":
        return False
    return isinstance(items[1], PTuple) and items[1].items == (0,)


def is_scalar_call(items: tuple[Node, ...]) -> bool:
    """True if these are arguments of `multiarray.scalar`."""
    return len(items) == 2 and _is_dtype(items[0]) and _is_data(items[1])


def is_buffer_call(items: tuple[Node, ...]) -> bool:
    """True if these are arguments of `_frombuffer`."""
    return len(items) == 4 and _is_data(items[0]) and _is_dtype(items[1])


def check_array_state(cls: Global, state: Node) -> None:
    """Refuse state of an array or a dtype that numpy does not write.

    Raises:
        SourceError: `pickle.type_confusion`.
    """
    if cls.dotted == "numpy.dtype" and not _is_dtype_state(state):
        raise SourceError("pickle.type_confusion", "a numpy dtype with state that numpy does not write")
    if cls.name == "_reconstruct" and not _is_array_state(state):
        raise SourceError("pickle.type_confusion", "a numpy array whose shape, type and data do not fit together")


def _is_data(node: Node) -> bool:
    if isinstance(node, PObject) and isinstance(node.cls, Global):
        # The forms of bytes in protocol 2, and the bytes of an array without elements.
        empty = node.cls.dotted in ("__builtin__.bytes", "builtins.bytes") and not node.args.items
        return empty or node.cls.dotted == "_codecs.encode"
    return isinstance(node, bytes | str | PBytearray)


def _is_dtype(node: Node) -> bool:
    return isinstance(node, PObject) and isinstance(node.cls, Global) and node.cls.dotted == "numpy.dtype"


def _is_dtype_state(state: Node) -> bool:
    items: tuple[Node, ...] = state.items if isinstance(state, PTuple) else ()
    if not 8 <= len(items) <= 9 or type(items[0]) is not int or items[1] not in ("<", ">", "|", "="):
        return False
    sizes = [type(v) is int and v >= -1 for v in items[5:8]]
    plain = all(v is None for v in items[2:5])
    return plain and all(sizes) and items[5] <= _MAX_ITEMSIZE_BYTES and items[6] <= _MAX_ALIGNMENT_BYTES


def _is_array_state(state: Node) -> bool:
    items: tuple[Node, ...] = state.items if isinstance(state, PTuple) else ()
    if len(items) != 5 or not isinstance(items[1], PTuple) or not _is_dtype(items[2]) or not _is_data(items[4]):
        return False
    shape = items[1].items
    if len(shape) > 64 or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
        return False
    return prod(shape) * _itemsize_bytes(items[2]) == _data_bytes(items[4])


def _itemsize_bytes(dtype: PObject) -> int:
    found = _DTYPE.fullmatch(dtype.args.items[0])
    size = int(found["size"]) if found else 0
    return 4 * size if found and found["kind"] == "U" else size


def _data_bytes(node: Node) -> int:
    if isinstance(node, PObject):
        node = (
            node.args.items[0] if node.args.items else b""
        )  # text of one character per byte, for `_codecs.encode(_, "latin1")`
    return len(node.data if isinstance(node, PBytearray) else node)


# Checks the arguments of allow-listed calls: only arguments that known writers give pass.
#
# A program that unpickles our output calls the names on the allow-list, so their arguments are checked here:
# `bytearray(2_000_000_000)` builds two gigabytes from nine bytes.
#
# Source: CPython 3.11 `Lib/pickle.py` (bytes before protocol 3), torch 2.13.0 `torch/_utils.py`.

_ENCODINGS = ("latin1", "latin-1", "ascii", "utf-8")
_LAYOUT = re.compile(r"torch\.[a-z_]{1,32}")


def _bytes_like(items: tuple[Node, ...]) -> bool:
    if not items:
        return True
    first = items[0]
    encoded = isinstance(first, PObject) and isinstance(first.cls, Global) and first.cls.dotted == "_codecs.encode"
    text = len(items) == 2 and isinstance(first, str) and items[1] in _ENCODINGS
    return text or (len(items) == 1 and (encoded or isinstance(first, bytes | PBytearray | PList)))


def _encode(items: tuple[Node, ...]) -> bool:
    return len(items) == 2 and isinstance(items[0], str) and isinstance(items[1], str) and items[1] in _ENCODINGS


def _never(_items: tuple[Node, ...]) -> bool:
    return False


def _numbers(items: tuple[Node, ...]) -> bool:
    return len(items) <= 3 and all(type(i) in (int, float) for i in items)


def _one_sequence(items: tuple[Node, ...]) -> bool:
    return not items or (len(items) == 1 and isinstance(items[0], PTuple | PList))


def _layout(items: tuple[Node, ...]) -> bool:
    return len(items) == 1 and isinstance(items[0], str) and _LAYOUT.fullmatch(items[0]) is not None


_CHECKS: dict[str, Callable[[tuple[Node, ...]], bool]] = {
    "_codecs.encode": _encode,
    "numpy.ndarray": _never,
    "numpy.dtype": is_dtype_call,
    "torch.Size": _one_sequence,
    "torch._utils._rebuild_wrapper_subclass": _never,  # an argument of `_rebuild_from_type_v2` alone
    "torch.serialization._get_layout": _layout,
    "datetime.timedelta": _numbers,
    **policy.CHECKS,
    **{f"{b}.{n}": _bytes_like for b in ("builtins", "__builtin__") for n in ("bytes", "bytearray")},
    **{f"{b}.complex": _numbers for b in ("builtins", "__builtin__")},
    **{f"numpy.{c}.multiarray._reconstruct": is_empty_array_call for c in ("core", "_core")},
    **{f"numpy.{c}.multiarray.scalar": is_scalar_call for c in ("core", "_core")},
    **{f"numpy.{c}.numeric._frombuffer": is_buffer_call for c in ("core", "_core")},
}
_OBJECTS = ("O", "O8", "O4", "|O")
"""The dtype object. Source: numpy 2.4 `dtype.__reduce__` (`O` and the size of a pointer); verified by running."""
_NO_INSTANCES = frozenset(_CHECKS) - {"collections.OrderedDict"}
"""Functions, and classes that no writer instantiates by NEWOBJ."""


def check_call(func: Global, args: PTuple) -> None:
    """Refuse a call of a listed name with arguments that its writers never give.

    Raises:
        SourceError: `pickle.forbidden_call`.
    """
    check = _CHECKS.get(func.dotted)
    if check is not None and not check(args.items):
        if func.dotted == "numpy.dtype" and args.items[:1] and args.items[0] in _OBJECTS:
            raise SourceError(
                "pickle.forbidden_call",
                "a numpy array has the dtype object: its elements are Python objects, and nothing of it was executed",
                fix="store a list or an array of numbers where the run saves it, and save again",
            )
        raise SourceError("pickle.forbidden_call", f"{printable(func.dotted)} with arguments that no writer gives")


def check_instance(cls: Global, args: PTuple) -> None:
    """Refuse to instantiate a listed name that is only ever called, or an OrderedDict with entries as arguments.

    Raises:
        SourceError: `pickle.forbidden_build`.
    """
    if cls.dotted in _NO_INSTANCES or (cls.dotted in _CHECKS and args.items):
        raise SourceError(
            "pickle.forbidden_build", f"an instance of {printable(cls.dotted)}, which is only ever called"
        )


# Turns allow-listed calls and persistent ids into nodes.

MAX_ELEMS = 1 << 62
_ATTRIBUTES, _ATTRIBUTE_CHARS = 8, 64
_OF_META = "torch._utils._rebuild_meta_tensor_no_storage"
_EXPANDED_ELEMS = 1 << 20
"""So many elements may repeat one element: buffers that `expand` made. A checkpoint bounds their sum."""
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
    if 0 in stride and numel > max(_EXPANDED_ELEMS, room * 4):
        raise SourceError(
            "tensor.amplification",
            f"a tensor of {numel} elements repeats a storage of {room} elements: `expand` made it",
            fix="where the run saved it, save the buffer whole: buffer.contiguous()",
        )
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
    check_call(func, args)
    return policy.normal_form(func, args) or PObject("reduce", func, args, depth=args.depth + 1)


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


def refuse_meta(entries: Mapping[Any, Node], what: str) -> None:
    """Refuse a state dict with tensors of the device `meta`, which have no values.

    Source: torch 2.13.0 `_tensor.py` (`_reduce_ex_internal`: such a tensor is saved without a storage).

    Raises:
        SourceError: `checkpoint.incomplete`.
    """
    ghosts = [
        name
        for name, node in entries.items()
        if isinstance(node, PObject) and isinstance(node.cls, Global) and node.cls.dotted == _OF_META
    ]
    if ghosts:
        raise SourceError(
            "checkpoint.incomplete",
            f"{what}: {len(ghosts)} of {counted(len(entries), 'tensor')} are on the device `meta`, so no values were "
            f"saved: {listed([printable(str(name)) for name in ghosts])}",
            fix="give the model its weights before it is saved, and save it again",
        )


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
    # The attributes of the class; or they and its slots (DTensor); or a tuple of its own (ShardedTensor).
    if not isinstance(kind, Global) or same != kind or not isinstance(state, PDict | PTuple):
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
            or for names with two leading underscores; `pickle.type_confusion` as `check_array_state`.
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
        check_array_state(target.cls, state)
    return steps


# Attributes of named classes, which pickles write as calls of `getattr`: members of enums, and nested classes.
#
# `getattr` is read as data: nothing is imported, and no attribute is looked up. Every other writer spells a member
# of an enum by its value, `ZeroStageEnum(3)`; so does the node of a member that the table below knows, because every
# Python reads that form. A class within a class gets the dotted name that protocol 4 gives it.
#
# Source: CPython 3.11.2 `Lib/enum.py` (`Enum.__reduce_ex__`, so in 3.11.0 to 3.11.3; by value before and after),
# CPython 3.8 to 3.13 `Lib/pickle.py` (`save_global` of nested names before protocol 4).

GETATTR = frozenset({"__builtin__.getattr", "builtins.getattr"})

_Members = dict[str, int | str]
_LAYERS: _Members = {"encoder": 1, "decoder": 2}
_RETRO_LAYERS: _Members = {"retro_encoder": 3, "retro_decoder": 4, "retro_decoder_with_retriever": 5}
_ATTENTION: _Members = {"self_attn": 1, "cross_attn": 2}
_MASKS: _Members = {"padding": 1, "causal": 2}
_MODELS: _Members = {"encoder_or_decoder": 1, "encoder_and_decoder": 2}
_GRAPHS: _Members = {"attn": 2, "mlp": 3, "moe": 4, "moe_router": 5, "moe_preprocess": 6, "mamba": 7}
_MODULES: _Members = {"attn": 1, "mlp": 2, "moe": 3, "moe_router": 4, "moe_preprocess": 5, "mamba": 6}

MEMBERS: dict[str, _Members] = {
    # DeepSpeed 0.19.8 `runtime/zero/config.py`; the same since 0.6.
    "deepspeed.runtime.zero.config.ZeroStageEnum": {
        "disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3,
    },
    # Megatron-LM and Megatron-DeepSpeed of 2021 and 2022 (BigScience's too), `megatron/enums.py`.
    "megatron.enums.LayerType": _LAYERS,
    "megatron.enums.AttnType": _ATTENTION,
    "megatron.enums.AttnMaskType": {**_MASKS, "prefix": 3, "custom": 4},
    "megatron.enums.PositionEmbeddingType": {"rotary": 1, "absolute": 2, "alibi": 3, "xpos": 4},
    "megatron.enums.UL2ModelType": {"ENCODER_DECODER": "ED", "NON_CAUSAL_DECODER": "ND", "CAUSAL_DECODER": "CD"},
    # Megatron-DeepSpeed of July 2025 and Megatron-LM to 2023, `megatron/model/enums.py`.
    # Its forks number `PositionEmbeddingType` in two ways: a name alone does not say its value.
    "megatron.model.enums.ModelType": _MODELS,
    "megatron.model.enums.LayerType": {**_LAYERS, **_RETRO_LAYERS},
    "megatron.model.enums.AttnType": _ATTENTION,
    "megatron.model.enums.AttnMaskType": _MASKS,
    # Megatron-LM core 0.2 to 0.15, `megatron/core/enums.py` and `megatron/core/transformer/enums.py`.
    "megatron.core.enums.ModelType": {**_MODELS, "retro_encoder": 3, "retro_decoder": 4},
    "megatron.core.enums.Fp8Recipe": {
        name: name for name in ("delayed", "tensorwise", "mxfp8", "blockwise", "custom")
    },
    "megatron.core.enums.Fp4Recipe": {name: name for name in ("nvfp4", "custom")},
    "megatron.core.transformer.enums.ModelType": _MODELS,
    "megatron.core.transformer.enums.LayerType": {"embedding": 1, "loss": 2, "encoder": 3, "decoder": 4, "mtp": 5},
    "megatron.core.transformer.enums.AttnType": _ATTENTION,
    "megatron.core.transformer.enums.AttnMaskType": {
        **_MASKS, "no_mask": 3, "padding_causal": 4, "arbitrary": 5,
        "causal_bottom_right": 6, "padding_causal_bottom_right": 7,
    },
    "megatron.core.transformer.enums.AttnBackend": {
        "flash": 1, "fused": 2, "unfused": 3, "local": 4, "auto": 5, "flashmask": 6,
    },
    "megatron.core.transformer.enums.CudaGraphScope": {
        "full_iteration": 1, **_GRAPHS, "full_iteration_inference": 8,
    },
    "megatron.core.transformer.enums.CudaGraphModule": _MODULES,
    "megatron.core.transformer.enums.InferenceCudaGraphScope": {"none": 1, "layer": 2, "block": 3},
}  # fmt: skip
"""Values of the members of enums on the allow-list, by the names that `getattr` gives."""


def checked_arguments(args: PTuple) -> tuple[Node, str]:
    """Check the arguments of `getattr` and return the owner and the attribute's name.

    Raises:
        SourceError: `pickle.forbidden_call` for arguments that no pickler gives: a default, a name that is not
            an identifier, or one with two leading underscores.
    """
    owner, name = args.items if len(args.items) == 2 else (None, None)
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("__"):
        raise SourceError("pickle.forbidden_call", f"getattr with arguments that no writer gives: {printable(name)}")
    return owner, name


def member(owner: Global, name: str) -> PObject | None:
    """The member of a known enum, as a call with its value; None for any other attribute."""
    value = MEMBERS.get(owner.dotted, {}).get(name)
    return None if value is None else PObject("reduce", owner, PTuple((value,)), depth=2)


def is_mentioned(value: Node) -> bool:
    """True if `getattr` is itself a value somewhere in the tree, not only called."""
    left: list[Node] = [value]
    met: set[int] = set()
    while left:
        node = left.pop()
        if isinstance(node, Global) and node.dotted in GETATTR:
            return True
        if not isinstance(node, PList | PTuple | PSet | PDict | PObject) or id(node) in met:
            continue
        met.add(id(node))
        if isinstance(node, PDict):
            left += node.pairs
            continue
        left += node.items
        if isinstance(node, PObject):
            # Its class was refused or recorded when it was called.
            left += (node.args, node.kwargs, node.state, *node.appends)
    return False
