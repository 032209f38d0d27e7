"""Small named texts by which processes agree: the protocol of the stores that keep them, as files and as objects.

The protocol needs one atomic operation: to create a text under a name that is still free. Object stores (conditional
puts) and file systems (hard links, exclusive creation) both have it. Claims, heartbeats and journals of workers are
such texts. A text that is a file appears complete: it is written under a name of its own first, then linked or renamed.
Hosts of a network file system see each other's files when they open a directory or a file (close-to-open consistency of
NFS, RFC 7530 §1.4.6).
"""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Protocol, Self

from pydantic import TypeAdapter, ValidationError

from reshard.errors import IntegrityError, RequestError, SourceError, StorageError, as_text, printable
from reshard_engine.storage.local_writes import write_all, writing
from reshard_engine.storage.locations import WRITABLE_URLS, Location
from reshard_engine.storage.protocol import ObjectInfo, ObjectStore, join, read_bytes

MAX_TEXT_BYTES = 64 << 20
"""Largest text that is read. The ids of a hundred thousand uploads take 20 MB."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_TEMPORARY = ".new-"
_NAME_TRIES = _READ_TRIES = 8


class TextStore(Protocol):
    """Named texts that several processes see. Any method may raise a `StorageError`."""

    def create(self, name: str, text: bytes) -> bool:
        """Write a text under a free name; False, and nothing changes, if the name is taken.

        The caller makes its text unlike all others, so that a lost acknowledgement can be told from another's text.
        """
        ...

    def put(self, name: str, text: bytes) -> None:
        """Write a text, whether or not the name is taken."""
        ...

    def read(self, name: str) -> bytes | None:
        """The text under a name, or None.

        Raises:
            IntegrityError: `integrity.journal` for a text of more than `MAX_TEXT_BYTES`, which reshard did not write.
        """
        ...

    def names(self) -> Mapping[str, str]:
        """All names. Each has a version, which changes whenever the text is written again."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Remove texts. A missing one is not an error."""
        ...


def agreed_text(store: TextStore, name: str, text: bytes) -> bytes | None:
    """Claim a name with a text; returns the text that has it, this one or another's. None if it comes and goes."""
    for _ in range(_NAME_TRIES):
        if store.create(name, text):
            return text
        if (there := store.read(name)) is not None:
            return there
    return None


class JsonText:
    """The base of dataclasses that are texts: JSON objects with their fields."""

    __slots__ = ()

    def to_text(self) -> bytes:
        """The value as JSON text."""
        # Messages may name files whose names are no text.
        return json.dumps(as_text(_json_of(type(self)).dump_python(self, mode="json"))).encode()

    @classmethod
    def from_text(cls, text: bytes | None) -> Self | None:
        """The value in a text; None if there is no text, or one that holds no such value."""
        try:
            return _json_of(cls).validate_json(text or b"", strict=True)
        except ValidationError:
            return None


