"""The plan as data: source pins, target, files, units, digest. It never lists pieces.

The pieces of unit k are a pure function of (checkpoint, layout, k) and are computed where the unit
runs; a plan for a trillion parameters stays as small as its table of units.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from reshard.models import NotCarried, OverflowPolicy

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
class RecordSum:
    """A record of a source file whose CRC-32 its container keeps."""

    offset: int
    length_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class ServerCopy:
    """Bytes of a target file that the store can copy from a source object itself: one whole chunk, or several."""

    file: int
    begin: int
    end: int
    """Of the target file, as `begin`."""
    record: int | None
    """The record of the target file that holds them (see `FileTemplate.records`)."""
    record_offset: int
    """Where that record begins in the target file."""
    source: int
    """Number of the source file."""
    source_offset: int
    proof: RecordSum | None
    """The source's record that they make up but for a little: its CRC-32 gives theirs. Without one the bytes are read
    for their checksums, and only not sent."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file of the target."""

    path: str
    size_bytes: int
    commit: bool
    shape: str
    """Digest of its template, so that an executor that would lay it out differently refuses."""


def _digest(facts: dict[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


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
    metadata_bytes: int
    """Memory that the metadata takes beside the buffers; of this process, not part of the plan's JSON."""
    warnings: tuple[str, ...] = ()
    not_carried: tuple[NotCarried, ...] = ()
    server_copies: tuple[ServerCopy, ...] = ()
    """In file order. What a store refuses to copy is read and sent instead: the plan stays the same."""
    digest: str = field(init=False)
    """Of everything that decides the bytes and how they are cut into units; not of where they lie."""
    content_digest: str = field(init=False)
    """Of everything that decides the bytes: equal for two plans that write the same files in other units."""

    def __post_init__(self) -> None:
        """Derive the digests."""
        facts = self.to_json(with_digest=False)
        # The same checkpoint may be named by its save directory or by its tag directory.
        facts["source"] = {k: v for k, v in self.source.items() if k not in {"url", "tag"}}
        for name in ("warnings", "not_carried", "pointer"):
            facts.pop(name)
        object.__setattr__(self, "digest", _digest(facts))
        how = {"units", "chunk_bytes", "server_copies"}
        object.__setattr__(self, "content_digest", _digest({k: v for k, v in facts.items() if k not in how}))

    @property
    def on_overflow(self) -> OverflowPolicy:
        """What becomes of elements that are too large for their new type."""
        return OverflowPolicy(self.target.get("on_overflow", OverflowPolicy.INF))

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
            "not_carried": [n.model_dump(mode="json") for n in self.not_carried],
        }
        if self.server_copies:
            facts["server_copies"] = [
                [o.file, o.begin, o.end, o.source, o.source_offset, o.proof is not None] for o in self.server_copies
            ]
        return facts | ({"digest": self.digest} if with_digest else {})
