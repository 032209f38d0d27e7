"""A store whose reads are recorded for a pack, or served from one.

Listings and calls of `stat` always go to the store: each process learns the versions of objects by itself, and a pack
serves a range only for the version that this process has seen.
"""

from __future__ import annotations

import threading

from reshard_engine.storage.protocol import Listing, ObjectInfo, Store
from reshard_engine.storage.read_pack import BLOB_BYTES, MAX_PACK_BYTES, PART_BYTES, ReadPack, key_of, to_part

_RANGE_COST = 64
"""Bytes that a range takes in memory beside its data."""


class ReadRecorder:
    """Takes the ranges that are read, and makes the parts of a pack of them. Any thread may call it."""

    def __init__(self, *, most_bytes: int = MAX_PACK_BYTES, part_bytes: int = PART_BYTES) -> None:
        """Start with nothing. After more than `most_bytes`, everything is forgotten."""
        self._most_bytes = most_bytes
        self._part_bytes = part_bytes
        self._lock = threading.Lock()
        self._ranges: dict[bytes, list[tuple[int, bytes]]] = {}
        self._blobs: dict[bytes, bytes] = {}
        """The data of the part that is being filled, by itself: equal data is kept once."""
        self._bytes = self._earlier_bytes = 0
        self._parts: list[bytes] = []
        self.too_large = False

    def add(self, key: bytes, offset: int, data: bytes) -> None:
        """Take a range."""
        for at in range(0, len(data), BLOB_BYTES):
            piece = data if len(data) <= BLOB_BYTES else data[at : at + BLOB_BYTES]
            with self._lock:
                self._add(key, offset + at, piece)

    def _add(self, key: bytes, offset: int, data: bytes) -> None:
        if self.too_large:
            return
        self._bytes += _RANGE_COST
        self._bytes += 0 if data in self._blobs else len(data)
        self._bytes += 0 if key in self._ranges else len(key)
        self._ranges.setdefault(key, []).append((offset, self._blobs.setdefault(data, data)))
        if self._earlier_bytes + self._bytes > self._most_bytes:
            self.too_large = True
            self._forget()
            self._parts.clear()
        elif self._bytes >= self._part_bytes:
            self._parts.append(to_part(self._ranges))
            self._earlier_bytes += self._bytes
            self._forget()

    def _forget(self) -> None:
        self._ranges, self._blobs, self._bytes = {}, {}, 0

    def parts(self) -> list[bytes]:
        """The parts of everything that was taken; none if it was too much."""
        with self._lock:
            if self._ranges:
                self._parts.append(to_part(self._ranges))
                self._earlier_bytes += self._bytes
                self._forget()
            return list(self._parts)


class PackedStore:
    """A store with a pack before it, or with a recorder behind it, or with neither after `release`."""

    def __init__(self, store: Store, place: str, pack: ReadPack | None, recorder: ReadRecorder | None) -> None:
        """`place` tells apart stores in which one path names different objects."""
        self.inner = store
        self.scheme = store.scheme
        self._place = place
        self._pack = pack
        self._recorder = recorder

    def release(self) -> None:
        """From now on, pass everything on to the store."""
        self._pack = self._recorder = None

    def list_directory(self, path: str, *, most: int | None = None) -> Listing:
        """See `Store`; never from a pack."""
        return self.inner.list_directory(path, most=most)

    def list_tree(self, path: str) -> list[ObjectInfo]:
        """See `Store`; never from a pack."""
        return self.inner.list_tree(path)

    def stat(self, path: str) -> ObjectInfo | None:
        """See `Store`; never from a pack."""
        return self.inner.stat(path)

    def read_into(self, info: ObjectInfo, offset: int, buffer: memoryview) -> None:
        """See `Store`."""
        held = self.held(info, offset, len(buffer))
        if held is not None:
            buffer[:] = held
            return
        self.inner.read_into(info, offset, buffer)
        if self._recorder is not None:
            self.note(info, offset, bytes(buffer))

    def read_ahead(self, info: ObjectInfo, offset: int, buffer: memoryview) -> None:
        """Read bytes that a reader may need. Those that it does need, it passes to `note`."""
        self.inner.read_into(info, offset, buffer)

    def held(self, info: ObjectInfo, offset: int, length: int) -> bytes | None:
        """The bytes `[offset, offset + length)` of an object if the pack holds them."""
        if self._pack is None or (key := key_of(self._place, info)) is None:
            return None
        return self._pack.read(key, offset, length)

    def note(self, info: ObjectInfo, offset: int, data: bytes) -> None:
        """Record a range that was read."""
        if self._recorder is not None and data and (key := key_of(self._place, info)) is not None:
            self._recorder.add(key, offset, data)
