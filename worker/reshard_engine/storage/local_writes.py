"""System calls for local targets: typed errors, syncs, and a rename that replaces nothing."""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress
from types import TracebackType

from reshard.errors import SourceError, StorageError, printable
from reshard_engine.storage.local import translated

_RENAME_NOREPLACE, _AT_FDCWD = 1, -100
LIBC = ctypes.CDLL(None, use_errno=True)
"""The C library, for `syncfs` and `renameat2`, which Python does not offer."""


class writing(translated):  # noqa: N801 - reads as the function that it is used as
    """A context manager that turns errors of the operating system into typed errors about a target."""

    __slots__ = ()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Raise a typed error in place of the system's error, and in place of a typed error about a missing source."""
        found = self.typed(error) if isinstance(error, OSError) else error
        if isinstance(found, SourceError) and found.code == "source.not_found":
            raise StorageError(
                "storage.denied",
                f"{printable(self._path)} cannot be written: a parent is missing or no directory",
                fix="choose another target, below a directory that you may write to",
            ) from found
        if found is not None and found is not error:
            raise found from None


def sync_file_system(path: str) -> None:
    """Sync everything that was written to the file system of a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # There is one sync for the whole tree: a sync of each atom would cost more than writing them all.
        if not hasattr(LIBC, "syncfs"):
            os.sync()
        elif LIBC.syncfs(descriptor) != 0:
            code = ctypes.get_errno()
            if code != errno.ENOSYS:
                # A failed sync means that data is missing on the disk, so the failure must be reported.
                raise OSError(code, os.strerror(code), path)
            os.sync()
    finally:
        os.close(descriptor)


def sync_directory(path: str) -> None:
    """Sync the entries of one directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_new(source: str, target: str) -> None:
    """Rename a directory to a free name.

    Raises:
        OSError: `EEXIST` if the name is taken; any other failure of the rename.
    """
    old, new = os.fsencode(source), os.fsencode(target)
    code = errno.ENOSYS
    if hasattr(LIBC, "renameat2"):
        if LIBC.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_NOREPLACE) == 0:
            return
        code = ctypes.get_errno()
    if code not in (errno.ENOSYS, errno.EINVAL):
        raise OSError(code, os.strerror(code), target)
    # Some file systems do not know the flag. A plain rename does not replace a non-empty directory either.
    os.rename(source, target)


def unlink(path: str) -> None:
    """Remove a file if it exists."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def write_file(path: str, data: bytes) -> None:
    """Write a small file and sync it to the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes, with as many calls of `write` as necessary."""
    done = 0
    while done < len(data):
        done += os.write(descriptor, data[done:])
