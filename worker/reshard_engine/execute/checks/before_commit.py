"""The checks before a commit: source objects still have their pins, and written files can be parsed.

The sink checks the lengths of all files. Here, the readers that parse foreign files open archives and headers again.
Records, offsets, sizes and CRC-32s must be the planned ones; tensor names must be unique, and tensors must lie without
holes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod

from reshard.errors import IntegrityError, SourceError, printable
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.safetensors_file import open_safetensors_file
from reshard_engine.containers.source_file import CachedFile, SourceFile
from reshard_engine.containers.zip_reader import read_zip_directory
from reshard_engine.execute.journal import UnitRecord
from reshard_engine.integrity.crc import combine
from reshard_engine.plan.model import Plan
from reshard_engine.storage.local import changed
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import ObjectInfo, Store
from reshard_engine.tensors.layout import TargetFile

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
        there = _as_they_are(store, [i.path for i in objects])
        for info in objects:
            if there.get(info.path) != info:
                raise changed(info)


def _as_they_are(store: Store, paths: Sequence[str]) -> dict[str, ObjectInfo | None]:
    """The objects that are now at these paths, found by one request per path or, for many, by one listing."""
    if len(paths) > LISTED_FROM:
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
        there = SourceFile(where.store, file.path, (info,))
        try:
            if _is_safetensors(file):
                return _header_problem(there, file)
            return _archive_problem(there, file, [sums[number, r] for r in range(len(file.template.records))])
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


def _header_problem(there: SourceFile, file: TargetFile) -> str | None:
    tensors = Counter((t.offset, t.dtype.itemsize_bytes * prod(t.shape)) for t in open_safetensors_file(there).tensors)
    if tensors != Counter((b.offset, b.length_bytes) for b in file.template.bodies):
        return "its tensors are not where they were planned"
    return None


def _archive_problem(there: SourceFile, file: TargetFile, sums: Sequence[int]) -> str | None:
    if not file.archives:
        return _records_problem(there, file, sums, 0)
    step = max(1, len(file.archives) // SAMPLED_FILES)
    parts = ((there.part(*archive), archive[0]) for archive in file.archives[::step])
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
