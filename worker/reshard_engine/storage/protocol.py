"""What the engine asks of storage: pinned ranged reads, conditional puts, explicit multipart verbs.

Paths are strings without a scheme (`/abs/path`, `bucket/key`): a key on an object store is no
`pathlib.Path`. Every read names the pinned object, so that a source that changes fails, never mixes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object as it was when it was listed."""

    path: str
    size_bytes: int
    pin: str
    """Changes whenever the content does: an ETag, or mtime and size. Empty when the store has neither."""
    modified_at: float | None = field(default=None, compare=False)
    """When it was written, by the store's clock, where a listing said so."""


@dataclass(frozen=True, slots=True)
class Listing:
    """One directory level: immediate files and the names of immediate sub-directories."""

    files: tuple[ObjectInfo, ...]
    directories: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PartInfo:
    """One uploaded part of a multipart upload. Numbers start at 1."""

    number: int
    size_bytes: int
    etag: str
    crc32: int | None = None
    """CRC-32 of the part; stores that keep checksums want it again when the upload is completed."""


class Store(Protocol):
    """A place with files. All methods raise `StorageError`s; `storage.unavailable` may be retried."""

    scheme: str

    def list_directory(self, path: str) -> Listing:
        """The immediate children of a directory; empty if there is none."""
        ...

    def list_tree(self, path: str) -> list[ObjectInfo]:
        """Every object below a directory, sorted by path; empty if there is none."""
        ...

    def stat(self, path: str) -> ObjectInfo | None:
        """The object at exactly this path, or None."""
        ...

    def read_into(self, info: ObjectInfo, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the object's bytes from `offset` on.

        Raises:
            SourceError: `source.changed` if the object is not the pinned one any more.
        """
        ...


@runtime_checkable
class ObjectStore(Store, Protocol):
    """A store without rename: objects appear whole, at their final key, when they are put or completed."""

    min_part_bytes: int

    def put(
        self,
        path: str,
        data: bytes | memoryview,
        *,
        metadata: Mapping[str, str],
        if_absent: bool,
        crc32: int | None = None,
    ) -> ObjectInfo:
        """Write a whole object. The store compares it with `crc32`, or with what it is as it is sent.

        Raises:
            StorageError: `storage.conflict` with `if_absent` when an object is there already;
                `storage.unavailable` when other bytes arrived.
        """
        ...

    def delete(self, paths: Sequence[str]) -> None:
        """Remove objects; absent ones are no error."""
        ...

    def metadata(self, path: str) -> Mapping[str, str] | None:
        """User metadata of an object, or None if there is no object."""
        ...

    def create_multipart(self, path: str, *, metadata: Mapping[str, str]) -> str:
        """Begin a multipart upload; returns its id. Nothing is visible until it is completed."""
        ...

    def put_part(
        self, path: str, upload_id: str, number: int, data: memoryview, *, crc32: int | None = None
    ) -> PartInfo:
        """Upload one part; uploading a number again replaces it. Checked as `put` is."""
        ...

    def copy_part(
        self, path: str, upload_id: str, number: int, source: ObjectInfo, *, offset: int, length: int
    ) -> PartInfo | None:
        """Fill one part from a byte range of an object of the same store, without moving bytes through us.

        None if the store does not copy: it cannot, or these credentials may not.

        Raises:
            SourceError: `source.changed` if the object is not the pinned one any more.
        """
        ...

    def list_parts(self, path: str, upload_id: str) -> list[PartInfo] | None:
        """The parts of an upload in number order, or None if the upload is gone."""
        ...

    def list_uploads(self, prefix: str) -> list[tuple[str, str]]:
        """(path, upload id) of every unfinished upload below a prefix."""
        ...

    def complete_multipart(self, path: str, upload_id: str, parts: Sequence[PartInfo]) -> None:
        """Make the object visible. A lost acknowledgement is for the caller to resolve by reading back."""
        ...

    def abort_multipart(self, path: str, upload_id: str) -> None:
        """Drop an upload; one that is gone is no error."""
        ...


@runtime_checkable
class CopyingStore(ObjectStore, Protocol):
    """An object store whose `copy_part` may reach the objects of other instances."""

    def reaches(self, other: Store) -> bool:
        """Whether objects of another store are in this service, and within reach of these credentials."""
        ...


def read_bytes(store: Store, info: ObjectInfo, offset: int = 0, length: int | None = None) -> bytes:
    """Bytes `[offset, offset + length)` of an object; to its end by default."""
    count = info.size_bytes - offset if length is None else length
    buffer = bytearray(count)
    if count:
        store.read_into(info, offset, memoryview(buffer))
    return bytes(buffer)


def join(path: str, *names: str) -> str:
    """`path/name/...` with single slashes; `path` may end with one."""
    return "/".join([path.rstrip("/") or ("" if path.startswith("/") else path), *names])


def parent_and_name(path: str) -> tuple[str, str]:
    """The directory and the last name of a path; a trailing slash is ignored."""
    parent, _, name = path.rstrip("/").rpartition("/")
    return (parent or ("/" if path.startswith("/") else "")), name
