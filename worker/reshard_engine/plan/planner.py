"""The planner: it makes a plan from a checkpoint and a layout, deterministically and without I/O."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence

from reshard.errors import RequestError, counted
from reshard.models import ConvertRequest
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.plan.budget import UNIT_BYTES, chunk_bytes_within, metadata_bytes, running_bytes, unit_bytes
from reshard_engine.plan.model import Chunk, Plan, PlannedFile, Unit
from reshard_engine.plan.server_copy import Cuts, plan_server_copies
from reshard_engine.tensors.derived import Merged, plan_facts
from reshard_engine.tensors.layout import ZEROS, TargetFile, TargetLayout

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
        source=_source(checkpoint),
        target=request_facts(request) | _merged(checkpoint),
        files=tuple(PlannedFile(f.path, f.size_bytes, f.commit, f.template.digest) for f in layout.files),
        units=units,
        chunk_bytes=chunk_bytes,
        read_bytes=_read_bytes(checkpoint, layout.files),
        write_bytes=write_bytes,
        pointer=layout.pointer.name if layout.pointer else None,
        metadata_bytes=held + more,
        warnings=(*checkpoint.warnings, *layout.warnings, *_strided_warning(checkpoint)),
        not_carried=(*checkpoint.not_carried, *layout.not_carried),
        server_copies=tuple(o for _, found in sorted(cuts.items()) for o in found.server_copies),
    )


def _strided_warning(checkpoint: Checkpoint) -> list[str]:
    count = len(checkpoint.shard_map.strides)
    if not count:
        return []
    strided = counted(count, "tensor lies strided in its file", "tensors lie strided in their files")
    return [f"{strided}: each unit that needs one reads all of it"]


def _source(checkpoint: Checkpoint) -> dict[str, object]:
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
    return {
        "to": str(request.to),
        "dtype": request.dtype.value if request.dtype else None,
        "exclude_frozen": request.exclude_frozen,
        "opaque": request.opaque.value,
        "replicas": request.replicas.value,
        "on_overflow": request.on_overflow.value,
        # Options that name places are left out: the files that are read there are in the plan, with their pins.
        "options": {
            name: {option: value for option, value in found.given().items() if option not in found.places()}
            for name, found in request.options.by_format()
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
            fix="name a source with tensors: reshard inspect SRC lists what this one holds",
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
