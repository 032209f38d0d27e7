"""A target on the local file system: it is staged in a hidden sibling directory, synced once, and renamed.

The rename never replaces a directory. With `--overwrite` the old directory is first renamed aside, and it is removed
after the commit. A crash between the two renames leaves no checkpoint at the target, and never a mixture of both.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from reshard.errors import IntegrityError, RequestError, printable
from reshard.models.jobs import Leftover
from reshard_engine.execute.journal import ChunkRecord, UnitRecord, records_in
from reshard_engine.execute.sinks.free_space import require_room
from reshard_engine.execute.sinks.leftovers import (
    WORKERS,
    abandoned_bytes,
    busy,
    held_by_others,
    leftovers_of,
    locked,
    plans_beside,
    remove_unless_held,
    targets_below,
)
from reshard_engine.execute.sinks.protocol import (
    CopyRead,
    Earlier,
    Made,
    Shared,
    not_to_overwrite,
    target_exists,
    write_streamed,
)
from reshard_engine.integrity.file_check import crc_of_range
from reshard_engine.integrity.manifest import MANIFEST_NAME
from reshard_engine.plan.model import Chunk, Plan
from reshard_engine.storage.local import LocalStore, translated
from reshard_engine.storage.local_writes import (
    rename_new,
    sync_directory,
    sync_file_system,
    unlink,
    write_all,
    write_file,
    writing,
)
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import ObjectInfo, PartInfo, Store, read_bytes, save_directory
from reshard_engine.storage.texts import FileTexts
from reshard_engine.tensors.layout import KnownFiles, Pointer

# The writer of one chunk of a local file.

_WRITE = 2
_WRITEBACK_BYTES = 8 << 20
_START_WRITING = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)


class LocalChunkFile:
    """Writes items at their offsets, and tells the kernel to write them to the disk while the next items are made.

    So the sync at the end has little left to do. The call (`sync_file_range`) is only a hint: the sync at the end
    reports all failures of writing.
    """

    def __init__(self, path: str) -> None:
        """Open or create the file."""
        self._path = path
        with translated(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._unsent = (0, 0)

    def put(self, offset: int, data: memoryview) -> None:
        """Write bytes at their offset in the file."""
        with translated(self._path):
            done = 0
            while done < len(data):
                done += os.pwrite(self._descriptor, data[done:], offset + done)
        first, end = self._unsent
        first, end = (first, offset + len(data)) if offset == end else (offset, offset + len(data))
        if end - first >= _WRITEBACK_BYTES:
            self._send(first, end)
            first = end
        self._unsent = first, end

    def _send(self, first: int, end: int) -> None:
        if _START_WRITING is not None:
            _START_WRITING(self._descriptor, ctypes.c_int64(first), ctypes.c_int64(end - first), _WRITE)

    def close(self) -> None:
        """Close the file."""
        first, end = self._unsent
        if end - first >= _WRITEBACK_BYTES >> 3:
            self._send(first, end)
        os.close(self._descriptor)


# The journal beside a local target. A running process locks it and appends one line for each finished unit.

_THREADS = 4


def _boot_id() -> str:
    # Data that was written but not synced does not survive a power loss, so a journal from an earlier boot is void.
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else "unknown"


class LocalJournal:
    """The journal of one plan. Its descriptor is -1 if this process does not have the lock."""

    def __init__(self, path: str, *, shared: bool = False) -> None:
        """Open and lock the file, which is created if necessary; `shared` locks it together with other workers."""
        self._path = path
        self._lock = threading.Lock()
        self._descriptor = locked(path, shared=shared)

    @property
    def held(self) -> bool:
        """True if this process has the lock."""
        return self._descriptor >= 0

    def remove_empty(self) -> None:
        """Remove the journal if no unit was ever finished."""
        if os.fstat(self._descriptor).st_size == 0:
            os.unlink(self._path)

    def append(self, record: UnitRecord) -> None:
        """Append the line of a finished unit. Any thread may call this."""
        line = record.to_line() + b"\n"
        with self._lock, translated(self._path):
            write_all(self._descriptor, line)

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def resume(self, plan: Plan, staging: str, synced: Iterable[UnitRecord] = ()) -> Mapping[int, UnitRecord]:
        """The records of units that earlier attempts finished and whose bytes are still staged.

        Without an earlier attempt, the journal and the staging directory are made anew, empty.

        Args:
            plan: The plan.
            staging: The directory in which the target's files are.
            synced: Records of workers that shared the conversion. Their data was on the disk before their records.
        """
        header = {"plan": plan.digest, "boot": _boot_id()}
        size = os.fstat(self._descriptor).st_size
        lines = os.pread(self._descriptor, size, 0).split(b"\n")
        try:
            same = json.loads(lines[0]) == header
        except ValueError:
            same = False
        durable = [r for r in synced if r.belongs_to(plan)]
        if same and os.path.isdir(staging):
            found = records_in(b"\n".join(lines[1:-1]))
            # A torn last line is cut off, so that the next one does not continue it.
            os.ftruncate(self._descriptor, size - len(lines[-1]))
            os.lseek(self._descriptor, 0, os.SEEK_END)
            return _still_valid(plan, staging, [*durable, *(r for r in found if r.belongs_to(plan))])
        if durable and os.path.isdir(staging):
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            write_all(self._descriptor, json.dumps(header).encode() + b"\n")
            return _still_valid(plan, staging, durable)
        # The journal is emptied before the directory is made: an old journal must not describe a new directory.
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        shutil.rmtree(staging, ignore_errors=True)
        os.makedirs(staging)
        write_all(self._descriptor, json.dumps(header).encode() + b"\n")
        return {}


def _still_valid(plan: Plan, staging: str, records: Sequence[UnitRecord]) -> Mapping[int, UnitRecord]:
    """The records whose bytes are still in the staging directory. Every byte is read again."""
    with ThreadPoolExecutor(_THREADS) as pool:
        intact = list(pool.map(partial(_is_there, plan, staging), records))
    return {r.unit: r for r, whole in zip(records, intact, strict=True) if whole}


def _is_there(plan: Plan, staging: str, record: UnitRecord) -> bool:
    """True if the staged bytes of every chunk of a unit have the CRC-32 of its record."""
    store = LocalStore()
    for entry in record.chunks:
        chunk = entry.chunk
        info = store.stat(os.path.join(staging, plan.files[chunk.file].path))
        if info is None or info.size_bytes < chunk.offset + chunk.length_bytes:
            return False
        if crc_of_range(store, info, chunk.offset, chunk.length_bytes) != entry.crc32:
            return False
    return True


# The sink: files in a hidden directory, which takes the name of the target at the end.

INNER = ".reshard-into"
"""The name of the target inside an existing directory into which a conversion writes."""
_RIVALS_GIVE_UP_S = 2.0
_RIVALS_LOOK_S = 0.05


class _FilesOfOthers(Mapping[str, ObjectInfo]):
    """Files that other hosts may have written, looked at one by one, when they are needed.

    A network file system caches the attributes of a file until the file is opened (close-to-open consistency of NFS,
    RFC 7530 §1.4.6).
    """

    def __init__(self, where: Location) -> None:
        self._where = where
        self._found: dict[str, ObjectInfo] = {}

    def __getitem__(self, path: str) -> ObjectInfo:
        if path not in self._found:
            place = self._where.child(path).path
            with suppress(OSError):
                os.close(os.open(place, os.O_RDONLY | os.O_CLOEXEC))
            info = self._where.store.stat(place)
            if info is None:
                raise KeyError(path)
            self._found[path] = info
        return self._found[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


class LocalSink:
    """The sink that writes one local directory."""

    streams, calls_wait, look_s = True, False, 0.05
    min_part_bytes: int | None = None
    repairs = False
    """Without a meaning here: the old target stays whole until the new one takes its name."""
    uploads: Mapping[int, str] = {}

    def __init__(self, target: str, *, known: KnownFiles) -> None:
        """`target` is an absolute path with symbolic links resolved; `begin` creates its parent directory."""
        self._target = target
        self._known = known
        self._parent, self._name = os.path.split(target)
        self._stem = os.path.join(self._parent, f".{self._name}.reshard-")
        self._aside = f"{self._stem}old"
        self._journal: LocalJournal | None = None
        self._shared: Shared | None = None
        self._lock = threading.Lock()
        self._directories: set[str] = set()

    def _paths(self, digest: str) -> None:
        self._digest = digest[:16]
        self._staging = f"{self._stem}{self._digest}"
        self._journal_path = self._staging + ".journal"

    # -- begin ------------------------------------------------------------------------------------------

    def examine(self, plan: Plan, *, overwrite: bool) -> None:
        """Refuse a target that is occupied, in use, or too large for its file system."""
        self._paths(plan.digest)
        occupied = self._refuse_occupied(overwrite=overwrite)
        with writing(self._parent):
            if held_by_others(self._target, but="") is not None:
                raise busy(self._target)
            require_room(
                self._target,
                [f.size_bytes for f in plan.files],
                staging=self._staging,
                replaces=occupied,
                abandoned_bytes=abandoned_bytes(self._target, but=self._digest),
            )

    def look(self, plan: Plan) -> None:
        """Do nothing (see `repairs`)."""

    def meeting_place(self, plan: Plan) -> FileTexts:
        """The directory in which the workers that share a conversion meet."""
        self._paths(plan.digest)
        return FileTexts(f"{self._staging}{WORKERS}")

    def copies_from(self, source: Store) -> bool:
        """See `Sink`; a file system copies nothing."""
        return False

    def copy(self, chunk: Chunk, source: ObjectInfo, offset: int) -> PartInfo | None:
        """See `copies_from`."""
        return None

    def places_of(self, paths: Iterable[str]) -> set[str]:
        """The directories of files, and the files elsewhere that links lead to.

        What lies beside such a file, such as a pool that a rank's file is a link into, is no part of the checkpoint.
        """
        found = list(paths)
        return {os.path.realpath(os.path.dirname(p)) for p in found} | {
            os.path.realpath(p) for p in found if os.path.islink(p)
        }

    def make_parent(self) -> None:
        """Make the directory in which the target will lie."""
        with writing(self._parent):
            os.makedirs(self._parent, exist_ok=True)

    def join(self, plan: Plan, shared: Shared, *, overwrite: bool, uploads: Mapping[int, str]) -> None:
        """Write to the staging directory of another worker, which every worker keeps locked for the others."""
        self._shared = shared
        if self._journal is None:
            self._lock_journal(plan, overwrite=overwrite, shared=True)

    def _lock_journal(self, plan: Plan, *, overwrite: bool, shared: bool) -> LocalJournal:
        self._plan = plan
        self._overwrite = overwrite
        self._paths(plan.digest)
        with writing(self._journal_path):
            journal = LocalJournal(self._journal_path, shared=shared)
        if not journal.held:
            raise busy(self._target)
        self._journal = journal
        return journal

    def begin(
        self, plan: Plan, *, overwrite: bool, earlier: Earlier | None = None, shared: bool = False
    ) -> Mapping[int, UnitRecord]:
        """Take the target and read the journals of earlier attempts."""
        self.make_parent()
        self._refuse_occupied(overwrite=overwrite)
        journal = self._lock_journal(plan, overwrite=overwrite, shared=shared)
        with writing(self._journal_path):
            try:
                self._refuse_rivals()
                # The process that had the lock until a moment ago may have finished the target.
                self._refuse_occupied(overwrite=overwrite)
            except RequestError:
                journal.remove_empty()
                raise
            return journal.resume(plan, self._staging, () if earlier is None else earlier.records())

    def _refuse_rivals(self) -> None:
        """Refuse a target into which a process converts with other options.

        Each process locks its own journal before it looks for others. So if two begin at the same time, at least one
        sees the other. The process whose plan has the smaller digest waits until the other one gives up.
        """
        until = time.monotonic() + _RIVALS_GIVE_UP_S
        while (rival := held_by_others(self._target, but=self._digest)) is not None:
            if rival < self._digest or time.monotonic() > until:
                raise busy(self._target)
            time.sleep(_RIVALS_LOOK_S)

    def _refuse_occupied(self, *, overwrite: bool) -> bool:
        with writing(self._target):
            exists = os.path.lexists(self._target)
            names = os.listdir(self._target) if os.path.isdir(self._target) else []
            occupied = exists and (bool(names) or not os.path.isdir(self._target))
        if occupied and not overwrite:
            raise target_exists(self._target, self._known, names)
        if occupied:
            self._refuse_precious(names)
        return occupied

    def _refuse_precious(self, names: Sequence[str]) -> None:
        """Refuse to let `--overwrite` remove a directory that is neither a checkpoint nor an output of reshard."""
        here = os.path.realpath(os.getcwd())
        kept = {"/", os.path.realpath(os.path.expanduser("~")), here}
        foreign = bool(names) and not self._known.holds_checkpoint(names)
        if self._target in kept or here.startswith(self._target + "/") or foreign:
            raise not_to_overwrite(self._target)

    # -- units ------------------------------------------------------------------------------------------

    def write_made(self, made: Made, copy_read: CopyRead | None, pool: Executor | None) -> list[ChunkRecord]:
        """Write each item at its offset in its file."""
        return write_streamed(self.open_chunk, made)

    def open_chunk(self, chunk: Chunk) -> LocalChunkFile:
        """Open the staged file of a chunk for writing."""
        path = f"{self._staging}/{self._plan.files[chunk.file].path}"
        with writing(path):
            self._make_directory(path.rpartition("/")[0])
            return LocalChunkFile(path)

    def _make_directory(self, path: str) -> None:
        if path in self._directories:
            return
        try:
            os.mkdir(path)
        except OSError:  # the directory exists, or its parent does not
            os.makedirs(path, exist_ok=True)
        with self._lock:
            self._directories.add(path)

    def sync(self) -> None:
        """Sync what this process wrote to the disk: only then may other hosts rely on its records."""
        with writing(self._staging):
            sync_file_system(self._staging)

    def record(self, record: UnitRecord) -> None:
        """Append one line to the journal, or give the record to the journal of the workers."""
        if self._shared is not None:
            self._shared.put_record(record)
            return
        assert self._journal is not None
        self._journal.append(record)

    def seal(self, records: Mapping[int, UnitRecord]) -> None:
        """Check the length of every file that is not a commit file."""
        self._check_lengths([u.chunks for u in self._plan.units if not u.commit])

    @property
    def written(self) -> Location:
        """The staging directory."""
        return Location(LocalStore(), self._staging, self._staging)

    def written_files(self) -> Mapping[str, ObjectInfo]:
        """The staged files, looked at one by one."""
        return _FilesOfOthers(self.written)

    def publish(self, records: Mapping[int, UnitRecord]) -> Sequence[ObjectInfo]:
        """Check the lengths of the commit files, and list the staged target."""
        self._check_lengths([u.chunks for u in self._plan.units if u.commit])
        return [ObjectInfo(path, i.size_bytes, i.pin) for path, i in self.written.files().items()]

    def _check_lengths(self, chunks: Sequence[Sequence[Chunk]]) -> None:
        store = LocalStore()
        for number in sorted({c.file for unit in chunks for c in unit}):
            planned = self._plan.files[number]
            info = store.stat(os.path.join(self._staging, planned.path))
            held = -1 if info is None else info.size_bytes
            if held != planned.size_bytes:
                raise IntegrityError(
                    "integrity.mismatch",
                    f"{printable(planned.path)} has {held} bytes, {planned.size_bytes} were planned",
                )

    # -- commit -----------------------------------------------------------------------------------------

    def withdraw(self, paths: Sequence[str]) -> None:
        """Remove staged files; nothing is visible yet, and the next attempt writes their units anew."""
        with writing(self._staging):
            for path in paths:
                unlink(os.path.join(self._staging, path))

    def commit(self, manifest: bytes, pointer: Pointer | None) -> None:
        """Write the manifest, sync once, rename once, then write the pointer."""
        with writing(self._target):
            write_file(os.path.join(self._staging, MANIFEST_NAME), manifest)
            sync_file_system(self._staging)
            if self._overwrite and os.path.lexists(self._target):
                self._withdraw()
            if os.path.isdir(self._target) and not os.listdir(self._target):
                os.rmdir(self._target)
            try:
                rename_new(self._staging, self._target)
            except FileExistsError:
                raise target_exists(self._target, self._known) from None
            sync_directory(self._parent)
        self.finish(pointer)

    def finish(self, pointer: Pointer | None) -> None:
        """Do what follows the rename: write the pointer, and remove the journal and all leftovers. Safe to repeat."""
        with writing(self._target):
            if pointer is not None:
                self._write_pointer(pointer)
            shutil.rmtree(self._aside, ignore_errors=True)
            unlink(self._journal_path)
            shutil.rmtree(f"{self._staging}{WORKERS}", ignore_errors=True)
        # Leftovers of attempts with other options are of no use any more.
        self.discard_all()

    def finish_after_crash(self, plan: Plan, pointer: Pointer | None) -> None:
        """Complete a commit that crashed after the rename. If there is no journal, only the pointer may be lost."""
        self._paths(plan.digest)
        if os.path.exists(self._journal_path):
            self.finish(pointer)
        elif pointer is not None and not os.path.lexists(os.path.join(pointer.directory(self._target), pointer.name)):
            # An existing pointer is kept: it may name a newer checkpoint.
            with writing(self._target):
                self._write_pointer(pointer)

    def _withdraw(self) -> None:
        store = LocalStore()
        save, tag = save_directory(self._target, self._plan.source.get("tag"))
        for name in self._known.all_pointers:
            info = store.stat(path := os.path.join(save, name))
            if info is not None and self._known.tag_in(name, read_bytes(store, info)) == tag:
                os.unlink(path)
        shutil.rmtree(self._aside, ignore_errors=True)
        if os.path.isdir(self._target) and not os.path.islink(self._target):
            os.rename(self._target, self._aside)
        else:
            os.unlink(self._target)

    def _write_pointer(self, pointer: Pointer) -> None:
        temporary, directory = f"{self._stem}pointer", pointer.directory(self._target)
        for name, content in (*pointer.beside, (pointer.name, pointer.content)):
            write_file(temporary, content)
            # Another attempt at this plan may already have put the same content in place.
            with suppress(FileNotFoundError):
                os.replace(temporary, os.path.join(directory, name))
        sync_directory(directory)

    def close(self) -> None:
        """Release the lock."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def discard_all(self) -> None:
        """Remove staging directories, journals and a moved old target of conversions that no process runs any more."""
        with writing(self._parent):
            names = set(os.listdir(self._parent)) if os.path.isdir(self._parent) else set[str]()
            found = plans_beside(self._target)
            held = [digest for digest in sorted(found) if not remove_unless_held(f"{self._stem}{digest}")]
            if not held:
                self._put_back(names)

    def discard(self, digests: Collection[str], *, idle_s: float = 0.0, keep_unfinished: bool = False) -> None:
        """Remove the staging directories and journals of these plans that no process runs; the lock tells that.

        The last two arguments are for stores without locks: a target that is finished has no staging directory.
        """
        doomed = {digest[:16] for digest in digests}
        with writing(self._parent):
            names = set(os.listdir(self._parent)) if os.path.isdir(self._parent) else set[str]()
            for digest in sorted(plans_beside(self._target) & doomed):
                remove_unless_held(f"{self._stem}{digest}")
            if not plans_beside(self._target):
                self._put_back(names)

    def leftovers(self, *, idle_s: float) -> list[Leftover]:
        """The leftovers of conversions to the directory, and into it. A lock tells which are in use."""
        with writing(self._target):
            return [*leftovers_of(self._target), *leftovers_of(os.path.join(self._target, INNER))]

    def targets_below(self) -> list[str]:
        """See `Sink`; without the target inside of a conversion into the directory."""
        with writing(self._target):
            return [path for path in targets_below(self._target) if os.path.basename(path) != INNER]

    def clean(self, found: Sequence[Leftover]) -> bool:
        """Remove all leftovers. Each is checked again under its lock."""
        if found:
            self.discard_all()
            LocalSink(os.path.join(self._target, INNER), known=self._known).discard_all()
        return True

    def suspect(self) -> None:
        """Do nothing: a process that has the lock on its journal is the only one that can end its conversion."""

    def _put_back(self, names: Set[str]) -> None:
        """Clean up after a crash in the middle of a commit. An old target that was not replaced gets its name back."""
        aside = os.path.basename(self._aside)
        if aside in names and not os.path.lexists(self._target):
            os.rename(self._aside, self._target)
        shutil.rmtree(self._aside, ignore_errors=True)
        if f".{self._name}.reshard-pointer" in names:
            unlink(f"{self._stem}pointer")
