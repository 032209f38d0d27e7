"""A target on the local file system: a hidden sibling directory, synced once, then one rename.

The rename does not replace. With `--overwrite` the old directory is renamed aside first and removed after
the commit: a crash between leaves no checkpoint there, never a mixture.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from reshard.errors import IntegrityError, RequestError, SourceError, StorageError, printable
from reshard_engine.execute.journal import UnitRecord
from reshard_engine.execute.sinks.free_space import require_room
from reshard_engine.execute.sinks.local_chunk import LocalChunkFile
from reshard_engine.execute.sinks.local_leftovers import (
    abandoned_bytes,
    busy,
    held_by_others,
    locked,
    plans_beside,
    remove_unless_held,
)
from reshard_engine.execute.sinks.overwrite import not_to_overwrite, target_exists
from reshard_engine.integrity.manifest import MANIFEST_NAME
from reshard_engine.integrity.readback import crc_of_range
from reshard_engine.plan.model import Chunk, Plan
from reshard_engine.storage.local import LocalStore, translated
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import ObjectInfo, read_bytes
from reshard_engine.tensors.layout import KnownFiles, Pointer

_RENAME_NOREPLACE, _AT_FDCWD = 1, -100
_THREADS = 4
_RIVALS_GIVE_UP_S = 2.0
_RIVALS_LOOK_S = 0.05
LIBC = ctypes.CDLL(None, use_errno=True)
"""The C library: one sync of one file system, and the rename that does not replace."""


def _boot_id() -> str:
    # Data that was written but not synced does not survive a power loss: a journal of another boot is void.
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else "unknown"


class LocalSink:
    """Writes one local directory."""

    def __init__(self, target: str, *, known: KnownFiles) -> None:
        """`target` is absolute, symbolic links resolved; its parent is created when the sink begins."""
        self._target = target
        self._known = known
        self._parent, self._name = os.path.split(target)
        self._stem = os.path.join(self._parent, f".{self._name}.reshard-")
        self._aside = f"{self._stem}old"
        self._journal = -1
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

    def begin(self, plan: Plan, *, overwrite: bool) -> Mapping[int, UnitRecord]:
        """Take the target and read the journal of an earlier attempt."""
        self._plan = plan
        self._overwrite = overwrite
        self._paths(plan.digest)
        with writing(self._parent):
            os.makedirs(self._parent, exist_ok=True)
        self._refuse_occupied(overwrite=overwrite)
        with writing(self._journal_path):
            self._journal = locked(self._journal_path)
        if self._journal < 0:
            raise busy(self._target)
        with writing(self._journal_path):
            try:
                self._refuse_rivals()
                # Who had the target until a moment ago may have finished it.
                self._refuse_occupied(overwrite=overwrite)
            except RequestError:
                if os.fstat(self._journal).st_size == 0:
                    os.unlink(self._journal_path)
                raise
            return self._resume()

    def _refuse_rivals(self) -> None:
        """Refuse a target into which a process converts with other options.

        Both lock their journals before they look: of two that begin at once at least one sees the other. The one that
        comes first in order then gives the other the time to give up.
        """
        until = time.monotonic() + _RIVALS_GIVE_UP_S
        while (rival := held_by_others(self._target, but=self._digest)) is not None:
            if rival < self._digest or time.monotonic() > until:
                raise busy(self._target)
            time.sleep(_RIVALS_LOOK_S)

    def _refuse_occupied(self, *, overwrite: bool) -> bool:
        with writing(self._target):
            there = os.path.lexists(self._target)
            names = os.listdir(self._target) if os.path.isdir(self._target) else []
            occupied = there and (bool(names) or not os.path.isdir(self._target))
        if occupied and not overwrite:
            raise target_exists(self._target, self._known, names)
        if occupied:
            self._refuse_precious(names)
        return occupied

    def _refuse_precious(self, names: Sequence[str]) -> None:
        """Let `--overwrite` remove checkpoints and our own outputs, nothing else."""
        here = os.path.realpath(os.getcwd())
        kept = {"/", os.path.realpath(os.path.expanduser("~")), here}
        foreign = bool(names) and not self._known.holds_checkpoint(names)
        if self._target in kept or here.startswith(self._target + "/") or foreign:
            raise not_to_overwrite(self._target)

    def _resume(self) -> Mapping[int, UnitRecord]:
        header = {"plan": self._plan.digest, "boot": _boot_id()}
        size = os.fstat(self._journal).st_size
        lines = os.pread(self._journal, size, 0).split(b"\n")
        try:
            same = json.loads(lines[0]) == header
        except ValueError:
            same = False
        if same and os.path.isdir(self._staging):
            found = [UnitRecord.from_line(line) for line in lines[1:-1]]
            # A torn last line is cut off, so that the next one does not continue it.
            os.ftruncate(self._journal, size - len(lines[-1]))
            os.lseek(self._journal, 0, os.SEEK_END)
            return self._still_valid([r for r in found if r is not None and r.belongs_to(self._plan)])
        # Emptied first: an old journal must not speak for a new staging directory.
        os.ftruncate(self._journal, 0)
        os.lseek(self._journal, 0, os.SEEK_SET)
        shutil.rmtree(self._staging, ignore_errors=True)
        os.makedirs(self._staging)
        _write_all(self._journal, json.dumps(header).encode() + b"\n")
        return {}

    def _still_valid(self, records: Sequence[UnitRecord]) -> Mapping[int, UnitRecord]:
        """The records whose bytes are still in the staging directory, read again."""
        with ThreadPoolExecutor(_THREADS) as pool:
            wrong = list(pool.map(self._damage, records))
        return {r.unit: r for r, problem in zip(records, wrong, strict=True) if problem is None}

    def _damage(self, record: UnitRecord) -> str | None:
        """The first chunk of a unit that is not what was written, or None."""
        store = LocalStore()
        for entry in record.chunks:
            planned = self._plan.files[entry.chunk.file]
            info = store.stat(os.path.join(self._staging, planned.path))
            end = entry.chunk.offset + entry.chunk.length_bytes
            if info is None or info.size_bytes < end:
                return (
                    f"{printable(planned.path)} has {-1 if info is None else info.size_bytes} bytes, {end} were written"
                )
            if crc_of_range(store, info, entry.chunk.offset, entry.chunk.length_bytes) != entry.crc32:
                return f"{printable(planned.path)} at byte {entry.chunk.offset} is not what was written"
        return None

    # -- units ------------------------------------------------------------------------------------------

    def open_chunk(self, chunk: Chunk) -> LocalChunkFile:
        """Begin to write a chunk at its offset."""
        path = f"{self._staging}/{self._plan.files[chunk.file].path}"
        with writing(path):
            self._make_directory(path.rpartition("/")[0])
            return LocalChunkFile(path)

    def _make_directory(self, path: str) -> None:
        if path in self._directories:
            return
        try:
            os.mkdir(path)
        except OSError:  # it is there, or its parent is not
            os.makedirs(path, exist_ok=True)
        with self._lock:
            self._directories.add(path)

    def record(self, record: UnitRecord) -> None:
        """Append one line to the journal."""
        line = record.to_line() + b"\n"
        with self._lock, translated(self._journal_path):
            _write_all(self._journal, line)

    def seal(self, records: Mapping[int, UnitRecord]) -> None:
        """Check the length of every file that is written by now."""
        self._check_lengths([u.chunks for u in self._plan.units if not u.commit])

    @property
    def written(self) -> Location:
        """The staging directory."""
        return Location(LocalStore(), self._staging, self._staging)

    def publish(self, records: Mapping[int, UnitRecord]) -> Sequence[ObjectInfo]:
        """Check the commit files too, and list the staged target."""
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
        """Nothing is visible yet; without these files the next attempt writes their units anew."""
        with writing(self._staging):
            for path in paths:
                _unlink(os.path.join(self._staging, path))

    def commit(self, manifest: bytes, pointer: Pointer | None) -> None:
        """Manifest, one sync, one rename, then the pointer."""
        with writing(self._target):
            _write_file(os.path.join(self._staging, MANIFEST_NAME), manifest)
            self._sync()
            if self._overwrite and os.path.lexists(self._target):
                self._withdraw()
            if os.path.isdir(self._target) and not os.listdir(self._target):
                os.rmdir(self._target)
            self._rename()
            self._sync_directory(self._parent)
        self.finish(pointer)

    def finish(self, pointer: Pointer | None) -> None:
        """What is left after the rename: the pointer, and forgetting the journal. Safe to repeat."""
        with writing(self._target):
            if pointer is not None:
                self._write_pointer(pointer)
            shutil.rmtree(self._aside, ignore_errors=True)
            _unlink(self._journal_path)
        # What attempts with other options left beside the target serves nobody any more.
        self.discard_all()

    def finish_after_crash(self, plan: Plan, pointer: Pointer | None) -> None:
        """Do what a crash after the rename left undone; without a journal that is at most a lost pointer."""
        self._paths(plan.digest)
        if os.path.exists(self._journal_path):
            self.finish(pointer)
        elif pointer is not None and not os.path.lexists(os.path.join(self._parent, pointer.name)):
            # One that is there may name a newer checkpoint.
            with writing(self._target):
                self._write_pointer(pointer)

    def _withdraw(self) -> None:
        store = LocalStore()
        for path in (os.path.join(self._parent, name) for name in self._known.pointers):
            info = store.stat(path)
            if info is not None and read_bytes(store, info).strip() == self._name.encode():
                os.unlink(path)
        shutil.rmtree(self._aside, ignore_errors=True)
        if os.path.isdir(self._target) and not os.path.islink(self._target):
            os.rename(self._target, self._aside)
        else:
            os.unlink(self._target)

    def _write_pointer(self, pointer: Pointer) -> None:
        temporary = f"{self._stem}pointer"
        for name, content in (*pointer.beside, (pointer.name, pointer.content)):
            _write_file(temporary, content)
            # Another attempt at this plan may have put the same content in place by now.
            with suppress(FileNotFoundError):
                os.replace(temporary, os.path.join(self._parent, name))
        self._sync_directory(self._parent)

    def _sync(self) -> None:
        descriptor = os.open(self._staging, os.O_RDONLY)
        try:
            # One sync for the whole tree: a sync per atom costs more than writing them.
            if not hasattr(LIBC, "syncfs"):
                os.sync()
            elif LIBC.syncfs(descriptor) != 0:
                code = ctypes.get_errno()
                if code != errno.ENOSYS:
                    # What could not be written back is not there: a sync that says nothing must not hide it.
                    raise OSError(code, os.strerror(code), self._staging)
                os.sync()
        finally:
            os.close(descriptor)

    def _sync_directory(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _rename(self) -> None:
        old, new = os.fsencode(self._staging), os.fsencode(self._target)
        code = errno.ENOSYS
        if hasattr(LIBC, "renameat2"):
            if LIBC.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_NOREPLACE) == 0:
                return
            code = ctypes.get_errno()
        if code == errno.EEXIST:
            raise target_exists(self._target, self._known)
        if code not in (errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code), self._target)
        # File systems without the flag: a directory does not replace a non-empty one either.
        os.rename(self._staging, self._target)

    def close(self) -> None:
        """Release the lock."""
        if self._journal >= 0:
            os.close(self._journal)
            self._journal = -1

    def discard_all(self) -> None:
        """Remove what conversions that no process runs have left of staging, journals and a moved old target."""
        with writing(self._parent):
            names = set(os.listdir(self._parent)) if os.path.isdir(self._parent) else set[str]()
            found = plans_beside(self._target)
            held = [digest for digest in sorted(found) if not remove_unless_held(f"{self._stem}{digest}")]
            if not held:
                self._put_back(names)

    def _put_back(self, names: Set[str]) -> None:
        """Clean up after a crash in the middle of a commit: an old target that was not replaced is there again."""
        aside = os.path.basename(self._aside)
        if aside in names and not os.path.lexists(self._target):
            os.rename(self._aside, self._target)
        shutil.rmtree(self._aside, ignore_errors=True)
        if f".{self._name}.reshard-pointer" in names:
            _unlink(f"{self._stem}pointer")


class writing(translated):  # noqa: N801 - reads as the function that it is used as
    """Turns the operating system's errors into those of a target."""

    __slots__ = ()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Raise the typed error in place of the system's, and of one that speaks of a source."""
        found = self.typed(error) if isinstance(error, OSError) else error
        if isinstance(found, SourceError) and found.code == "source.not_found":
            raise StorageError(
                "storage.denied",
                f"{printable(self._path)} cannot be written: a parent is missing or no directory",
                fix="choose another target, below a directory that you may write to",
            ) from found
        if found is not None and found is not error:
            raise found from None


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _write_file(path: str, data: bytes) -> None:
    """A small file, on the disk when this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        _write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    done = 0
    while done < len(data):
        done += os.write(descriptor, data[done:])
