"""An object store in memory with the semantics of S3, and faults at numbered operations of any storage.

Source: Amazon S3 API reference (ETags of objects and of multipart uploads, conditional puts, uploads that are
invisible until they are completed, parts of at least a fixed size but for the last).
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from reshard.errors import StorageError, printable
from reshard_engine.storage.protocol import Listing, ObjectInfo, ObjectStore, PartInfo, Store, changed, join


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    etag: str
    metadata: Mapping[str, str]


@dataclass(slots=True)
class _Upload:
    path: str
    metadata: Mapping[str, str]
    parts: dict[int, bytes] = field(default_factory=dict[int, bytes])


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()


class MemoryStore:
    """One S3 service in memory, for any number of threads. Paths are `bucket/key`; every bucket is there.

    Args:
        min_part_bytes: Least size of a part that is not the last one; S3 wants 5 MiB.
    """

    scheme = "mem"

    def __init__(self, *, min_part_bytes: int = 1 << 10) -> None:
        self.min_part_bytes = min_part_bytes
        self._objects: dict[str, _Object] = {}
        self._uploads: dict[str, _Upload] = {}
        self._lock = threading.RLock()
        self._begun = 0
        """Uploads so far: each has its own id."""

    # -- what tests look at -----------------------------------------------------------------------

    def load(self, directory: Path, path: str) -> None:
        """Put every file of a local directory below a path."""
        for file in sorted(p for p in directory.rglob("*") if p.is_file()):
            key = join(path, file.relative_to(directory).as_posix())
            self.put(key, file.read_bytes(), metadata={}, if_absent=False)

    def snapshot(self, path: str = "") -> dict[str, bytes]:
        """Every object below a path (all by default) by its whole path, to be compared with another snapshot."""
        head = path and path.rstrip("/") + "/"
        with self._lock:
            return {p: o.data for p, o in sorted(self._objects.items()) if p.startswith(head)}

    # -- names and listings -------------------------------------------------------------------------

    def list_directory(self, path: str, *, most: int | None = None) -> Listing:
        """The immediate children of a prefix, any `most` of them at the most; empty if there is none."""
        below = [(i, i.path[len(path.rstrip("/")) + 1 :]) for i in self.list_tree(path)]
        files = tuple(info for info, name in below if "/" not in name)[:most]
        directories = sorted({name.partition("/")[0] for _, name in below if "/" in name})
        return Listing(files, tuple(directories if most is None else directories[: most - len(files)]))

    def list_tree(self, path: str) -> list[ObjectInfo]:
        """Every object below a prefix, sorted by path; empty if there is none."""
        head = path.rstrip("/") + "/"
        with self._lock:
            return [_info(p, o) for p, o in sorted(self._objects.items()) if p.startswith(head)]

    def stat(self, path: str) -> ObjectInfo | None:
        """The object at exactly this key, or None."""
        with self._lock:
            found = self._objects.get(path)
        return None if found is None else _info(path, found)

    def metadata(self, path: str) -> Mapping[str, str] | None:
        """User metadata of an object, or None if there is no object."""
        with self._lock:
            found = self._objects.get(path)
        return None if found is None else dict(found.metadata)

    # -- bytes ----------------------------------------------------------------------------------------

    def read_into(self, info: ObjectInfo, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on; the object must still have the pinned ETag."""
        with self._lock:
            found = self._objects.get(info.path)
        if found is None or _info(info.path, found).pin != info.pin:
            raise changed(info)
        if offset + len(buffer) > len(found.data):
            raise StorageError("storage.protocol", f"mem://{printable(info.path)}: the range is past the end")
        buffer[:] = found.data[offset : offset + len(buffer)]

    def put(
        self,
        path: str,
        data: bytes | memoryview,
        *,
        metadata: Mapping[str, str],
        if_absent: bool,
        crc32: int | None = None,
    ) -> ObjectInfo:
        """Write a whole object."""
        held = _checked(data, crc32)
        made = _Object(held, _md5(held).hex(), {k.lower(): v for k, v in metadata.items()})
        with self._lock:
            if if_absent and path in self._objects:
                raise StorageError("storage.conflict", f"mem://{printable(path)} is there already")
            self._objects[path] = made
        return _info(path, made)

    def delete(self, paths: Sequence[str], *, in_order: bool = True) -> None:
        """Remove objects; absent ones are not an error."""
        with self._lock:
            for path in paths:
                self._objects.pop(path, None)

    # -- multipart ------------------------------------------------------------------------------------

    def create_multipart(self, path: str, *, metadata: Mapping[str, str]) -> str:
        """Begin a multipart upload; returns its id."""
        with self._lock:
            self._begun += 1
            upload_id = f"upload-{self._begun}"
            self._uploads[upload_id] = _Upload(path, {k.lower(): v for k, v in metadata.items()})
        return upload_id

    def put_part(
        self, path: str, upload_id: str, number: int, data: memoryview, *, crc32: int | None = None
    ) -> PartInfo:
        """Upload one part."""
        held = _checked(data, crc32)
        with self._lock:
            self._upload(path, upload_id).parts[number] = held
        return _part(number, held)

    def copy_part(
        self, path: str, upload_id: str, number: int, source: ObjectInfo, *, offset: int, length: int
    ) -> PartInfo:
        """Fill one part from a byte range of a pinned object."""
        buffer = bytearray(length)
        self.read_into(source, offset, memoryview(buffer))
        return self.put_part(path, upload_id, number, memoryview(buffer))

    def reaches(self, other: Store) -> bool:
        """Only itself."""
        return other is self

    def list_parts(self, path: str, upload_id: str) -> list[PartInfo] | None:
        """The parts of an upload in number order, or None if the upload is gone."""
        with self._lock:
            found = self._uploads.get(upload_id)
            if found is None or found.path != path:
                return None
            return [_part(number, data) for number, data in sorted(found.parts.items())]

    def list_uploads(self, prefix: str) -> list[tuple[str, str]]:
        """(path, upload id) of every unfinished upload below a prefix; `""` for all."""
        with self._lock:
            return sorted((u.path, i) for i, u in self._uploads.items() if u.path.startswith(prefix))

    def complete_multipart(self, path: str, upload_id: str, parts: Sequence[PartInfo]) -> None:
        """Make the object visible, if the parts are the ones that were uploaded."""
        with self._lock:
            held = self._upload(path, upload_id)
            numbers = [p.number for p in parts]
            if not parts or numbers != sorted(set(numbers)):
                raise StorageError("storage.protocol", f"mem://{printable(path)}: InvalidPartOrder")
            for part in parts:
                data = held.parts.get(part.number)
                if data is None or _md5(data).hex() != part.etag or part.crc32 not in (None, zlib.crc32(data)):
                    raise StorageError("storage.protocol", f"mem://{printable(path)}: InvalidPart {part.number}")
            pieces = [held.parts[number] for number in numbers]
            if any(len(piece) < self.min_part_bytes for piece in pieces[:-1]):
                raise StorageError("storage.protocol", f"mem://{printable(path)}: EntityTooSmall")
            etag = f"{_md5(b''.join(map(_md5, pieces))).hex()}-{len(pieces)}"
            self._objects[path] = _Object(b"".join(pieces), etag, held.metadata)
            del self._uploads[upload_id]

    def abort_multipart(self, path: str, upload_id: str) -> None:
        """Drop an upload; one that is gone is not an error."""
        with self._lock:
            found = self._uploads.get(upload_id)
            if found is not None and found.path == path:
                del self._uploads[upload_id]

    def _upload(self, path: str, upload_id: str) -> _Upload:
        found = self._uploads.get(upload_id)
        if found is None or found.path != path:
            raise StorageError("storage.conflict", f"mem://{printable(path)}: the upload is gone")
        return found


