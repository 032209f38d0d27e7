"""Items of a unit: pieces so small that their bytes stay in the cache from one pass to the next.

An item is read, summed, digested and written before the next item begins. Items of a large tensor end at the ends of
digest blocks (`digests`), so that no block is digested from two items.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reshard_engine.integrity.digests import BLOCK_BYTES
from reshard_engine.plan.model import Chunk, Unit
from reshard_engine.tensors.layout import FileTemplate, TargetFile

CACHED_BYTES = 2 << 20
"""Size of an item: about the size of a core's own cache. With shorter items, threads pass Python's lock more often: a
cast of 1.3 GB to 16 bits by two threads took 1.5 s with items of 256 KiB, 0.88 s with 1 MiB, 0.77 s with 2 MiB, and
0.96 s with 4 MiB."""


@dataclass(frozen=True, slots=True)
class WriteItem:
    """A run of bytes of a chunk that is made and written at once; `at` is its place in the memory of its step."""

    chunk: Chunk
    file: TargetFile
    begin: int
    """First byte in the file."""
    at: int
    length_bytes: int


def steps_of(unit: Unit, files: Sequence[TargetFile], most_bytes: int) -> Iterator[list[WriteItem]]:
    """The items of a unit in the order of its chunks, grouped in steps: lists of items that are made together.

    A step takes at most `most_bytes` of memory, or consists of one item.
    """
    step: list[WriteItem] = []
    held = 0
    for chunk in unit.chunks:
        file, end = files[chunk.file], chunk.offset + chunk.length_bytes
        begin = chunk.offset
        while begin < end or begin == end == chunk.offset:
            stop = _cut(file.template, begin, end, most_bytes)
            if step and held + stop - begin > most_bytes:
                yield step
                step, held = [], 0
            step.append(WriteItem(chunk, file, begin, held, stop - begin))
            held += stop - begin
            if begin == stop:
                break
            begin = stop
    if step:
        yield step


def _cut(template: FileTemplate, begin: int, end: int, most_bytes: int) -> int:
    """The end of an item that begins at `begin`: at most `most_bytes` later, and at the end of a block if possible."""
    limit = begin + most_bytes
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
