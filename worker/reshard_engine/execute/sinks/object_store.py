"""A target in an object store: nothing is staged, objects appear whole at their final keys.

Large objects are one multipart upload each, whose id is in the journal before its first part; small
ones are created if absent. Bytes are deterministic, so a part or an object that an earlier attempt (or
a zombie) wrote is the same one; a lost acknowledgement is resolved by reading back. The journal is one
small object per unit beside the target.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

from reshard.errors import IntegrityError, ReshardError, StorageError, printable
from reshard_engine.execute.journal import UnitRecord
from reshard_engine.execute.sinks.control_objects import ControlObjects
from reshard_engine.execute.sinks.object_leftovers import PLAN_KEY, Leftovers
from reshard_engine.execute.sinks.overwrite import not_to_overwrite, target_exists
from reshard_engine.integrity.manifest import MANIFEST_NAME
from reshard_engine.plan.model import Chunk, Plan
from reshard_engine.plan.server_copy import part_numbers
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import ObjectInfo, ObjectStore, PartInfo, join, parent_and_name
from reshard_engine.tensors.layout import KnownFiles, Pointer

CRC_KEY = "reshard-crc32"
_THREADS = 8
_DOUBTFUL = frozenset({"storage.conflict", "storage.protocol", "request.target_busy", "integrity.mismatch"})
"""Failures that another conversion of the same target may have caused."""
_Receipts = dict[int, dict[int, PartInfo]]
"""By file, then by part number; a small object is its own part 1."""


class ObjectSink:
    """Writes one prefix of an object store."""

    fence_s = 0.5
    """How long a look at the claim is good for while old objects are removed."""

    def __init__(self, store: ObjectStore, target: str, *, known: KnownFiles) -> None:
        """`target` is `bucket/key...` without a trailing slash."""
        self._known = known
        self._store = store
        self._target = target
        self._url = f"{store.scheme}://{target}"
        self._parent = parent_and_name(target)[0]
        self._control = ControlObjects(store, target)
        self._leftovers = Leftovers(store, target, self._control, known)
        self._uploads: dict[int, str] = {}
        self._created: dict[str, str] = {}
        """Path by upload id, of uploads that this process created."""
        self._put_here: set[str] = set()
        """Small objects that this process wrote, or found written by this very plan."""
        self._completed: set[int] = set()
        self._doubt = False
        """Whether something happened that a rival may have caused."""
        self._lock = threading.Lock()
        self._creating: dict[int, threading.Lock] = {}

    def _path(self, file: int) -> str:
        return join(self._target, self._plan.files[file].path)

    def _paths(self) -> set[str]:
        return {join(self._target, f.path) for f in self._plan.files}

    # -- begin ------------------------------------------------------------------------------------------

    def examine(self, plan: Plan, *, overwrite: bool) -> None:
        """Refuse a target that holds something else, or that another plan has claimed."""
        if not overwrite:
            self._leftovers.refuse_others(plan.digest)

    def begin(self, plan: Plan, *, overwrite: bool) -> Mapping[int, UnitRecord]:
        """Claim the target and read the journal of an earlier attempt."""
        self._plan = plan
        self._numbers = part_numbers(plan.units)
        self.examine(plan, overwrite=overwrite)
        rival = self._control.claimed_by()
        if rival is not None and rival.plan != plan.digest and overwrite:
            # Its uploads are known only to its journal: they go before the journal does.
            self.discard_all()
        claim = self._control.claim(plan)
        # Looked at again, under the claim: what is there now, nobody else is still writing.
        there = {i.path: i for i in self._store.list_tree(self._target)}
        if not self._control.is_settled():
            if there:
                self._make_room(sorted(there), allowed=claim.clearing, overwrite=overwrite)
            self._control.settle(plan)
            return {}
        self._uploads = self._control.uploads()
        self._leftovers.abort_uploads(self._paths(), keep=set(self._uploads.values()))
        return self._still_valid(there)

    def _make_room(self, paths: Sequence[str], *, allowed: bool, overwrite: bool) -> None:
        heads = {p.removeprefix(self._target + "/").partition("/")[0] for p in paths}
        if not allowed and (not overwrite or not self._known.holds_checkpoint(heads)):
            self._control.remove(self._plan.digest)
            raise not_to_overwrite(self._url) if overwrite else target_exists(self._url, self._known)
        self._control.allow_clearing(self._plan)
        with self._doubting():
            self._clear(paths)

    def _clear(self, paths: Sequence[str]) -> None:
        # What makes the old target readable goes first.
        first = [p for p in paths if p.endswith(self._known.needed)]
        last = set(paths).difference(first)
        checked_at = -math.inf
        for path in (*self._leftovers.pointers(), *first, *sorted(last)):
            if time.monotonic() - checked_at > self.fence_s:
                # Who slept since the last look may find what another attempt has written since.
                self._control.require_clearing(self._plan)
                checked_at = time.monotonic()
            self._store.delete([path])

    def _still_valid(self, there: Mapping[str, ObjectInfo]) -> Mapping[int, UnitRecord]:
        """The records whose bytes the store still holds."""
        parts: dict[int, dict[int, PartInfo]] = {}
        self._uploads = {f: u for f, u in self._uploads.items() if f < len(self._plan.files)}
        for file, upload_id in list(self._uploads.items()):
            listed = self._store.list_parts(self._path(file), upload_id)
            if listed is not None:
                parts[file] = {p.number: p for p in listed}
            elif self._is_mine(self._path(file), self._plan.files[file].size_bytes):
                self._completed.add(file)
            else:
                del self._uploads[file]

        def held(record: UnitRecord) -> bool:
            for entry in record.chunks:
                file = entry.chunk.file
                if not self._is_large(file):
                    info = there.get(self._path(file))
                    if info is None or info.size_bytes != entry.chunk.length_bytes or info.pin != f"etag:{entry.etag}":
                        return False
                elif file not in self._completed:
                    part = parts.get(file, {}).get(self._numbers.get(entry.chunk, 0))
                    if part is None or (part.size_bytes, part.etag) != (entry.chunk.length_bytes, entry.etag):
                        return False
            return True

        # Read after the uploads were looked at: one that is complete by now has all its records.
        return {
            k: r for k, r in self._control.records().items() if k == r.unit and r.belongs_to(self._plan) and held(r)
        }

    def _is_large(self, file: int) -> bool:
        return self._plan.files[file].size_bytes > self._plan.chunk_bytes

    def _is_mine(self, path: str, size_bytes: int, crc32: int | None = None) -> bool:
        info = self._store.stat(path)
        facts = self._store.metadata(path)
        if info is None or facts is None or info.size_bytes != size_bytes or facts.get(PLAN_KEY) != self._plan.digest:
            return False
        return crc32 is None or facts.get(CRC_KEY) == f"{crc32:08x}"

    # -- units ------------------------------------------------------------------------------------------

    def write(self, chunk: Chunk, data: memoryview, crc32: int) -> str:
        """Put a small object, or upload one part of a large one."""
        path = self._path(chunk.file)
        if self._is_large(chunk.file):
            with self._doubting():
                upload, number = self._upload(chunk.file), self._numbers[chunk]
                return self._store.put_part(path, upload, number, data, crc32=crc32).etag
        facts = {PLAN_KEY: self._plan.digest, CRC_KEY: f"{crc32:08x}"}
        with self._doubting():
            etag = self._put_once(path, data, facts, crc32)
        with self._lock:
            self._put_here.add(path)
        return etag

    def copy(self, chunk: Chunk, source: ObjectInfo, offset: int) -> PartInfo | None:
        """Have the store fill one part of a large object from a pinned object of its own."""
        with self._doubting():
            upload, number = self._upload(chunk.file), self._numbers[chunk]
            length = chunk.length_bytes
            return self._store.copy_part(self._path(chunk.file), upload, number, source, offset=offset, length=length)

    def _put_once(self, path: str, data: bytes | memoryview, facts: Mapping[str, str], crc32: int) -> str:
        try:
            return self._store.put(path, data, metadata=facts, if_absent=True, crc32=crc32).pin.removeprefix("etag:")
        except StorageError as error:
            if not (error.code == "storage.conflict" or error.retryable) or not self._is_mine(path, len(data), crc32):
                raise
        info = self._store.stat(path)
        if info is None:
            raise StorageError("storage.protocol", f"{printable(path)} vanished after it was written")
        return info.pin.removeprefix("etag:")

    def _upload(self, file: int) -> str:
        """The upload of a large object, begun by whoever comes first."""
        if file in self._completed:
            self._control.require_claim(self._plan)
            path = printable(self._path(file))
            raise IntegrityError("integrity.journal", f"{path} is complete, but a unit of it is not")
        with self._lock:
            gate = self._creating.setdefault(file, threading.Lock())
        with gate:
            if file not in self._uploads:
                upload_id = self._store.create_multipart(self._path(file), metadata={PLAN_KEY: self._plan.digest})
                with self._lock:
                    self._created[upload_id] = self._path(file)
                self._control.put_upload(file, upload_id)
                self._uploads[file] = upload_id
            return self._uploads[file]

    def record(self, record: UnitRecord) -> None:
        """One small object per unit."""
        self._control.put_record(record)

    # -- commit -----------------------------------------------------------------------------------------

    def seal(self, records: Mapping[int, UnitRecord]) -> None:
        """Complete the uploads that no loader waits for, then compare a listing with the receipts."""
        etags = self._receipts(records)
        large = [i for i in range(len(self._plan.files)) if self._is_large(i)]
        with self._doubting():
            self._control.require_claim(self._plan)
            self._complete_all([i for i in large if not self._plan.files[i].commit], etags)
            for file in large:
                if self._plan.files[file].commit and file not in self._completed:
                    self._check_parts(file, etags)
            self._check_listing([i for i, f in enumerate(self._plan.files) if not f.commit], etags)

    @property
    def written(self) -> Location:
        """The target itself: nothing is staged."""
        return Location(self._store, self._target, self._url)

    def publish(self, records: Mapping[int, UnitRecord]) -> Sequence[ObjectInfo]:
        """Complete the commit files' uploads; returns the listing of the target.

        Raises:
            RequestError: `request.target_busy` if another conversion took the target over meanwhile.
        """
        etags = self._receipts(records)
        with self._doubting():
            self._control.require_claim(self._plan)
            self._complete_all([i for i, f in enumerate(self._plan.files) if f.commit and self._is_large(i)], etags)
            there = self._check_listing(range(len(self._plan.files)), etags)
        return [ObjectInfo(i.path.removeprefix(self._target + "/"), i.size_bytes, i.pin) for i in there]

    def _receipts(self, records: Mapping[int, UnitRecord]) -> _Receipts:
        found: _Receipts = {}
        for record in records.values():
            for entry in record.chunks:
                number = self._numbers[entry.chunk]
                found.setdefault(entry.chunk.file, {})[number] = PartInfo(
                    number, entry.chunk.length_bytes, entry.etag, entry.crc32
                )
        return found

    def _complete_all(self, files: Sequence[int], etags: _Receipts) -> None:
        with ThreadPoolExecutor(_THREADS) as pool:
            todo = [f for f in files if f not in self._completed]
            list(pool.map(partial(self._complete, etags=etags), todo))

    def _complete(self, file: int, etags: _Receipts) -> None:
        path = self._path(file)
        parts = [part for _, part in sorted(etags[file].items())]
        try:
            self._store.complete_multipart(path, self._uploads[file], parts)
        except ReshardError:
            # The reply may be lost and the effect done: only reading back tells.
            if not self._is_mine(path, self._plan.files[file].size_bytes):
                raise
        self._completed.add(file)

    def _check_parts(self, file: int, etags: _Receipts) -> None:
        listed = self._store.list_parts(self._path(file), self._uploads[file])
        if listed is None:
            # Another attempt at this plan completed it, or the conversion was ended.
            self._control.require_claim(self._plan)
            if self._is_mine(self._path(file), self._plan.files[file].size_bytes):
                self._completed.add(file)
                return
        held = {p.number: (p.size_bytes, p.etag) for p in listed or ()}
        if held != {n: (p.size_bytes, p.etag) for n, p in etags[file].items()}:
            raise IntegrityError(
                "integrity.mismatch", f"{printable(self._path(file))}: the store holds other parts than were sent"
            )

    def _check_listing(self, files: Sequence[int], etags: _Receipts) -> list[ObjectInfo]:
        there = {i.path: i for i in self._store.list_tree(self._target)}
        for file in files:
            planned, info = self._plan.files[file], there.get(self._path(file))
            receipt = etags[file].get(1) if not self._is_large(file) else None
            held = -1 if info is None else info.size_bytes
            if (
                info is None
                or held != planned.size_bytes
                or (receipt is not None and info.pin != f"etag:{receipt.etag}")
            ):
                self._control.require_claim(self._plan)
                raise IntegrityError(
                    "integrity.mismatch",
                    f"{printable(planned.path)}: the store holds {held} bytes or another object, "
                    f"{planned.size_bytes} bytes were written",
                )
        return list(there.values())

    def withdraw(self, paths: Sequence[str]) -> None:
        """Delete commit files that are there, then the damaged ones: a later attempt writes them anew."""
        commit = {f.path for f in self._plan.files if f.commit}
        doomed = [join(self._target, p) for p in sorted(commit | set(paths), key=lambda p: p not in commit)]
        with self._doubting():
            self._control.require_claim(self._plan)  # what looks damaged may be what a rival wrote
            self._leftovers.delete_written(doomed, self._plan.digest)

    def commit(self, manifest: bytes, pointer: Pointer | None) -> None:
        """The manifest, then the pointer, then the journal goes."""
        facts = {PLAN_KEY: self._plan.digest}
        path = join(self._target, MANIFEST_NAME)
        try:
            self._store.put(path, manifest, metadata=facts, if_absent=True)
        except StorageError as error:
            if not (error.code == "storage.conflict" or error.retryable) or not self._is_published():
                raise
        self._take_back_if_discarded(path)
        self.finish(pointer)

    def _take_back_if_discarded(self, path: str) -> None:
        """Remove an object that came too late: someone discarded the conversion while this process slept."""
        with self._doubting():
            try:
                self._control.require_claim(self._plan)
            except ReshardError:
                # Without a claim but whole, the target was finished by another attempt.
                there = {i.path: i.size_bytes for i in self._store.list_tree(self._target)}
                if all(there.get(join(self._target, f.path)) == f.size_bytes for f in self._plan.files):
                    return
                if self._leftovers.is_written_by(path, self._plan.digest):
                    self._store.delete([path])
                raise

    def finish(self, pointer: Pointer | None) -> None:
        """What is left after the manifest; safe to repeat. Without the claim the pointer may name a newer target."""
        if pointer is not None and self._control.is_claimed_by(self._plan.digest):
            self._take_back_if_discarded(self._put_pointer(pointer))
        self._leftovers.abort_uploads(self._paths())
        self._control.remove(self._plan.digest)

    def finish_after_crash(self, plan: Plan, pointer: Pointer | None) -> None:
        """Do what a crash after the manifest left undone; without a claim that is at most a lost pointer."""
        self._plan = plan
        if self._control.is_claimed_by(self._plan.digest):
            self.finish(pointer)
        elif pointer is not None and self._store.stat(join(self._parent, pointer.name)) is None:
            # One that is there may name a newer checkpoint.
            self._put_pointer(pointer)

    def _put_pointer(self, pointer: Pointer) -> str:
        facts = {PLAN_KEY: self._plan.digest}
        for name, content in pointer.beside:
            self._store.put(join(self._parent, name), content, metadata=facts, if_absent=False)
        path = join(self._parent, pointer.name)
        self._store.put(path, pointer.content, metadata=facts, if_absent=False)
        return path

    def close(self) -> None:
        """Take back what was written after the claim was lost; otherwise nothing is held between calls."""
        if self._doubt:
            with suppress(ReshardError):  # the caller hears of the failure that brought us here
                self._step_back()
        self._creating.clear()

    @contextmanager
    def _doubting(self) -> Generator[None]:
        try:
            yield
        except ReshardError as error:
            self._doubt = self._doubt or error.code in _DOUBTFUL
            raise

    def _step_back(self) -> None:
        """Remove what only this process knows of: it wrote on after another one had ended the conversion."""
        claimed = self._control.is_claimed_by(self._plan.digest)
        # Another attempt at the same plan keeps the objects, and the uploads that the journal names.
        kept = set(self._control.uploads().values()) if claimed else set[str]()
        for upload_id, path in self._created.items():
            if upload_id not in kept:
                self._store.abort_multipart(path, upload_id)
        if not claimed:
            if not self._is_published():
                self._leftovers.delete_written(sorted(self._put_here), self._plan.digest)
            self._control.forget()

    def discard_all(self) -> None:
        """Remove what an unfinished conversion into this target left."""
        self._leftovers.collect()

    def _is_published(self) -> bool:
        return self._leftovers.is_written_by(join(self._target, MANIFEST_NAME), self._plan.digest)
