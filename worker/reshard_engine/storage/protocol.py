"""The protocol of stores: pinned ranged reads, conditional puts, and explicit multipart calls.

Paths are strings without a scheme (`/abs/path`, `bucket/key`): a key of an object store is not a `pathlib.Path`.
Every read names the pinned object. So a read of a changed source fails, and never mixes two versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from reshard.errors import SourceError, StorageError, printable
from reshard_engine.storage.urls import has_plain_segments

DELETED_AT_ONCE = 1000
"""Most objects that one request removes (Amazon S3, `DeleteObjects`)."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object, as it was when it was listed."""

    path: str
    size_bytes: int
    pin: str
    """A text that changes with the content: the ETag, or mtime and size. It is empty if the store has neither."""
    modified_at: float | None = field(default=None, compare=False)
    """Time of the last write by the store's clock; None if no listing reported it."""


@dataclass(frozen=True, slots=True)
class Listing:
    """One directory level: its files, and the names of its sub-directories."""

    files: tuple[ObjectInfo, ...]
    directories: tuple[str, ...]

    @classmethod
    def of(cls, files: Iterable[ObjectInfo], directories: Iterable[str]) -> Listing:
        """The entries of a directory in order, without those that no path can name: an empty name, `.` and `..`.

        In an object store they are possible as names of directories (`run/../x`), and joined to the path of the listed
        directory they would lead out of it.
        """
        return cls(
            tuple(sorted((f for f in files if has_plain_segments(parent_and_name(f.path)[1])), key=lambda f: f.path)),
            tuple(sorted(filter(has_plain_segments, directories))),
        )

    @property
    def by_name(self) -> dict[str, ObjectInfo]:
        """The files by their names within the directory."""
        return {info.path.rpartition("/")[2]: info for info in self.files}


@dataclass(frozen=True, slots=True)
class PartInfo:
    """One uploaded part of a multipart upload. Numbers start at 1."""

    number: int
    size_bytes: int
    etag: str
    crc32: int | None = None
    """CRC-32 of the part. Stores that keep checksums need it again to complete the upload."""


