"""Checksums that do not depend on cuts: digests of logical tensors, and CRC-32s of concatenations.

A tensor's packed little-endian bytes, in the row-major order of its global shape, are cut into blocks of
`BLOCK_BYTES`; each has an XXH3-64, and the tensor's digest is the XXH3-128 of those, eight little-endian
bytes each, in order. So two layouts that hold the same elements have the same digest, units that run in
any order can each digest what passes them, and padding is never part of it.

Source: xxHash 0.8 (XXH3, seed 0), as the package `xxhash` binds it. Not cryptographic: it finds accidents.
"""

from __future__ import annotations

import threading
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np
import xxhash
from isal.isal_zlib import crc32_combine
from pydantic import BeforeValidator, PlainSerializer, StringConstraints

from reshard.errors import IntegrityError

BLOCK_BYTES = 256 << 10
DIGEST_BYTES = 8


Sha256 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
"""A SHA-256 in hex."""
_Digests = Annotated[
    bytes,
    BeforeValidator(partial(b64decode, validate=True)),
    PlainSerializer(lambda digests: b64encode(digests).decode()),
]


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Digests of consecutive blocks of one tensor as one element type."""

    tensor: int
    dtype: str
    first: int
    """Number of the first block."""
    digests: _Digests
    """Eight little-endian bytes per block; base64 in JSON."""

    @property
    def end(self) -> int:
        """Number of the block behind the last one."""
        return self.first + len(self.digests) // DIGEST_BYTES


def block_count(size_bytes: int) -> int:
    """The number of blocks of a tensor of `size_bytes` bytes."""
    return -(-size_bytes // BLOCK_BYTES)


def blocks_beginning_in(begin: int, end: int) -> range:
    """Numbers of the blocks whose first byte lies in `[begin, end)`; units that tile a tensor tile its blocks."""
    return range(block_count(begin), block_count(end))


def block_digest(data: memoryview) -> bytes:
    """The digest of one block."""
    return xxhash.xxh3_64_intdigest(data).to_bytes(DIGEST_BYTES, "little")


def tensor_digest(blocks: bytes | bytearray) -> str:
    """The digest of a tensor, in hex, from the digests of its blocks in order."""
    return xxhash.xxh3_128_hexdigest(blocks)


class _Blocks:
    """The known digests of one tensor, at nine bytes a block."""

    def __init__(self) -> None:
        self.digests = bytearray()
        self.written = bytearray()

    def put(self, number: int, digest: bytes) -> bool:
        """Store a digest; False if the block has another digest already."""
        missing = number + 1 - len(self.written)
        if missing > 0:
            self.written += bytes(missing)
            self.digests += bytes(missing * DIGEST_BYTES)
        at = number * DIGEST_BYTES
        if self.written[number]:
            return bytes(self.digests[at : at + DIGEST_BYTES]) == digest
        self.written[number] = 1
        self.digests[at : at + DIGEST_BYTES] = digest
        return True


class TensorDigests:
    """Collects block digests in any order, from any thread."""

    def __init__(self) -> None:
        """Start without digests."""
        self._blocks: dict[tuple[int, str], _Blocks] = {}
        self._lock = threading.Lock()

    def add(self, run: BlockRun) -> None:
        """Add the digests of a run.

        Raises:
            IntegrityError: `integrity.mismatch` if a block is known with another digest: two copies of one
                tensor differ.
        """
        with self._lock:
            known = self._blocks.setdefault((run.tensor, run.dtype), _Blocks())
            for at in range(0, len(run.digests), DIGEST_BYTES):
                number, digest = run.first + at // DIGEST_BYTES, run.digests[at : at + DIGEST_BYTES]
                if not known.put(number, digest):
                    raise IntegrityError(
                        "integrity.mismatch", f"block {number} of tensor {run.tensor} was written with two contents"
                    )

    def missing(self, tensor: int, dtype: str, size_bytes: int) -> list[int]:
        """The numbers of the blocks of a tensor that have no digest yet."""
        written = self._blocks.get((tensor, dtype), _Blocks()).written
        return [n for n in range(block_count(size_bytes)) if n >= len(written) or not written[n]]

    def runs(self) -> list[BlockRun]:
        """All digests so far."""
        found: list[BlockRun] = []
        for (tensor, dtype), blocks in self._blocks.items():
            for number, written in enumerate(blocks.written):
                if not written:
                    continue
                digest = bytes(blocks.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES])
                last = found[-1] if found else None
                if last is not None and (last.tensor, last.dtype, last.end) == (tensor, dtype, number):
                    found[-1] = BlockRun(tensor, dtype, last.first, last.digests + digest)
                else:
                    found.append(BlockRun(tensor, dtype, number, digest))
        return found

    def digest(self, tensor: int, dtype: str, size_bytes: int) -> str | None:
        """The digest of a tensor of `size_bytes` bytes; None while blocks are missing."""
        known = self._blocks.get((tensor, dtype), _Blocks())
        count = block_count(size_bytes)
        if len(known.written) != count or known.written.count(1) != count:
            return None
        return tensor_digest(known.digests)


class TensorStream:
    """Digests tensors from pieces of any order and size, such as the reads of a file give.

    It holds the bytes of blocks of which only a part has arrived: at most two blocks per run of a tensor in a file.
    """

    def __init__(self) -> None:
        """Start without pieces."""
        self.digests = TensorDigests()
        self._open: dict[tuple[int, str, int], tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], int]] = {}
        self._lock = threading.Lock()

    def feed(self, tensor: int, dtype: str, size_bytes: int, *, begin: int, data: memoryview) -> None:
        """Add the bytes `[begin, begin + len(data))` of a tensor of `size_bytes` bytes."""
        whole: list[tuple[int, bytes]] = []
        for number, low, high in _cut(begin, begin + len(data)):
            piece = data[low - begin : high - begin]
            start = number * BLOCK_BYTES
            length = min(BLOCK_BYTES, size_bytes - start)
            if len(piece) == length:
                whole.append((number, block_digest(piece)))
            elif (block := self._complete((tensor, dtype, number), length, low - start, piece)) is not None:
                whole.append((number, block_digest(block)))
        for run in _runs(tensor, dtype, whole):
            self.digests.add(run)

    def _complete(self, key: tuple[int, str, int], length: int, offset: int, piece: memoryview) -> memoryview | None:
        """The block's bytes if this piece completes it; else None."""
        with self._lock:
            buffer, have = self._open.pop(key, (np.empty(length, dtype=np.uint8), 0))
            buffer[offset : offset + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
            if have + len(piece) == length:
                return buffer.data
            self._open[key] = (buffer, have + len(piece))
            return None


def _cut(begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(block, begin, end) of the parts of a byte range."""
    while begin < end:
        number = begin // BLOCK_BYTES
        stop = min(end, (number + 1) * BLOCK_BYTES)
        yield number, begin, stop
        begin = stop


def _runs(tensor: int, dtype: str, blocks: Iterable[tuple[int, bytes]]) -> Iterator[BlockRun]:
    for number, digest in blocks:
        yield BlockRun(tensor, dtype, number, digest)


# CRC-32 of concatenations and of their parts from one another, and the board where running units meet.
#
# Source: zlib's `crc32_combine` (Mark Adler), which `isal` binds: appending n zero bytes to a message multiplies its
# CRC-32 by x^(8n) modulo the polynomial. That polynomial is primitive, so x^(2^32 - 1) is 1.

_ORDER = (1 << 32) - 1
"""After so many zero bytes every CRC-32 is what it was: appending `_ORDER - n` takes n away again."""


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two byte strings put together, from theirs and the second one's length.

    >>> import zlib
    >>> combine(zlib.crc32(b"ab"), zlib.crc32(b"cde"), 3) == zlib.crc32(b"abcde")
    True
    """
    return crc32_combine(first, second, second_bytes)


def without_prefix(whole: int, prefix: int, rest_bytes: int) -> int:
    """The CRC-32 of what follows a prefix, from the CRC-32s of all and of the prefix, and the length of the rest.

    >>> import zlib
    >>> without_prefix(zlib.crc32(b"abcde"), zlib.crc32(b"ab"), 3) == zlib.crc32(b"cde")
    True
    """
    return combine(prefix, whole, rest_bytes)


def without_suffix(whole: int, suffix: int, suffix_bytes: int) -> int:
    """The CRC-32 of what stands before a suffix, from the CRC-32s of all and of the suffix, and its length.

    >>> import zlib
    >>> without_suffix(zlib.crc32(b"abcde"), zlib.crc32(b"cde"), 3) == zlib.crc32(b"ab")
    True
    """
    return combine(whole ^ suffix, 0, -suffix_bytes % _ORDER)


Span = tuple[int, int, int]
"""(offset in the record, bytes, CRC-32)."""


class CrcBoard:
    """CRC-32s of parts of records, put up by the units that pass them, read by those that write the sums."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._spans: dict[tuple[int, int], dict[int, Span]] = {}
        self._changed = threading.Condition()
        self._failed = False

    def put(self, file: int, record: int, spans: Iterable[Span]) -> None:
        """Put up parts of a record."""
        with self._changed:
            known = self._spans.setdefault((file, record), {})
            for span in spans:
                known[span[0]] = span
            self._changed.notify_all()

    def knows(self, file: int, record: int, offset: int, length_bytes: int) -> bool:
        """True if this part of a record was put up."""
        with self._changed:
            span = self._spans.get((file, record), {}).get(offset)
            return span is not None and span[1] == length_bytes

    def fail(self) -> None:
        """Wake everyone that waits: what they wait for will not come."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def wait_for(self, file: int, record: int, length_bytes: int) -> int | None:
        """The CRC-32 of a whole record when all its parts are known; None after a failure elsewhere."""
        with self._changed:
            while not self._failed:
                spans = self._spans.get((file, record), {})
                if sum(s[1] for s in spans.values()) == length_bytes:
                    total = 0
                    for span in sorted(spans.values()):
                        total = combine(total, span[2], span[1])
                    return total
                self._changed.wait()
        return None