def _checked(data: bytes | memoryview, crc32: int | None) -> bytes:
    held = bytes(data)
    if crc32 is not None and zlib.crc32(held) != crc32:
        raise StorageError("storage.unavailable", "BadDigest: other bytes arrived than were sent")
    return held


def _info(path: str, found: _Object) -> ObjectInfo:
    return ObjectInfo(path, len(found.data), f"etag:{found.etag}")


def _part(number: int, data: bytes) -> PartInfo:
    return PartInfo(number, len(data), _md5(data).hex())


# Faults at numbered operations, which tests inject between the engine and its storage.
#
# `Steps` counts the operations of one process (or of one thread that stands for a process) and disturbs some of
# them. `FaultyStore` numbers the calls of a store.

_T = TypeVar("_T")
_HANG_LIMIT_S = 60.0


class Fault(StrEnum):
    """The faults that may happen at an operation."""

    ERROR_BEFORE = "error before"
    ERROR_AFTER = "effect done, then error"
    KILL_BEFORE = "kill before"
    KILL_AFTER = "kill after"
    HANG = "hang past the lease"
    SHORT = "half of it is done"
    """Fewer bytes move than were requested. A store raises an error if it notices; the operating system does not."""


class Killed(BaseException):
    """The end of a simulated process. Every later operation of it raises this again."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One numbered operation. Numbers start at 1."""

    number: int
    name: str
    path: str


def unavailable() -> StorageError:
    """The error of a store that timed out, threw the connection away, or answered 503."""
    return StorageError("storage.unavailable", "injected")


