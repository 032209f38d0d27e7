"""The format of packs of reads: byte ranges of pinned objects, compressed, for other processes that need the same ones.

A pack consists of parts of bounded size. Each part stands for itself, so parts that are lost, torn, old or foreign only
make reads miss. A part is a magic, the length and the XXH3-128 of its body, and the body as a zlib stream. In the body,
ranges with equal bytes share one blob: the files of many ranks hold the same pickle. A range belongs to a key, which
names the object and its version.

Whoever reads a part trusts nothing in it: every count and length is compared with the body before it is used.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import xxhash
from isal import isal_zlib

from reshard_engine.storage.protocol import ObjectInfo

Ranges = Mapping[bytes, Sequence[tuple[int, bytes]]]
"""(offset, bytes) of the ranges of each key."""

PART_BYTES = 8 << 20
"""A part is full when its body has this many bytes."""
BLOB_BYTES = 4 << 20
"""Longer ranges are cut into pieces of this size."""
MAX_BODY_BYTES = 24 << 20
"""Largest body of a part: a full one, and the ranges that filled it."""
MAX_PACK_BYTES = 256 << 20
"""Largest sum of the bodies of a pack, which is what a reader of the pack holds in memory."""
MAX_KEY_BYTES = (1 << 16) - 1

_MAGIC = b"reshard reads 1\n"
_HEAD = struct.Struct("<I16s")
_COUNT = struct.Struct("<I")
_KEY = struct.Struct("<HI")
_RANGE = struct.Struct("<QI")


def key_of(place: str, info: ObjectInfo) -> bytes | None:
    """The key of a version of an object; None if the store tells no version, or if the key would be too long.

    Args:
        place: A text that tells apart stores in which one path names different objects.
        info: The object as the caller's own listing shows it.
    """
    if not info.pin or info.pin.endswith(":"):
        return None
    key = "\0".join((place, info.path, info.pin, str(info.size_bytes))).encode("utf-8", "surrogatepass")
    return key if len(key) <= MAX_KEY_BYTES else None


def to_part(ranges: Ranges) -> bytes:
    """A part with these ranges."""
    numbers: dict[bytes, int] = {}
    entries = bytearray(_COUNT.pack(len(ranges)))
    for key, found in ranges.items():
        entries += _KEY.pack(len(key), len(found)) + key
        for offset, data in found:
            entries += _RANGE.pack(offset, numbers.setdefault(data, len(numbers)))
    lengths = b"".join(_COUNT.pack(len(data)) for data in numbers)
    body = b"".join((_COUNT.pack(len(numbers)), lengths, entries, *numbers))
    head = _HEAD.pack(len(body), xxhash.xxh3_128_digest(body))
    packed: bytes = isal_zlib.compress(body, 1)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return b"".join((_MAGIC, head, packed))


def body_bytes(part: bytes) -> int:
    """Bytes of memory that `from_part` of this part takes."""
    if len(part) < len(_MAGIC) + _HEAD.size:
        return 0
    length: int = _HEAD.unpack_from(part, len(_MAGIC))[0]
    return length if length <= MAX_BODY_BYTES else 0


def from_part(part: bytes) -> Ranges | None:
    """The ranges of a part; None if it is none, or is torn or damaged."""
    body = _body(part)
    if body is None:
        return None
    try:
        return dict(_ranges(body))
    except (struct.error, ValueError, IndexError):
        return None


def _body(part: bytes) -> bytes | None:
    start = len(_MAGIC) + _HEAD.size
    if len(part) < start or not part.startswith(_MAGIC):
        return None
    length, digest = _HEAD.unpack_from(part, len(_MAGIC))
    if length > MAX_BODY_BYTES:
        return None
    stream = isal_zlib.decompressobj()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    try:
        body: bytes = stream.decompress(part[start:], length + 1)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    except isal_zlib.error:  # pyright: ignore[reportGeneralTypeIssues]  # the package has no types
        return None
    if len(body) != length or not stream.eof or stream.unused_data:  # pyright: ignore[reportUnknownMemberType]
        return None
    return body if xxhash.xxh3_128_digest(body) == digest else None


def _ranges(body: bytes) -> Iterator[tuple[bytes, list[tuple[int, bytes]]]]:
    (count,) = _COUNT.unpack_from(body)
    at = _COUNT.size * (1 + count)
    if at > len(body):
        raise ValueError
    lengths = struct.unpack_from(f"<{count}I", body, _COUNT.size)
    first = len(body) - sum(lengths)
    if first < at:
        raise ValueError
    ends = list(accumulate(lengths, initial=first))
    blobs = [body[begin:end] for begin, end in pairwise(ends)]
    (keys,) = _COUNT.unpack_from(body, at)
    at += _COUNT.size
    for _ in range(keys):
        key_bytes, many = _KEY.unpack_from(body, at)
        at += _KEY.size
        end = at + key_bytes + many * _RANGE.size
        if end > first:
            raise ValueError
        yield (
            body[at : at + key_bytes],
            [(offset, blobs[number]) for offset, number in _RANGE.iter_unpack(body[at + key_bytes : end])],
        )
        at = end
    if at != first:
        raise ValueError


class ReadPack:
    """The ranges of a pack, to be read from."""

    def __init__(self, parts: Sequence[Ranges]) -> None:
        """Join the parts. Ranges that lie within others are left out, so that later ones also end later."""
        found: dict[bytes, list[tuple[int, bytes]]] = {}
        for part in parts:
            for key, ranges in part.items():
                found.setdefault(key, []).extend(ranges)
        self._ranges: dict[bytes, tuple[list[int], list[bytes]]] = {}
        for key, ranges in found.items():
            offsets: list[int] = []
            blobs: list[bytes] = []
            end = -1
            for offset, data in sorted(ranges, key=lambda r: (r[0], -len(r[1]))):
                if offset + len(data) > end:
                    end = offset + len(data)
                    offsets.append(offset)
                    blobs.append(data)
            self._ranges[key] = (offsets, blobs)

    def read(self, key: bytes, offset: int, length: int) -> bytes | None:
        """The bytes `[offset, offset + length)` of an object, joined from ranges; None if the pack lacks some."""
        found = self._ranges.get(key)
        if found is None:
            return None
        offsets, blobs = found
        number = bisect_right(offsets, offset) - 1
        pieces: list[bytes] = []
        at, end = offset, offset + length
        while at < end:
            if not 0 <= number < len(offsets) or not offsets[number] <= at < offsets[number] + len(blobs[number]):
                return None
            pieces.append(blobs[number][at - offsets[number] : end - offsets[number]])
            at += len(pieces[-1])
            number += 1
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
