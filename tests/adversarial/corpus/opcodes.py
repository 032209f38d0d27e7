"""A pickle assembler: Python values to opcodes, with any opcode spliced in. Nothing here uses `pickle`."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any


class Code(bytes):
    """Opcodes that push one value, taken as they are."""


def push(value: Any) -> Code:
    """The opcodes (protocol 2 and the byte opcodes of 3) that push a value."""
    match value:
        case Code():
            return value
        case None | bool():
            return Code({None: b"N", True: b"\x88", False: b"\x89"}[value])
        case int():
            return _integer(value)
        case float():
            return Code(b"G" + struct.pack(">d", value))
        case str():
            raw = value.encode("utf-8", "surrogatepass")
            return Code(b"X" + struct.pack("<I", len(raw)) + raw)
        case bytes():
            return Code(b"B" + struct.pack("<I", len(value)) + value)
        case tuple():
            return Code(b"(" + joined(value) + b"t")
        case list():
            return Code(b"](" + joined(value) + b"e")
        case dict():
            return Code(b"}(" + b"".join(push(k) + push(v) for k, v in value.items()) + b"u")
        case _:
            raise TypeError(type(value))


@lru_cache(maxsize=1024)  # some entries hold a million
def _integer(value: int) -> Code:
    if 0 <= value < 256:
        return Code(b"K" + bytes([value]))
    if -(1 << 31) <= value < 1 << 31:
        return Code(b"J" + struct.pack("<i", value))
    raw = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return Code(b"\x8a" + bytes([len(raw)]) + raw)


def joined(values: Sequence[Any]) -> bytes:
    """The opcodes that push these values one after another."""
    return b"".join(map(push, values))


def name(module: str, qualified: str) -> Code:
    """GLOBAL."""
    return Code(b"c" + module.encode() + b"\n" + qualified.encode() + b"\n")


def call(func: Code, *args: Any) -> Code:
    """REDUCE."""
    return Code(func + push(tuple(args)) + b"R")


def ordered(items: Mapping[str, Any]) -> Code:
    """An OrderedDict, as torch pickles it."""
    pairs = b"".join(push(k) + push(v) for k, v in items.items())
    return Code(call(name("collections", "OrderedDict")) + b"(" + pairs + b"u")


def size(*lengths: int) -> Code:
    """A torch.Size."""
    return call(name("torch", "Size"), lengths)


def storage(kind: str, key: Any, numel: Any, *, location: Any = "cpu", module: str = "torch") -> Code:
    """BINPERSID of a storage."""
    return Code(push(("storage", name(module, kind), key, location, numel)) + b"Q")


def tensor(
    store: Code, shape: Sequence[int], *, offset: Any = 0, stride: Sequence[int] | None = None, func: str = ""
) -> Code:
    """`torch._utils._rebuild_tensor_v2` over a storage; packed unless strides are given."""
    steps: list[int] = []
    step = 1
    for length in reversed(shape):
        steps.append(step)
        step *= max(length, 1)
    args = (store, offset, tuple(shape), tuple(reversed(steps) if stride is None else stride), False, ordered({}))
    return call(name("torch._utils", func or "_rebuild_tensor_v2"), *args)


def stream(value: Any, *, proto: int = 2) -> bytes:
    """A whole pickle."""
    return b"\x80" + bytes([proto]) + push(value) + b"."


def get(index: int) -> bytes:
    """BINGET or LONG_BINGET."""
    return b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)


def put(index: int) -> bytes:
    """BINPUT or LONG_BINPUT."""
    return b"q" + bytes([index]) if index < 256 else b"r" + struct.pack("<I", index)