@cache
def _json_of(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


class FileTexts:
    """Texts as files below one directory."""

    def __init__(self, root: str) -> None:
        """`root` is an absolute path, whose parent exists. The first text whose name has no slash makes it."""
        self._root = root

    def _path(self, name: str) -> str:
        return os.path.join(self._root, name)

    def create(self, name: str, text: bytes) -> bool:
        """Create a file if there is none of this name."""
        path = self._path(name)
        with writing(path):
            temporary = self._written(name, text)
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                # A file system without hard links: for readers a file that is still empty has no text, and a claim
                # that stays so ends after a lease (`Session.owner_of`).
                return self._create_in_place(path, text)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
        return True

    @staticmethod
    def _create_in_place(path: str, text: bytes) -> bool:
        try:
            descriptor = _new_text_file(path)
        except FileExistsError:
            return False
        try:
            write_all(descriptor, text)
        except OSError:
            with suppress(FileNotFoundError):
                os.unlink(path)
            raise
        finally:
            os.close(descriptor)
        return True

    def put(self, name: str, text: bytes) -> None:
        """Create or replace a file."""
        path = self._path(name)
        with writing(path):
            os.replace(self._written(name, text), path)

    def _written(self, name: str, text: bytes) -> str:
        """The path of a new file with this text, in the directory of the name."""
        path = self._path(f"{name}{_TEMPORARY}{uuid.uuid4().hex[:12]}")
        for _ in range(_NAME_TRIES):
            with suppress(FileNotFoundError):
                descriptor = _new_text_file(path)
                break
            # One level only: a worker that goes on after the conversion ended must not make the directory anew.
            # Another worker may remove it before the file is there, because it is still empty.
            with suppress(FileExistsError):
                os.mkdir(os.path.dirname(path))
        else:
            descriptor = _new_text_file(path)
        try:
            write_all(descriptor, text)
        finally:
            os.close(descriptor)
        return path

    def read(self, name: str) -> bytes | None:
        """Read a file; None also while it is still empty."""
        path = self._path(name)
        with writing(path):
            try:
                with open(path, "rb") as file:
                    _refuse_large(path, os.fstat(file.fileno()).st_size)
                    return file.read() or None
            except FileNotFoundError:
                return None

    def names(self) -> Mapping[str, str]:
        """List the files; a version is the inode, the time and the size."""
        found: dict[str, str] = {}
        with writing(self._root):
            pending = [""]
            while pending:
                head = pending.pop()
                with suppress(FileNotFoundError), os.scandir(self._path(head)) as entries:
                    for entry in entries:
                        name = f"{head}{entry.name}"
                        with suppress(FileNotFoundError):
                            if entry.is_dir(follow_symlinks=False):
                                pending.append(f"{name}/")
                            elif _TEMPORARY not in name:
                                info = entry.stat(follow_symlinks=False)
                                found[name] = f"{info.st_ino}:{info.st_mtime_ns}:{info.st_size}"
        return found

    def delete(self, names: Sequence[str]) -> None:
        """Remove files, and the directories that become empty: of a conversion that was refused nothing stays."""
        with writing(self._root):
            for name in names:
                with suppress(FileNotFoundError):
                    os.unlink(self._path(name))
            for directory in sorted({os.path.dirname(self._path(name)) for name in names} | {self._root}, reverse=True):
                with suppress(OSError):  # it is not empty, or gone
                    os.rmdir(directory)


def _new_text_file(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


class ObjectTexts:
    """Texts as objects below one prefix."""

    def __init__(self, store: ObjectStore, root: str) -> None:
        """`root` is `bucket/key...` without a trailing slash; it need not exist."""
        self._store = store
        self._root = root
        self._listed: Mapping[str, ObjectInfo] = {}
        """The objects that the last listing showed: those need not be looked up before they are read."""

    def create(self, name: str, text: bytes) -> bool:
        """Put an object if it is absent."""
        try:
            self._store.put(join(self._root, name), text, metadata={}, if_absent=True)
        except StorageError as error:
            if error.code != "storage.conflict" and not error.retryable:
                raise
            there = self.read(name)
            if there is None:
                # The put failed and left nothing, or the object was removed: the caller looks again.
                if error.retryable:
                    raise
                return False
            return there == text
        return True

    def put(self, name: str, text: bytes) -> None:
        """Put an object."""
        self._store.put(join(self._root, name), text, metadata={}, if_absent=False)

    def read(self, name: str) -> bytes | None:
        """Read an object that other workers may replace at any moment."""
        path = join(self._root, name)
        return read_text(self._store, path, listed=self._listed.get(path))

    def names(self) -> Mapping[str, str]:
        """List the objects; their versions are their pins."""
        head = len(self._root) + 1
        self._listed = {i.path: i for i in self._store.list_tree(self._root)}
        return {i.path[head:]: i.pin for i in self._listed.values()}

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects."""
        self._store.delete([join(self._root, name) for name in names])


def write_text(location: Location, text: bytes) -> None:
    """Write a text whole, as a file or as an object.

    Raises:
        RequestError: `request.unknown_scheme` for a store that cannot be written to.
        StorageError: The storage refused or failed.
    """
    if isinstance(location.store, ObjectStore):
        location.store.put(location.path, text, metadata={}, if_absent=False)
    elif location.store.scheme == "file":
        directory, name = os.path.split(os.path.abspath(location.path))
        FileTexts(directory).put(name, text)
    else:
        raise RequestError(
            "request.unknown_scheme",
            f"nothing can be written to {printable(location.url)}",
            fix=f"give {WRITABLE_URLS}",
        )


def read_text(
    store: ObjectStore, path: str, *, most_bytes: int = MAX_TEXT_BYTES, listed: ObjectInfo | None = None
) -> bytes | None:
    """The content of an object that other processes may replace or remove at any moment; None if there is none.

    Args:
        store: The store.
        path: The object's path.
        most_bytes: The largest size that reshard may have written.
        listed: The object as a listing showed it, which need not be looked up.

    Raises:
        IntegrityError: `integrity.journal` for a larger object.
        StorageError: `storage.unavailable` if the object is replaced each time.
    """
    for _ in range(_READ_TRIES):
        info, listed = listed or store.stat(path), None
        if info is None:
            return None
        _refuse_large(path, info.size_bytes, most_bytes)
        try:
            return read_bytes(store, info)
        except SourceError as error:
            if error.code not in ("source.changed", "source.not_found"):
                raise
    raise StorageError("storage.unavailable", f"{path} was replaced each time it was read")


def _refuse_large(path: str, size_bytes: int, most_bytes: int = MAX_TEXT_BYTES) -> None:
    """Refuse a text that is too large to be one of reshard's.

    Raises:
        IntegrityError: `integrity.journal`.
    """
    if size_bytes > most_bytes:
        raise IntegrityError(
            "integrity.journal",
            f"{printable(path)} has {size_bytes} bytes: reshard did not write it",
            fix="remove it if no conversion into this target is running",
        )
