"""The manifest `reshard.json`: the source, the files and the tensors of a target, with their checksums.

The file is one JSON object. Its last member, `sha256`, is the SHA-256 of the file's own bytes with zeros in place of
that value, so that every changed byte is found.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from reshard.choices import MANIFEST, VerifyLevel
from reshard.errors import IntegrityError, printable
from reshard.models.jobs import CastLoss, NotCarried
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import read_bytes

MANIFEST_NAME = MANIFEST
MANIFEST_SCHEMA_VERSION = 2
MAX_MANIFEST_BYTES = 1 << 30
_TAIL = b',"sha256":"%s"}\n'
_NO_DIGEST = b"0" * 64


class _Facts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ManifestSource(_Facts):
    """One object of the source."""

    path: str
    """Path relative to the checkpoint; several objects of one path are consecutive parts of one file."""
    size_bytes: int
    pin: str
    """ETag, or mtime and size."""
    directory_sha256: str | None
    """Digest of the names, sizes and CRC-32s of the file's records, if its container stores them."""
    sha256: str | None = None
    """SHA-256 of all bytes; only with verification `full`."""
    uncovered_bytes: int | None = None
    """Bytes that no checksum of the source covers (headers, padding, records without a CRC-32); None where
    the source's checksums were not compared, which `full` does."""
    uncovered: tuple[tuple[int, int], ...] = ()
    """(offset, length) of those bytes, at most `MAX_UNCOVERED` of them."""


class ManifestFile(_Facts):
    """One file of the target."""

    path: str
    size_bytes: int
    pin: str
    """The file's pin (ETag, or mtime and size) at the commit: an unchanged pin means an unchanged file."""
    chunks: tuple[tuple[int, int, int], ...]
    """(offset, length, CRC-32), covering the file."""
    sha256: str | None = None
    """SHA-256 of all bytes; only with verification `full`, and in a repository of the hub."""


class ManifestTensor(_Facts):
    """One copy of a logical tensor in the target."""

    fqn: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    xxh3: str
    """Digest that does not depend on the layout: see `reshard_engine.integrity.checksums`. It is empty if the store
    itself copied bytes of the tensor: the worker did not see them; `Manifest.server_copied` has their CRC-32s."""
    extents: tuple[tuple[int, int, int, int], ...]
    """(file, byte offset, first byte, last byte + 1): bytes of the packed tensor and where they are."""


class ManifestServerCopy(_Facts):
    """A range of a file that the store copied from the source, with the CRC-32 of the source's container."""

    file: int
    offset: int
    length: int
    crc32: int
    """The CRC-32, derived from that of the source's record."""
    source: str
    """Path of the source file, relative to the checkpoint."""
    source_offset: int


class Manifest(_Facts):
    """The whole manifest."""

    schema_version: int
    tool: str
    verification: VerifyLevel
    plan_digest: str
    content_digest: str
    created_at: str
    source: dict[str, Any]
    sources: tuple[ManifestSource, ...]
    target: dict[str, Any]
    pointer: str | None
    files: tuple[ManifestFile, ...]
    tensors: tuple[ManifestTensor, ...]
    server_copied: tuple[ManifestServerCopy, ...] = ()
    """The ranges that the store copied. The file has no such member if there are none: older versions can read it."""
    casts: tuple[CastLoss, ...] = ()
    """Losses of casts, by parameter. The file has no such member if there are none, for the same reason."""
    uncovered: tuple[tuple[str, int, int], ...] = ()
    """(path, offset, length) of bytes of the target that no checksum covers. The writer leaves none."""
    read_bytes: int
    write_bytes: int
    foreign_globals: tuple[str, ...]
    warnings: tuple[str, ...]
    not_carried: tuple[NotCarried, ...] = ()
    """Everything that the source holds and the target does not. The file has no such member if there is nothing."""

    def without_pins(self) -> Manifest:
        """The manifest without the pins of its files, which a target has others of once it was written again."""
        return self.model_copy(update={"files": tuple(f.model_copy(update={"pin": ""}) for f in self.files)})

    def to_bytes(self) -> bytes:
        """The manifest as it is stored, sealed with its own SHA-256."""
        absent = {name for name in ("server_copied", "casts", "not_carried") if not getattr(self, name)}
        head = self.model_dump_json(exclude=absent).encode().removesuffix(b"}")
        digest = hashlib.sha256(head + _TAIL % _NO_DIGEST).hexdigest()
        return head + _TAIL % digest.encode()


def parse_manifest(data: bytes) -> Manifest:
    """Parse a manifest.

    Raises:
        IntegrityError: `integrity.mismatch` if the manifest is damaged, or of another version.
    """
    tail = len(_TAIL % _NO_DIGEST)
    head, end = data[:-tail], data[-tail:]
    digest = hashlib.sha256(head + _TAIL % _NO_DIGEST).hexdigest()
    if end != _TAIL % digest.encode():
        raise IntegrityError(
            "integrity.mismatch",
            f"{MANIFEST_NAME} is damaged, or of another version of this tool: it does not match its own SHA-256",
            fix="copy the directory again, or convert again with --overwrite",
        )
    try:
        manifest = Manifest.model_validate_json(head + b"}")
    except ValidationError as error:
        raise IntegrityError(
            "integrity.mismatch",
            f"{MANIFEST_NAME} is damaged: {printable(str(error.errors()[0]['msg']))}",
            fix="copy the directory again, or convert again with --overwrite",
        ) from None
    if manifest.schema_version != MANIFEST_SCHEMA_VERSION:
        raise IntegrityError(
            "integrity.mismatch",
            f"{MANIFEST_NAME} has schema version {manifest.schema_version}",
            fix="verify with the release that wrote it, or convert again with --overwrite",
        )
    if (problem := _contradiction(manifest)) is not None:
        raise IntegrityError(
            "integrity.mismatch",
            f"{MANIFEST_NAME} contradicts itself: {problem}",
            fix="copy the directory again, or convert again with --overwrite",
        )
    return manifest


def _contradiction(manifest: Manifest) -> str | None:
    """A contradiction in a manifest, or None. Its SHA-256 shows that it is undamaged, not who wrote it."""
    if any("\0" in path for path in (manifest.pointer or "", *(f.path for f in manifest.files))):
        return "a name holds a NUL"
    for tensor in manifest.tensors:
        if not tensor.extents:
            return f"{printable(tensor.fqn)} has no place in any file"
        for file, offset, begin, end in tensor.extents:
            if not 0 <= file < len(manifest.files) or not 0 <= begin <= end or offset < 0:
                return f"{printable(tensor.fqn)} has an invalid file number or byte range"
            if offset + end - begin > manifest.files[file].size_bytes:
                return f"{printable(tensor.fqn)} is beyond the end of its file"
    return None


def read_manifest(target: Location) -> Manifest | None:
    """The manifest of a target, or None if there is none.

    Raises:
        IntegrityError: As `parse_manifest`.
    """
    info = target.store.stat(target.child(MANIFEST_NAME).path)
    if info is None:
        return None
    if info.size_bytes > MAX_MANIFEST_BYTES:
        raise IntegrityError(
            "integrity.mismatch",
            f"{MANIFEST_NAME} has {info.size_bytes} bytes",
            fix="copy the directory again, or convert again with --overwrite",
        )
    return parse_manifest(read_bytes(target.store, info))


# The version that plans and manifests carry.


def _installed() -> str:
    try:
        return version("reshard")
    except PackageNotFoundError:
        return "unknown"


TOOL_VERSION = f"reshard {_installed()}"
