"""The protocols of sinks: staging, journal and commit of one target that a conversion writes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from typing import Protocol

from reshard.errors import RequestError, printable
from reshard.models.jobs import Leftover
from reshard_engine.execute.journal import ChunkRecord, UnitRecord
from reshard_engine.plan.model import Chunk, Plan, WriteItem
from reshard_engine.storage.crc32 import crc32
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import ObjectInfo, PartInfo, Store
from reshard_engine.storage.texts import TextStore
from reshard_engine.tensors.layout import KnownFiles, Pointer

Made = Iterator[tuple[WriteItem, memoryview]]
"""The items of one unit in order, each with its bytes. The bytes stay valid until the next step begins."""
CopyRead = Callable[[Chunk, int], str | None]
"""Has the store copy a chunk with this CRC-32; returns the store's receipt, or None."""


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
    """One target that is being written, on whatever kind of storage: nothing else asks for the kind.

    From `examine` to `close`, the methods are called in this order; chunks are written after `begin`.
    """

    repairs: bool
    """True if the target was this plan's when the conversion began: `--overwrite` may then clear it."""

    # -- the kind of storage ----------------------------------------------------------------------------

    @property
    def streams(self) -> bool:
        """True if chunks are written item by item; False if each is written as a whole."""
        ...

    @property
    def calls_wait(self) -> bool:
        """True if calls wait for a network, so that many at once are faster than one."""
        ...

    @property
    def look_s(self) -> float:
        """The pause of a worker that waits for others, in seconds: in proportion to what a look costs."""
        ...

    @property
    def min_part_bytes(self) -> int | None:
        """The least size of a part of a large file; None without such a limit."""
        ...

    @property
    def sync(self) -> Callable[[], None] | None:
        """Makes what this process wrote durable; None if everything that was acknowledged is."""
        ...

    def copies_from(self, source: Store) -> bool:
        """True if the target's storage can fill chunks from objects of this store itself."""
        ...

    def places_of(self, paths: Iterable[str]) -> set[str]:
        """The directories in which objects of the same kind of storage lie, and files that links lead to, as URLs."""
        ...

    # -- before the conversion --------------------------------------------------------------------------

    def meeting_place(self, plan: Plan) -> TextStore:
        """The place beside the target where workers meet that share the conversion of a plan."""
        ...

    def make_parent(self) -> None:
        """Make the directory in which the target will lie."""
        ...

    def look(self, plan: Plan) -> None:
        """Note whether this plan has written the target already (see `repairs`)."""
        ...

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

    @property
    def uploads(self) -> Mapping[int, str]:
        """The ids of the uploads that are known, by file number. A file system has none."""
        ...

    def write_made(self, made: Made, copy_read: CopyRead | None, pool: Executor | None) -> list[ChunkRecord]:
        """Write the items of a unit. Any thread may call this.

        Args:
            made: The items with their bytes.
            copy_read: Has the store copy a chunk that was read; a receipt, or None if the chunk must be sent.
            pool: Sends several chunks at once.
        """
        ...

    def copy(self, chunk: Chunk, source: ObjectInfo, offset: int) -> PartInfo | None:
        """Fill a chunk from an object of the same store; None if the store refuses to copy."""
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

    def written_files(self) -> Mapping[str, ObjectInfo]:
        """The files of `written`, by path, as they are now: other hosts may have written them."""
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

    # -- leftovers --------------------------------------------------------------------------------------

    def finish_after_crash(self, plan: Plan, pointer: Pointer | None) -> None:
        """Do what follows the commit of a target that is committed."""
        ...

    def suspect(self) -> None:
        """Let `close` look whether another process has ended the conversion meanwhile."""
        ...

    def discard_all(self) -> None:
        """Remove all leftovers of unfinished conversions into the target that no process runs any more."""
        ...

    def discard(self, digests: Collection[str], *, idle_s: float = 0.0, keep_unfinished: bool = False) -> None:
        """Remove what conversions with these plans left.

        Args:
            digests: The digests of the plans.
            idle_s: Seconds without a write after which a conversion counts as ended, where no lock tells it.
            keep_unfinished: True to keep a conversion with one of these plans that has the claim and is unfinished.
        """
        ...

    def leftovers(self, *, idle_s: float) -> list[Leftover]:
        """The files that conversions into the target left; `idle_s` is as in `discard`."""
        ...

    def targets_below(self) -> list[str]:
        """The paths of other targets in the directory, of which conversions left files."""
        ...

    def clean(self, found: Sequence[Leftover]) -> bool:
        """Remove the leftovers that are not in use; False, and nothing is removed, if none may be."""
        ...


class ChunkFile(Protocol):
    """One chunk that one thread is writing."""

    def put(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset in the file."""
        ...

    def close(self) -> None:
        """Close the file, also if the chunk is incomplete."""
        ...


# Errors for targets that are not empty. Nothing is replaced without `--overwrite`; it replaces only checkpoints.


def target_exists(target: str, known: KnownFiles, names: Iterable[str] | None = None) -> RequestError:
    """The error for a target that is not empty. `names` are its entries, if they are known."""
    text = f"{printable(target)} already exists"
    if names is not None and not known.holds_checkpoint(names):
        return RequestError(
            "request.target_exists",
            f"{text}, and it is neither a checkpoint nor an output of reshard",
            fix="choose another target, or remove it yourself: --overwrite replaces checkpoints and outputs only",
        )
    fix = "choose another target, or add --overwrite (the old data will be gone)"
    return RequestError("request.target_exists", text, fix=fix)


def not_to_overwrite(target: str) -> RequestError:
    """The error for a target that `--overwrite` leaves alone."""
    return RequestError(
        "request.target_exists",
        f"{printable(target)} is neither a checkpoint nor an output of reshard; --overwrite removes nothing else",
        fix="choose another target, or remove it yourself",
    )


# Writers of the items of a unit: item by item to a file, or by whole chunks to an object store.


def write_streamed(open_chunk: Callable[[Chunk], ChunkFile], made: Made) -> list[ChunkRecord]:
    """Write each item at its offset in its file. One file is open at a time."""
    written: list[ChunkRecord] = []
    chunk: Chunk | None = None
    file: ChunkFile | None = None
    crc = 0
    try:
        for item, data in made:
            if file is None or item.chunk is not chunk:
                if file is not None and chunk is not None:
                    closing, file = file, None
                    closing.close()
                    written.append(ChunkRecord(chunk, crc))
                chunk, file, crc = item.chunk, open_chunk(item.chunk), 0
            crc = crc32(data, crc)
            file.put(item.begin, data)
    finally:
        if file is not None:
            file.close()
    if chunk is not None:
        written.append(ChunkRecord(chunk, crc))
    return written


def write_whole(
    send: Callable[[Chunk, memoryview, int], str], made: Made, copy_read: CopyRead | None, pool: Executor | None
) -> list[ChunkRecord]:
    """Write whole chunks: each item is one chunk. With a pool, several chunks are sent concurrently."""

    def write(chunk: Chunk, data: memoryview) -> ChunkRecord:
        crc = crc32(data)
        etag = copy_read(chunk, crc) if copy_read is not None else None
        return ChunkRecord(chunk, crc, send(chunk, data, crc) if etag is None else etag)

    if pool is None:
        return [write(item.chunk, data) for item, data in made]
    sent: list[Future[ChunkRecord]] = []
    try:
        sent.extend(pool.submit(write, item.chunk, data) for item, data in made)
        return [s.result() for s in sent]
    finally:
        # When this function returns, also after a failure, no call may still read the unit's memory.
        for one in sent:
            one.cancel()
        wait(sent)
