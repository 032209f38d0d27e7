"""The manifest of a conversion, made of its plan and of the records of its units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from reshard.errors import IntegrityError, printable
from reshard.models import CastLoss, VerifyLevel
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.execute.casts.losses import Losses
from reshard_engine.execute.checks.source import SourceSums
from reshard_engine.execute.journal import UnitRecord
from reshard_engine.execute.server_copy.receipt import chunk_sums, server_copied_ranges, undigested
from reshard_engine.integrity.digests import TensorDigests
from reshard_engine.integrity.manifest import (
    MANIFEST_SCHEMA_VERSION,
    Manifest,
    ManifestFile,
    ManifestSource,
    ManifestTensor,
)
from reshard_engine.integrity.version import TOOL_VERSION
from reshard_engine.plan.model import Plan
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.tensors.layout import ZEROS, TargetFile

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
    for record in records.values():
        for fqn, found in record.losses.items():
            lost[fqn] = lost.get(fqn, Losses()) + found
    return tuple(CastLoss(fqn=printable(fqn), **asdict(found)) for fqn, found in sorted(lost.items()))


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
    """The name of a source file as JSON text; bytes that are no UTF-8 are written as backslash escapes."""
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
