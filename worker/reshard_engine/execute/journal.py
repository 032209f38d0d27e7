"""What the journal says of a target: the records of finished units, and the names of uploads.

A later attempt checks a record and does not repeat the unit.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from reshard_engine.execute.casts.cast import Losses
from reshard_engine.integrity.checksums import BlockRun
from reshard_engine.plan.model import Chunk, Plan
from reshard_engine.storage.texts import JsonText

RecordSpan = tuple[int, int, int, int, int]
"""(file, record, offset in the record, bytes, CRC-32)."""


@dataclass(frozen=True, slots=True)
class NamedUpload(JsonText):
    """The text that names the upload of a file."""

    id: str


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """One written chunk: its CRC-32, and the store's receipt (`etag`) if the store gives one."""

    chunk: Chunk
    crc32: int | None
    """None if the store copied the chunk and reported no CRC-32; a span then holds the CRC-32 of several chunks."""
    etag: str = ""


def line_of(facts: object) -> bytes:
    """JSON values as one line without its line end: the CRC-32 of the JSON text, then the JSON text."""
    text = json.dumps(facts, separators=(",", ":")).encode()
    return b"%08x %s" % (zlib.crc32(text), text)


def facts_in(line: bytes) -> Any:
    """The JSON values in a line.

    Raises:
        ValueError, RecursionError: The line holds none, because a crash cut it off or it was damaged.
    """
    crc, _, text = line.partition(b" ")
    if crc != b"%08x" % zlib.crc32(text):
        raise ValueError
    return json.loads(text)


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """One finished unit."""

    unit: int
    chunks: tuple[ChunkRecord, ...]
    spans: tuple[RecordSpan, ...] = ()
    """The parts of records that the unit wrote, and the copied ranges that begin in it."""
    blocks: tuple[BlockRun, ...] = ()
    """Digests of the blocks of tensors that begin in the unit."""
    read_bytes: int = 0
    losses: dict[str, Losses] = field(default_factory=dict[str, Losses])
    """The losses of casts, by parameter."""

    def belongs_to(self, plan: Plan) -> bool:
        """True if the record describes a unit of this plan: files beside a target may come from any conversion."""
        return 0 <= self.unit < len(plan.units) and tuple(c.chunk for c in self.chunks) == plan.units[self.unit].chunks

    def to_line(self) -> bytes:
        """The record as a line of the journal."""
        return line_of(
            {
                "unit": self.unit,
                "chunks": [[c.chunk.file, c.chunk.offset, c.chunk.length_bytes, c.crc32, c.etag] for c in self.chunks],
                "spans": [list(s) for s in self.spans],
                "blocks": [[b.tensor, b.dtype, b.first, b64encode(b.digests).decode()] for b in self.blocks],
                "read_bytes": self.read_bytes,
                "losses": {fqn: lost.columns() for fqn, lost in self.losses.items()},
            }
        )

    @staticmethod
    def from_line(line: bytes) -> UnitRecord | None:
        """The record in a line; None if the line holds none, because a crash cut it off or it was damaged."""
        try:
            facts: dict[str, Any] = facts_in(line)
            chunks = tuple(ChunkRecord(Chunk(f, o, n), crc, etag) for f, o, n, crc, etag in facts["chunks"])
            spans = tuple((f, r, o, n, c) for f, r, o, n, c in facts["spans"])
            blocks = tuple(BlockRun(t, d, n, b64decode(x, validate=True)) for t, d, n, x in facts["blocks"])
            losses = {fqn: Losses.of_columns(columns) for fqn, columns in facts["losses"].items()}
            return UnitRecord(int(facts["unit"]), chunks, spans, blocks, int(facts["read_bytes"]), losses)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None


def records_in(text: bytes) -> Iterator[UnitRecord]:
    """The records in a journal. A line that holds none, because it was cut off or damaged, is left out."""
    return (r for line in text.split(b"\n") if line and (r := UnitRecord.from_line(line)) is not None)
