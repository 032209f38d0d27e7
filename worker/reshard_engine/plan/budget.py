"""The memory model: what metadata takes, what a unit holds while it runs, and how many may run at once.

One budget, `--memory-limit`, covers them all: the parsed checkpoint, the plan, the journal's records, the
manifest, and the buffers of units and uploads in flight (an upload sends the unit's own buffer).
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard.errors import RequestError
from reshard_engine.integrity.digests import BLOCK_BYTES
from reshard_engine.tensors.layout import FileTemplate, TargetFile
from reshard_engine.tensors.shard_map import ShardMap

READ_BATCH_BYTES = 16 << 20
"""Largest run of source bytes read at once beside the chunk that it fills."""
MIN_CHUNK_BYTES = 1 << 10

# Upper bounds measured with tracemalloc over 2,000 to 8,000 parameters on 4 to 16 ranks, CPython 3.11;
# `tests/memory` holds them against what a run takes.
TENSOR_BYTES = 700
"""A tensor of the source: its name, shape and parameter."""
PIECE_BYTES = 110
"""A row of the shard map, with the copies that sorting and proving it make."""
BOX_BYTES = 700
"""A box of a view."""
FILE_BYTES = 2_300
"""A file of the target: in layout, plan, records and manifest."""
BODY_BYTES = 2_000
"""A tensor in a file of the target: its digests and its entry in the manifest."""
UNIT_BYTES = 2_500
"""A unit: in the plan and as a record."""
BLOCK_DIGEST_BYTES = 60
"""A block of 256 KiB of a tensor: its digest in records, their JSON, and put together."""
PART_BYTES = 300
"""A literal or body of a file's shape; files of one shape share it."""


def metadata_bytes(shard_map: ShardMap, files: Sequence[TargetFile]) -> int:
    """What the metadata of a conversion takes at its peak, beside the interpreter and the parsed skeletons.

    Skeletons are bounded by the limits of the pickle interpreter.
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
        + BOX_BYTES * sum(len(v.boxes) for v in shard_map.views.values())
        + FILE_BYTES * len(files)
        + BODY_BYTES * bodies
        + shapes
    )


def running_bytes(metadata: int, write_bytes: int, chunk_bytes: int) -> int:
    """Metadata with what grows with the bytes: units with their records, and the digests of blocks."""
    units = -(-write_bytes // chunk_bytes)
    return metadata + UNIT_BYTES * units + BLOCK_DIGEST_BYTES * -(-write_bytes // BLOCK_BYTES)


def unit_bytes(chunk_bytes: int) -> int:
    """Most bytes that one running unit holds: its chunk, a read batch, and the scratch of a cast.

    A cast works on a read batch: the source (at most the batch), the result (at most twice it when it
    widens) and one intermediate of the same size.
    """
    batch = min(READ_BATCH_BYTES, max(4 * chunk_bytes, 64 << 10))
    return chunk_bytes + 4 * batch


def chunk_bytes_within(
    limit_bytes: int, metadata: int, write_bytes: int, wanted_bytes: int, *, least_bytes: int
) -> int:
    """The largest grain up to the wanted one with which at least one unit fits the limit beside the metadata.

    Raises:
        RequestError: `request.budget_too_small` if even the least grain does not fit.
    """
    chunk = wanted_bytes
    floor = max(least_bytes, MIN_CHUNK_BYTES)
    grains = [chunk]
    while grains[-1] > floor:
        grains.append(max(floor, grains[-1] // 2))
    # A smaller grain takes less for its buffers and more for its units: the least need is in between.
    needs = [running_bytes(metadata, write_bytes, grain) + unit_bytes(grain) for grain in grains]
    for grain, need in zip(grains, needs, strict=True):
        if need <= limit_bytes:
            return grain
    need = min(needs)
    held = running_bytes(metadata, write_bytes, grains[needs.index(need)])
    raise RequestError(
        "request.budget_too_small",
        f"names, shapes and plan of this checkpoint take {held} bytes of memory and one unit needs {need - held}, "
        f"the limit is {limit_bytes}",
        fix=f"--memory-limit {-(-need // (1 << 20))}MiB",
        details={"need_bytes": need, "metadata_bytes": held, "limit_bytes": limit_bytes},
    )


def threads_within(limit_bytes: int, metadata: int, chunk_bytes: int, wanted: int) -> int:
    """How many units may run at once beside the metadata under the limit, at most `wanted`, at least one."""
    return max(1, min(wanted, (limit_bytes - metadata) // unit_bytes(chunk_bytes)))


def peak_bytes(metadata: int, threads: int, unit_lengths: Sequence[int]) -> int:
    """The model's peak of a run, beside the interpreter: metadata, and as many units as run at once."""
    return metadata + min(threads, len(unit_lengths)) * unit_bytes(max(unit_lengths))
