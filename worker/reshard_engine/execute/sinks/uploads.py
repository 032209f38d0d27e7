"""The multipart uploads of one target: one upload for each large file and plan, whoever begins it.

Several processes may write one target: attempts of which one was taken for dead, or workers that share a conversion.
The first that names its upload of a file wins; the others abort theirs and use that one. Part numbers are fixed by the
plan, so a part that two of them send is the same part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from reshard.errors import IntegrityError, ReshardError, StorageError, printable
from reshard_engine.execute.sinks.control_objects import ControlObjects
from reshard_engine.execute.sinks.protocol import Shared
from reshard_engine.plan.model import Plan
from reshard_engine.storage.protocol import ObjectStore, PartInfo, join

PLAN_KEY = "reshard-plan"
"""Metadata key of our objects; its value is the digest of the plan that wrote the object."""
_THREADS = 8

Receipts = dict[int, dict[int, PartInfo]]
"""Uploaded parts by file number, then by part number. A small object counts as its own part 1."""


class ObjectUploads:
    """The uploads of one target under one plan."""

    def __init__(
        self,
        store: ObjectStore,
        target: str,
        plan: Plan,
        names: ControlObjects | Shared,
        *,
        known: Mapping[int, str],
        require_unfinished: Callable[[], None],
    ) -> None:
        """Take note of the uploads that exist.

        Args:
            store: The store of the target.
            target: The target's path.
            plan: The plan.
            names: The journal that names uploads: that of one process, or that of workers that share the conversion.
            known: The ids of uploads that earlier attempts began, by file number.
            require_unfinished: Raises `request.target_busy` if the target is no longer this conversion's, or complete.
        """
        self._store = store
        self._target = target
        self._plan = plan
        self._names = names
        self._require_unfinished = require_unfinished
        self._ids = {file: upload for file, upload in known.items() if file < len(plan.files)}
        self.created: dict[str, str] = {}
        """The paths of the uploads that this process created, by upload id."""
        self.completed: set[int] = set()
        """Files whose upload is complete."""
        self._lock = threading.Lock()
        self._creating: dict[int, threading.Lock] = {}

    @property
    def ids(self) -> Mapping[int, str]:
        """The ids of the uploads that are known, by file number."""
        return self._ids

    def _path(self, file: int) -> str:
        return join(self._target, self._plan.files[file].path)

    def is_large(self, file: int) -> bool:
        """True if the file is written by an upload, and not as one object."""
        return self._plan.files[file].size_bytes > self._plan.chunk_bytes

    def is_whole(self, file: int) -> bool:
        """True if the object is there with the planned size, written under this plan."""
        path = self._path(file)
        info, facts = self._store.stat(path), self._store.metadata(path)
        planned = (self._plan.files[file].size_bytes, self._plan.digest)
        return info is not None and facts is not None and (info.size_bytes, facts.get(PLAN_KEY)) == planned

    def look(self) -> dict[int, dict[int, PartInfo]]:
        """List the parts of the known uploads, by file and number. Uploads that no longer exist are forgotten."""
        parts: dict[int, dict[int, PartInfo]] = {}
        for file, upload_id in list(self._ids.items()):
            listed = self._store.list_parts(self._path(file), upload_id)
            if listed is not None:
                parts[file] = {p.number: p for p in listed}
            elif self.is_whole(file):
                self.completed.add(file)
            else:
                del self._ids[file]
        return parts

    def adopt(self, uploads: Mapping[int, str]) -> None:
        """Take note of uploads that other workers began."""
        self._ids |= uploads

    def id_of(self, file: int) -> str:
        """The id of a large object's upload. The first thread that asks creates the upload."""
        if file in self.completed:
            self._require_unfinished()
            path = printable(self._path(file))
            raise IntegrityError("integrity.journal", f"{path} is complete, but one of its units has no record")
        with self._lock:
            gate = self._creating.setdefault(file, threading.Lock())
        with gate:
            if file not in self._ids and not isinstance(self._names, ControlObjects):
                known = self._names.upload(file)
                self._ids |= {} if known is None else {file: known}
            if file not in self._ids:
                self._ids[file] = self._new(file)
            return self._ids[file]

    def _new(self, file: int) -> str:
        path = self._path(file)
        upload_id = self._store.create_multipart(path, metadata={PLAN_KEY: self._plan.digest})
        with self._lock:
            self.created[upload_id] = path
        chosen = self._names.offer_upload(file, upload_id)
        if chosen == upload_id:
            return upload_id
        if isinstance(self._names, ControlObjects) and self._is_gone(file, chosen):
            self._names.replace_upload(file, upload_id)
            return upload_id
        # Another process began an upload of this file at the same time, and all use that one.
        self._store.abort_multipart(path, upload_id)
        return chosen

    def _is_gone(self, file: int, upload_id: str) -> bool:
        return self._store.list_parts(self._path(file), upload_id) is None and not self.is_whole(file)

    def as_held(self, file: int, sent: dict[int, PartInfo]) -> dict[int, PartInfo]:
        """The receipts of a file's parts, with the ETags that the store now has.

        A worker that lost its run may have sent a part once more. Under server-side encryption, equal bytes get another
        ETag then, so parts are compared by size and CRC-32.
        """
        if file not in self._ids:
            raise self._gone(file)  # another worker ended the conversion and removed the journal
        return _with_etags_of(self._store.list_parts(self._path(file), self._ids[file]) or (), sent)

    def _gone(self, file: int) -> StorageError:
        return StorageError(
            "storage.conflict",
            f"{printable(self._path(file))}: its upload is gone; another attempt at this conversion ended it",
            fix="run the same command again: it sends the missing parts",
        )

    def complete(self, files: Sequence[int], receipts: Receipts) -> None:
        """Complete the uploads of these files, unless that is done.

        Raises:
            StorageError: The store refused one, and the object is not there.
        """
        with ThreadPoolExecutor(_THREADS) as pool:
            todo = [f for f in files if f not in self.completed]
            list(pool.map(partial(self._complete, receipts=receipts), todo))

    def _complete(self, file: int, receipts: Receipts) -> None:
        sent = receipts[file]
        try:
            self._store.complete_multipart(self._path(file), self._ids[file], _in_order(sent))
        except ReshardError:
            # The upload may be complete although the reply was lost. Only reading back the object can tell.
            if not self.is_whole(file):
                held = self.as_held(file, sent)
                if held == sent:
                    raise
                self._store.complete_multipart(self._path(file), self._ids[file], _in_order(held))
        self.completed.add(file)

    def check_parts(self, file: int, receipts: Receipts) -> None:
        """Compare the parts that the store holds with those that were sent.

        Raises:
            StorageError: `storage.conflict` if another attempt ended the upload.
            IntegrityError: `integrity.mismatch`.
        """
        listed = self._store.list_parts(self._path(file), self._ids[file])
        if listed is None:
            # Another attempt at this plan completed the upload, or another process ended the conversion.
            self._require_unfinished()
            if self.is_whole(file):
                self.completed.add(file)
                return
            raise self._gone(file)
        receipts[file] = _with_etags_of(listed, receipts[file])
        held = {p.number: (p.size_bytes, p.etag) for p in listed}
        if held != {n: (p.size_bytes, p.etag) for n, p in receipts[file].items()}:
            raise IntegrityError(
                "integrity.mismatch",
                f"{printable(self._path(file))}: the parts in the store differ from those that were sent",
            )

    def abort_created(self, kept: Container[str] = ()) -> None:
        """Abort the uploads that this process created, except those in `kept`."""
        for upload_id, path in self.created.items():
            if upload_id not in kept:
                self._store.abort_multipart(path, upload_id)


def _in_order(parts: Mapping[int, PartInfo]) -> list[PartInfo]:
    return [part for _, part in sorted(parts.items())]


def _with_etags_of(listed: Sequence[PartInfo], sent: Mapping[int, PartInfo]) -> dict[int, PartInfo]:
    """The receipts of parts, with the ETags of the listed parts that have the same size and CRC-32."""
    held = {p.number: p for p in listed}
    return {
        number: replace(part, etag=held[number].etag)
        if number in held
        and held[number].size_bytes == part.size_bytes
        and part.crc32 is not None
        and held[number].crc32 == part.crc32
        else part
        for number, part in sent.items()
    }
