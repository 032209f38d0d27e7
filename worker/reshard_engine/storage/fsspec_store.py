"""A read-only store over any file system of fsspec that lists directories: HDFS, FTP, memory, zip files and others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from inspect import signature
from typing import Any, TypeVar, cast

from reshard.errors import RequestError, ReshardError, StorageError, printable
from reshard_engine.storage.protocol import Listing, ObjectInfo, changed, refuse_unclear_path

_ETAGS = ("ETag", "etag")
_GENERATION = "generation"
_CONTENTS = ("sha256", "sha", "md5Hash", "content_md5", "checksum", "blob_id", "CRC")
_TIMES = ("mtime", "modified", "modify", "updated", "LastModified", "last_modified", "date_time")
"""Keys of the details that file systems report of a file.

The `time` of sshfs is that of the last read, and `created` of `memory` stays when a file is changed in place.

Sources: s3fs 2026.9.0 `core.py`, gcsfs 2026.6.0 `core.py` (`generation`, `md5Hash`), adlfs 2026.8.0 `spec.py`
(`etag`, `content_md5`), huggingface_hub 2.4.0 `hf_file_system.py` (`blob_id`), and fsspec 2026.9.0
`implementations/`: `ftp` (`modify`), `sftp` (`mtime`), `github` (`sha`), `zip` (`CRC`, `date_time`),
`arrow` (`mtime`); sshfs 2026.8.0 `spec.py` (`mtime`).
"""
_LOCK = "_reshard_lock"
_TYPED_ALREADY = (FileNotFoundError, NotADirectoryError, MemoryError, ReshardError)
"""Exceptions that callers of `FsspecStore._call` know."""
_Result = TypeVar("_Result")


class FsspecStore:
    """A read-only view of an fsspec file system.

    A pin is the version of a file, as the file system reports it: the ETag, as that of `S3Store` and `AzureStore` for
    the same object, the generation, as that of `GcsStore`, or digest, time and size. It is empty if there is only a
    size, and then a change that keeps the size is not noticed.
    """

    def __init__(self, filesystem: Any, scheme: str, *, lead: str = "") -> None:
        """Wrap a file system.

        Args:
            filesystem: An `AbstractFileSystem`.
            scheme: The scheme of the URLs of its files.
            lead: A slash if the paths of this store begin with one.
        """
        self._fs = filesystem
        self._lead = lead
        self.scheme = scheme
        self._reads_ranges = _takes_ranges(filesystem)
        self._alone: AbstractContextManager[Any] = nullcontext() if _is_parallel(filesystem) else _lock_of(filesystem)

    def list_directory(self, path: str, *, most: int | None = None) -> Listing:
        """The immediate children of a directory, any `most` of them at the most; empty if there is none."""

        def listed() -> tuple[list[ObjectInfo], list[str]]:
            self._fs.invalidate_cache()
            entries = [*map(self._followed, list(self._fs.ls(self._own(path), detail=True))[:most])]
            names = [str(e["name"]).rstrip("/").rpartition("/")[2] for e in entries if e["type"] == "directory"]
            return [self._info(e) for e in entries if e["type"] == "file"], names

        try:
            files, names = self._call(listed, path.rstrip("/"))
        except (FileNotFoundError, NotADirectoryError):
            return Listing((), ())
        # The directory itself: object stores have an object of its name and a slash, FTP lists a file as its own child.
        return Listing.of([f for f in files if f.path.rstrip("/") != path.rstrip("/")], names)

    def list_tree(self, path: str) -> list[ObjectInfo]:
        """Every file below a directory, sorted by path."""

        def walked() -> list[ObjectInfo]:
            self._fs.invalidate_cache()
            entries = map(self._followed, self._fs.find(self._own(path), detail=True).values())
            return [self._info(e) for e in entries if e["type"] == "file"]

        try:
            return sorted(self._call(walked, path.rstrip("/")), key=lambda f: f.path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def stat(self, path: str) -> ObjectInfo | None:
        """The file at exactly this path, or None."""
        try:
            return self._call(lambda: self._fresh(path), path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_into(self, info: ObjectInfo, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on, then check the pin: what was read before that is of the pinned version."""

        def read() -> bytes:
            data = self._range(self._own(info.path), offset, len(buffer))
            if self._fresh(info.path) != info:
                raise changed(info)
            return data

        try:
            data = self._call(read, info.path)
        except (FileNotFoundError, NotADirectoryError):
            raise changed(info) from None
        if len(data) != len(buffer):
            raise changed(info)
        buffer[:] = data

    def _range(self, own: str, offset: int, length: int) -> bytes:
        if self._reads_ranges:
            return bytes(self._fs.cat_file(own, start=offset, end=offset + length))
        with self._fs.open(own, "rb") as file:
            file.seek(offset)
            return bytes(file.read(length))

    def _followed(self, entry: dict[str, Any]) -> dict[str, Any]:
        """The details of what a link leads to; SFTP lists links as such. Links that lead nowhere stay what they are."""
        if entry["type"] != "link":
            return entry
        with suppress(OSError):
            return {**self._fs.info(entry["name"]), "name": entry["name"]}
        return entry

    def _fresh(self, path: str) -> ObjectInfo | None:
        """The file as it is now, whatever the file system remembers of its directory."""
        # Which of its listings has the file is for the file system to know: FTP's keeps that of its root under `/`.
        self._fs.invalidate_cache()
        entry: dict[str, Any] = self._fs.info(self._own(path))
        return self._info(entry) if entry["type"] == "file" else None

    def _info(self, entry: dict[str, Any]) -> ObjectInfo:
        if (size := entry["size"]) is None or int(size) < 0:
            raise ValueError(f"the file system tells no size of {printable(str(entry['name']))}")
        size = int(size)
        return ObjectInfo(self._lead + str(entry["name"]).strip("/"), size, _pin(entry, size))

    def _own(self, path: str) -> str:
        """The path as the file system writes it."""
        return path if self._fs.root_marker else path.lstrip("/")

    def _call(self, call: Callable[[], _Result], path: str) -> _Result:
        """The result of a call of the file system, whose errors get types.

        Raises:
            FileNotFoundError: There is no such file.
            NotADirectoryError: There is no such directory.
        """
        # Paths of this store may begin with a slash, which does not make their first name empty.
        refuse_unclear_path(path.removeprefix("/"), self.scheme)
        try:
            with self._alone:
                return call()
        except _TYPED_ALREADY:
            raise
        except Exception as error:
            # Clients of other packages raise whatever theirs raise: ftplib.Error, azure.core's, aiohttp's.
            raise self._typed(error, path) from error

    def _typed(self, error: Exception, path: str) -> ReshardError:
        where = f"{self.scheme}://{printable(path.lstrip('/'))}"
        reason = printable(str(error) or type(error).__name__)
        if isinstance(error, LookupError | TypeError | AttributeError):
            reason = f"its file system lists or reads files in another way than fsspec describes ({reason})"
        if isinstance(error, ValueError | ImportError | NotImplementedError | LookupError | TypeError | AttributeError):
            return RequestError(
                "request.invalid",
                f"{where}: {reason}",
                fix="copy the checkpoint to a local directory, and name that",
            )
        if isinstance(error, PermissionError):
            return StorageError(
                "storage.denied",
                f"{where}: {reason}",
                fix="check the credentials of the store, then run the same command again",
            )
        return StorageError(
            "storage.unavailable",
            f"{where} cannot be reached: {reason}",
            fix="check the network and the URL, or copy the checkpoint to this machine",
        )


