"""Checks numpy arrays, scalars and dtypes in pickles: only numbers and texts pass, with sizes that match their data.

This module never builds them, but a program that unpickles our output does. An object dtype makes numpy unpickle its
contents, and the state of a dtype sets sizes that numpy trusts.

Source: numpy 2.4 `ndarray.__reduce__`, `dtype.__reduce__` (`_core/src/multiarray/methods.c`, `descriptor.c`), the
same since 1.0 but for the module's name.
"""

from __future__ import annotations

import re
from math import prod

from reshard.errors import SourceError
from reshard_engine.pickles.nodes import Global, Node, PBytearray, PObject, PTuple

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


def check_state(cls: Global, state: Node) -> None:
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
