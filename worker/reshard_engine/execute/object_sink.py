"""A target in an object store: nothing is staged, objects appear whole at their final keys.

Large objects are one multipart upload each, whose id is in the journal before its first part; small
ones are created if absent. Bytes are deterministic, so a part or an object that an earlier attempt (or
a zombie) wrote is the same one; a lost acknowledgement is resolved by reading back. The journal is one
small object per unit beside the target.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from reshard.errors import IntegrityError, RequestError, ReshardError, StorageError, printable
from reshard_engine.execute.control import ControlObjects
from reshard_engine.execute.journal import UnitRecord
from reshard_engine.execute.occupancy import holds_checkpoint, not_to_overwrite, target_exists
from reshard_engine.layout import Pointer
from reshard_engine.manifest import MANIFEST_NAME
from reshard_engine.plan.model import Chunk, Plan
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import ObjectInfo, ObjectStore, PartInfo, join, parent_and_name, read_bytes

PLAN_KEY, CRC_KEY = "reshard-plan", "reshard-crc32"
_THREADS = 8
_Receipts = dict[int, dict[int, PartInfo]]
"""By file, then by part number; a small object is its own part 1."""


class ObjectSink:
    """Writes one prefix of an object store."""

    def __init__(self, store: ObjectStore, target: str, *, pointer_names: Sequence[str]) -> None:
        """`target` is `bucket/key...` without a trailing slash."""
        self._pointer_names = pointer_names
        self._store = store
        self._target = target
        self._parent, self._name = parent_and_name(target)
        self._control = ControlObjects(store, target)
        self._uploads: dict[int, str] = {}
        self._completed: set[int] = set()
        self._lock = threading.Lock()
        self._creating: dict[int, threading.Lock] = {}

    def _path(self, file: int) -> str:
        return join(self._target, self._plan.files[file].path)

    # -- begin ------------------------------------------------------------------------------------------

    def begin(self, plan: Plan, *, overwrite: bool) -> Mapping[int, UnitRecord]:
        """Claim the target and read the journal of an earlier attempt."""
        self._plan = plan
        there = {i.path: i for i in self._store.list_tree(self._target)}
        claim = self._control.claimed_by()
        if there and (claim is None or claim.plan != plan.digest) and not overwrite:
            raise target_exists(f"{self._store.scheme}://{self._target}")
        if claim is not None and claim.plan != plan.digest and overwrite:
            # Its uploads are known only to its journal: they go before the journal does.
            self.discard_all()
            there = {i.path: i for i in self._store.list_tree(self._target)}
        heads = {p.removeprefix(self._target + "/").partition("/")[0] for p in there}
        if there and (claim is None or claim.plan != plan.digest) and not holds_checkpoint(heads):
            raise not_to_overwrite(f"{self._store.scheme}://{self._target}")
        fresh = self._control.claim(plan, overwrite=overwrite, clear=bool(there))
        if fresh.clearing:
            self._clear(sorted(there))
            self._control.cleared(plan)
            return {}
        self._uploads = self._control.uploads()
        self._abort_strays()
        return self._still_valid(self._control.records(), there)

    def _clear(self, paths: Sequence[str]) -> None:
        # What makes the old target readable goes first.
        first = [p for p in paths if p.endswith((MANIFEST_NAME, ".index.json", "_states.pt", "optimizer_state.pt"))]
        for name in self._pointer_names:
            path = join(self._parent, name)
            info = self._store.stat(path)
            content = b"" if info is None or info.size_bytes >= 1024 else read_bytes(self._store, info)
            if content.decode("utf-8", "replace").strip() == self._name:
                self._store.delete([path])
        self._store.delete(first)
        gone = set(first)
        self._store.delete([p for p in paths if p not in gone])

    def _abort_strays(self) -> None:
        known = set(self._uploads.values())
        mine = {join(self._target, f.path) for f in self._plan.files}
        for path, upload_id in self._store.list_uploads(self._target + "/"):
            if path in mine and upload_id not in known:
                self._store.abort_multipart(path, upload_id)

    def _still_valid(
        self, records: Mapping[int, UnitRecord], there: Mapping[str, ObjectInfo]
    ) -> Mapping[int, UnitRecord]:
        """The records whose bytes the store still holds."""
        parts: dict[int, dict[int, PartInfo]] = {}
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
                    part = parts.get(file, {}).get(self._number(entry.chunk))
                    if part is None or (part.size_bytes, part.etag) != (entry.chunk.length_bytes, entry.etag):
                        return False
            return True

        return {k: r for k, r in records.items() if held(r)}

    def _is_large(self, file: int) -> bool:
        return self._plan.files[file].size_bytes > self._plan.chunk_bytes

    def _number(self, chunk: Chunk) -> int:
        return chunk.offset // self._plan.chunk_bytes + 1

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
            if chunk.file in self._completed:
                raise IntegrityError("integrity.journal", f"{printable(path)} is complete, but a unit of it is not")
            return self._store.put_part(path, self._upload(chunk.file), self._number(chunk), data).etag
        facts = {PLAN_KEY: self._plan.digest, CRC_KEY: f"{crc32:08x}"}
        return self._put_once(path, data, facts, crc32)

    def _put_once(self, path: str, data: bytes | memoryview, facts: Mapping[str, str], crc32: int) -> str:
        try:
            return self._store.put(path, data, metadata=facts, if_absent=True).pin.removeprefix("etag:")
        except StorageError as error:
            if not (error.code == "storage.conflict" or error.retryable) or not self._is_mine(path, len(data), crc32):
                raise
        info = self._store.stat(path)
        if info is None:
            raise StorageError("storage.protocol", f"{printable(path)} vanished after it was written")
        return info.pin.removeprefix("etag:")

    def _upload(self, file: int) -> str:
        with self._lock:
            gate = self._creating.setdefault(file, threading.Lock())
        with gate:
            if file not in self._uploads:
                upload_id = self._store.create_multipart(self._path(file), metadata={PLAN_KEY: self._plan.digest})
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
        self._complete_all([i for i in large if not self._plan.files[i].commit], etags)
        for file in large:
            if self._plan.files[file].commit and file not in self._completed:
                self._check_parts(file, etags)
        self._check_listing([i for i, f in enumerate(self._plan.files) if not f.commit], etags)

    @property
    def written(self) -> Location:
        """The target itself: nothing is staged."""
        return Location(self._store, self._target, f"{self._store.scheme}://{self._target}")

    def publish(self, records: Mapping[int, UnitRecord]) -> Sequence[ObjectInfo]:
        """Complete the commit files' uploads; returns the listing of the target.

        Raises:
            RequestError: `request.target_busy` if another conversion took the target over meanwhile.
        """
        claim = self._control.claimed_by()
        if claim is None or claim.plan != self._plan.digest:
            raise RequestError(
                "request.target_busy",
                f"another conversion took {printable(self._target)} over",
                fix="let it finish; with the same options it writes the same files",
            )
        etags = self._receipts(records)
        self._complete_all([i for i, f in enumerate(self._plan.files) if f.commit and self._is_large(i)], etags)
        there = self._check_listing(range(len(self._plan.files)), etags)
        return [ObjectInfo(i.path.removeprefix(self._target + "/"), i.size_bytes, i.pin) for i in there]

    def _receipts(self, records: Mapping[int, UnitRecord]) -> _Receipts:
        found: _Receipts = {}
        for record in records.values():
            for entry in record.chunks:
                number = self._number(entry.chunk)
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
        listed = self._store.list_parts(self._path(file), self._uploads[file]) or []
        held = {p.number: (p.size_bytes, p.etag) for p in listed}
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
                raise IntegrityError(
                    "integrity.mismatch",
                    f"{printable(planned.path)}: the store holds {held} bytes or another object, "
                    f"{planned.size_bytes} bytes were written",
                )
        return list(there.values())

    def commit(self, manifest: bytes, pointer: Pointer | None) -> None:
        """The manifest, then the pointer, then the journal goes."""
        facts = {PLAN_KEY: self._plan.digest}
        path = join(self._target, MANIFEST_NAME)
        try:
            self._store.put(path, manifest, metadata=facts, if_absent=True)
        except StorageError as error:
            found = self._store.metadata(path)
            if (
                not (error.code == "storage.conflict" or error.retryable)
                or (found or {}).get(PLAN_KEY) != self._plan.digest
            ):
                raise
        self.finish(pointer)

    def finish(self, pointer: Pointer | None) -> None:
        """What is left after the manifest. Safe to repeat."""
        if pointer is not None:
            path = join(self._parent, pointer.name)
            self._store.put(path, pointer.content, metadata={PLAN_KEY: self._plan.digest}, if_absent=False)
        self._control.remove(self._plan.digest)

    def finish_after_crash(self, plan: Plan, pointer: Pointer | None) -> None:
        """Do what a crash after the manifest left undone; nothing if the claim is gone."""
        self._plan = plan
        claim = self._control.claimed_by()
        if claim is not None and claim.plan == plan.digest:
            self.finish(pointer)

    def close(self) -> None:
        """Nothing is held between calls."""
        self._creating.clear()

    def discard_all(self) -> None:
        """Remove what the unfinished conversion that claims this target wrote, commit files first.

        A conversion is finished when its pointer is written, or its manifest where there is no pointer.
        """
        claim = self._control.claimed_by()
        if claim is None:
            return
        plan = self._control.stored_plan(claim.plan)
        if self._is_finished(plan, claim.plan):
            self._control.remove(claim.plan)
            return
        paths = {join(self._target, f[0]) for f in plan.get("files", [])} | {join(self._target, MANIFEST_NAME)}
        for path, upload_id in self._store.list_uploads(self._target + "/"):
            if path in paths:
                self._store.abort_multipart(path, upload_id)
        there = [i.path for i in self._store.list_tree(self._target) if i.path in paths]
        with ThreadPoolExecutor(_THREADS) as pool:
            mine = list(pool.map(partial(self._written_by, digest=claim.plan), there))
        commit = {join(self._target, f[0]) for f in plan.get("files", []) if f[2]} | {join(self._target, MANIFEST_NAME)}
        doomed = [p for p, yes in zip(there, mine, strict=True) if yes]
        self._store.delete(sorted(doomed, key=lambda p: p not in commit))
        self._control.remove(claim.plan)

    def _is_finished(self, plan: Mapping[str, Any], digest: str) -> bool:
        last = join(self._parent, plan["pointer"]) if plan.get("pointer") else join(self._target, MANIFEST_NAME)
        return self._written_by(last, digest)

    def _written_by(self, path: str, digest: str) -> bool:
        return (self._store.metadata(path) or {}).get(PLAN_KEY) == digest
