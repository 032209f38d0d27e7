"""A target in an object store: nothing is staged, and objects appear complete at their final keys.

A large object is one multipart upload, whose id is in the journal before the first part is sent. A small object is
created only if it is absent. The bytes are deterministic, so a part or an object is the same whether this attempt, an
earlier attempt or a process that lost its claim wrote it. After a lost acknowledgement, the object is read back. The
journal is one small object per unit beside the target.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from functools import partial

from reshard.errors import IntegrityError, ReshardError, StorageError, printable
from reshard.models.jobs import Leftover
from reshard_engine.execute.journal import ChunkRecord, UnitRecord
from reshard_engine.execute.sinks.control_objects import WORKERS, ControlObjects
from reshard_engine.execute.sinks.leftovers import Leftovers
from reshard_engine.execute.sinks.protocol import (
    CopyRead,
    Earlier,
    Made,
    Shared,
    not_to_overwrite,
    target_exists,
    write_whole,
)
from reshard_engine.execute.sinks.uploads import PLAN_KEY, ObjectUploads, Receipts
from reshard_engine.integrity.manifest import MANIFEST_NAME
from reshard_engine.plan.model import Chunk, Plan
from reshard_engine.plan.planner import part_numbers
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import (
    DELETED_AT_ONCE,
    CopyingStore,
    ObjectInfo,
    ObjectStore,
    PartInfo,
    Store,
    join,
    parent_and_name,
)
from reshard_engine.storage.texts import ObjectTexts
from reshard_engine.tensors.layout import KnownFiles, Pointer

CRC_KEY = "reshard-crc32"
_THREADS = 8
_DOUBTFUL = frozenset({"storage.conflict", "storage.protocol", "request.target_busy", "integrity.mismatch"})
"""Error codes that another conversion into the same target may have caused."""


class ObjectSink:
    """The sink that writes one prefix of an object store."""

    streams, calls_wait, look_s, sync = False, True, 0.2, None
    deleted_at_once = DELETED_AT_ONCE
    """Old objects that are removed after each check of the claim."""

    def __init__(self, store: ObjectStore, target: str, *, known: KnownFiles) -> None:
        """`target` is `bucket/key...` without a trailing slash."""
        self._known = known
        self._store = store
        self._target = target
        self._url = f"{store.scheme}://{target}"
        self._control = ControlObjects(store, target)
        self._leftovers = Leftovers(store, target, self._control, known)
        self._put_here: set[str] = set()
        """Small objects that this process wrote, or that it found already written by the same plan."""
        self._earlier: Earlier | None = None
        self._shared: Shared | None = None
        self.repairs = False
        """True if the target was this plan's when the conversion began: `--overwrite` may then clear it."""
        self._claimed = False
        """True if this process has once taken the claim."""
        self._doubt = False
        """True if a failure occurred that another conversion may have caused."""
        self._lock = threading.Lock()

    def _path(self, file: int) -> str:
        return join(self._target, self._plan.files[file].path)

    def _paths(self) -> set[str]:
        return {join(self._target, f.path) for f in self._plan.files}

    def look(self, plan: Plan) -> None:
        """Note whether this plan has written the target already, before the conversion decides to run."""
        self._plan = plan
        self.repairs = self._is_published()

    def examine(self, plan: Plan, *, overwrite: bool) -> None:
        """Refuse a target that holds something else, or that another plan has claimed."""
        if not overwrite:
            self._leftovers.refuse_others(plan.digest)

    @property
    def min_part_bytes(self) -> int | None:
        """The least size of a part of an upload."""
        return self._store.min_part_bytes

    def copies_from(self, source: Store) -> bool:
        """True if the store reaches the source's objects."""
        return isinstance(self._store, CopyingStore) and self._store.reaches(source)

    def places_of(self, paths: Iterable[str]) -> set[str]:
        """The prefixes of objects."""
        return {f"{self._store.scheme}://{parent_and_name(path)[0]}" for path in paths}

    def make_parent(self) -> None:
        """Do nothing: prefixes are not made."""

    @property
    def uploads(self) -> Mapping[int, str]:
        """The ids of the uploads that are known, by file number."""
        return self._uploads.ids

    def meeting_place(self, plan: Plan) -> ObjectTexts:
        """The part of the journal in which the workers that share a conversion meet."""
        return ObjectTexts(self._store, join(self._control.journal_of(plan.digest), WORKERS))

    def join(self, plan: Plan, shared: Shared, *, overwrite: bool, uploads: Mapping[int, str]) -> None:
        """Write parts and objects of a target that another worker has claimed for the same plan."""
        self._plan = plan
        self._numbers = part_numbers(plan.units)
        self._control.use_journal(plan.digest)
        self._shared = shared
        self._uploads = self._uploads_of(uploads, shared)

    def begin(
        self, plan: Plan, *, overwrite: bool, earlier: Earlier | None = None, shared: bool = False
    ) -> Mapping[int, UnitRecord]:
        """Claim the target and read the journals of earlier attempts."""
        self._plan = plan
        self._numbers = part_numbers(plan.units)
        self._earlier = earlier
        self._uploads = self._uploads_of({})
        self.examine(plan, overwrite=overwrite)
        rival = self._control.claimed_by()
        if rival is not None and rival.plan != plan.digest and overwrite:
            # Only the other plan's journal knows its uploads, so they are aborted before the journal is removed.
            self.discard_all()
        claim = self._control.claim(plan)
        self._claimed = True
        # The target is listed again, under the claim: from now on, no other conversion writes there.
        objects = {i.path: i for i in self._store.list_tree(self._target)}
        if not self._control.is_settled():
            if objects:
                self._make_room(sorted(objects), allowed=claim.clearing, overwrite=overwrite)
            with self._doubting():
                self._control.settle(plan)
                if shared:
                    # If this worker was paused, the others may have finished the conversion and removed its journal.
                    self._control.require_claim(plan)
            return {}
        # The uploads are listed before their names are read: an upload that another attempt names now is not aborted.
        listed = self._leftovers.uploads_of(self._paths())
        known = self._control.uploads() | dict(earlier.uploads() if earlier is not None else {})
        self._uploads = self._uploads_of(known)
        self._leftovers.abort(u for u in listed if u[1] not in set(known.values()))
        return self._still_valid(objects)

    def _make_room(self, paths: Sequence[str], *, allowed: bool, overwrite: bool) -> None:
        heads = {p.removeprefix(self._target + "/").partition("/")[0] for p in paths}
        if not allowed and (not overwrite or not self._known.holds_checkpoint(heads)):
            self._leftovers.release(self._plan.digest, ())
            raise not_to_overwrite(self._url) if overwrite else target_exists(self._url, self._known)
        self._control.allow_clearing(self._plan)
        if not self.repairs and self._is_published():
            # Another attempt at this plan finished the target while this process was paused.
            self._leftovers.release(self._plan.digest, ())
            raise target_exists(self._url, self._known)
        with self._doubting():
            self._clear(paths)

    def _clear(self, paths: Sequence[str]) -> None:
        # The files without which no loader reads the old target are deleted first.
        first = [p for p in paths if self._known.needs(p)]
        last = set(paths).difference(first)
        for group in (self._leftovers.pointers(self._plan.source.get("tag")), first, sorted(last)):
            for at in range(0, len(group), self.deleted_at_once):
                # If this process was paused since the last check, another attempt may have written objects meanwhile.
                self._control.require_clearing(self._plan)
                self._store.delete(group[at : at + self.deleted_at_once], in_order=False)

    def _still_valid(self, objects: Mapping[str, ObjectInfo]) -> Mapping[int, UnitRecord]:
        """The records of units whose parts and objects the store still holds, with the same ETags."""
        parts = self._uploads.look()

        def held(record: UnitRecord) -> bool:
            for entry in record.chunks:
                file = entry.chunk.file
                if not self._uploads.is_large(file):
                    info = objects.get(self._path(file))
                    if info is None or (info.size_bytes, _etag(info)) != (entry.chunk.length_bytes, entry.etag):
                        return False
                elif file not in self._uploads.completed:
                    part = parts.get(file, {}).get(self._numbers.get(entry.chunk, 0))
                    if part is None or (part.size_bytes, part.etag) != (entry.chunk.length_bytes, entry.etag):
                        return False
            return True

        # The records are read after the uploads were listed: an upload that was complete then has all its records.
        shared = self._earlier.records() if self._earlier is not None else ()
        found = [*shared, *(r for k, r in self._control.records().items() if k == r.unit)]
        return {r.unit: r for r in found if r.belongs_to(self._plan) and held(r)}

    def _uploads_of(self, known: Mapping[int, str], shared: Shared | None = None) -> ObjectUploads:
        names = shared or self._control
        unfinished = partial(self._control.require_unfinished, self._plan)
        return ObjectUploads(self._store, self._target, self._plan, names, known=known, require_unfinished=unfinished)

    def _is_mine(self, path: str, size_bytes: int, crc32: int | None = None) -> bool:
        info = self._store.stat(path)
        facts = self._store.metadata(path)
        if info is None or facts is None or info.size_bytes != size_bytes or facts.get(PLAN_KEY) != self._plan.digest:
            return False
        return crc32 is None or facts.get(CRC_KEY) == f"{crc32:08x}"

    def write_made(self, made: Made, copy_read: CopyRead | None, pool: Executor | None) -> list[ChunkRecord]:
        """Write each chunk as a whole."""
        return write_whole(self.write, made, copy_read, pool)

    def write(self, chunk: Chunk, data: memoryview, crc32: int) -> str:
        """Put a small object, or upload one part of a large one."""
        path = self._path(chunk.file)
        if self._uploads.is_large(chunk.file):
            with self._doubting():
                upload, number = self._uploads.id_of(chunk.file), self._numbers[chunk]
                return self._store.put_part(path, upload, number, data, crc32=crc32).etag
        facts = {PLAN_KEY: self._plan.digest, CRC_KEY: f"{crc32:08x}"}
        with self._doubting():
            etag = self._put_once(path, data, facts, crc32)
        with self._lock:
            self._put_here.add(path)
        return etag

    def copy(self, chunk: Chunk, source: ObjectInfo, offset: int) -> PartInfo | None:
        """Have the store fill one part of a large object from a pinned object in the same store."""
        with self._doubting():
            upload, number = self._uploads.id_of(chunk.file), self._numbers[chunk]
            length = chunk.length_bytes
            return self._store.copy_part(self._path(chunk.file), upload, number, source, offset=offset, length=length)

    def _put_once(self, path: str, data: bytes | memoryview, facts: Mapping[str, str], crc32: int) -> str:
        try:
            return _etag(self._store.put(path, data, metadata=facts, if_absent=True, crc32=crc32))
        except StorageError as error:
            if not (error.code == "storage.conflict" or error.retryable) or not self._is_mine(path, len(data), crc32):
                raise
        info = self._store.stat(path)
        if info is None:
            raise StorageError("storage.protocol", f"{printable(path)} vanished after it was written")
        return _etag(info)

    def record(self, record: UnitRecord) -> None:
        """Write the record of a unit as one small object, or give it to the journal of the workers."""
        if self._shared is not None:
            self._shared.put_record(record)
        else:
            self._control.put_record(record)

    def seal(self, records: Mapping[int, UnitRecord]) -> None:
        """Complete the uploads of all files except commit files, then compare a listing with the receipts."""
        etags = self._receipts(records)
        large = [i for i in range(len(self._plan.files)) if self._uploads.is_large(i)]
        with self._doubting():
            self._control.require_claim(self._plan)
            self._uploads.complete([i for i in large if not self._plan.files[i].commit], etags)
            for file in large:
                if self._plan.files[file].commit and file not in self._uploads.completed:
                    self._uploads.check_parts(file, etags)
            self._check_listing([i for i, f in enumerate(self._plan.files) if not f.commit], etags)

    @property
    def written(self) -> Location:
        """The target itself: nothing is staged."""
        return Location(self._store, self._target, self._url)

    def written_files(self) -> Mapping[str, ObjectInfo]:
        """The target, as one listing shows it."""
        return self.written.files()

    def publish(self, records: Mapping[int, UnitRecord]) -> Sequence[ObjectInfo]:
        """Complete the uploads of the commit files; returns the listing of the target.

        Raises:
            RequestError: `request.target_busy` if another conversion took the target over meanwhile.
        """
        etags = self._receipts(records)
        with self._doubting():
            self._control.require_claim(self._plan)
            self._uploads.complete(
                [i for i, f in enumerate(self._plan.files) if f.commit and self._uploads.is_large(i)], etags
            )
            objects = self._check_listing(range(len(self._plan.files)), etags)
        return [ObjectInfo(i.path.removeprefix(self._target + "/"), i.size_bytes, i.pin) for i in objects]

    def _receipts(self, records: Mapping[int, UnitRecord]) -> Receipts:
        found: Receipts = {}
        for record in records.values():
            for entry in record.chunks:
                number = self._numbers[entry.chunk]
                found.setdefault(entry.chunk.file, {})[number] = PartInfo(
                    number, entry.chunk.length_bytes, entry.etag, entry.crc32
                )
        if self._shared is not None:
            self._uploads.adopt(self._shared.uploads())
            for file in filter(self._uploads.is_large, set(found).difference(self._uploads.completed)):
                found[file] = self._uploads.as_held(file, found[file])
        return found

    def _check_listing(self, files: Sequence[int], etags: Receipts) -> list[ObjectInfo]:
        objects = {i.path: i for i in self._store.list_tree(self._target)}
        for file in files:
            planned, info = self._plan.files[file], objects.get(self._path(file))
            receipt = etags[file].get(1) if not self._uploads.is_large(file) else None
            held = -1 if info is None else info.size_bytes
            if info is None or held != planned.size_bytes or (receipt is not None and _etag(info) != receipt.etag):
                self._control.require_claim(self._plan)
                raise IntegrityError(
                    "integrity.mismatch",
                    f"{printable(planned.path)}: the store holds another object, or {held} bytes of it; "
                    f"{planned.size_bytes} bytes were written",
                )
        return list(objects.values())

    def withdraw(self, paths: Sequence[str]) -> None:
        """Delete the commit files that exist, then the damaged files. A later attempt writes them anew."""
        commit = {f.path for f in self._plan.files if f.commit}
        doomed = [join(self._target, p) for p in sorted(commit | set(paths))]
        with self._doubting():
            self._control.require_claim(self._plan)  # another conversion may have written what looks damaged
            self._leftovers.delete_written(doomed, self._plan.digest, first={join(self._target, p) for p in commit})

    def commit(self, manifest: bytes, pointer: Pointer | None) -> None:
        """Write the manifest, then the pointer, then remove the journal."""
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
        """Remove an object that was written too late: the conversion was discarded while this process was paused."""
        with self._doubting():
            try:
                self._control.require_claim(self._plan)
            except ReshardError:
                # There is no claim, but the target is complete: another attempt finished it.
                sizes = {i.path: i.size_bytes for i in self._store.list_tree(self._target)}
                if all(sizes.get(join(self._target, f.path)) == f.size_bytes for f in self._plan.files):
                    return
                if self._leftovers.is_written_by(path, self._plan.digest):
                    self._store.delete([path])
                raise

    def finish(self, pointer: Pointer | None) -> None:
        """Do what follows the manifest: write the pointer, and remove uploads, journal and claim. Safe to repeat.

        Without the claim the pointer is not written: an existing one may name a newer target.
        """
        if pointer is not None and self._control.is_claimed_by(self._plan.digest):
            self._take_back_if_discarded(self._put_pointer(pointer))
        self._leftovers.release(self._plan.digest, self._paths())
        self._uploads.created.clear()
        self._put_here.clear()

    def finish_after_crash(self, plan: Plan, pointer: Pointer | None) -> None:
        """Complete a commit that crashed after the manifest. If there is no claim, only the pointer may be lost."""
        self._plan = plan
        if self._control.is_claimed_by(self._plan.digest):
            self._uploads = self._uploads_of({})  # this process may have begun nothing
            self.finish(pointer)
        elif pointer is not None and self._store.stat(join(pointer.directory(self._target), pointer.name)) is None:
            # An existing pointer is kept: it may name a newer checkpoint.
            self._put_pointer(pointer)

    def _put_pointer(self, pointer: Pointer) -> str:
        facts, directory = {PLAN_KEY: self._plan.digest}, pointer.directory(self._target)
        for name, content in pointer.beside:
            self._store.put(join(directory, name), content, metadata=facts, if_absent=False)
        path = join(directory, pointer.name)
        self._store.put(path, pointer.content, metadata=facts, if_absent=False)
        return path

    def close(self) -> None:
        """Remove what this process wrote after it lost the claim. There is nothing else to release."""
        # A worker that shares a conversion learns of its end from the other workers, and not by an error of the store.
        if self._doubt or (self._shared is not None and (self._uploads.created or self._put_here)):
            with suppress(ReshardError):  # the caller already gets the first failure
                self._step_back()

    @contextmanager
    def _doubting(self) -> Generator[None]:
        try:
            yield
        except ReshardError as error:
            self._doubt = self._doubt or error.code in _DOUBTFUL
            raise

    def _step_back(self) -> None:
        """Remove the uploads and objects of this process, which went on writing after another ended the conversion."""
        claimed = self._control.is_claimed_by(self._plan.digest)
        if claimed and self._shared is not None:
            if self._shared.is_over:
                self._uploads.abort_created()  # the worker that finishes the conversion no longer looks for uploads
            return  # else the other workers may use the uploads of this one
        # If another attempt at the same plan has the claim, it keeps the objects and the uploads named in the journal.
        kept = set(self._control.uploads().values()) if claimed else set[str]()
        self._uploads.abort_created(kept)
        if not claimed:
            if not self._is_published():
                self._leftovers.delete_written(sorted(self._put_here), self._plan.digest)
            self._control.forget()

    def discard_all(self) -> None:
        """Remove all leftovers of an unfinished conversion into this target."""
        self._leftovers.collect()

    def discard(self, digests: Collection[str], *, idle_s: float = 0.0, keep_unfinished: bool = False) -> None:
        """Remove what conversions with these plans left (see `Leftovers.collect_plans`)."""
        self._leftovers.collect_plans(digests, idle_s=idle_s, keep_unfinished=keep_unfinished)

    def leftovers(self, *, idle_s: float) -> list[Leftover]:
        """See `Leftovers.found`."""
        return self._leftovers.found(idle_s=idle_s)

    def targets_below(self) -> list[str]:
        """Nothing: a conversion into an existing prefix leaves nothing inside."""
        return []

    def clean(self, found: Sequence[Leftover]) -> bool:
        """Remove all leftovers, unless one is in use: all of them share one claim."""
        if any(f.in_use for f in found):
            return False
        for _ in range(2 if found else 0):
            self.discard_all()  # the second time: other journals beside that of the claim, which has been removed
        return True

    def suspect(self) -> None:
        """Let `close` look whether another process has ended the conversion meanwhile."""
        self._doubt = self._doubt or self._claimed

    def _is_published(self) -> bool:
        return self._leftovers.is_written_by(join(self._target, MANIFEST_NAME), self._plan.digest)


def _etag(info: ObjectInfo) -> str:
    """The pin of an object as receipts spell it: that of a store with ETags is the ETag itself."""
    return info.pin.removeprefix("etag:")
