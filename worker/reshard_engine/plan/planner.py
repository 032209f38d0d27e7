"""The planner: it makes a plan from a checkpoint and a layout, deterministically and without I/O."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reshard.errors import RequestError, counted
from reshard.models.jobs import ConvertRequest
from reshard.options import ConversionOptions, decides_bytes, former_place
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.plan.budget import UNIT_BYTES, chunk_bytes_within, metadata_bytes, running_bytes, unit_bytes
from reshard_engine.plan.model import Chunk, Plan, PlannedFile, RecordSum, ServerCopy, Unit
from reshard_engine.tensors.layout import ZEROS, Body, TargetFile, TargetLayout
from reshard_engine.tensors.views import Merged, plan_facts

# Planning of server-side copies: the ranges that the target's store can copy, and the cuts of large files.
#
# The parts of a multipart upload usually have equal lengths. Where a long run of bytes moves unchanged, the cuts follow
# the run, so that it consists of whole parts. The bytes between two runs (headers, descriptors) take as many bytes of
# their neighbours as a part needs.
#
# Source: Amazon S3 API reference (every part but the last has at least 5 MiB; at most 10,000 parts; `UploadPartCopy`).

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
        source = checkpoint.files[run.source]
        # Of one archive, not of a sequence: there the bytes of a copied run are read, and its tensors have digests.
        sums = source.sums.table if source.directory_sha256 is not None else np.zeros((3, 0), np.int64)
        proof = _proof(sums, offset, run.end - begin)
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


def _proof(checksums: npt.NDArray[np.int64], offset: int, length: int) -> RecordSum | None:
    """The record that holds a range, if the rest of the record is at most half as long as the range; else None."""
    index = int(np.searchsorted(checksums[0], offset, side="right")) - 1
    if index < 0:
        return None
    start, size, crc32 = checksums[:, index].tolist()
    inside = offset + length <= start + size
    return RecordSum(start, size, crc32) if inside and 2 * (size - length) <= length else None


# The plan of a conversion.

MAX_PARTS = 9_000
MAX_FILES_PER_UNIT = 256


def plan_conversion(
    checkpoint: Checkpoint,
    layout: TargetLayout,
    request: ConvertRequest,
    *,
    min_part_bytes: int | None,
    copied_from: Collection[int] = (),
) -> Plan:
    """Make the plan of a conversion.

    Args:
        checkpoint: The source.
        layout: The target's layout.
        request: The options. `part_bytes` is the wanted chunk size; `memory_limit_bytes` bounds it.
        min_part_bytes: Least size of a part if the target is written in multipart uploads, else None.
        copied_from: Numbers of the source files from which the target's store can copy.

    Raises:
        RequestError: `request.budget_too_small` if no chunk size fits the memory limit.
    """
    largest = max((f.size_bytes for f in layout.files), default=0)
    least = max(min_part_bytes or 1, -(-largest // MAX_PARTS) if min_part_bytes else 1)
    metadata = metadata_bytes(checkpoint.shard_map, layout.files)
    wanted = max(request.part_bytes, least)
    write_bytes = sum(f.size_bytes for f in layout.files)
    chunk_bytes = chunk_bytes_within(request.memory_limit_bytes, metadata, write_bytes, wanted, least_bytes=least)
    cuts = plan_server_copies(
        checkpoint, layout.files, copied_from, chunk_bytes=chunk_bytes, min_part_bytes=min_part_bytes or 1
    )
    in_parts = min_part_bytes is not None
    units = tuple(_units(layout.files, chunk_bytes, cuts, in_parts=in_parts))
    held = running_bytes(metadata, write_bytes, chunk_bytes)
    more = UNIT_BYTES * max(0, len(units) - -(-write_bytes // chunk_bytes)) if cuts else 0
    if more and held + more + unit_bytes(chunk_bytes) > request.memory_limit_bytes:
        cuts, more = dict[int, Cuts](), 0
        units = tuple(_units(layout.files, chunk_bytes, cuts, in_parts=in_parts))
    return Plan(
        source=source_facts(checkpoint),
        target=request_facts(request) | _merged(checkpoint),
        files=tuple(PlannedFile(f.path, f.size_bytes, f.commit, f.template.digest) for f in layout.files),
        units=units,
        chunk_bytes=chunk_bytes,
        read_bytes=_read_bytes(checkpoint, layout.files),
        write_bytes=write_bytes,
        pointer=layout.pointer.name if layout.pointer else None,
        metadata_bytes=held + more,
        warnings=(*checkpoint.warnings, *checkpoint.pin_warnings, *layout.warnings, *_strided_warning(checkpoint)),
        not_carried=(*checkpoint.not_carried, *layout.not_carried),
        server_copies=tuple(o for _, found in sorted(cuts.items()) for o in found.server_copies),
    )


def _strided_warning(checkpoint: Checkpoint) -> list[str]:
    count = len(checkpoint.shard_map.strides)
    if not count:
        return []
    strided = counted(count, "tensor lies strided in its file", "tensors lie strided in their files")
    return [f"{strided}: each unit that needs one reads all of it"]


def source_facts(checkpoint: Checkpoint) -> dict[str, object]:
    """Place and format of a source, and its files with their pins."""
    return {
        "url": checkpoint.url,
        "tag": checkpoint.tag,
        "format": checkpoint.format,
        "objects": [
            [file.name, number, info.size_bytes, info.pin]
            for file in sorted(checkpoint.files, key=lambda f: f.name)
            for number, info in enumerate(file.objects)
        ],
    }


def request_facts(request: ConvertRequest) -> dict[str, object]:
    """The options of a request that decide the bytes of its target, for the plan's digest."""
    choices = request.source.given()
    fields = ConversionOptions.model_fields.items()
    own = {name for name, info in fields if decides_bytes(info) and former_place(info) is None}
    return {
        "to": str(request.to),
        **request.model_dump(mode="json", include=own),
        # Options that name places are left out: the files that are read there are in the plan, with their pins.
        "options": {
            format_name: {n: o.value for n, o in found.items() if o.given and decides_bytes(o.info)}
            for format_name, found in request.digested_options().items()
        },
        **({"choices": choices} if choices else {}),
    }