def _pin(entry: dict[str, Any], size_bytes: int) -> str:
    """The pin of a file's details; empty if they have no version, digest or time."""
    if generation := entry.get(_GENERATION):
        return f"generation:{generation}"
    if etag := next((str(entry[k]) for k in _ETAGS if entry.get(k)), None):
        return f"etag:{etag.strip(chr(34))}"
    marks = list(_marks(entry))
    return f"info:{size_bytes}:{':'.join(marks)}" if marks else ""


def _marks(entry: dict[str, Any]) -> Iterator[str]:
    for key in (*_CONTENTS, *_TIMES):
        if value := entry.get(key):
            # A time is a `datetime` in one call and its seconds in the other (`MemoryFileSystem.info` and `ls`).
            yield str(value.timestamp() if isinstance(value, datetime) else value)


def _takes_ranges(filesystem: Any) -> bool:
    """False for a file system that reads whole files where a range is asked for, as that of sshfs 2026.8.0 does."""
    call = filesystem._cat_file if getattr(filesystem, "async_impl", False) else filesystem.cat_file  # noqa: SLF001
    return "start" in signature(call).parameters


def _lock_of(filesystem: Any) -> AbstractContextManager[Any]:
    """The lock of a file system, whatever stores wrap it: many, such as FTP's, have one connection or one open file."""
    lock: AbstractContextManager[Any] = cast("dict[str, Any]", vars(filesystem)).setdefault(_LOCK, threading.Lock())
    return lock


def _is_parallel(filesystem: Any) -> bool:
    """True for a file system whose calls may come from several threads: one over asyncio, or over pyarrow's."""
    if any(kind.__name__ == "ArrowFSWrapper" for kind in type(filesystem).__mro__):
        return True
    return bool(getattr(filesystem, "async_impl", False))
