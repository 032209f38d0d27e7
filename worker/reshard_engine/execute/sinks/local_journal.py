"""The journal beside a local target. A running process locks it and appends one line for each finished unit."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from reshard_engine.execute.journal import UnitRecord, records_in
from reshard_engine.execute.sinks.local_leftovers import locked
from reshard_engine.integrity.readback import crc_of_range
from reshard_engine.plan.model import Plan
from reshard_engine.storage.local import LocalStore, translated
from reshard_engine.storage.local_writes import write_all

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
        there = list(pool.map(partial(_is_there, plan, staging), records))
    return {r.unit: r for r, whole in zip(records, there, strict=True) if whole}


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
