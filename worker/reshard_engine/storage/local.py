"""The store of local files. It reads with `preadv` into the caller's memory; pins are mtime and size."""

from __future__ import annotations

import errno
import os
import shlex
import stat as stat_module
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import islice
from types import TracebackType

from reshard.errors import RequestError, SourceError, StorageError, counted, printable, storage_code
from reshard_engine.storage.protocol import Listing, ObjectInfo, changed
from reshard_engine.storage.urls import refuse_opened_outside, refuse_outside

_KEPT_FILES = 64
_MOST_LINKED = 1_000
"""Most linked directories in one tree. Links that lead to directories with links make exponentially many paths."""


def _pin(found: os.stat_result) -> str:
    return f"mtime:{found.st_mtime_ns}-{found.st_size}"


class translated:  # noqa: N801 - reads as the function that it is used as
    """A context manager that turns system errors into typed errors. It is a class, which is faster for small files."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        """`path` is the path that the errors name."""
        self._path = path

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Raise the typed error in place of the system's error."""
        if isinstance(error, OSError):
            raise self.typed(error) from None

    def typed(self, error: OSError) -> SourceError | StorageError:
        """The typed error for a system error."""
        path = printable(self._path)
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return SourceError(
                "source.not_found",
                f"{path} does not exist",
                fix=f"correct the path, or copy the file again: ls {shlex.quote(os.path.dirname(path) or '.')}",
            )
        if isinstance(error, FileExistsError):
            return StorageError("storage.denied", f"{path} is not a directory", fix="choose another target")
        reason = f"{path}: {error.strerror}"
        if error.errno == errno.ENAMETOOLONG:
            return SourceError("name.invalid", reason, fix="use a shorter path")
        code = storage_code(error)
        if code == "storage.denied":
            return StorageError(code, reason, fix="check the owner and mode of the path, and how it is mounted")
        return StorageError(code, reason)


def _status(path: str) -> os.stat_result | None:
    """The status of a directory's entry; None for a dead link, and for a file that was removed meanwhile."""
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link to itself
            return None
        raise


def dead_links(directory: str) -> str:
    """A sentence that names the dead links below a directory, for the error of a file that is missing; "" for none."""
    found: list[str] = []
    for root, _, names in islice(os.walk(directory), _MOST_LINKED):
        for name in sorted(names):
            path = os.path.join(root, name)
            if os.path.islink(path) and _status(path) is None:
                place = os.path.normpath(os.path.join(root, os.readlink(path)))
                inner = os.path.relpath(path, directory)
                found.append(f"{printable(inner)} is a link to {printable(place)}, which does not exist")
    more = f"; {counted(len(found) - 3, 'more dead link')}" if len(found) > 3 else ""
    return "; ".join(found[:3]) + more


def not_files(directory: str) -> dict[str, str]:
    """What every entry below a directory is that is neither a file nor a directory, by its path relative to it.

    Lists of files leave them out, and yet a program that goes by names opens them: a dead link leads to a file as soon
    as there is one, and from a FIFO or a socket comes what its writer likes.

    Raises:
        SourceError, RequestError, StorageError: As `LocalStore.list_tree`.
    """
    with translated(directory):
        return {
            os.path.relpath(path, directory): _kind(status)
            for path, status in sorted(_entries(directory), key=lambda entry: entry[0])
            if status is None or not stat_module.S_ISREG(status.st_mode)
        }


def _kind(status: os.stat_result | None) -> str:
    if status is None:
        return "a dead link"
    if stat_module.S_ISFIFO(status.st_mode):
        return "a FIFO"
    return "a socket" if stat_module.S_ISSOCK(status.st_mode) else "a device"


def _tree(path: str) -> Iterator[ObjectInfo]:
    """The regular files below a directory, also those in linked directories: a reader opens them by the same paths.

    Raises:
        SourceError, RequestError: As `_entries`.
    """
    for inner, status in _entries(path):
        if status is not None and stat_module.S_ISREG(status.st_mode):
            yield ObjectInfo(inner, status.st_size, _pin(status))


