"""Which bytes of a target its store can copy from source objects itself, and how large files are cut for that.

Parts of a multipart upload are equal but where a long run of bytes moves unchanged: there they follow the run, so that
it is whole parts, and what is made in between (headers, descriptors) takes as much of its neighbours as a part needs.

Source: Amazon S3 API reference (parts are at least 5 MiB but for the last, at most 10,000; `UploadPartCopy`).
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
"""Bodies of large files from which on nobody looks for runs: they are short then, and looking takes minutes."""
_PARTS_OF_A_RUN = 2
"""Least parts that a run must be long for its cuts to be worth their price: a part beside it, and the proof."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """How one large file is cut."""

    chunks: tuple[tuple[int, int], ...]
    """(offset, length), tiling the file."""
    server_copies: tuple[ServerCopy, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes `[begin, end)` of a target file that lie in one piece in a source file, too."""

    begin: int
    end: int
    source: int
    source_offset: int
    record: int | None

    def joined(self, other: _Run) -> _Run | None:
        """Both as one, if the other one goes on where this one ends."""
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
    """The cuts of the large files that hold long unchanged runs, by number.

    Args:
        checkpoint: What the reader found.
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
    """The number of each chunk's part within its file, from 1 on."""
    numbers: dict[Chunk, int] = {}
    counts: dict[int, int] = {}
    for unit in units:
        for chunk in unit.chunks:
            numbers[chunk] = counts[chunk.file] = counts.get(chunk.file, 0) + 1
    return numbers


def _runs(checkpoint: Checkpoint, file: TargetFile) -> Iterator[_Run]:
    """The longest runs of a file, in file order."""
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
    """The pieces behind a body whose bytes do not change on the way."""
    shard_map = checkpoint.shard_map
    if tensor == ZEROS or shard_map.tensors[tensor].dtype is not body.dtype or shard_map.averages(tensor):
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
        # What is made before the run must be a whole part, or nothing.
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
    """`[begin, end)` in as few pieces as may be, of about one size: none is shorter than half the longest."""
    length = end - begin
    count = -(-length // most)
    edges = [begin + length * n // count for n in range(count)] if count else []
    return [(low, high - low) for low, high in zip(edges, [*edges[1:], end], strict=True)] if edges else []


def _proof(checksums: Sequence[tuple[int, int, int]], offset: int, length: int) -> RecordSum | None:
    """The record around a range, if reading the rest of it is much less than reading the range."""
    index = bisect_right(checksums, offset, key=lambda c: c[0]) - 1
    if index < 0:
        return None
    start, size, crc32 = checksums[index]
    inside = offset + length <= start + size
    return RecordSum(start, size, crc32) if inside and 2 * (size - length) <= length else None
