"""`reshard.json`: what was written, from what, and the checksums that `reshard verify` compares with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from reshard.errors import IntegrityError, printable
from reshard_engine.execute.journal import UnitRecord
from reshard_engine.plan.model import Plan
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import ObjectInfo, read_bytes
from reshard_engine.version import TOOL_VERSION

MANIFEST_NAME = "reshard.json"
MANIFEST_SCHEMA_VERSION = 1
MAX_MANIFEST_BYTES = 1 << 30


class ManifestFile(BaseModel):
    """One file of the target."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    size_bytes: int
    pin: str
    """What the store said of the file when it was committed: an unchanged pin means an unchanged file."""
    chunks: tuple[tuple[int, int, int], ...]
    """(offset, length, CRC-32), covering the file."""


class Manifest(BaseModel):
    """The whole manifest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int
    tool: str
    plan_digest: str
    content_digest: str
    created_at: str
    source: dict[str, Any]
    target: dict[str, Any]
    pointer: str | None
    files: tuple[ManifestFile, ...]
    read_bytes: int
    write_bytes: int
    foreign_globals: tuple[str, ...]
    warnings: tuple[str, ...]


def build_manifest(
    plan: Plan,
    records: Mapping[int, UnitRecord],
    there: Sequence[ObjectInfo],
    *,
    created_at: str,
    foreign_globals: tuple[str, ...],
    warnings: tuple[str, ...],
) -> bytes:
    """The manifest of a finished conversion, as the bytes to write."""
    pins = {i.path: i.pin for i in there}
    chunks: dict[int, list[tuple[int, int, int]]] = {}
    for record in records.values():
        for entry in record.chunks:
            chunks.setdefault(entry.chunk.file, []).append((entry.chunk.offset, entry.chunk.length_bytes, entry.crc32))
    files = tuple(
        ManifestFile(path=f.path, size_bytes=f.size_bytes, pin=pins[f.path], chunks=tuple(sorted(chunks[i])))
        for i, f in enumerate(plan.files)
    )
    manifest = Manifest(
        schema_version=MANIFEST_SCHEMA_VERSION,
        tool=TOOL_VERSION,
        plan_digest=plan.digest,
        content_digest=plan.content_digest,
        created_at=created_at,
        source=plan.source,
        target=plan.target,
        pointer=plan.pointer,
        files=files,
        read_bytes=sum(r.read_bytes for r in records.values()),
        write_bytes=plan.write_bytes,
        foreign_globals=foreign_globals,
        warnings=warnings,
    )
    return json.dumps(manifest.model_dump(mode="json"), separators=(",", ":")).encode() + b"\n"


def read_manifest(target: Location) -> Manifest | None:
    """The manifest of a target, or None if there is none.

    Raises:
        IntegrityError: `integrity.mismatch` if it is there and is not a manifest of a known version.
    """
    info = target.store.stat(target.child(MANIFEST_NAME).path)
    if info is None:
        return None
    if info.size_bytes > MAX_MANIFEST_BYTES:
        raise IntegrityError("integrity.mismatch", f"{MANIFEST_NAME} has {info.size_bytes} bytes")
    try:
        manifest = Manifest.model_validate_json(read_bytes(target.store, info))
    except ValidationError as error:
        raise IntegrityError(
            "integrity.mismatch", f"{MANIFEST_NAME} is damaged: {printable(str(error.errors()[0]['msg']))}"
        ) from None
    if manifest.schema_version != MANIFEST_SCHEMA_VERSION:
        raise IntegrityError("integrity.mismatch", f"{MANIFEST_NAME} has schema version {manifest.schema_version}")
    return manifest
