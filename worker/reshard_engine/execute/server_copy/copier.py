"""Chunks that the store copies from source objects itself: no byte of them passes here, and their CRC-32s are known.

A record of a source is the bytes before a copied range, the range, and the bytes behind it. The container says the
CRC-32 of all; the few bytes around the range are read, and what remains is the CRC-32 of the range. So a record of the
target has a right CRC-32 if the source's record is undamaged and the store copies faithfully: whoever reads it finds
out, `reshard verify` among them. What no such record proves is read for its checksums, and only not sent.

A store may refuse to copy. Then, once and for all, the same chunks are read and sent: plan and digests stay the same.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from reshard.errors import IntegrityError, printable
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.execute.journal import ChunkRecord, RecordSpan, UnitRecord
from reshard_engine.integrity.crc import without_prefix, without_suffix
from reshard_engine.integrity.readback import crc_of_range
from reshard_engine.plan.model import Chunk, Plan, ServerCopy, Unit
from reshard_engine.storage.protocol import ObjectInfo, PartInfo

NO_RECORD = -1
"""In place of a record's number where a range lies in none: its span counts from the beginning of the file."""


@runtime_checkable
class CopyingSink(Protocol):
    """A sink whose store can fill a chunk itself."""

    def copy(self, chunk: Chunk, source: ObjectInfo, offset: int) -> PartInfo | None:
        """Fill a chunk from an object of the same store; None if the store refuses to copy."""
        ...


class ServerCopier:
    """Has the store copy the chunks that a plan leaves to it. Any thread may call."""

    def __init__(self, checkpoint: Checkpoint, plan: Plan, sink: CopyingSink) -> None:
        """Nothing is asked of the store yet."""
        self._checkpoint = checkpoint
        self._sink = sink
        self._server_copies = dict(_by_chunk(plan))
        self._refused = False
        self._lock = threading.Lock()
        self.copied_bytes = 0
        """Bytes that the store copied."""

    def proves(self, chunk: Chunk) -> bool:
        """Whether the CRC-32 of what a chunk holds of a record comes from the source's, not from its bytes."""
        server_copy = self._server_copies.get(chunk)
        return server_copy is not None and server_copy.proof is not None

    def copy(self, unit: Unit) -> UnitRecord | None:
        """Have a unit copied; None if it is none of those that are, or if the store refuses."""
        chunk = unit.chunks[0]
        server_copy = self._server_copies.get(chunk)
        if server_copy is None or server_copy.proof is None or (part := self._copied(chunk, server_copy)) is None:
            return None
        spans, read_bytes = self.spans_of(chunk)
        return UnitRecord(unit.index, (ChunkRecord(chunk, part.crc32, part.etag),), spans, read_bytes=read_bytes)

    def copy_read(self, chunk: Chunk, crc32: int) -> str | None:
        """Have a chunk copied whose bytes were read and have this CRC-32; the store's receipt, or None as `copy`.

        Raises:
            IntegrityError: `integrity.mismatch` if the store says that it copied other bytes.
        """
        server_copy = self._server_copies.get(chunk)
        if server_copy is None or server_copy.proof is not None or (part := self._copied(chunk, server_copy)) is None:
            return None
        if part.crc32 not in (None, crc32):
            raise _other_bytes(self._checkpoint.files[server_copy.source].name)
        return part.etag

    def spans_of(self, chunk: Chunk) -> tuple[tuple[RecordSpan, ...], int]:
        """The CRC-32 of the whole range that begins with a chunk, as a span of its record, and the bytes read for it.

        Nothing for the further chunks of a range.
        """
        server_copy = self._server_copies[chunk]
        if server_copy.begin != chunk.offset or server_copy.proof is None:
            return (), 0
        proof, length = server_copy.proof, server_copy.end - server_copy.begin
        file = self._checkpoint.files[server_copy.source]
        info, end = file.objects[0], server_copy.source_offset + length
        before, behind = server_copy.source_offset - proof.offset, proof.offset + proof.length_bytes - end
        first = crc_of_range(file.store, info, proof.offset, before)
        last = crc_of_range(file.store, info, end, behind)
        crc = without_prefix(without_suffix(proof.crc32, last, behind), first, length)
        record = NO_RECORD if server_copy.record is None else server_copy.record
        span = (server_copy.file, record, server_copy.begin - server_copy.record_offset, length, crc)
        return (span,), before + behind

    def _copied(self, chunk: Chunk, server_copy: ServerCopy) -> PartInfo | None:
        if self._refused:
            return None
        info = self._checkpoint.files[server_copy.source].objects[0]
        part = self._sink.copy(chunk, info, server_copy.source_offset + chunk.offset - server_copy.begin)
        if part is None:
            self._refused = True
            return None
        with self._lock:
            self.copied_bytes += chunk.length_bytes
        return part


def _by_chunk(plan: Plan) -> Iterator[tuple[Chunk, ServerCopy]]:
    """The chunks that server-side copies are made of, with these: a unit holds one chunk of a large file."""
    by_file: dict[int, list[ServerCopy]] = {}
    for server_copy in plan.server_copies:
        by_file.setdefault(server_copy.file, []).append(server_copy)
    for unit in plan.units:
        chunk = unit.chunks[0]
        inside = by_file.get(chunk.file, [])
        index = bisect_right(inside, chunk.offset, key=lambda o: o.begin) - 1
        if index >= 0 and chunk.offset < inside[index].end:
            yield chunk, inside[index]


def _other_bytes(name: str) -> IntegrityError:
    return IntegrityError("integrity.mismatch", f"the store copied other bytes of {printable(name)} than it gave us")
