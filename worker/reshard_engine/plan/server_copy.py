"""Planning of server-side copies: the ranges that the target's store can copy, and the cuts of large files.

The parts of a multipart upload usually have equal lengths. Where a long run of bytes moves unchanged, the cuts follow
the run, so that it consists of whole parts. The bytes between two runs (headers, descriptors) take as many bytes of
their neighbours as a part needs.

Source: Amazon S3 API reference (every part but the last has at least 5 MiB; at most 10,000 parts; `UploadPartCopy`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from reshard_engine.checkpoint import Checkpoint
from reshard_engine.plan.model import Chunk, RecordSum, ServerCopy, Unit
from reshard_engine.tensors.layout import ZEROS, Body, TargetFile

MAX_CUTS = 9_900
MAX_BODIES = 500_000
"""Number of bodies in large files above which no runs are searched: runs are short then, and a search takes minutes."""
_PARTS_OF_A_RUN = 2
"""Least length of a run, in least parts. Shorter runs cost more (one more part, and the proof) than they save."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """The cuts of one large file."""

    chunks: tuple[tuple[int, int], ...]
    """(offset, length) of each chunk. The chunks tile the file."""
    server_copies: tuple[ServerCopy, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes `[begin, end)` of a target file that are also contiguous in a source file."""

    begin: int
    end: int
    source: int
    source_offset: int
    record: int | None

    def joined(self, other: _Run) -> _Run | None:
        """Both runs as one, if the other run continues this one in target and source; else None."""
        follows = (self.end, self.source, self.source_offset + self.end - self.begin, self.record) == (
            *(other.begin, other.source, other.source_offset),
            other.record,
        )
        return _Run(self.begin, other.end, self.source, self.source_offset, self.record) if follows else None


def plan_server_copies(
    checkpoint: Checkpoint,
    files: Sequence[TargetFile],
    sources: Collection[int],
    *,
    chunk_bytes: int,
    min_part_bytes: int,
) -> Mapping[int, Cuts]:
    """The cuts of the large files that hold long unchanged runs, by file number.

    Args:
        checkpoint: The source.
        files: The target's files.
        sources: Numbers of the source files that the target's store can copy from.
        chunk_bytes: Most bytes of a chunk; files up to this size are not uploaded in parts.
        min_part_bytes: Least bytes of a part that is not the last one.
    """
    large = [n for n, f in enumerate(files) if f.size_bytes > chunk_bytes]
    bodies = sum(len(files[n].template.bodies) for n in large)
    if not sources or chunk_bytes < 2 * min_part_bytes or bodies > MAX_BODIES:
        return {}
    found: dict[int, Cuts] = {}
    for number in large:
        runs = [r for r in _runs(checkpoint, files[number]) if r.source in sources]
        cuts = _cut(checkpoint, files[number], number, runs, (min_part_bytes, chunk_bytes))
        if cuts.server_copies and len(cuts.chunks) <= MAX_CUTS:
            found[number] = cuts
    return found


def part_numbers(units: Iterable[Unit]) -> dict[Chunk, int]:
    """The part number of each chunk within its file, from 1 on."""
    numbers: dict[Chunk, int] = {}
    counts: dict[int, int] = {}
    for unit in units:
        for chunk in unit.chunks:
            numbers[chunk] = counts[chunk.file] = counts.get(chunk.file, 0) + 1
    return numbers


def _runs(checkpoint: Checkpoint, file: TargetFile) -> Iterator[_Run]:
    """The runs of a file, in file order; adjacent runs are joined."""
    last: _Run | None = None
    for body in file.template.bodies:
        for run in _pieces(checkpoint, file.tensors[body.slot], body):
            if last is not None and (joined := last.joined(run)) is not None:
                last = joined
                continue
            if last is not None:
                yield last
            last = run
    if last is not None:
        yield last


def _pieces(checkpoint: Checkpoint, tensor: int, body: Body) -> Iterator[_Run]:
    """The pieces of the source that hold a body, if its bytes do not change."""
    shard_map = checkpoint.shard_map
    if tensor == ZEROS or shard_map.tensors[tensor].dtype is not body.dtype or shard_map.is_computed(tensor):
        return
    size = body.dtype.itemsize_bytes
    pieces = shard_map.pieces(tensor, body.begin, body.end)
    for row in range(len(pieces.begin)):
        begin, end, source = int(pieces.begin[row]), int(pieces.end[row]), int(pieces.file[row])
        if pieces.strides[row] < 0 and len(checkpoint.files[source].objects) == 1:
            at = body.offset + (begin - body.begin) * size
            yield _Run(at, at + (end - begin) * size, source, int(pieces.offset[row]), body.record)


def _cut(checkpoint: Checkpoint, file: TargetFile, number: int, runs: Iterable[_Run], sizes: tuple[int, int]) -> Cuts:
    """Cut a file so that runs are whole chunks where they are long enough."""
    least, most = sizes
    chunks: list[tuple[int, int]] = []
    server_copies: list[ServerCopy] = []
    done = 0
    for run in runs:
        # The bytes before the run must be at least one part, or there must be none.
        begin = run.begin if run.begin == done else max(run.begin, done + least)
        if run.end - begin < _PARTS_OF_A_RUN * least:
            continue
        chunks += _even(done, begin, most)
        chunks += _even(begin, run.end, most)
        offset = run.source_offset + begin - run.begin
        record_offset = 0 if run.record is None else file.template.records[run.record][0]
        proof = _proof(checkpoint.files[run.source].checksums, offset, run.end - begin)
        server_copies.append(ServerCopy(number, begin, run.end, run.record, record_offset, run.source, offset, proof))
        done = run.end
    chunks += _even(done, file.size_bytes, most)
    return Cuts(tuple(chunks), tuple(server_copies))


def _even(begin: int, end: int, most: int) -> list[tuple[int, int]]:
    """`[begin, end)` in as few pieces as possible, of about one size: none is shorter than half the longest."""
    length = end - begin
    count = -(-length // most)
    edges = [begin + length * n // count for n in range(count)] if count else []
    return [(low, high - low) for low, high in zip(edges, [*edges[1:], end], strict=True)] if edges else []


def _proof(checksums: Sequence[tuple[int, int, int]], offset: int, length: int) -> RecordSum | None:
    """The record that holds a range, if the rest of the record is at most half as long as the range; else None."""
    index = bisect_right(checksums, offset, key=lambda c: c[0]) - 1
    if index < 0:
        return None
    start, size, crc32 = checksums[index]
    inside = offset + length <= start + size
    return RecordSum(start, size, crc32) if inside and 2 * (size - length) <= length else None
