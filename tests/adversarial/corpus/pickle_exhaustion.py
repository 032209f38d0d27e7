"""Pickles that cost far more than their size: each runs under bounds of a million opcodes, and under the defaults."""

from __future__ import annotations

import struct

from adversarial.corpus import carriers, opcodes as op
from adversarial.corpus.entry import OK, Entry

_WORK, _DEEP, _MEMORY = "pickle.too_much_work", "pickle.too_deep", "pickle.too_much_memory"
_PRIME = (1 << 61) - 1
"""CPython's hash of an integer is its remainder."""


def _laughs(levels: int, width: int) -> bytes:
    code = b"](" + b"K\x01" * width + b"e" + op.put(100)
    for level in range(1, levels):
        code += b"](" + op.get(99 + level) * width + b"e" + op.put(100 + level)
    return b"(" + code + b"t"


def _chain(count: int) -> bytes:
    return b"(" + b"".join(b"]" + op.put(i) for i in range(count)) + b"l0" + b"".join(
        op.get(i) + op.get(i + 1) + b"a0" for i in range(count - 1)
    ) + op.get(0)  # fmt: skip


def _args(kind: str, count: int) -> bytes:
    """A call of a listed name with the same many arguments again and again."""
    arguments = b"(](" + b"K\x01" * count + b"et" + op.put(0) + b"0"
    return op.name(*kind.rsplit(".", 1)) + op.put(1) + b"0" + arguments + (op.get(1) + op.get(0) + b"R0") * count + b"N"


_BUILDS = op.name("argparse", "Namespace") + b")\x81" + op.push({"a": 1}) + op.put(0) + b"0"

ENTRIES = (
    Entry(46, "long-binput-2-28", OK, carriers.payload(b"Nr" + struct.pack("<I", 1 << 28)), scaled=True),
    Entry(46, "long-binput-2-32", OK, carriers.payload(b"Nr" + struct.pack("<I", (1 << 32) - 1)), scaled=True),
    Entry(47, "text-put-10-30", "pickle.bad_memo", carriers.payload(b"Np1" + b"0" * 30 + b"\n"), scaled=True),
    Entry(48, "ten-million-marks", _DEEP, carriers.payload(lambda: b"(" * 10_000_000), scaled=True),
    Entry(49, "list-nested-million", _WORK, carriers.payload(lambda: b"]" * 1_000_000 + b"a" * 999_999), scaled=True, by_default=_DEEP),
    Entry(49, "list-nested", _DEEP, carriers.payload(lambda: b"]" * 900_000 + b"a" * 899_999), scaled=True),
    Entry(49, "chain-nested-after", _DEEP, carriers.payload(lambda: _chain(900)), scaled=True, inspect=_DEEP),
    Entry(50, "tuple-key-million-deep", _DEEP, carriers.payload(lambda: b"}" + b")" + b"\x85" * 1_000_000 + b"Ns"), scaled=True),
    Entry(51, "billion-laughs", OK, carriers.payload(_laughs(30, 10)), scaled=True),
    Entry(51, "laughs-in-param-groups", "checkpoint.malformed", carriers.ranked(lambda state, _: state.update(base_optimizer_state={"state": {}, "param_groups": op.Code(_laughs(30, 10))})), scaled=True),
    Entry(52, "list-holds-itself", OK, carriers.payload(b"]" + op.put(0) + op.get(0) + b"a"), scaled=True, why="where nobody interprets it, a cycle is written out as the cycle that it is"),
    Entry(52, "dict-holds-itself", OK, carriers.payload(b"}" + op.put(0) + op.push("x") + op.get(0) + b"s"), scaled=True, why="as above"),
    Entry(52, "ordered-dict-holds-itself", OK, carriers.payload(op.ordered({}) + op.put(0) + op.push("x") + op.get(0) + b"s"), scaled=True, why="as above"),
    Entry(52, "set-holds-itself", _DEEP, carriers.payload(b"\x8f" + op.put(0) + b"(" + op.get(0) + b"\x90"), scaled=True, inspect=_DEEP, why="no writer can make one: every walk over it would be endless"),
    Entry(52, "param-shapes-hold-themselves", "checkpoint.malformed", carriers.entry("param_shapes", op.Code(b"]" + op.put(0) + op.get(0) + b"a")), scaled=True, why="what is interpreted has a known kind at every level"),
    Entry(52, "module-holds-itself", _DEEP, carriers.entry("module", op.Code(op.ordered({}) + op.put(0) + op.push("x") + op.get(0) + b"s")), scaled=True, why="nested state dicts are read to a depth"),
    Entry(53, "hash-flood", OK, carriers.payload(lambda: b"}(" + b"".join(op.push(k * _PRIME) + b"N" for k in range(1, 100_001)) + b"u"), scaled=True),
    Entry(53, "hash-flood-interpreted", "checkpoint.malformed", carriers.pickled(lambda: b"\x80\x02}(" + b"".join(op.push(k * _PRIME) + b"N" for k in range(1, 100_001)) + b"u."), scaled=True, why="such integers are not keys of ours, and are never hashed"),
    Entry(54, "binunicode8-2-63", "pickle.truncated", carriers.payload(b"\x8d" + struct.pack("<Q", 1 << 63)), scaled=True),
    Entry(54, "binbytes8-2-63", "pickle.truncated", carriers.payload(b"\x8e" + struct.pack("<Q", 1 << 63)), scaled=True),
    Entry(54, "bytearray8-2-63", "pickle.truncated", carriers.payload(b"\x96" + struct.pack("<Q", 1 << 63)), scaled=True),
    Entry(54, "text-of-65-mib", "pickle.too_large", carriers.payload(lambda: b"X" + struct.pack("<I", 65 << 20) + b"a" * (65 << 20)), scaled=True),
    Entry(55, "million-long1", _MEMORY, carriers.payload(lambda: b"](" + (b"\x8a\x64" + b"\x7f" * 100) * 850_000 + b"e"), scaled=True, by_default=OK),
    Entry(56, "ten-million-none-pop", _WORK, carriers.payload(lambda: b"N0" * 10_000_000 + b"N"), scaled=True, by_default=OK),
    Entry(57, "million-builds", _WORK, carriers.payload(lambda: _BUILDS + (op.get(0) + b"b") * 1_000_000), scaled=True, by_default=OK),
    Entry(57, "builds-of-large-state", _WORK, carriers.payload(lambda: op.name("argparse", "Namespace") + b")\x81" + b"}(" + b"K\x01K\x01" * 20_000 + b"u" + op.put(0) + b"0" + (op.get(0) + b"b") * 20_000), scaled=True),
    Entry(58, "sets-copied-again-and-again", _WORK, carriers.payload(lambda: _args("builtins.set", 20_000)), scaled=True),
    Entry(58, "dup-million", _WORK, carriers.payload(lambda: b"N" + b"2" * 1_000_000 + b"0" * 1_000_000), scaled=True, by_default=OK),
    Entry(59, "million-globals", _WORK, carriers.payload(lambda: b"".join(b"cm\nn%d\n0" % i for i in range(1_000_000)) + b"N"), scaled=True),
    Entry(60, "line-of-100-mb", "pickle.truncated", carriers.payload(lambda: b"c" + b"a" * 100_000_000), scaled=True),
    Entry(60, "stream-of-129-mib", "zip.bomb", carriers.pickled(lambda: b"\x80\x02" + b"N0" * (129 << 19)), scaled=True, by_default=_WORK, why="the record is refused by its size before it is read"),
)  # fmt: skip
