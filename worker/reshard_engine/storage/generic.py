"""A read-only store over any other fsspec file system that lists directories: gs, az, hdfs, memory and others."""

from __future__ import annotations

from typing import Any

from reshard.errors import RequestError, ReshardError, StorageError, printable
from reshard_engine.storage.local import changed
from reshard_engine.storage.protocol import Listing, ObjectInfo

_RAISED = (OSError, ValueError, ImportError)
"""Exceptions of file systems: system errors, paths that they do not accept, and missing packages."""


class FsspecStore:
    """A read-only view of an fsspec file system. Pins hold all that the file system reports of ETag, mtime and size."""

    def __init__(self, filesystem: Any, scheme: str) -> None:
        """Wrap a file system that fsspec made."""
        self._fs = filesystem
        self.scheme = scheme

    def _info(self, entry: dict[str, Any]) -> ObjectInfo:
        marks = [
            str(entry[k])
            for k in ("ETag", "etag", "md5Hash", "mtime", "updated", "LastModified", "created")
            if entry.get(k)
        ]
        size = int(entry.get("size") or 0)
        return ObjectInfo(str(entry["name"]), size, f"info:{size}:{':'.join(marks)}")

    def list_directory(self, path: str, *, most: int | None = None) -> Listing:
        """The immediate children of a directory, any `most` of them at the most; empty if there is none."""
        try:
            entries: list[dict[str, Any]] = self._fs.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return Listing((), ())
        except _RAISED as error:
            raise self._typed(error, path) from error
        entries = entries[:most]
        files = [self._info(e) for e in entries if e["type"] == "file" and e["name"].rstrip("/") != path.rstrip("/")]
        names = [str(e["name"]).rstrip("/").rpartition("/")[2] for e in entries if e["type"] == "directory"]
        return Listing(tuple(sorted(files, key=lambda f: f.path)), tuple(sorted(names)))

    def list_tree(self, path: str) -> list[ObjectInfo]:
        """Every file below a directory, sorted by path."""
        try:
            found: dict[str, dict[str, Any]] = self._fs.find(path, detail=True)
        except _RAISED as error:
            raise self._typed(error, path) from error
        return sorted((self._info(e) for e in found.values()), key=lambda f: f.path)

    def stat(self, path: str) -> ObjectInfo | None:
        """The file at exactly this path, or None."""
        try:
            entry: dict[str, Any] = self._fs.info(path)
        except FileNotFoundError:
            return None
        except _RAISED as error:
            raise self._typed(error, path) from error
        return self._info(entry) if entry["type"] == "file" else None

    def read_into(self, info: ObjectInfo, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on, after checking the pin."""
        try:
            if self._info(self._fs.info(info.path)) != info:
                raise changed(info)
            data = self._fs.cat_file(info.path, start=offset, end=offset + len(buffer))
        except FileNotFoundError:
            raise changed(info) from None
        except _RAISED as error:
            raise self._typed(error, info.path) from error
        if len(data) != len(buffer):
            raise changed(info)
        buffer[:] = data

    def _typed(self, error: BaseException, path: str) -> ReshardError:
        where = f"{self.scheme}://{printable(path)}"
        if isinstance(error, ValueError | ImportError):
            return RequestError(
                "request.invalid",
                f"{where}: {printable(str(error))}",
                fix="copy the checkpoint to a local directory, and name that",
            )
        if isinstance(error, PermissionError):
            return StorageError(
                "storage.denied",
                f"{where}: {printable(str(error))}",
                fix="check the credentials of the store, then run the same command again",
            )
        text = f"{where} cannot be reached: {printable(str(error))}"
        return StorageError(
            "storage.unavailable",
            text,
            fix="check the network and the URL, or copy the checkpoint to this machine",
        )
