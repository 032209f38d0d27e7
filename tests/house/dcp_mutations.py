"""Spoils the pickles of `.metadata` files opcode by opcode, so that most of what comes out still parses in part."""

from __future__ import annotations

import pickletools
import struct
from itertools import pairwise
from random import Random

import numpy as np

from reshard.errors import ReshardError
from reshard_engine.formats.dcp_files.metadata.parse import Parts, parts_of_nodes, parts_with_runs
from reshard_engine.pickles.nodes import PickleLimits

ROOM = PickleLimits(stream_bytes=1 << 30, opcodes=20_000_000, node_bytes=8 << 30)
_ODD = (
    b"K\x05", b"J\xff\xff\xff\xff", b"\x8a\x01\x05", b"\x8a\x09" + bytes(9), b"\x8a\x08" + b"\xff" * 8, b"\x88", b"N",
    b"u(", b"e(", b"(", b"u", b"b", b"}\x94b", b"\x94", b")", b"\x85", b"R", b"\x81", b"\x8c\x01x\x94", b"G" + bytes(8),
)  # fmt: skip


def opcodes(data: bytes) -> list[bytes]:
    """The opcodes of a pickle with their arguments, but for frames."""
    starts = [at for _, _, at in pickletools.genops(data)] + [len(data)]
    found = [data[start:end] for start, end in pairwise(starts)]
    return [opcode for opcode in found if opcode[:1] != b"\x95"]


def mutated(data: bytes, random: Random) -> bytes:
    """A pickle with up to three changes, in frames of another size, or in none."""
    found = opcodes(data)
    for _ in range(random.randint(0, 3)):
        _change(found, random)
    return framed(found, random)


def framed(found: list[bytes], random: Random) -> bytes:
    """The opcodes in frames of random lengths, in a single one, or in none; now and then a frame ends in an opcode."""
    head, body = found[0], b"".join(found[1:])
    pieces: list[bytes] = []
    match random.randrange(8):
        case 0 | 1:
            return head + body
        case 2:
            return head + _frame(body)
        case 3:
            at = 0
            while at < len(body):
                pieces.append(body[at : at + random.randint(20, 3_000)])
                at += len(pieces[-1])
        case _:
            at = 1
            while at < len(found):
                count = random.randint(1, 300)
                pieces.append(b"".join(found[at : at + count]))
                at += count
    return head + b"".join(map(_frame, pieces))


def _frame(body: bytes) -> bytes:
    return b"\x95" + struct.pack("<Q", len(body)) + body


def _change(found: list[bytes], random: Random) -> None:
    at, other, count = random.randrange(1, len(found)), random.randrange(1, len(found)), random.randint(1, 30)
    match random.randrange(9):
        case 0:
            found[at] = found[other]
        case 1:
            found[at:at] = found[other : other + count]
        case 2:
            del found[at : at + random.randint(1, 4)]
        case 3:
            spoilt = bytearray(found[at])
            spoilt[random.randrange(len(spoilt))] = random.randrange(256)
            found[at] = bytes(spoilt)
        case 4:
            found[at:at] = [b"h" + bytes([random.randrange(256)])]
        case 5:
            found[at:at] = [b"j" + struct.pack("<I", random.randrange(2_000))]
        case 6:
            found[at : at + 1] = [random.choice(_ODD)]
        case 7:
            found[at], found[other] = found[other], found[at]
        case _:
            found[at:at] = [b"}", b"\x94", b"(", *found[other : other + 2], b"u", b"b"]


def agree(data: bytes, limits: PickleLimits = ROOM) -> bool:
    """Compare both readers of a `.metadata`; true if the one that reads runs read it.

    What the one that reads runs takes, the other one takes with equal values. What the first one refuses, the second
    one decides.
    """
    try:
        fast = parts_with_runs(data, ".metadata", limits)
    except ReshardError:
        return False
    assert_equal(fast, parts_of_nodes(data, ".metadata", limits))
    return True


def assert_equal(one: Parts, other: Parts) -> None:
    """Fail unless two readings are equal."""
    assert (one.keys, one.paths, one.original_shapes) == (other.keys, other.paths, other.original_shapes)
    for mine, theirs in zip(one.tensors, other.tensors, strict=True):
        assert (mine.number, mine.key, mine.shape) == (theirs.number, theirs.key, theirs.shape)
        assert (mine.dtype, mine.requires_grad) == (theirs.dtype, theirs.requires_grad)
        for column in ("offsets", "sizes"):
            _assert_same(getattr(mine, column), getattr(theirs, column), f"{column} of {mine.key!r}")
    for column in ("number", "dims", "offsets", "file", "offset", "length", "transform"):
        _assert_same(getattr(one.places, column), getattr(other.places, column), column)
    assert one.places.files == other.places.files
    assert one.places.transforms == other.places.transforms


def _assert_same(one: object, other: object, what: str) -> None:
    mine, theirs = np.asarray(one), np.asarray(other)
    assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), what
    assert np.array_equal(mine, theirs), what
