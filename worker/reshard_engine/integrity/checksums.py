"""Checksums that do not depend on cuts: digests of logical tensors, and CRC-32s of concatenations.

A tensor's packed little-endian bytes, in the row-major order of its global shape, are cut into blocks of
`BLOCK_BYTES`; each has an XXH3-64, and the tensor's digest is the XXH3-128 of those, eight little-endian
bytes each, in order. So two layouts that hold the same elements have the same digest, units that run in
any order can each digest what passes them, and padding is never part of it.

Source: xxHash 0.8 (XXH3, seed 0), as the package `xxhash` binds it. Not cryptographic: it finds accidents.
"""

from __future__ import annotations

import threading
from array import array
from base64 import b64decode, b64encode
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import add
from typing import Annotated

import numpy as np
import numpy.typing as npt
import xxhash
from isal.isal_zlib import crc32_combine
from pydantic import BeforeValidator, PlainSerializer, StringConstraints

from reshard.errors import IntegrityError
from reshard_engine.storage.crc32 import crc32

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


# CRC-32s of the records of a source, from the bytes that a run reads anyway.

_MOST_SPANS = 1 << 16
"""Number of separate spans whose CRC-32s are kept: about 20 MB. A record that would need more is not compared."""


@dataclass(slots=True)
class _PartlyRead:
    """A record that is read in several pieces: the disjoint spans that were read, and their CRC-32s."""

    begins: list[int] = field(default_factory=list[int])
    """Begins of the spans that a thread has read, sorted, with their `ends`."""
    ends: list[int] = field(default_factory=list[int])
    sums: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    """(end, CRC-32) by begin; adjacent spans are joined."""
    begin_of: dict[int, int] = field(default_factory=dict[int, int])
    """The begin of the span in `sums` that ends there."""

    def take(self, low: int, high: int) -> list[tuple[int, int]]:
        """Mark a range as read; returns those parts of it that were not read before."""
        if self.ends and self.ends[-1] == low < high:  # in file order, as most records are read
            self.ends[-1] = high
            return [(low, high)]
        first, last = bisect_left(self.ends, low), bisect_right(self.begins, high)
        new: list[tuple[int, int]] = []
        at = low
        for begin, end in zip(self.begins[first:last], self.ends[first:last], strict=True):
            if begin > at:
                new.append((at, begin))
            at = max(at, end)
        if at < high:
            new.append((at, high))
        if first < last:
            low, high = min(low, self.begins[first]), max(high, self.ends[last - 1])
        self.begins[first:last], self.ends[first:last] = [low], [high]
        return new

    def put(self, low: int, high: int, crc: int) -> None:
        """Keep the CRC-32 of a span that `take` returned."""
        if low in self.begin_of:
            begin = self.begin_of.pop(low)
            crc = combine(self.sums.pop(begin)[1], crc, high - low)
            low = begin
        if high in self.sums:
            end, after = self.sums.pop(high)
            crc = combine(crc, after, end - high)
            high = end
        self.sums[low] = high, crc
        self.begin_of[high] = low


@dataclass(frozen=True, slots=True)
class _Records:
    """The records of one file in file order."""

    begins: array[int]
    ends: array[int]
    sums: array[int]

    @classmethod
    def of(cls, table: npt.NDArray[np.int64]) -> _Records:
        offset, length, crc = (row.tolist() for row in table)
        return cls(array("q", offset), array("q", map(add, offset, length)), array("q", crc))

    def span(self, number: int) -> tuple[int, int]:
        return self.begins[number], self.ends[number]


_UNREAD, _MATCHES, _DAMAGED, _NOT_COMPARED = range(4)


