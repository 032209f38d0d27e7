"""An object store in memory with the semantics of S3, for tests that control every operation.

Source: Amazon S3 API reference (ETags of objects and of multipart uploads, conditional puts, uploads that are
invisible until they are completed, parts of at least a fixed size but for the last).
"""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reshard.errors import StorageError, printable
from reshard_engine.storage.local import changed
from reshard_engine.storage.protocol import Listing, ObjectInfo, PartInfo, Store, join


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
        """Remove objects; absent ones are no error."""
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
        """Drop an upload; one that is gone is no error."""
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