class Steps:
    """Counts operations, and disturbs those that a script names. One instance stands for one process.

    Args:
        script: Faults by number of operation; a function is called before the operation (to change something
            meanwhile, or to be slow).
        error: Makes the error of the two error modes.
        kill: Ends the process for good; by default `Killed` is raised from there on.
        hang: Sleeps until the process is to go on; by default until `wake` is called.
    """

    def __init__(
        self,
        script: Mapping[int, Fault | Callable[[], None]] | None = None,
        *,
        error: Callable[[], Exception] = unavailable,
        kill: Callable[[], None] | None = None,
        hang: Callable[[], None] | None = None,
    ) -> None:
        self._script = script or {}
        self._error = error
        self._kill = kill or self._die
        self._hang = hang or self._sleep
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self.hung = threading.Event()
        """Set once the process hangs."""
        self.dead = False
        self.done: list[Operation] = []
        """Every operation so far, the disturbed ones included."""

    def wake(self) -> None:
        """Let a process that hangs (or will) go on."""
        self._woken.set()

    def step(self, name: str, path: str, effect: Callable[[], _T], short: Callable[[], _T] | None = None) -> _T:
        """Do an operation, or the fault that the script has for it. `short` does half of the operation."""
        with self._lock:
            if self.dead:
                raise Killed
            operation = Operation(len(self.done) + 1, name, path)
            self.done.append(operation)
        fault = self._script.get(operation.number)
        self._before(fault)
        result = short() if fault is Fault.SHORT and short is not None else effect()
        if fault is Fault.ERROR_AFTER:
            raise self._error()
        if fault is Fault.KILL_AFTER:
            self._kill()
        return result

    def _before(self, fault: Fault | Callable[[], None] | None) -> None:
        if fault is Fault.HANG:
            self._hang()
        elif fault is Fault.ERROR_BEFORE:
            raise self._error()
        elif fault is Fault.KILL_BEFORE:
            self._kill()
        elif fault is not None and not isinstance(fault, Fault):
            fault()

    def _die(self) -> None:
        with self._lock:
            self.dead = True
        raise Killed

    def _sleep(self) -> None:
        self.hung.set()
        if not self._woken.wait(_HANG_LIMIT_S):
            raise AssertionError("nobody woke the process")


class FaultyStore:
    """An object store whose every call is an operation of `steps`."""

    def __init__(self, store: ObjectStore, steps: Steps) -> None:
        """Calls go to `store`."""
        self._store = store
        self._step = steps.step
        self.scheme = store.scheme
        self.min_part_bytes = store.min_part_bytes

    def list_directory(self, path: str, *, most: int | None = None) -> Listing:
        """See `Store`."""
        return self._step("list_directory", path, lambda: self._store.list_directory(path, most=most))

    def list_tree(self, path: str) -> list[ObjectInfo]:
        """See `Store`."""
        return self._step("list_tree", path, lambda: self._store.list_tree(path))

    def stat(self, path: str) -> ObjectInfo | None:
        """See `Store`."""
        return self._step("stat", path, lambda: self._store.stat(path))

    def read_into(self, info: ObjectInfo, offset: int, buffer: memoryview) -> None:
        """See `Store`."""

        def truncated() -> None:
            self._store.read_into(info, offset, buffer[: len(buffer) // 2])
            raise unavailable()

        self._step("read_into", info.path, lambda: self._store.read_into(info, offset, buffer), truncated)

    def put(
        self,
        path: str,
        data: bytes | memoryview,
        *,
        metadata: Mapping[str, str],
        if_absent: bool,
        crc32: int | None = None,
    ) -> ObjectInfo:
        """See `ObjectStore`."""
        return self._step(
            "put", path, lambda: self._store.put(path, data, metadata=metadata, if_absent=if_absent, crc32=crc32)
        )

    def delete(self, paths: Sequence[str], *, in_order: bool = True) -> None:
        """See `ObjectStore`. Each object is an operation of its own."""
        for path in paths:
            self._step("delete", path, lambda path=path: self._store.delete([path]))

    def metadata(self, path: str) -> Mapping[str, str] | None:
        """See `ObjectStore`."""
        return self._step("metadata", path, lambda: self._store.metadata(path))

    def create_multipart(self, path: str, *, metadata: Mapping[str, str]) -> str:
        """See `ObjectStore`."""
        return self._step("create_multipart", path, lambda: self._store.create_multipart(path, metadata=metadata))

    def put_part(
        self, path: str, upload_id: str, number: int, data: memoryview, *, crc32: int | None = None
    ) -> PartInfo:
        """See `ObjectStore`."""
        return self._step("put_part", path, lambda: self._store.put_part(path, upload_id, number, data, crc32=crc32))

    def copy_part(
        self, path: str, upload_id: str, number: int, source: ObjectInfo, *, offset: int, length: int
    ) -> PartInfo | None:
        """See `ObjectStore`."""
        return self._step(
            "copy_part",
            path,
            lambda: self._store.copy_part(path, upload_id, number, source, offset=offset, length=length),
        )

    def reaches(self, other: Store) -> bool:
        """See `CopyingStore`. This call is not counted as an operation, because it uses no network."""
        return other is self

    def list_parts(self, path: str, upload_id: str) -> list[PartInfo] | None:
        """See `ObjectStore`."""
        return self._step("list_parts", path, lambda: self._store.list_parts(path, upload_id))

    def list_uploads(self, prefix: str) -> list[tuple[str, str]]:
        """See `ObjectStore`."""
        return self._step("list_uploads", prefix, lambda: self._store.list_uploads(prefix))

    def complete_multipart(self, path: str, upload_id: str, parts: Sequence[PartInfo]) -> None:
        """See `ObjectStore`."""
        self._step("complete_multipart", path, lambda: self._store.complete_multipart(path, upload_id, parts))

    def abort_multipart(self, path: str, upload_id: str) -> None:
        """See `ObjectStore`."""
        self._step("abort_multipart", path, lambda: self._store.abort_multipart(path, upload_id))
