"""Entries of a manifest for bytes that the store copied: their CRC-32s, and the tensors that have no digest."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from reshard.errors import IntegrityError, printable
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.execute.journal import UnitRecord
from reshard_engine.execute.server_copy.copier import NO_RECORD
from reshard_engine.integrity.crc import combine
from reshard_engine.integrity.manifest import Manifest, ManifestServerCopy, ManifestTensor
from reshard_engine.plan.model import Plan, ServerCopy

ChunkSum = tuple[int, int, int]
"""(offset, length, CRC-32)."""


def chunk_sums(plan: Plan, records: Mapping[int, UnitRecord]) -> dict[int, list[ChunkSum]]:
    """The checksummed ranges of each file, in order: its chunks, or one range in place of the chunks of a server copy.

    Raises:
        IntegrityError: `integrity.mismatch` if the CRC-32s of copied chunks differ from that of the source's record.
    """
    known: dict[int, list[ChunkSum]] = {}
    unknown: dict[int, list[tuple[int, int]]] = {}
    for record in records.values():
        for entry in record.chunks:
            chunk = entry.chunk
            if entry.crc32 is None:
                unknown.setdefault(chunk.file, []).append((chunk.offset, chunk.length_bytes))
            else:
                known.setdefault(chunk.file, []).append((chunk.offset, chunk.length_bytes, entry.crc32))
    for sums in known.values():
        sums.sort()
    sums_of_ranges = range_sums(plan, records)
    for server_copy in plan.server_copies:
        crc = sums_of_ranges.get((server_copy.file, server_copy.begin))
        if crc is not None:
            _replace(plan, server_copy, crc, known.setdefault(server_copy.file, []), unknown.get(server_copy.file, []))
    return known


def range_sums(plan: Plan, records: Mapping[int, UnitRecord]) -> dict[tuple[int, int], int]:
    """The CRC-32s that sources prove, by file and begin of the range, for all ranges that units have reached."""
    spans = {(f, r, o, n): crc for record in records.values() for f, r, o, n, crc in record.spans}
    found: dict[tuple[int, int], int] = {}
    for o in plan.server_copies:
        record = NO_RECORD if o.record is None else o.record
        crc = spans.get((o.file, record, o.begin - o.record_offset, o.end - o.begin))
        if o.proof is not None and crc is not None:
            found[o.file, o.begin] = crc
    return found


def _replace(
    plan: Plan, server_copy: ServerCopy, crc: int, known: list[ChunkSum], unknown: Sequence[tuple[int, int]]
) -> None:
    """Replace chunks by their range if the CRC-32 of a chunk is unknown; compare the CRC-32s if all are known."""
    begin, end = bisect_left(known, (server_copy.begin,)), bisect_left(known, (server_copy.end,))
    inside, copied = known[begin:end], [n for at, n in unknown if server_copy.begin <= at < server_copy.end]
    if sum(copied) + sum(n for _, n, _ in inside) != server_copy.end - server_copy.begin:
        return  # some chunks of the range are not written yet
    if copied:
        known[begin:end] = [(server_copy.begin, server_copy.end - server_copy.begin, crc)]
        return
    total = 0
    for _, length, part in inside:
        total = combine(total, part, length)
    if total != crc:
        path = printable(plan.files[server_copy.file].path)
        raise IntegrityError(
            "integrity.mismatch",
            f"{path} bytes {server_copy.begin}+{server_copy.end - server_copy.begin}: CRC-32 {total:08x}, "
            f"the source's record says {crc:08x}",
            fix="check the source with --verify full; its copy elsewhere may be sound",
        )


def server_copied_ranges(
    checkpoint: Checkpoint, plan: Plan, records: Mapping[int, UnitRecord], tensors: Sequence[ManifestTensor]
) -> tuple[ManifestServerCopy, ...]:
    """The copied ranges that hold bytes of tensors without a digest."""
    bare: dict[int, list[tuple[int, int]]] = {}
    for tensor in tensors:
        if not tensor.xxh3:
            for file, offset, begin, end in tensor.extents:
                bare.setdefault(file, []).append((offset, offset + end - begin))
    for extents in bare.values():
        extents.sort()
    sums = range_sums(plan, records)
    found: list[ManifestServerCopy] = []
    for o in plan.server_copies:
        crc = sums.get((o.file, o.begin))
        if crc is not None and _touches(bare.get(o.file, []), o.begin, o.end):
            name = checkpoint.files[o.source].name.encode("utf-8", "backslashreplace").decode()
            found.append(
                ManifestServerCopy(
                    file=o.file,
                    offset=o.begin,
                    length=o.end - o.begin,
                    crc32=crc,
                    source=name,
                    source_offset=o.source_offset,
                )
            )
    return tuple(found)


def undigested(manifest: Manifest) -> ManifestTensor | None:
    """A tensor that has no digest although the store copied none of its bytes; None if there is no such tensor."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    for server_copy in manifest.server_copied:
        ranges.setdefault(server_copy.file, []).append((server_copy.offset, server_copy.offset + server_copy.length))
    for tensor in manifest.tensors:
        places = [(f, o, o + end - begin) for f, o, begin, end in tensor.extents]
        if not tensor.xxh3 and not any(_touches(ranges.get(f, []), low, high) for f, low, high in places):
            return tensor
    return None


def _touches(extents: Sequence[tuple[int, int]], begin: int, end: int) -> bool:
    """True if one of the sorted, disjoint extents overlaps `[begin, end)`."""
    index = bisect_left(extents, (end, 0)) - 1
    return index >= 0 and extents[index][1] > begin
