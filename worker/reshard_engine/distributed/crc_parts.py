"""Parts of records: which CRC slots of units need bytes that earlier units write.

A worker that does not execute such a unit before sums the bytes once more (`Executor.run`), if they are few.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from reshard_engine.plan.model import Chunk, Plan, RecordPart, Unit
from reshard_engine.tensors.layout import TargetFile


def copied_records(plan: Plan) -> frozenset[tuple[int, int]]:
    """The records, as (file, number), of which the store copies a part. Their CRC-32s are known by ranges of units."""
    return frozenset((o.file, o.record) for o in plan.server_copies if o.record is not None)


@dataclass(frozen=True)
class _WrittenChunk:
    """A chunk of a large file, and the place of its unit."""

    begin: int
    end: int
    place: int


class CrcParts:
    """The units of a plan, and what their CRC slots need of one another."""

    def __init__(
        self, units: Sequence[Unit], files: Sequence[TargetFile], copied: Container[tuple[int, int]] = ()
    ) -> None:
        """A place is a position in `units`.

        Args:
            units: The units, in order.
            files: The target's files.
            copied: Records whose parts no other worker can sum.
        """
        self._units = units
        self._files = files
        self._copied = copied
        self._chunks = _large_chunks(units, files)
        self._ends = {file: [chunk.end for chunk in chunks] for file, chunks in self._chunks.items()}
        self._first = {
            # For each chunk, the first place of a unit that writes it or a chunk behind it.
            file: list(accumulate((chunk.place for chunk in reversed(chunks)), min))[::-1]
            for file, chunks in self._chunks.items()
        }

    def first_needed(self) -> list[int]:
        """For each place, that of the first unit whose bytes its CRC slots sum; the place itself if there is none."""
        found = list(range(len(self._units)))
        for place, unit in enumerate(self._units):
            for chunk in unit.chunks:
                begins = [self._files[chunk.file].template.records[r][0] for r in self._records_of(chunk)]
                if begins:
                    first = self._first[chunk.file]
                    found[place] = min(found[place], first[bisect_right(self._ends[chunk.file], min(begins))])
        return found

    def again(self, place: int, of: Container[int]) -> int | None:
        """The bytes of units at the places `of` that the CRC slots of a unit need; None if nobody else can sum them."""
        parts = [part for part, other in self.parts_of(place) if other in of]
        if any((part.file, part.record) in self._copied for part in parts):
            return None
        return sum(part.length_bytes for part in parts)

    def open_bytes(self, places: Sequence[int]) -> list[int | None]:
        """For each unit of a wave, the bytes of the wave before it that a worker sums once more if it begins there.

        None stands where no worker may begin: behind a part of a record that the store copies.

        Args:
            places: The places of the wave's units, in order.
        """
        # Differences between neighbouring units of the wave, for bytes and for records that must not be cut.
        more, closed = [0] * (len(places) + 1), [0] * (len(places) + 1)
        numbers = {place: number for number, place in enumerate(places)}
        for number, place in enumerate(places):
            for part, of in self.parts_of(place):
                if of in numbers:
                    begin = numbers[of] + 1
                    is_copied = (part.file, part.record) in self._copied
                    for found, value in ((more, part.length_bytes), (closed, int(is_copied))):
                        found[begin] += value
                        found[number + 1] -= value
        summed = zip(accumulate(more[:-1]), accumulate(closed[:-1]), strict=True)
        return [None if cuts else length for length, cuts in summed]

    def _records_of(self, chunk: Chunk) -> list[int]:
        """The records of a large file for which a chunk has a slot."""
        if chunk.file not in self._chunks:
            return []
        template = self._files[chunk.file].template
        return [record for _, record in template.slots_in(chunk.offset, chunk.offset + chunk.length_bytes)]

    def parts_of(self, place: int) -> Iterator[tuple[RecordPart, int]]:
        """The parts of records for which a unit has slots, with the earlier places whose units write them."""
        for chunk in self._units[place].chunks:
            for record in self._records_of(chunk):
                offset, length = self._files[chunk.file].template.records[record]
                for other in self._overlapping(chunk.file, offset, offset + length):
                    if other.place < place:
                        low, high = max(offset, other.begin), min(offset + length, other.end)
                        yield RecordPart(chunk.file, record, low, high - low), other.place

    def _overlapping(self, file: int, begin: int, end: int) -> Iterator[_WrittenChunk]:
        chunks = self._chunks[file]
        # A slice would copy the rest of a file's chunks for each of its records.
        number = bisect_right(self._ends[file], begin)
        while number < len(chunks) and chunks[number].begin < end:
            yield chunks[number]
            number += 1


def _large_chunks(units: Sequence[Unit], files: Sequence[TargetFile]) -> Mapping[int, list[_WrittenChunk]]:
    """The chunks of files that several units write, in the order of their offsets."""
    found: dict[int, list[_WrittenChunk]] = {}
    for place, unit in enumerate(units):
        for chunk in unit.chunks:
            if chunk.length_bytes < files[chunk.file].size_bytes:
                written = _WrittenChunk(chunk.offset, chunk.offset + chunk.length_bytes, place)
                found.setdefault(chunk.file, []).append(written)
    return {file: sorted(chunks, key=lambda c: c.begin) for file, chunks in found.items()}
