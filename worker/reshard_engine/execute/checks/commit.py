"""The end of a conversion: the checks before its commit, and the manifest of its plan and its units' records.

The sink checks the lengths of all files. Here, the readers that parse foreign files open archives and headers again.
Records, offsets, sizes and CRC-32s must be the planned ones; tensor names must be unique, and tensors must lie without
holes.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod, sqrt

from reshard.choices import VerifyLevel
from reshard.errors import IntegrityError, SourceError, printable
from reshard.models.jobs import CastLoss
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.safetensors import open_safetensors_file
from reshard_engine.containers.source_file import CachedFile, SourceFile
from reshard_engine.containers.zip_reader import read_zip_directory
from reshard_engine.execute.casts.cast import Losses
from reshard_engine.execute.checks.source import SourceSums
from reshard_engine.execute.journal import UnitRecord
from reshard_engine.execute.server_copy import NO_RECORD
from reshard_engine.integrity.checksums import TensorDigests, combine
from reshard_engine.integrity.manifest import (
    MANIFEST_SCHEMA_VERSION,
    TOOL_VERSION,
    Manifest,
    ManifestFile,
    ManifestServerCopy,
    ManifestSource,
    ManifestTensor,
)
from reshard_engine.plan.model import Plan, ServerCopy
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import ObjectInfo, Store, changed
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.tensors.layout import ZEROS, TargetFile

_THREADS = 32
LISTED_FROM = 16
"""Number of objects above which a listing (1,000 names a request) is cheaper than one request per object."""
SAMPLED_FILES = 64
"""Number of files that are opened again; a hundred thousand atoms have only a dozen different shapes."""


def prove_source_unchanged(checkpoint: Checkpoint) -> None:
    """Compare every source object with its pin again.

    Raises:
        SourceError: `source.changed`.
    """
    by_store: dict[int, tuple[Store, list[ObjectInfo]]] = {}
    for file in checkpoint.files:
        by_store.setdefault(id(file.store), (file.store, []))[1].extend(file.objects)
    for store, objects in by_store.values():
        current = _as_they_are(store, [i.path for i in objects])
        for info in objects:
            if current.get(info.path) != info:
                raise changed(info)


def _as_they_are(store: Store, paths: Sequence[str]) -> dict[str, ObjectInfo | None]:
    """The objects that are now at these paths, by one request per path or, for many objects of a store, one listing."""
    if len(paths) > LISTED_FROM and store.scheme != "file":  # a listing of a disk costs more than these calls
        return {i.path: i for i in store.list_tree(os.path.commonpath(paths))}
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(paths, pool.map(store.stat, paths), strict=True))


def prove_complete(plan: Plan, records: Mapping[int, UnitRecord]) -> None:
    """Prove that every unit has a record, and that the chunks of the records are those of the plan.

    Raises:
        IntegrityError: `integrity.mismatch`.
    """
    for unit in plan.units:
        record = records.get(unit.index)
        if record is None or tuple(c.chunk for c in record.chunks) != unit.chunks:
            raise IntegrityError(
                "integrity.mismatch", f"unit {unit.index} of {len(plan.units)} was not written as planned"
            )


def prove_structure(
    where: Location, files: Sequence[TargetFile], records: Mapping[int, UnitRecord], *, commit: bool
) -> None:
    """Open written files with their readers, and compare them with their templates.

    Args:
        where: Location of the directory that holds the files now.
        files: The target's files; only torch archives and safetensors files are opened.
        records: The records of the units.
        commit: True to open the commit files, False to open the others.

    Raises:
        IntegrityError: `integrity.mismatch`; its details name the files as `paths`.
    """
    candidates = [i for i, f in enumerate(files) if f.commit is commit and (f.template.records or _is_safetensors(f))]
    step = max(1, len(candidates) // SAMPLED_FILES)
    sums = _record_sums(records, set(candidates[::step]))

    def problem(number: int) -> str | None:
        file = files[number]
        info = where.store.stat(where.child(file.path).path)
        if info is None:
            return "it is not there"
        written = SourceFile(where.store, file.path, (info,))
        try:
            if _is_safetensors(file):
                return _header_problem(written, file)
            return _archive_problem(written, file, [sums[number, r] for r in range(len(file.template.records))])
        except SourceError as error:
            return f"{error.code}: {error.message}"

    chosen = candidates[::step]
    with ThreadPoolExecutor(_THREADS) as pool:
        wrong = {files[n].path: text for n, text in zip(chosen, pool.map(problem, chosen), strict=True) if text}
    if wrong:
        path, text = next(iter(wrong.items()))
        raise IntegrityError("integrity.mismatch", f"{printable(path)}: {text}", details={"paths": list(wrong)})


def _is_safetensors(file: TargetFile) -> bool:
    # A safetensors file that is copied unchanged (`reshard slim`) is one body, and its content is not checked.
    return file.path.endswith(".safetensors") and file.template.literals[:1] != ()


def _header_problem(written: SourceFile, file: TargetFile) -> str | None:
    tensors = Counter(
        (t.offset, t.dtype.itemsize_bytes * prod(t.shape)) for t in open_safetensors_file(written).tensors
    )
    if tensors != Counter((b.offset, b.length_bytes) for b in file.template.bodies):
        return "its tensors are not where they were planned"
    return None


def _archive_problem(written: SourceFile, file: TargetFile, sums: Sequence[int]) -> str | None:
    if not file.archives:
        return _records_problem(written, file, sums, 0)
    step = max(1, len(file.archives) // SAMPLED_FILES)
    parts = ((written.part(*archive), archive[0]) for archive in file.archives[::step])
    return next((text for part, at in parts if (text := _records_problem(part, file, sums, at))), None)


def _records_problem(archive: SourceFile, file: TargetFile, sums: Sequence[int], begin: int) -> str | None:
    """The difference between the records of an archive, which begins at this byte of its file, and the template."""
    directory = read_zip_directory(CachedFile(archive))
    found = {begin + e.data_offset: (e.size_bytes, e.crc32) for e in directory.entries.values() if e.size_bytes}
    for record in file.template.records_in(begin, begin + archive.size_bytes):
        offset, length = file.template.records[record]
        if found.get(offset) != (length, sums[record]):
            return f"record {record} at byte {offset} is not as planned"
    return None


def _record_sums(records: Mapping[int, UnitRecord], wanted: set[int]) -> dict[tuple[int, int], int]:
    parts: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for unit in records.values():
        for file, record, offset, length, crc in unit.spans:
            if file in wanted:
                parts.setdefault((file, record), []).append((offset, length, crc))
    sums: dict[tuple[int, int], int] = {}
    for key, spans in parts.items():
        total = 0
        for _, length, crc in sorted(spans):
            total = combine(total, crc, length)
        sums[key] = total
    return sums


# Entries of a manifest for bytes that the store copied: their CRC-32s, and the tensors that have no digest.

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


# The manifest of a conversion, made of its plan and of the records of its units.

Extent = tuple[int, int, int, int]
"""An entry of `ManifestTensor.extents`."""


def build_manifest(
    checkpoint: Checkpoint,
    plan: Plan,
    files: Sequence[TargetFile],
    records: Mapping[int, UnitRecord],
    *,
    pointer: str | None,
    created_at: str,
    warnings: tuple[str, ...],
) -> Manifest:
    """The manifest of the units that have run so far, without pins and without SHA-256 of the files.

    Ranges that no unit has written yet have no checksums. `with_pins` proves that none are left out at the end.

    Raises:
        IntegrityError: `integrity.mismatch` if units disagree about a tensor, or if the store copied wrong bytes.
    """
    chunks = chunk_sums(plan, records)
    written = tuple(
        ManifestFile(path=f.path, size_bytes=f.size_bytes, pin="", chunks=tuple(chunks.get(i, ())))
        for i, f in enumerate(plan.files)
    )
    tensors = _tensors(checkpoint, files, records)
    return Manifest(
        schema_version=MANIFEST_SCHEMA_VERSION,
        tool=TOOL_VERSION,
        verification=VerifyLevel.DEFAULT,
        plan_digest=plan.digest,
        content_digest=plan.content_digest,
        created_at=created_at,
        source={name: plan.source[name] for name in ("url", "tag", "format")},
        sources=_sources(checkpoint),
        target=plan.target,
        pointer=pointer,
        files=written,
        uncovered=tuple(gap for file in written for gap in _gaps(file)),
        tensors=tensors,
        casts=casts_of(records),
        server_copied=server_copied_ranges(checkpoint, plan, records, tensors),
        read_bytes=sum(r.read_bytes for r in records.values()),
        write_bytes=plan.write_bytes,
        foreign_globals=checkpoint.foreign_globals,
        warnings=warnings,
        not_carried=plan.not_carried,
    )


def casts_of(records: Mapping[int, UnitRecord]) -> tuple[CastLoss, ...]:
    """The losses of the casts of these units, by parameter."""
    lost: dict[str, Losses] = {}
    for _, record in sorted(records.items()):
        for fqn, found in record.losses.items():
            lost[fqn] = lost.get(fqn, Losses()) + found
    return tuple(_cast_loss(fqn, found) for fqn, found in sorted(lost.items()))


def _cast_loss(fqn: str, lost: Losses) -> CastLoss:
    counts = CastLoss(
        fqn=printable(fqn),
        overflowed=lost.overflowed,
        underflowed=lost.underflowed,
        nan=lost.nan,
        infinite=lost.infinite,
    )
    if not lost.squares:
        return counts
    error = sqrt(lost.error_squares / lost.squares)
    return counts.model_copy(update={"largest_error": lost.largest_error, "relative_rms_error": error})


def _gaps(file: ManifestFile) -> list[tuple[str, int, int]]:
    found: list[tuple[str, int, int]] = []
    at = 0
    for offset, length, _ in (*file.chunks, (file.size_bytes, 0, 0)):
        if offset > at:
            found.append((file.path, at, offset - at))
        at = offset + length
    return found


def with_pins(manifest: Manifest, pins: Mapping[str, str]) -> Manifest:
    """The finished manifest, with the pin that the store gives to each file.

    Raises:
        IntegrityError: `integrity.mismatch` if a tensor, or a part of one, was digested by no unit.
    """
    if manifest.uncovered:
        path, offset, length = manifest.uncovered[0]
        raise IntegrityError("integrity.mismatch", f"{printable(path)} bytes {offset}+{length} were written by no unit")
    if (tensor := undigested(manifest)) is not None:
        raise IntegrityError("integrity.mismatch", f"a part of {printable(tensor.fqn)} was digested by no unit")
    return manifest.model_copy(
        update={"files": tuple(f.model_copy(update={"pin": pins[f.path]}) for f in manifest.files)}
    )


def with_full_checks(manifest: Manifest, sums: Mapping[str, SourceSums], sha256: Mapping[str, str]) -> Manifest:
    """The manifest of a conversion with `--verify full`, which has read the whole source and the whole target."""
    files = tuple(f.model_copy(update={"sha256": sha256[f.path]}) for f in manifest.files)
    part: dict[str, int] = {}
    sources: list[ManifestSource] = []
    for source in manifest.sources:
        number = part[source.path] = part.get(source.path, -1) + 1
        found = sums[source.path]
        update: dict[str, object] = {"sha256": found.sha256[number], "uncovered_bytes": 0}
        if number == 0:
            update |= {"uncovered_bytes": found.uncovered_bytes, "uncovered": found.uncovered}
        sources.append(source.model_copy(update=update))
    return manifest.model_copy(update={"verification": VerifyLevel.FULL, "files": files, "sources": tuple(sources)})


def name_in_manifest(file: SourceFile) -> str:
    """The name of a source file as JSON text; bytes that are not UTF-8 are written as backslash escapes."""
    return file.name.encode("utf-8", "backslashreplace").decode()


def _sources(checkpoint: Checkpoint) -> tuple[ManifestSource, ...]:
    return tuple(
        ManifestSource(
            path=name_in_manifest(file),
            size_bytes=info.size_bytes,
            pin=info.pin,
            directory_sha256=file.directory_sha256,
        )
        for file in sorted(checkpoint.files, key=lambda f: f.name)
        for info in file.objects
    )


def _tensors(
    checkpoint: Checkpoint, files: Sequence[TargetFile], records: Mapping[int, UnitRecord]
) -> tuple[ManifestTensor, ...]:
    digests = TensorDigests()
    for record in records.values():
        for run in record.blocks:
            digests.add(run)
    extents: dict[tuple[int, str], list[Extent]] = {}
    for number, file in enumerate(files):
        for body in file.template.bodies:
            tensor, size = file.tensors[body.slot], body.dtype.itemsize_bytes
            if tensor != ZEROS:
                extents.setdefault((tensor, body.dtype.name), []).append(
                    (number, body.offset, body.begin * size, body.end * size)
                )
    found: list[ManifestTensor] = []
    for (tensor, dtype), where in extents.items():
        stored = checkpoint.shard_map.tensors[tensor]
        digest = digests.digest(tensor, dtype, stored.numel * BY_NAME[dtype].itemsize_bytes) or ""
        found += [
            ManifestTensor(
                fqn=stored.fqn, state=stored.state, dtype=dtype, shape=stored.shape, xxh3=digest, extents=copy
            )
            for copy in _copies(where)
        ]
    return tuple(found)


def _copies(extents: Sequence[Extent]) -> list[tuple[Extent, ...]]:
    """The extents of one tensor, grouped by copy. The extents of a copy tile the tensor from first to last byte."""
    if len(extents) == 1:
        return [tuple(extents)]
    copies: list[list[Extent]] = []
    ending: dict[int, list[list[Extent]]] = {}
    for extent in sorted(extents, key=lambda e: e[2]):
        open_here = ending.get(extent[2])
        if open_here and extent[3] > extent[2]:
            copy = open_here.pop()
            copy.append(extent)
        else:
            copies.append(copy := [extent])
        ending.setdefault(extent[3], []).append(copy)
    return [tuple(copy) for copy in copies]
