"""From a checkpoint and a layout to a plan: pure, no I/O, deterministic."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from reshard.errors import RequestError
from reshard.models import ConvertRequest, OverflowPolicy
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.plan.budget import UNIT_BYTES, chunk_bytes_within, metadata_bytes, running_bytes, unit_bytes
from reshard_engine.plan.model import Chunk, Plan, PlannedFile, Unit
from reshard_engine.plan.server_copy import Cuts, plan_server_copies
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
    """The plan of a conversion.

    Args:
        checkpoint: What the reader found.
        layout: What the writer will write.
        request: Options; `part_bytes` is the wanted grain, `memory_limit_bytes` bounds it.
        min_part_bytes: Least size of a part where the target is written in multipart uploads, else None.
        copied_from: Numbers of the source files that the target's store can copy from itself.

    Raises:
        RequestError: `request.budget_too_small` if no grain fits the memory limit.
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
    units = tuple(_units(layout.files, chunk_bytes, cuts))
    held = running_bytes(metadata, write_bytes, chunk_bytes)
    more = UNIT_BYTES * max(0, len(units) - -(-write_bytes // chunk_bytes)) if cuts else 0
    if more and held + more + unit_bytes(chunk_bytes) > request.memory_limit_bytes:
        cuts, more = dict[int, Cuts](), 0
        units = tuple(_units(layout.files, chunk_bytes, cuts))
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
    return [f"{count} tensors lie strided in their files: each unit that needs one reads all of it"] if count else []


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
    return {
        "to": request.to.value,
        "dtype": request.dtype.value if request.dtype else None,
        "max_shard_bytes": request.max_shard_bytes,
        "exclude_frozen": request.exclude_frozen,
        "opaque": request.opaque.value,
        "layout": request.layout.model_dump(mode="json") if request.layout else None,
        "rules": request.rules,
        "family": request.family,
        "names": request.names.value if request.names else None,
        "replicas": request.replicas.value,
        # Not said where it is as it always was: what was converted before is still recognised.
        **({"adapter": request.adapter} if request.adapter else {}),
        **({"on_overflow": request.on_overflow.value} if request.on_overflow is not OverflowPolicy.INF else {}),
    }


def _merged(checkpoint: Checkpoint) -> dict[str, object]:
    """What decides the bytes of merged weights beside their factors."""
    merges = checkpoint.shard_map.merges
    return {"merged": [m.said for m in merges.values()]} if merges else {}


def _read_bytes(checkpoint: Checkpoint, files: Sequence[TargetFile]) -> int:
    tensors = checkpoint.shard_map.tensors
    total = 0
    for file in files:
        for body in file.template.bodies:
            number = file.tensors[body.slot]
            if number != ZEROS:
                total += (body.end - body.begin) * tensors[number].dtype.itemsize_bytes
    return total


def _units(files: Sequence[TargetFile], chunk_bytes: int, cuts: Mapping[int, Cuts]) -> list[Unit]:
    """Large files one chunk a unit, small ones gathered until a chunk is full. Commit files come last.

    Chunks of a large file are equal but for the last where `cuts` say nothing else.
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
        for offset, length in cuts[index].chunks if index in cuts else _equal(file.size_bytes, chunk_bytes):
            gathered.append(Chunk(index, offset, length))
            flush(commit=False)
    flush(commit=was_commit)
    if not units:
        raise RequestError("request.unsatisfiable", "there is nothing to write")
    return units


def _equal(size_bytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    return [(at, min(chunk_bytes, size_bytes - at)) for at in range(0, size_bytes, chunk_bytes)]
