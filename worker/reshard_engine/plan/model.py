"""The plan as data: source pins, target, files, units, digest. It never lists pieces.

The pieces of unit k are a pure function of (checkpoint, layout, k) and are computed where the unit
runs; a plan for a trillion parameters stays as small as its table of units.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

PLAN_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """A byte range of one target file: the grain of writing, one part of a multipart upload where there is one."""

    file: int
    offset: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Unit:
    """A bounded, idempotent piece of work: some whole small files, or one chunk of a large one."""

    index: int
    chunks: tuple[Chunk, ...]
    commit: bool
    """Whether it writes files that may appear only when everything else is there."""

    @property
    def length_bytes(self) -> int:
        """Bytes that the unit writes."""
        return sum(c.length_bytes for c in self.chunks)


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file of the target."""

    path: str
    size_bytes: int
    commit: bool
    shape: str
    """Digest of its template, so that an executor that would lay it out differently refuses."""


@dataclass(frozen=True)
class Plan:
    """Everything that an executor must know beside the metadata that it reads again itself."""

    source: dict[str, Any]
    """URL, tag, format, and each object with size and pin."""
    target: dict[str, Any]
    """Format and the options that change bytes."""
    files: tuple[PlannedFile, ...]
    units: tuple[Unit, ...]
    chunk_bytes: int
    read_bytes: int
    write_bytes: int
    pointer: str | None
    warnings: tuple[str, ...] = ()
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        """Derive the digest over everything that decides the bytes; not over where they lie."""
        facts = self.to_json(with_digest=False)
        facts["source"] = {k: v for k, v in self.source.items() if k != "url"}
        facts.pop("warnings")
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        object.__setattr__(self, "digest", hashlib.sha256(text.encode()).hexdigest())

    def to_json(self, *, with_digest: bool = True) -> dict[str, Any]:
        """The plan as JSON values. Units are (file, offset, file, end, commit) of their first and last chunk."""
        facts: dict[str, Any] = {
            "schema_version": PLAN_SCHEMA_VERSION,
            "source": self.source,
            "target": self.target,
            "files": [[f.path, f.size_bytes, f.commit, f.shape] for f in self.files],
            "units": [
                [
                    u.chunks[0].file,
                    u.chunks[0].offset,
                    u.chunks[-1].file,
                    u.chunks[-1].offset + u.chunks[-1].length_bytes,
                    u.commit,
                ]
                for u in self.units
            ],
            "chunk_bytes": self.chunk_bytes,
            "read_bytes": self.read_bytes,
            "write_bytes": self.write_bytes,
            "pointer": self.pointer,
            "warnings": list(self.warnings),
        }
        return facts | ({"digest": self.digest} if with_digest else {})
