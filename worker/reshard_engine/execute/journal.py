"""What a finished unit leaves in the journal, so that a later attempt neither repeats nor trusts it blindly."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from reshard_engine.plan.model import Chunk


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """One written chunk: its CRC-32, and the store's receipt where the store gives one."""

    chunk: Chunk
    crc32: int
    etag: str = ""


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """One finished unit."""

    unit: int
    chunks: tuple[ChunkRecord, ...]
    spans: tuple[tuple[int, int, int, int, int], ...] = ()
    """(file, record, offset in the record, bytes, CRC-32) of the parts of records that the unit passed."""
    read_bytes: int = 0
    overflows: dict[str, int] = field(default_factory=dict[str, int])

    def to_json(self) -> str:
        """One line."""
        return json.dumps(
            {
                "unit": self.unit,
                "chunks": [[c.chunk.file, c.chunk.offset, c.chunk.length_bytes, c.crc32, c.etag] for c in self.chunks],
                "spans": [list(s) for s in self.spans],
                "read_bytes": self.read_bytes,
                "overflows": self.overflows,
            },
            separators=(",", ":"),
        )

    @staticmethod
    def from_json(text: str | bytes) -> UnitRecord | None:
        """The record of a line, or None if the line is not one (torn by a crash)."""
        try:
            facts: dict[str, Any] = json.loads(text)
            chunks = tuple(ChunkRecord(Chunk(f, o, n), crc, etag) for f, o, n, crc, etag in facts["chunks"])
            spans = tuple((f, r, o, n, c) for f, r, o, n, c in facts["spans"])
            return UnitRecord(int(facts["unit"]), chunks, spans, int(facts["read_bytes"]), dict(facts["overflows"]))
        except (ValueError, KeyError, TypeError):
            return None