def _entries(path: str) -> Iterator[tuple[str, os.stat_result | None]]:
    """The path and status of all below a directory that is no directory, also in linked directories; None: a dead link.

    A link to a directory above itself is not followed. A directory that cannot be listed raises: it must not look
    empty.

    Raises:
        SourceError: `checkpoint.too_large`: too many linked directories.
        RequestError: `request.root_forbidden`.
    """
    top = _status(path)
    waiting = [] if top is None else [(path, frozenset({(top.st_dev, top.st_ino)}))]
    linked = 0
    while waiting:
        directory, above = waiting.pop()
        try:
            entries = list(os.scandir(directory))
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in entries:
            status = _status(entry.path)
            if status is None:
                if entry.is_symlink():  # else the file was removed meanwhile
                    yield entry.path, None
            elif not stat_module.S_ISDIR(status.st_mode):
                yield entry.path, status
            elif (key := (status.st_dev, status.st_ino)) not in above:
                if entry.is_symlink():
                    refuse_outside(entry.path)
                    linked += 1
                if linked > _MOST_LINKED:
                    raise SourceError(
                        "checkpoint.too_large",
                        f"{printable(path)} has more than {_MOST_LINKED:,} linked directories",
                        fix=f"see which links it has: find {shlex.quote(printable(path))} -type l",
                    )
                waiting.append((entry.path, above | {key}))


class _Kept(threading.local):
    """Descriptors that the reads of this thread share; None if each read opens its own."""

    descriptors: dict[str, int] | None = None


_KEPT = _Kept()


@contextmanager
def kept_open() -> Generator[None]:
    """Keep the files open that this thread reads in the block: opening a file costs as much as reading 256 KiB.

    Every read still compares the file with its pin.
    """
    descriptors: dict[str, int] = {}
    before, _KEPT.descriptors = _KEPT.descriptors, descriptors
    try:
        yield
    finally:
        _KEPT.descriptors = before
        for descriptor in descriptors.values():
            os.close(descriptor)


@contextmanager
def _opened(path: str) -> Generator[int]:
    kept = _KEPT.descriptors
    if kept is not None and path in kept:
        yield kept[path]
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        refuse_opened_outside(descriptor, path)
    except RequestError:
        os.close(descriptor)
        raise
    if kept is not None and len(kept) < _KEPT_FILES:
        kept[path] = descriptor
        yield descriptor
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class LocalStore:
    """The local file system. Paths are absolute."""

    scheme = "file"

    def list_directory(self, path: str, *, most: int | None = None) -> Listing:
        """The immediate children of a directory, any `most` of them at the most; empty if there is none."""
        refuse_outside(path)
        files: list[ObjectInfo] = []
        directories: list[str] = []
        try:
            with translated(path), os.scandir(path) as entries:
                for entry in islice(entries, most):
                    found = _status(entry.path)
                    if found is None:
                        continue
                    if stat_module.S_ISDIR(found.st_mode):
                        directories.append(entry.name)
                    elif stat_module.S_ISREG(found.st_mode):
                        files.append(ObjectInfo(os.path.join(path, entry.name), found.st_size, _pin(found)))
        except SourceError as error:
            if error.code != "source.not_found":
                raise
            return Listing((), ())
        return Listing(tuple(sorted(files, key=lambda f: f.path)), tuple(sorted(directories)))

    def list_tree(self, path: str) -> list[ObjectInfo]:
        """Every regular file below a directory, sorted by path, also in linked directories (`_tree`)."""
        with translated(path):
            return sorted(_tree(path), key=lambda f: f.path)

    def stat(self, path: str) -> ObjectInfo | None:
        """The regular file at exactly this path, or None."""
        try:
            with translated(path):
                status = os.stat(path)
        except SourceError:
            return None
        if not stat_module.S_ISREG(status.st_mode):
            return None
        return ObjectInfo(path, status.st_size, _pin(status))

    def read_into(self, info: ObjectInfo, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on. The file must still have its pin when the bytes are read."""
        with translated(info.path), _opened(info.path) as descriptor:
            done = 0
            while done < len(buffer):
                count = os.preadv(descriptor, [buffer[done:]], offset + done)
                if count == 0:
                    raise changed(info)
                done += count
            # A writer may come between a comparison and the read, so it comes last. A write moves the time of the file
            # before it moves its bytes (Linux, `file_update_time` in mm/filemap.c).
            if _pin(os.fstat(descriptor)) != info.pin:
                raise changed(info)