class Store(Protocol):
    """A store of files. All methods may raise a `StorageError`; after `storage.unavailable`, a call may be retried."""

    scheme: str

    def list_directory(self, path: str, *, most: int | None = None) -> Listing:
        """The immediate children of a directory, any `most` of them at the most; empty if there is none."""
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
    """A store without rename. Objects appear complete, at their final keys, after a put or a completed upload."""

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
        """Write a whole object. The store checks it against `crc32` or, by default, against the CRC-32 of `data`.

        Raises:
            StorageError: `storage.conflict` with `if_absent` if the object already exists;
            `storage.unavailable` if the store received other bytes.
        """
        ...

    def delete(self, paths: Sequence[str], *, in_order: bool = True) -> None:
        """Remove objects, in this order or in any. A missing object is not an error.

        Without an order, many go in one request of at most `DELETED_AT_ONCE`, of which a part may have happened after
        an error.
        """
        ...

    def metadata(self, path: str) -> Mapping[str, str] | None:
        """The user metadata of an object, or None if there is no object."""
        ...

    def create_multipart(self, path: str, *, metadata: Mapping[str, str]) -> str:
        """Begin a multipart upload; returns its id. The object is not visible until the upload is completed."""
        ...

    def put_part(
        self, path: str, upload_id: str, number: int, data: memoryview, *, crc32: int | None = None
    ) -> PartInfo:
        """Upload one part. A second upload of a number replaces the part. The store checks the CRC-32 as in `put`."""
        ...

    def copy_part(
        self, path: str, upload_id: str, number: int, source: ObjectInfo, *, offset: int, length: int
    ) -> PartInfo | None:
        """Have the store fill one part from a byte range of one of its objects; no bytes pass through this process.

        Returns None if the store cannot copy, or if these credentials may not.

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
        """Make the object visible. If the acknowledgement is lost, the caller must read the object back."""
        ...

    def abort_multipart(self, path: str, upload_id: str) -> None:
        """Abort an upload. An upload that no longer exists is not an error."""
        ...


class ServiceStore(ObjectStore, Protocol):
    """A class of object stores that a service keeps, for one scheme of URLs. A path is `bucket/key`."""

    profiles: type[Any]
    """The dataclass whose fields are the keys of its storage profiles."""
    credentials_fix: str
    """The fix if there are no credentials."""

    @classmethod
    def of_profile(cls, name: str | None, beside: Store | None = None) -> ServiceStore:
        """The store of a profile; for None, that of the environment. No request is sent.

        `beside` itself is returned if it is the same service under the same credentials.

        Raises:
            RequestError: As in `storage.profiles.profile_named`.
        """
        ...

    @staticmethod
    def credentials() -> str | None:
        """A line on the origin of the environment's credentials, without secrets, and their service; None without any.

        Raises:
            StorageError: `storage.denied` if they cannot be read.
        """
        ...


@runtime_checkable
class CopyingStore(ObjectStore, Protocol):
    """An object store whose `copy_part` may reach the objects of other instances."""

    def reaches(self, other: Store) -> bool:
        """True if another store is the same service, and these credentials may read its objects."""
        ...


# Shared by the clients of stores: names, errors, and reads and removals that take several calls.

_READ_TRIES = 4


def refuse_unclear_path(path: str, scheme: str) -> None:
    """Reject a path that a client or a gateway may resolve to another object than the one of that name.

    A slash at the end is accepted: web consoles make such objects as placeholders of directories.

    Raises:
        SourceError: `name.invalid`.
    """
    if path and not has_plain_segments(path.removesuffix("/")):
        raise SourceError(
            "name.invalid",
            f"{scheme}://{printable(path)}: a segment of the name is empty, `.` or `..`, and some programs resolve it "
            "to another name",
            fix="rename the object with the tool that wrote it, or remove it with the tools of the store",
            details={"path": printable(path)},
        )


def bucket_and_key(path: str, scheme: str) -> tuple[str, str]:
    """The bucket and the key of a path in an object store.

    Raises:
        SourceError: `name.invalid` as `refuse_unclear_path`. Every call of a store parses its paths here.
    """
    refuse_unclear_path(path, scheme)
    bucket, _, key = path.partition("/")
    return bucket, key


def bucket_and_prefix(path: str, scheme: str) -> tuple[str, str]:
    """The bucket, and the prefix of all keys below a directory. The prefix is empty for the bucket itself."""
    bucket, key = bucket_and_key(path.rstrip("/"), scheme)
    return bucket, f"{key}/" if key else ""


def changed(info: ObjectInfo) -> SourceError:
    """The error for an object that has changed since it was listed."""
    return SourceError(
        "source.changed",
        f"{printable(info.path)} changed while it was read (pinned as {info.pin})",
        fix="wait until the training run has finished saving, then run the same command again",
        details={"path": info.path, "pin": info.pin},
    )


def already_exists(where: str) -> StorageError:
    """The error for an object that is there, and should not be."""
    return StorageError("storage.conflict", f"{where} already exists", fix="choose another target, or --overwrite")


def upload_gone(where: str) -> StorageError:
    """The error for an upload in parts that somebody else has ended."""
    return StorageError(
        "storage.conflict",
        f"{where}: the upload no longer exists: another conversion took over the target",
        fix="wait until the other conversion has ended, then run the same command again",
    )


def no_bucket(path: str) -> StorageError:
    """The error for a path whose bucket does not exist."""
    bucket = path.partition("/")[0]
    return StorageError(
        "storage.no_bucket", f"bucket {printable(bucket)!r} does not exist", fix="check the bucket's name"
    )


def read_pinned(info: ObjectInfo, read: Callable[[], None]) -> None:
    """Read a range, again after failures that pass; a conflict or a missing object means that the object changed.

    Raises:
        SourceError: `source.changed`.
    """
    for attempt in range(_READ_TRIES):
        try:
            read()
            return
        except StorageError as error:
            if error.code == "storage.conflict":
                raise changed(info) from error
            if not error.retryable or attempt == _READ_TRIES - 1:
                raise
        except SourceError as error:
            if error.code == "source.not_found":
                raise changed(info) from error
            raise


def fill(chunks: Iterable[bytes], buffer: memoryview, where: str) -> None:
    """Fill a buffer with the pieces of a body, which must have exactly as many bytes.

    Raises:
        StorageError: `storage.protocol` for more bytes, `storage.unavailable` for fewer.
    """
    done = 0
    for chunk in chunks:
        if done + len(chunk) > len(buffer):
            raise StorageError("storage.protocol", f"{where}: more bytes than were asked for")
        buffer[done : done + len(chunk)] = chunk
        done += len(chunk)
    if done != len(buffer):
        raise StorageError("storage.unavailable", f"{where}: {done} of {len(buffer)} bytes arrived")


def delete_each(paths: Sequence[str], delete: Callable[[str], None], *, in_order: bool, threads: int) -> None:
    """Remove objects with one call each: one after another, or in threads if the order does not matter."""
    if in_order or len(paths) < 2:
        for path in paths:
            delete(path)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(delete, paths))


class Body:
    """A seekable view of a buffer, which clients of stores send without a copy."""

    def __init__(self, data: memoryview) -> None:
        """Begin at the first byte."""
        self._data = data
        self._at = 0

    def read(self, count: int = -1) -> memoryview:
        """The next bytes, at most `count`; all that are left by default."""
        end = len(self._data) if count < 0 else min(len(self._data), self._at + count)
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move, as `io.IOBase.seek` does."""
        self._at = offset if whence == 0 else self._at + offset if whence == 1 else len(self._data) + offset
        return self._at

    def tell(self) -> int:
        """The place of the next byte."""
        return self._at

    def __len__(self) -> int:
        return len(self._data)


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


def save_directory(path: str, tag: str | None) -> tuple[str, str]:
    """The save directory of a target that is a tag directory, and the target's tag in it.

    A tag may have slashes. A target that ends with the source's tag has the same one; any other target's tag is its
    last name.
    """
    whole = path.rstrip("/")
    if tag and whole.endswith(f"/{tag}"):
        return whole.removesuffix(f"/{tag}") or "/", tag
    return parent_and_name(path)
