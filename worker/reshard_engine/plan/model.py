"""The plan as data: source pins, target, files, units, their items and digests. It never lists pieces.

The pieces of unit k are a pure function of (checkpoint, layout, k). The executor computes them when the unit runs, so a
plan for a trillion parameters is only as large as its table of units.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from reshard.choices import OverflowPolicy
from reshard.models.jobs import NotCarried
from reshard_engine.integrity.checksums import BLOCK_BYTES
from reshard_engine.tensors.layout import FileTemplate, TargetFile

PLAN_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """A byte range of one target file, which is written as a whole. In a multipart upload, a chunk is one part."""

    file: int
    offset: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Unit:
    """A bounded, idempotent piece of work: some whole small files, or one chunk of a large file."""

    index: int
    chunks: tuple[Chunk, ...]
    commit: bool
    """True if the unit writes commit files, which may appear only after all other files."""

    @property
    def length_bytes(self) -> int:
        """Number of bytes that the unit writes."""
        return sum(c.length_bytes for c in self.chunks)


@dataclass(frozen=True, slots=True)
class RecordSum:
    """A record of a source file, with the CRC-32 that its container holds."""

    offset: int
    length_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class RecordPart:
    """The bytes of one record of a target file that one unit writes."""

    file: int
    record: int
    begin: int
    """First byte in the file."""
    length_bytes: int


@dataclass(frozen=True, slots=True)
class ServerCopy:
    """A range of a target file that the store can copy from a source object: one or more whole chunks."""

    file: int
    begin: int
    end: int
    """The range `[begin, end)` counts bytes of the target file."""
    record: int | None
    """The record of the target file that holds the range (see `FileTemplate.records`)."""
    record_offset: int
    """Begin of that record in the target file."""
    source: int
    """Number of the source file."""
    source_offset: int
    proof: RecordSum | None
    """The source's record that consists of the range and a few more bytes. The CRC-32 of the range is computed from the
    record's. If it is None, the bytes are read to compute their checksums, but they are not sent."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file of the target."""

    path: str
    size_bytes: int
    commit: bool
    shape: str
    """Digest of the file's template. An executor whose layout has another digest refuses the plan."""


def _digest(facts: dict[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def source_digest(source: dict[str, Any]) -> str:
    """Digest of a source's format and files, each with its pin. The same checkpoint may be named in several ways."""
    return _digest({k: v for k, v in source.items() if k not in {"url", "tag"}})


@dataclass(frozen=True)
class Plan:
    """Everything that an executor must know, except the metadata of the source, which it reads again."""

    source: dict[str, Any]
    """URL, tag and format of the source, and each object with its size and pin."""
    target: dict[str, Any]
    """The target format, and all options that change bytes."""
    files: tuple[PlannedFile, ...]
    units: tuple[Unit, ...]
    chunk_bytes: int
    read_bytes: int
    write_bytes: int
    pointer: str | None
    metadata_bytes: int
    """Memory of this process for metadata, without the buffers. It is not part of the plan's JSON."""
    warnings: tuple[str, ...] = ()
    not_carried: tuple[NotCarried, ...] = ()
    server_copies: tuple[ServerCopy, ...] = ()
    """Server-side copies in file order. If the store refuses, the bytes are read and sent; the plan stays the same."""
    digest: str = field(init=False)
    """Digest of everything that decides the bytes and the units. The URLs of source and target are not part of it."""
    content_digest: str = field(init=False)
    """Digest of everything that decides the bytes. Plans that write the same files in other units have the same one."""

    def __post_init__(self) -> None:
        """Compute the digests."""
        facts = self.to_json(with_digest=False)
        # The same checkpoint may be named by its save directory or by its tag directory.
        facts["source"] = {k: v for k, v in self.source.items() if k not in {"url", "tag"}}
        for name in ("warnings", "not_carried", "pointer"):
            facts.pop(name)
        object.__setattr__(self, "digest", _digest(facts))
        how = {"units", "chunk_bytes", "server_copies"}
        object.__setattr__(self, "content_digest", _digest({k: v for k, v in facts.items() if k not in how}))

    @property
    def layout_digest(self) -> str:
        """Digest of the target's files and of the options that decide their bytes."""
        return _digest({"target": self.target, "files": self._files()})

    @property
    def source_digest(self) -> str:
        """Digest of the source's files, each with its pin."""
        return source_digest(self.source)

    @property
    def on_overflow(self) -> OverflowPolicy:
        """The policy for elements that are too large for their new type."""
        return OverflowPolicy(self.target.get("on_overflow", OverflowPolicy.INF))

    def to_json(self, *, with_digest: bool = True) -> dict[str, Any]:
        """The plan as JSON values. Units are (file, offset, file, end, commit) of their first and last chunks."""
        facts: dict[str, Any] = {
            "schema_version": PLAN_SCHEMA_VERSION,
            "source": self.source,
            "target": self.target,
            "files": self._files(),
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

    def _files(self) -> list[list[Any]]:
        return [[f.path, f.size_bytes, f.commit, f.shape] for f in self.files]


# Items of a unit: pieces so small that their bytes stay in the cache from one pass to the next.
#
# An item is read, summed, digested and written before the next item begins. Items of a large tensor end at the ends of
# digest blocks (`BLOCK_BYTES`), so that no block is digested from two items.

CACHED_BYTES = 2 << 20
"""Size of an item: about the size of a core's own cache. With shorter items, threads pass Python's lock more often: a
cast of 1.3 GB to 16 bits by two threads took 1.5 s with items of 256 KiB, 0.88 s with 1 MiB, 0.77 s with 2 MiB, and
0.96 s with 4 MiB."""


@dataclass(frozen=True, slots=True)
class WriteItem:
    """A run of bytes of a chunk that is made and written at once; `at` is its place in the memory of its step."""

    chunk: Chunk
    file: TargetFile
    begin: int
    """First byte in the file."""
    at: int
    length_bytes: int


def steps_of(unit: Unit, files: Sequence[TargetFile], most_bytes: int) -> Iterator[list[WriteItem]]:
    """The items of a unit in the order of its chunks, grouped in steps: lists of items that are made together.

    A step takes at most `most_bytes` of memory, or consists of one item.
    """
    step: list[WriteItem] = []
    held = 0
    for chunk in unit.chunks:
        file, end = files[chunk.file], chunk.offset + chunk.length_bytes
        begin = chunk.offset
        while begin < end or begin == end == chunk.offset:
            stop = _cut(file.template, begin, end, most_bytes)
            if step and held + stop - begin > most_bytes:
                yield step
                step, held = [], 0
            step.append(WriteItem(chunk, file, begin, held, stop - begin))
            held += stop - begin
            if begin == stop:
                break
            begin = stop
    if step:
        yield step


def _cut(template: FileTemplate, begin: int, end: int, most_bytes: int) -> int:
    """The end of an item that begins at `begin`: at most `most_bytes` later, and at the end of a block if possible."""
    limit = begin + most_bytes
    if limit >= end:
        return end
    inside = template.bodies_in(limit - 1, limit)
    if not inside:
        return limit
    body = inside[0]
    first = body.begin * body.dtype.itemsize_bytes - body.offset
    aligned = (limit + first) // BLOCK_BYTES * BLOCK_BYTES - first
    if aligned > max(begin, body.offset):
        return aligned
    return body.offset if body.offset > begin else limit
