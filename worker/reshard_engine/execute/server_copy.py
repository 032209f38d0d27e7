"""Server-side copies: the store copies chunks from source objects, and their CRC-32s are known without reading them.

A record of a source consists of the bytes before a copied range, the range, and the bytes behind it. The container
holds the CRC-32 of the whole record. Only the few bytes around the range are read, and the CRC-32 of the range is
computed from both. So a record of the target has the right CRC-32 if the source's record is undamaged and the store
copies correctly. Every reader that checks the CRC-32, such as `reshard verify`, finds an error of either. A range
without such a record is read to compute its checksums, but its bytes are not sent.

A store may refuse to copy. From then on, the same chunks are read and sent; the plan and the digests stay the same.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator
from typing import Protocol

from reshard.errors import IntegrityError, printable
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.execute.journal import ChunkRecord, RecordSpan, UnitRecord
from reshard_engine.integrity.checksums import without_prefix, without_suffix
from reshard_engine.integrity.file_check import crc_of_range
from reshard_engine.plan.model import Chunk, Plan, RecordSum, ServerCopy, Unit
from reshard_engine.storage.protocol import ObjectInfo, PartInfo

NO_RECORD = -1
"""The record number of a range that lies in no record. The offset of its span counts from the start of the file."""


class CopyingSink(Protocol):
    """A sink whose store can copy chunks from its own objects."""

    def copy(self, chunk: Chunk, source: ObjectInfo, offset: int) -> PartInfo | None:
        """Fill a chunk from an object of the same store; None if the store refuses to copy."""
        ...


class ServerCopier:
    """Has the store copy the chunks that the plan marks for server-side copies. Any thread may call it."""

    def __init__(self, checkpoint: Checkpoint, plan: Plan, sink: CopyingSink) -> None:
        """Prepare the copies of a plan; no request is sent yet."""
        self._checkpoint = checkpoint
        self._sink = sink
        self._server_copies = dict(_by_chunk(plan))
        self._refused = False
        self._lock = threading.Lock()
        self.copied_bytes = 0
        """Bytes that the store copied."""

    def resolve(self, unit: Unit) -> UnitRecord | tuple[RecordSpan, ...] | None:
        """Have the store copy a unit if the source proves the CRC-32 of its range.

        Returns:
            The record of the unit; only the proven spans if the store refuses to copy; None if the unit must be read.
        """
        chunk = unit.chunks[0]
        server_copy = self._server_copies.get(chunk)
        if server_copy is None or server_copy.proof is None:
            return None
        part = self._copied(chunk, server_copy)
        spans, read_bytes = self._spans_of(chunk, server_copy, server_copy.proof)
        if part is None:
            return spans
        return UnitRecord(unit.index, (ChunkRecord(chunk, part.crc32, part.etag),), spans, read_bytes=read_bytes)

    def copy_read(self, chunk: Chunk, crc32: int) -> str | None:
        """Have the store copy a chunk whose bytes were read and have this CRC-32; returns the store's receipt or None.

        Raises:
            IntegrityError: `integrity.mismatch` if the store reports another CRC-32 of the copied bytes.
        """
        server_copy = self._server_copies.get(chunk)
        if server_copy is None or server_copy.proof is not None or (part := self._copied(chunk, server_copy)) is None:
            return None
        if part.crc32 not in (None, crc32):
            raise _other_bytes(self._checkpoint.files[server_copy.source].name)
        return part.etag

    def _spans_of(self, chunk: Chunk, server_copy: ServerCopy, proof: RecordSum) -> tuple[tuple[RecordSpan, ...], int]:
        """The span with the CRC-32 of the whole range that begins with a chunk, and the number of bytes read for it.

        Further chunks of a range get no span.
        """
        if server_copy.begin != chunk.offset:
            return (), 0
        length = server_copy.end - server_copy.begin
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
    """Each chunk of a server-side copy, with that copy. A unit holds one chunk of a large file."""
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
    return IntegrityError(
        "integrity.mismatch", f"the store copied other bytes of {printable(name)} than it returned to reads"
    )
