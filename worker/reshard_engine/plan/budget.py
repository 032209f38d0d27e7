"""The memory model: bytes of metadata, bytes of a running unit, and the number of units that may run at once.

One budget, `--memory-limit`, covers the parsed checkpoint, the plan, the records of the journal, the manifest, and the
buffers of units and uploads in flight (an upload sends the unit's own buffer).
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard.errors import RequestError
from reshard_engine.integrity.checksums import BLOCK_BYTES
from reshard_engine.tensors.layout import FileTemplate, TargetFile
from reshard_engine.tensors.shard_map import ShardMap
from reshard_engine.tensors.views import Spliced, View

READ_BATCH_BYTES = 16 << 20
"""Largest run of source bytes read at once beside the chunk that it fills."""
MIN_CHUNK_BYTES = 1 << 10

# These upper bounds were measured with tracemalloc over 2,000 to 8,000 parameters on 4 to 16 ranks, CPython 3.11.
# `tests/memory` compares them with the memory of real runs.
TENSOR_BYTES = 700
"""Bytes per tensor of the source: its name, shape and parameter."""
PIECE_BYTES = 110
"""Bytes per row of the shard map, with the copies made while the map is sorted and proven."""
BOX_BYTES = 700
"""Bytes per box of a view."""
FILE_BYTES = 2_300
"""Bytes per file of the target, in layout, plan, records and manifest."""
BODY_BYTES = 2_000
"""Bytes per tensor in a file of the target: its digests and its entry in the manifest."""
UNIT_BYTES = 2_500
"""Bytes per unit, in the plan and as a record."""
BLOCK_DIGEST_BYTES = 60
"""Bytes per block (256 KiB) of a tensor: its digest in records, in their JSON, and in the joined digests."""
PART_BYTES = 300
"""Bytes per literal or body of a template. Files of one shape share the template."""


def metadata_bytes(shard_map: ShardMap, files: Sequence[TargetFile]) -> int:
    """The peak memory for the metadata of a conversion, without the interpreter and the parsed skeletons.

    The limits of the pickle interpreter bound the skeletons.
    """
    templates: dict[int, FileTemplate] = {id(f.template): f.template for f in files}
    shapes = sum(
        PART_BYTES * (len(t.literals) + len(t.bodies)) + sum(len(data) for _, data in t.literals)
        for t in templates.values()
    )
    bodies = sum(len(f.template.bodies) for f in files)
    return (
        TENSOR_BYTES * len(shard_map.tensors)
        + PIECE_BYTES * shard_map.piece_count
        + BOX_BYTES * sum(len(v.boxes) for v in shard_map.derived.values() if isinstance(v, View))
        + BOX_BYTES * sum(len(v.splices) for v in shard_map.derived.values() if isinstance(v, Spliced))
        + FILE_BYTES * len(files)
        + BODY_BYTES * bodies
        + shapes
    )


def running_bytes(metadata: int, write_bytes: int, chunk_bytes: int) -> int:
    """Memory for metadata, units, their records and block digests; the last three grow with the written bytes."""
    units = -(-write_bytes // chunk_bytes)
    return metadata + UNIT_BYTES * units + BLOCK_DIGEST_BYTES * -(-write_bytes // BLOCK_BYTES)


def unit_bytes(chunk_bytes: int) -> int:
    """The most bytes that one running unit holds: its chunk, a read batch, and the scratch memory of a cast.

    A cast works on a read batch: it holds the source (at most one batch), the result (at most two batches, if it
    widens) and one intermediate result of that size.
    """
    batch = min(READ_BATCH_BYTES, max(4 * chunk_bytes, 64 << 10))
    return chunk_bytes + 4 * batch


def chunk_bytes_within(
    memory_limit_bytes: int, metadata: int, write_bytes: int, wanted_bytes: int, *, least_bytes: int
) -> int:
    """The largest chunk size, up to the wanted one, with which the metadata and at least one unit fit the limit.

    Raises:
        RequestError: `request.budget_too_small` if no chunk size fits.
    """
    chunk = wanted_bytes
    floor = max(least_bytes, MIN_CHUNK_BYTES)
    grains = [chunk]
    while grains[-1] > floor:
        grains.append(max(floor, grains[-1] // 2))
    # Smaller chunks need less memory for buffers and more for the table of units: the minimum lies in between.
    needs = [running_bytes(metadata, write_bytes, grain) + unit_bytes(grain) for grain in grains]
    for grain, need in zip(grains, needs, strict=True):
        if need <= memory_limit_bytes:
            return grain
    need = min(needs)
    held = running_bytes(metadata, write_bytes, grains[needs.index(need)])
    raise RequestError(
        "request.budget_too_small",
        f"names, shapes and plan of this checkpoint take {held} bytes of memory and one unit needs {need - held}, "
        f"the limit is {memory_limit_bytes}",
        fix=f"--memory-limit {-(-need // (1 << 20))}MiB",
        details={"need_bytes": need, "metadata_bytes": held, "limit_bytes": memory_limit_bytes},
    )


def threads_within(memory_limit_bytes: int, metadata: int, chunk_bytes: int, wanted: int) -> int:
    """The number of units that may run at once: as many as fit the limit beside the metadata, from 1 to `wanted`."""
    return max(1, min(wanted, (memory_limit_bytes - metadata) // unit_bytes(chunk_bytes)))


def peak_bytes(metadata: int, threads: int, unit_lengths: Sequence[int]) -> int:
    """The peak memory of a run according to the model, without the interpreter: metadata and all concurrent units."""
    return metadata + min(threads, len(unit_lengths)) * unit_bytes(max(unit_lengths))
