"""The texts of a distributed conversion as files in a directory beside a target that all workers share.

A text appears complete: it is written under a name of its own first, then linked or renamed. Hosts of a network file
system see each other's files when they open a directory or a file (close-to-open consistency of NFS, RFC 7530 §1.4.6).
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress

from reshard_engine.distributed.coordination import refuse_large
from reshard_engine.execute.sinks.local_files import write_all, writing

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_TEMPORARY = ".new-"
_TRIES = 8


class FileCoordination:
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
                # that stays so ends after a lease (`EpochMember._owner`).
                return self._create_in_place(path, text)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
        return True

    @staticmethod
    def _create_in_place(path: str, text: bytes) -> bool:
        try:
            descriptor = _new_file(path)
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
        for _ in range(_TRIES):
            with suppress(FileNotFoundError):
                descriptor = _new_file(path)
                break
            # One level only: a worker that goes on after the conversion ended must not make the directory anew.
            # Another worker may remove it before the file is there, because it is still empty.
            with suppress(FileExistsError):
                os.mkdir(os.path.dirname(path))
        else:
            descriptor = _new_file(path)
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
                    refuse_large(path, os.fstat(file.fileno()).st_size)
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


def _new_file(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
