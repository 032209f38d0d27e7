"""The memory model: what metadata takes, what a unit holds while it runs, and how many may run at once.

One budget, `--memory-limit`, covers them all: the parsed checkpoint, the plan, the journal's records, the
manifest, and the buffers of units and uploads in flight (an upload sends the unit's own buffer).
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard.errors import RequestError
from reshard_engine.layout import FileTemplate, TargetFile
from reshard_engine.shardmap import ShardMap

READ_BATCH_BYTES = 16 << 20
"""Largest run of source bytes read at once beside the chunk that it fills."""
MIN_CHUNK_BYTES = 1 << 10

# Upper bounds measured with tracemalloc over 2,000 to 8,000 parameters on 4 to 16 ranks, CPython 3.11;
# `tests/memory` holds them against what a run takes.
TENSOR_BYTES = 700
"""A tensor of the source: its name, shape and parameter."""
PIECE_BYTES = 220
"""A row of the shard map, with the copies that sorting and proving it make."""
FILE_BYTES = 2_300
"""A file of the target: in layout, plan, records and manifest."""
BODY_BYTES = 2_000
"""A tensor in a file of the target: its digests and its entry in the manifest."""
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
        + FILE_BYTES * len(files)
        + BODY_BYTES * bodies
        + shapes
    )


def unit_bytes(chunk_bytes: int) -> int:
    """Most bytes that one running unit holds: its chunk, a read batch, and the scratch of a cast.

    A cast works on a read batch: the source (at most the batch), the result (at most twice it when it
    widens) and one intermediate of the same size.
    """
    batch = min(READ_BATCH_BYTES, max(4 * chunk_bytes, 64 << 10))
    return chunk_bytes + 4 * batch


def chunk_bytes_within(limit_bytes: int, metadata: int, wanted_bytes: int, *, least_bytes: int) -> int:
    """The largest grain up to the wanted one with which at least one unit fits the limit beside the metadata.

    Raises:
        RequestError: `request.budget_too_small` if even the least grain does not fit.
    """
    chunk = wanted_bytes
    floor = max(least_bytes, MIN_CHUNK_BYTES)
    while metadata + unit_bytes(chunk) > limit_bytes and chunk > floor:
        chunk = max(floor, chunk // 2)
    need = metadata + unit_bytes(chunk)
    if need > limit_bytes:
        raise RequestError(
            "request.budget_too_small",
            f"names, shapes and plan of this checkpoint take {metadata} bytes of memory and one unit of {chunk} bytes "
            f"needs {unit_bytes(chunk)}, the limit is {limit_bytes}",
            fix=f"--memory-limit {-(-need // (1 << 20))}MiB",
            details={"need_bytes": need, "metadata_bytes": metadata, "limit_bytes": limit_bytes},
        )
    return chunk


def threads_within(limit_bytes: int, metadata: int, chunk_bytes: int, wanted: int) -> int:
    """How many units may run at once beside the metadata under the limit, at most `wanted`, at least one."""
    return max(1, min(wanted, (limit_bytes - metadata) // unit_bytes(chunk_bytes)))


def peak_bytes(metadata: int, threads: int, unit_lengths: Sequence[int]) -> int:
    """The model's peak of a run, beside the interpreter: metadata, and as many units as run at once."""
    return metadata + min(threads, len(unit_lengths)) * unit_bytes(max(unit_lengths))
