"""What a finished unit leaves in the journal, so that a later attempt neither repeats nor trusts it blindly."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from typing import Any

from reshard_engine.execute.casts.losses import Losses
from reshard_engine.integrity.digests import BlockRun
from reshard_engine.plan.model import Chunk, Plan

RecordSpan = tuple[int, int, int, int, int]
"""(file, record, offset in the record, bytes, CRC-32)."""


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """One written chunk: its CRC-32, and the store's receipt where the store gives one."""

    chunk: Chunk
    crc32: int | None
    """None where the store copied it and does not say: a span of the record tells the sum of several chunks."""
    etag: str = ""


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """One finished unit."""

    unit: int
    chunks: tuple[ChunkRecord, ...]
    spans: tuple[RecordSpan, ...] = ()
    """The parts of records that the unit passed, and those that begin in it and are copied."""
    blocks: tuple[BlockRun, ...] = ()
    """Digests of the blocks of tensors that begin in the unit."""
    read_bytes: int = 0
    losses: dict[str, Losses] = field(default_factory=dict[str, Losses])
    """What casts lost, by parameter."""

    def belongs_to(self, plan: Plan) -> bool:
        """Whether it tells of a unit of this plan: what lies beside a target may be anyone's."""
        return 0 <= self.unit < len(plan.units) and tuple(c.chunk for c in self.chunks) == plan.units[self.unit].chunks

    def to_line(self) -> bytes:
        """One line without its end: CRC-32 of the rest, then JSON."""
        text = json.dumps(
            {
                "unit": self.unit,
                "chunks": [[c.chunk.file, c.chunk.offset, c.chunk.length_bytes, c.crc32, c.etag] for c in self.chunks],
                "spans": [list(s) for s in self.spans],
                "blocks": [[b.tensor, b.dtype, b.first, b64encode(b.digests).decode()] for b in self.blocks],
                "read_bytes": self.read_bytes,
                "losses": {fqn: lost.columns() for fqn, lost in self.losses.items()},
            },
            separators=(",", ":"),
        ).encode()
        return b"%08x %s" % (zlib.crc32(text), text)

    @staticmethod
    def from_line(line: bytes) -> UnitRecord | None:
        """The record of a line, or None if the line is not one: torn by a crash, or damaged since."""
        crc, _, text = line.partition(b" ")
        if crc != b"%08x" % zlib.crc32(text):
            return None
        try:
            facts: dict[str, Any] = json.loads(text)
            chunks = tuple(ChunkRecord(Chunk(f, o, n), crc, etag) for f, o, n, crc, etag in facts["chunks"])
            spans = tuple((f, r, o, n, c) for f, r, o, n, c in facts["spans"])
            blocks = tuple(BlockRun(t, d, n, b64decode(x, validate=True)) for t, d, n, x in facts["blocks"])
            losses = {fqn: Losses(*map(int, columns)) for fqn, columns in facts["losses"].items()}
            return UnitRecord(int(facts["unit"]), chunks, spans, blocks, int(facts["read_bytes"]), losses)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
