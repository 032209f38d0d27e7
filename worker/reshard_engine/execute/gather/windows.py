"""How a unit is worked through: in windows small enough that what one pass brings into the cache the next finds there.

A window is read, summed, digested and written before the next one is touched. Windows of a large tensor end where its
blocks do (`digests`), so that no block is digested from two windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reshard_engine.execute.gather.chunks import Part
from reshard_engine.integrity.digests import BLOCK_BYTES
from reshard_engine.plan.model import Unit
from reshard_engine.tensors.layout import FileTemplate, TargetFile

CACHED_BYTES = 2 << 20
"""Of a window: about what a core's own cache holds. Shorter ones make threads hand Python's lock over more often: a
cast of 1.3 GB to 16 bits by two threads took 1.5 s in windows of 256 KiB, 0.88 of 1 MiB, 0.77 of 2, 0.96 of 4."""


@dataclass(frozen=True, slots=True)
class Window:
    """A part of one chunk of a unit, in a memory that it shares with the others of its step."""

    chunk: int
    """Number of the chunk in its unit."""
    part: Part


def steps_of(unit: Unit, files: Sequence[TargetFile], window_bytes: int) -> Iterator[list[Window]]:
    """The windows of a unit in the order of its chunks, in groups that are filled together.

    A group takes at most `window_bytes` of memory, or is one window.
    """
    group: list[Window] = []
    held = 0
    for number, chunk in enumerate(unit.chunks):
        file, end = files[chunk.file], chunk.offset + chunk.length_bytes
        begin = chunk.offset
        while begin < end or begin == end == chunk.offset:
            stop = _cut(file.template, begin, end, window_bytes)
            if group and held + stop - begin > window_bytes:
                yield group
                group, held = [], 0
            group.append(Window(number, Part(file, begin, held, stop - begin)))
            held += stop - begin
            if begin == stop:
                break
            begin = stop
    if group:
        yield group


def _cut(template: FileTemplate, begin: int, end: int, window_bytes: int) -> int:
    """Where a window that begins at `begin` ends: at most so many bytes on, at a block of a tensor if it can."""
    limit = begin + window_bytes
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
