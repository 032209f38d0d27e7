"""Faults at numbered operations, which tests inject between the engine and its storage.

`Steps` counts the operations of one process (or of one thread that stands for a process) and disturbs some of
them. `FaultyStore` numbers the calls of a store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from reshard.errors import StorageError
from reshard_engine.storage.protocol import Listing, ObjectInfo, ObjectStore, PartInfo, Store

_T = TypeVar("_T")
_HANG_LIMIT_S = 60.0


class Fault(StrEnum):
    """The faults that may happen at an operation."""

    ERROR_BEFORE = "error before"
    ERROR_AFTER = "effect done, then error"
    KILL_BEFORE = "kill before"
    KILL_AFTER = "kill after"
    HANG = "hang past the lease"
    SHORT = "half of it is done"
    """Fewer bytes move than were requested. A store raises an error if it notices; the operating system does not."""


class Killed(BaseException):
    """The end of a simulated process. Every later operation of it raises this again."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One numbered operation. Numbers start at 1."""

    number: int
    name: str
    path: str


def unavailable() -> StorageError:
    """The error of a store that timed out, threw the connection away, or answered 503."""
    return StorageError("storage.unavailable", "injected")


class Steps:
    """Counts operations, and disturbs those that a script names. One instance stands for one process.

    Args:
        script: Faults by number of operation; a function is called before the operation (to change something
            meanwhile, or to be slow).
        error: Makes the error of the two error modes.
        kill: Ends the process for good; by default `Killed` is raised from there on.
        hang: Sleeps until the process is to go on; by default until `wake` is called.
    """

    def __init__(
        self,
        script: Mapping[int, Fault | Callable[[], None]] | None = None,
        *,
        error: Callable[[], Exception] = unavailable,
        kill: Callable[[], None] | None = None,
        hang: Callable[[], None] | None = None,
    ) -> None:
        self._script = script or {}
        self._error = error
        self._kill = kill or self._die
        self._hang = hang or self._sleep
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self.hung = threading.Event()
        """Set once the process hangs."""
        self.dead = False
        self.done: list[Operation] = []
        """Every operation so far, the disturbed ones included."""

    def wake(self) -> None:
        """Let a process that hangs (or will) go on."""
        self._woken.set()

    def step(self, name: str, path: str, effect: Callable[[], _T], short: Callable[[], _T] | None = None) -> _T:
        """Do an operation, or the fault that the script has for it. `short` does half of the operation."""
        with self._lock:
            if self.dead:
                raise Killed
            operation = Operation(len(self.done) + 1, name, path)
            self.done.append(operation)
        fault = self._script.get(operation.number)
        self._before(fault)
        result = short() if fault is Fault.SHORT and short is not None else effect()
        if fault is Fault.ERROR_AFTER:
            raise self._error()
        if fault is Fault.KILL_AFTER:
            self._kill()
        return result

    def _before(self, fault: Fault | Callable[[], None] | None) -> None:
        if fault is Fault.HANG:
            self._hang()
        elif fault is Fault.ERROR_BEFORE:
            raise self._error()
        elif fault is Fault.KILL_BEFORE:
            self._kill()
        elif fault is not None and not isinstance(fault, Fault):
            fault()

    def _die(self) -> None:
        with self._lock:
            self.dead = True
        raise Killed

    def _sleep(self) -> None:
        self.hung.set()
        if not self._woken.wait(_HANG_LIMIT_S):
            raise AssertionError("nobody woke the process")


class FaultyStore:
    """An object store whose every call is an operation of `steps`."""

    def __init__(self, store: ObjectStore, steps: Steps) -> None:
        """Calls go to `store`."""
        self._store = store
        self._step = steps.step
        self.scheme = store.scheme
        self.min_part_bytes = store.min_part_bytes

    def list_directory(self, path: str, *, most: int | None = None) -> Listing:
        """See `Store`."""
        return self._step("list_directory", path, lambda: self._store.list_directory(path, most=most))

    def list_tree(self, path: str) -> list[ObjectInfo]:
        """See `Store`."""
        return self._step("list_tree", path, lambda: self._store.list_tree(path))

    def stat(self, path: str) -> ObjectInfo | None:
        """See `Store`."""
        return self._step("stat", path, lambda: self._store.stat(path))

    def read_into(self, info: ObjectInfo, offset: int, buffer: memoryview) -> None:
        """See `Store`."""

        def truncated() -> None:
            self._store.read_into(info, offset, buffer[: len(buffer) // 2])
            raise unavailable()

        self._step("read_into", info.path, lambda: self._store.read_into(info, offset, buffer), truncated)

    def put(
        self,
        path: str,
        data: bytes | memoryview,
        *,
        metadata: Mapping[str, str],
        if_absent: bool,
        crc32: int | None = None,
    ) -> ObjectInfo:
        """See `ObjectStore`."""
        return self._step(
            "put", path, lambda: self._store.put(path, data, metadata=metadata, if_absent=if_absent, crc32=crc32)
        )

    def delete(self, paths: Sequence[str], *, in_order: bool = True) -> None:
        """See `ObjectStore`. Each object is an operation of its own."""
        for path in paths:
            self._step("delete", path, lambda path=path: self._store.delete([path]))

    def metadata(self, path: str) -> Mapping[str, str] | None:
        """See `ObjectStore`."""
        return self._step("metadata", path, lambda: self._store.metadata(path))

    def create_multipart(self, path: str, *, metadata: Mapping[str, str]) -> str:
        """See `ObjectStore`."""
        return self._step("create_multipart", path, lambda: self._store.create_multipart(path, metadata=metadata))

    def put_part(
        self, path: str, upload_id: str, number: int, data: memoryview, *, crc32: int | None = None
    ) -> PartInfo:
        """See `ObjectStore`."""
        return self._step("put_part", path, lambda: self._store.put_part(path, upload_id, number, data, crc32=crc32))

    def copy_part(
        self, path: str, upload_id: str, number: int, source: ObjectInfo, *, offset: int, length: int
    ) -> PartInfo | None:
        """See `ObjectStore`."""
        return self._step(
            "copy_part",
            path,
            lambda: self._store.copy_part(path, upload_id, number, source, offset=offset, length=length),
        )

    def reaches(self, other: Store) -> bool:
        """See `CopyingStore`. This call is not counted as an operation, because it uses no network."""
        return other is self

    def list_parts(self, path: str, upload_id: str) -> list[PartInfo] | None:
        """See `ObjectStore`."""
        return self._step("list_parts", path, lambda: self._store.list_parts(path, upload_id))

    def list_uploads(self, prefix: str) -> list[tuple[str, str]]:
        """See `ObjectStore`."""
        return self._step("list_uploads", prefix, lambda: self._store.list_uploads(prefix))

    def complete_multipart(self, path: str, upload_id: str, parts: Sequence[PartInfo]) -> None:
        """See `ObjectStore`."""
        self._step("complete_multipart", path, lambda: self._store.complete_multipart(path, upload_id, parts))

    def abort_multipart(self, path: str, upload_id: str) -> None:
        """See `ObjectStore`."""
        self._step("abort_multipart", path, lambda: self._store.abort_multipart(path, upload_id))
