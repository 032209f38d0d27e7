"""Where a conversion writes: staging, journal and commit of one target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from reshard_engine.execute.journal import UnitRecord
from reshard_engine.plan.model import Chunk, Plan
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import ObjectInfo
from reshard_engine.tensors.layout import Pointer


class Sink(Protocol):
    """One target being written. Methods are called in the order in which they stand here, chunks after `begin`."""

    def examine(self, plan: Plan, *, overwrite: bool) -> None:
        """Refuse what `begin` will refuse, before anything is read or written.

        Raises:
            RequestError: `request.target_exists`, `request.target_busy`.
            StorageError: `storage.no_room`.
        """
        ...

    def begin(self, plan: Plan, *, overwrite: bool) -> Mapping[int, UnitRecord]:
        """Take the target; returns what an earlier attempt at the same plan finished.

        Raises:
            RequestError: `request.target_exists`, `request.target_busy`.
        """
        ...

    def record(self, record: UnitRecord) -> None:
        """Remember a finished unit, from any thread."""
        ...

    def seal(self, records: Mapping[int, UnitRecord]) -> None:
        """Make everything but the commit files final, and check lengths.

        Raises:
            IntegrityError: `integrity.mismatch` if what is there is not what was written.
        """
        ...

    @property
    def written(self) -> Location:
        """Where the files are before the commit."""
        ...

    def publish(self, records: Mapping[int, UnitRecord]) -> Sequence[ObjectInfo]:
        """Make the commit files final; returns every file of the target as it is there."""
        ...

    def withdraw(self, paths: Sequence[str]) -> None:
        """Take back files of the target that turned out damaged, and the commit files before them."""
        ...

    def commit(self, manifest: bytes, pointer: Pointer | None) -> None:
        """Write the manifest, make the target visible, then the pointer; forget the journal."""
        ...

    def close(self) -> None:
        """Let go of the target, committed or not; the journal stays if not."""
        ...


class ChunkFile(Protocol):
    """One chunk that is being written, by one thread."""

    def put(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset in the file."""
        ...

    def close(self) -> None:
        """Let go of it, whole or not."""
        ...


class WholeSink(Sink, Protocol):
    """A sink that takes a chunk at once: one part of an upload, or one object."""

    def write(self, chunk: Chunk, data: memoryview, crc32: int) -> str:
        """Write one chunk, from any thread; returns the store's receipt, if it gives one."""
        ...


@runtime_checkable
class StreamSink(Sink, Protocol):
    """A sink that takes a chunk in windows."""

    def open_chunk(self, chunk: Chunk) -> ChunkFile:
        """Begin to write a chunk, from any thread."""
        ...
