"""The protocols of sinks: staging, journal and commit of one target that a conversion writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from reshard_engine.execute.journal import UnitRecord
from reshard_engine.plan.model import Chunk, Plan
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import ObjectInfo
from reshard_engine.tensors.layout import Pointer


class Earlier(Protocol):
    """The work of workers that share a conversion, beside that of attempts by one process."""

    def records(self) -> Sequence[UnitRecord]:
        """The records of the units that they finished."""
        ...

    def uploads(self) -> Mapping[int, str]:
        """The ids of their uploads, by file number. Local targets have none."""
        ...


class Shared(Protocol):
    """The journal of workers that share a conversion now."""

    @property
    def is_over(self) -> bool:
        """True if the conversion is finished or was removed, as far as this worker knows."""
        ...

    def put_record(self, record: UnitRecord) -> None:
        """Take the record of a finished unit. Any thread may call this."""
        ...

    def upload(self, file: int) -> str | None:
        """The id of the upload that a worker has begun for a file."""
        ...

    def offer_upload(self, file: int, upload_id: str) -> str:
        """Name an upload as that of a file; returns the id of the upload that all workers use."""
        ...

    def uploads(self) -> Mapping[int, str]:
        """The ids of all uploads, by file number."""
        ...


class Sink(Protocol):
    """One target that is being written. Its methods are called in this order; chunks are written after `begin`."""

    def examine(self, plan: Plan, *, overwrite: bool) -> None:
        """Refuse what `begin` will refuse, before anything is read or written.

        Raises:
            RequestError: `request.target_exists`, `request.target_busy`.
            StorageError: `storage.no_room`.
        """
        ...

    def begin(
        self, plan: Plan, *, overwrite: bool, earlier: Earlier | None = None, shared: bool = False
    ) -> Mapping[int, UnitRecord]:
        """Take the target; returns the records of the units that earlier attempts at the same plan finished.

        Args:
            plan: The plan.
            overwrite: True to replace a checkpoint that the target holds.
            earlier: The work of workers that shared this conversion.
            shared: True if other workers will `join`.

        Raises:
            RequestError: `request.target_exists`, `request.target_busy`.
        """
        ...

    def join(self, plan: Plan, shared: Shared, *, overwrite: bool, uploads: Mapping[int, str]) -> None:
        """Write to a target that another worker has taken, or this one with `shared`.

        Args:
            plan: The plan.
            shared: The journal of all workers, which takes the place of the sink's own.
            overwrite: As in `begin`.
            uploads: The ids of uploads that earlier attempts began and that still hold.
        """
        ...

    def record(self, record: UnitRecord) -> None:
        """Write the record of a finished unit to the journal. Any thread may call this."""
        ...

    def seal(self, records: Mapping[int, UnitRecord]) -> None:
        """Make all files final, except the commit files, and check their lengths.

        Raises:
            IntegrityError: `integrity.mismatch` if the stored files differ from what was written.
        """
        ...

    @property
    def written(self) -> Location:
        """The location of the files before the commit."""
        ...

    def publish(self, records: Mapping[int, UnitRecord]) -> Sequence[ObjectInfo]:
        """Make the commit files final; returns every file of the target as the store lists it."""
        ...

    def withdraw(self, paths: Sequence[str]) -> None:
        """Remove files of the target that turned out to be damaged. The commit files are removed first."""
        ...

    def commit(self, manifest: bytes, pointer: Pointer | None) -> None:
        """Write the manifest, make the target visible, write the pointer, and remove the journal."""
        ...

    def close(self) -> None:
        """Release the target. The journal of a target that is not committed stays."""
        ...


class ChunkFile(Protocol):
    """One chunk that one thread is writing."""

    def put(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset in the file."""
        ...

    def close(self) -> None:
        """Close the file, also if the chunk is incomplete."""
        ...


class WholeSink(Sink, Protocol):
    """A sink that takes each chunk as a whole: as one part of an upload, or as one object."""

    def write(self, chunk: Chunk, data: memoryview, crc32: int) -> str:
        """Write one chunk; returns the store's receipt (its ETag), or an empty text. Any thread may call this."""
        ...


@runtime_checkable
class StreamSink(Sink, Protocol):
    """A sink that takes a chunk item by item."""

    def open_chunk(self, chunk: Chunk) -> ChunkFile:
        """Begin to write a chunk. Any thread may call this."""
        ...