def _merged(checkpoint: Checkpoint) -> dict[str, object]:
    """The facts beside the factors that decide the bytes of merged weights, for the plan's digest."""
    found = [plan_facts(d) for d in checkpoint.shard_map.derived.values() if isinstance(d, Merged)]
    return {"merged": found} if found else {}


def _read_bytes(checkpoint: Checkpoint, files: Sequence[TargetFile]) -> int:
    tensors = checkpoint.shard_map.tensors
    total = 0
    for file in files:
        for body in file.template.bodies:
            number = file.tensors[body.slot]
            if number != ZEROS:
                total += (body.end - body.begin) * tensors[number].dtype.itemsize_bytes
    return total


def _units(files: Sequence[TargetFile], chunk_bytes: int, cuts: Mapping[int, Cuts], *, in_parts: bool) -> list[Unit]:
    """The units: one per chunk of a large file, and one per group of small files up to a chunk. Commit files come last.

    Without `cuts` for a large file that is uploaded in parts, all its chunks but the last have equal lengths.
    """
    units: list[Unit] = []
    gathered: list[Chunk] = []
    room = chunk_bytes

    def flush(*, commit: bool) -> None:
        nonlocal room
        if gathered:
            units.append(Unit(len(units), tuple(gathered), commit))
            gathered.clear()
        room = chunk_bytes

    order = sorted(range(len(files)), key=lambda i: files[i].commit and files[i].size_bytes <= chunk_bytes)
    was_commit = False
    for index in order:
        file = files[index]
        commit = file.commit and file.size_bytes <= chunk_bytes
        if commit != was_commit or file.size_bytes > room or len(gathered) >= MAX_FILES_PER_UNIT:
            flush(commit=was_commit)
        was_commit = commit
        if file.size_bytes <= chunk_bytes:
            gathered.append(Chunk(index, 0, file.size_bytes))
            room -= file.size_bytes
            continue
        archives = () if in_parts else file.archives
        found = cuts[index].chunks if index in cuts else chunks_of(file.size_bytes, chunk_bytes, archives)
        for offset, length in found:
            gathered.append(Chunk(index, offset, length))
            flush(commit=False)
    flush(commit=was_commit)
    if not units:
        raise RequestError(
            "request.unsatisfiable",
            "there is nothing to write",
            fix="name a source with tensors: what this one holds is listed by `reshard inspect SRC`",
        )
    return units


def chunks_of(size_bytes: int, chunk_bytes: int, archives: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Chunks of one length that end earlier where an archive begins, if one begins in the second half of the chunk.

    The CRC-32 of a record stands behind it. A unit that begins within a record would wait there for the unit before it,
    which runs at the same time, and is written piece by piece: one thread would do the work of all.
    """
    begins = [offset for offset, _ in archives]
    chunks: list[tuple[int, int]] = []
    at = 0
    while at < size_bytes:
        end = min(at + chunk_bytes, size_bytes)
        if end < size_bytes:
            last = bisect_right(begins, end) - 1
            if last >= 0 and begins[last] > at + chunk_bytes // 2:
                end = begins[last]
        chunks.append((at, end - at))
        at = end
    return chunks
