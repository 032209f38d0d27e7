"""The last look before a commit: source objects are still the pinned ones, what was written parses.

Lengths of all files are the sink's to check; here archives and headers are opened again by the readers that
parse other people's files, and must say what the plan says: records, offsets, sizes, CRC-32s; tensors without a
name that comes twice, without a hole.
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
from reshard_engine.containers.source_file import SourceFile, Window
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
"""Objects from which on a listing (1,000 names a request) is cheaper than a request for each."""
SAMPLED_FILES = 64
"""Archives that are opened again; a checkpoint of a hundred thousand atoms has a dozen shapes of them."""


def prove_source_unchanged(checkpoint: Checkpoint) -> None:
    """Compare every source object with its pin once more.

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
    """What is at these paths now: one request each, or one listing for many."""
    if len(paths) > LISTED_FROM:
        return {i.path: i for i in store.list_tree(os.path.commonpath(paths))}
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(paths, pool.map(store.stat, paths), strict=True))


def prove_complete(plan: Plan, records: Mapping[int, UnitRecord]) -> None:
    """Every unit has a record, and the records' chunks are the plan's.

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
    """Open files that were written again, as their readers will, and compare them with their templates.

    Args:
        where: The directory in which the files are now.
        files: The target's files; torch archives and safetensors among them are looked at.
        records: What the units reported.
        commit: Whether to look at the files that are written last, or at the others.

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
            return str(error)

    chosen = candidates[::step]
    with ThreadPoolExecutor(_THREADS) as pool:
        wrong = {files[n].path: text for n, text in zip(chosen, pool.map(problem, chosen), strict=True) if text}
    if wrong:
        path, text = next(iter(wrong.items()))
        raise IntegrityError("integrity.mismatch", f"{printable(path)}: {text}", details={"paths": list(wrong)})


def _is_safetensors(file: TargetFile) -> bool:
    # One that is copied as it was (`reshard slim`) is all body, and what is in it is not ours to judge.
    return file.path.endswith(".safetensors") and file.template.literals[:1] != ()


def _header_problem(there: SourceFile, file: TargetFile) -> str | None:
    tensors = Counter((t.offset, t.dtype.itemsize_bytes * prod(t.shape)) for t in open_safetensors_file(there).tensors)
    if tensors != Counter((b.offset, b.length_bytes) for b in file.template.bodies):
        return "its tensors are not where they were planned"
    return None


def _archive_problem(there: SourceFile, file: TargetFile, sums: Sequence[int]) -> str | None:
    directory = read_zip_directory(Window(there))
    found = {e.data_offset: (e.size_bytes, e.crc32) for e in directory.entries.values() if e.size_bytes}
    for record, (offset, length) in enumerate(file.template.records):
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