class RecordReads:
    """Compares the records of source files with their CRC-32s while a run reads them, in any order and any thread.

    A byte that is read several times is summed once, so that the cost is one pass over the records that are read.
    """

    def __init__(
        self,
        tables: Sequence[npt.NDArray[np.int64]],
        compared: Sequence[Collection[int]] = (),
        damaged: Sequence[Collection[int]] = (),
    ) -> None:
        """Create the state of all records as unread.

        Args:
            tables: For each file the offset, length and CRC-32 of its records (`RecordSums.table`).
            compared: For each file the offsets of records that match already (`RecordSums.matching`).
            damaged: For each file the offsets of records that are known not to match (`RecordSums.damaged`).
        """
        # Of arrays, `bisect` takes a twentieth of the time of numpy's search, and a record takes 25 bytes.
        self._tables = [_Records.of(t) for t in tables]
        self._states = [bytearray(len(t.begins)) for t in self._tables]
        self._open: dict[tuple[int, int], _PartlyRead] = {}
        self._spans = 0
        self._lock = threading.Lock()
        self.damaged: list[tuple[int, int, int]] = []
        """(file, offset, length) of each record that does not match its CRC-32."""
        self.matching = 0
        self.matching_bytes = 0
        self.other_bytes = 0
        """Bytes that were read outside of records with a CRC-32; those read twice count twice."""
        self._abandoned_bytes = 0
        for file, offsets in enumerate(compared):
            for number in self._numbers(file, offsets):
                self._states[file][number] = _MATCHES
                begin, end = self._tables[file].span(number)
                self.matching += 1
                self.matching_bytes += end - begin
        for file, offsets in enumerate(damaged):
            for number in self._numbers(file, offsets):
                self._states[file][number] = _DAMAGED
                begin, end = self._tables[file].span(number)
                self.damaged.append((file, begin, end - begin))

    def _numbers(self, file: int, offsets: Collection[int]) -> Iterator[int]:
        """The numbers of the records that begin at these offsets."""
        begins = self._tables[file].begins
        for offset in sorted(offsets):
            number = bisect_left(begins, offset)
            if number < len(begins) and begins[number] == offset:
                yield number

    @property
    def records(self) -> int:
        """The number of records that have a CRC-32, read or not."""
        return sum(map(len, self._states))

    @property
    def in_part(self) -> int:
        """The number of records of which some bytes were read, but which were not compared."""
        return len(self._open) + sum(s.count(_NOT_COMPARED) for s in self._states)

    @property
    def in_part_bytes(self) -> int:
        """The number of bytes that were read of those records."""
        spans = ((e - b) for r in self._open.values() for b, e in zip(r.begins, r.ends, strict=True))
        return sum(spans) + self._abandoned_bytes

    def read_into(
        self, file: int, read_into: Callable[[int, memoryview], None], offset: int, buffer: memoryview
    ) -> None:
        """Read bytes of a file with its own function, and sum them while they are in the cache."""
        read_into(offset, buffer)
        self.add(file, offset, buffer)

    def add(self, file: int, offset: int, data: memoryview) -> None:
        """Sum bytes of a file that were just read."""
        records, states, end = self._tables[file], self._states[file], offset + len(data)
        other = len(data)
        number = bisect_right(records.ends, offset)
        while other and number < len(states) and (begin := records.begins[number]) < end:
            stop = records.ends[number]
            low, high = max(begin, offset), min(stop, end)
            other -= high - low
            if states[number] == _UNREAD:
                view = data[low - offset : high - offset]
                if (low, high) == (begin, stop):
                    self._judge(file, number, crc32(view))
                else:
                    self._add_part(file, number, low, view)
            number += 1
        if other:
            with self._lock:
                self.other_bytes += other

    def _add_part(self, file: int, number: int, low: int, view: memoryview) -> None:
        with self._lock:
            if self._states[file][number] != _UNREAD:
                return
            part = self._open.setdefault((file, number), _PartlyRead())
            new = part.take(low, low + len(view))
        sums = [crc32(view[begin - low : end - low]) for begin, end in new]
        begin, end = self._tables[file].span(number)
        with self._lock:
            if self._open.get((file, number)) is not part:
                return
            self._spans -= len(part.sums)
            for (first, last), crc in zip(new, sums, strict=True):
                part.put(first, last, crc)
            self._spans += len(part.sums)
            whole = part.sums.get(begin, (0, 0))
            if self._spans > _MOST_SPANS:
                self._close(file, number, _NOT_COMPARED)
        if whole[0] == end:
            self._judge(file, number, whole[1])

    def _close(self, file: int, number: int, state: int) -> None:
        self._states[file][number] = state
        part = self._open.pop((file, number), None)
        if part is not None:
            self._spans -= len(part.sums)
            if state == _NOT_COMPARED:
                self._abandoned_bytes += sum(e - b for b, e in zip(part.begins, part.ends, strict=True))

    def _judge(self, file: int, number: int, crc: int) -> None:
        begin, end = self._tables[file].span(number)
        expected = self._tables[file].sums[number]
        with self._lock:
            if self._states[file][number] != _UNREAD:
                return
            self._close(file, number, _MATCHES if crc == expected else _DAMAGED)
            if crc != expected:
                self.damaged.append((file, begin, end - begin))
                return
            self.matching += 1
            self.matching_bytes += end - begin

    def unread(self, *, most_bytes: Callable[[int], int]) -> Iterator[tuple[int, int, int]]:
        """(file, begin, end) of what is missing of records that were read in part.

        Args:
            most_bytes: For the length of a record the number of missing bytes up to which it is worth completing.
        """
        for (file, number), part in sorted(self._open.items(), key=lambda item: item[0]):
            begin, end = self._tables[file].span(number)
            edges = [begin, *(at for pair in zip(part.begins, part.ends, strict=True) for at in pair), end]
            gaps = [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]
            if sum(high - low for low, high in gaps) <= most_bytes(end - begin):
                yield from ((file, low, high) for low, high in gaps)
