"""The memory model: what a unit holds while it runs, and how many may run at once."""

from __future__ import annotations

from reshard.errors import RequestError

READ_BATCH_BYTES = 16 << 20
"""Largest run of source bytes read at once beside the chunk that it fills."""
MIN_CHUNK_BYTES = 1 << 10


def unit_bytes(chunk_bytes: int) -> int:
    """Most bytes that one running unit holds: its chunk, a read batch, and the scratch of a cast.

    A cast works on a read batch: the source (at most the batch), the result (at most twice it when it
    widens) and one intermediate of the same size.
    """
    batch = min(READ_BATCH_BYTES, max(4 * chunk_bytes, 64 << 10))
    return chunk_bytes + 4 * batch


def chunk_bytes_within(limit_bytes: int, wanted_bytes: int, *, least_bytes: int) -> int:
    """The largest grain up to the wanted one with which at least one unit fits the limit.

    Raises:
        RequestError: `request.budget_too_small` if even the least grain does not fit.
    """
    chunk = wanted_bytes
    floor = max(least_bytes, MIN_CHUNK_BYTES)
    while unit_bytes(chunk) > limit_bytes and chunk > floor:
        chunk = max(floor, chunk // 2)
    if unit_bytes(chunk) > limit_bytes:
        raise RequestError(
            "request.budget_too_small",
            f"one unit of {chunk} bytes needs {unit_bytes(chunk)} bytes of memory, the limit is {limit_bytes}",
            fix=f"--memory-limit {-(-unit_bytes(chunk) // (1 << 20))}MiB",
            details={"need_bytes": unit_bytes(chunk), "limit_bytes": limit_bytes},
        )
    return chunk


def threads_within(limit_bytes: int, chunk_bytes: int, wanted: int) -> int:
    """How many units may run at once under the limit, at most `wanted`, at least one."""
    return max(1, min(wanted, limit_bytes // unit_bytes(chunk_bytes)))
