"""Faults at numbered calls of the operating system, in a process of its own.

`disturbed_calls` replaces the functions of `os` with which files below a directory are read and written, so that
calls that a library makes (`shutil.rmtree`, `os.makedirs`) are counted, too. An audit hook reports accesses that were
not counted.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

from reshard_engine.storage import local_writes
from reshard_engine.testing.stores import Steps

_BY_PATH = ("mkdir", "rmdir", "unlink", "remove", "rename", "replace", "stat", "lstat", "scandir", "listdir")
_BY_DESCRIPTOR = ("ftruncate", "fsync", "fstat")
_BYTES = ("pwrite", "write", "pread", "preadv")
_AUDITED = {"open", "os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.scandir", "os.listdir", "os.truncate"}


class SystemCalls:
    """The calls of one process that touch files below a directory, as operations of `steps`.

    Args:
        root: Absolute path; what lies elsewhere is not counted.
        steps: Counts, and disturbs.
    """

    def __init__(self, root: str, steps: Steps) -> None:
        self._root = root.rstrip("/")
        self._steps = steps
        self._paths: dict[int, str] = {}
        self._inside = threading.local()
        self.unseen: list[str] = []
        """Calls below the directory that were not counted: a gap of this module."""

    def _place(self, path: Any, directory: int | None) -> str:
        """The absolute path that a call names, or "" if it is not below the directory."""
        if isinstance(path, int):
            return self._paths.get(path, "")
        text = os.fsdecode(path)
        if directory is not None:
            text = f"{self._paths.get(directory, '')}/{text}"
        return text if text == self._root or text.startswith(self._root + "/") else ""

    def by_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """A call whose first argument is a path (or a descriptor of one)."""

        def call(path: Any = ".", *args: Any, **options: Any) -> Any:
            place = self._place(path, options.get("dir_fd"))
            return self._counted(name, place, lambda: real(path, *args, **options))

        return call

    def by_bytes(self, name: str, real: Callable[..., int]) -> Callable[..., int]:
        """A call that moves bytes between a descriptor and its second argument, and may move fewer."""

        def call(descriptor: int, data: Any, *args: Any) -> Any:
            place = self._paths.get(descriptor, "")
            half = data // 2 if isinstance(data, int) else _half(data)
            short = partial(real, descriptor, half, *args)
            return self._counted(name, place, lambda: real(descriptor, data, *args), short)

        return call

    def open(self, real: Callable[..., int]) -> Callable[..., int]:
        """`os.open`: remembers what a descriptor stands for."""

        def call(path: Any, *args: Any, **options: Any) -> int:
            place = self._place(path, options.get("dir_fd"))

            def effect() -> int:
                descriptor = real(path, *args, **options)
                self._paths[descriptor] = place
                return descriptor

            return self._counted("open", place, effect) if place else real(path, *args, **options)

        return call

    def close(self, real: Callable[[int], None]) -> Callable[[int], None]:
        """`os.close`: not counted, because a dead process closes everything, too."""

        def call(descriptor: int) -> None:
            self._paths.pop(descriptor, None)
            real(descriptor)

        return call

    def library(self, real: Any) -> Any:
        """The C library as the sink uses it: a sync of one file system, a rename that does not replace."""

        class Library:
            """Counted calls."""

            syncfs = staticmethod(self.by_path("syncfs", real.syncfs))

            @staticmethod
            def renameat2(*args: Any) -> int:
                """The path is the second argument."""
                return self._counted("renameat2", os.fsdecode(args[1]), lambda: real.renameat2(*args))

        return Library

    def _counted(self, name: str, place: str, effect: Callable[[], Any], short: Callable[[], Any] | None = None) -> Any:
        if not place or getattr(self._inside, "counting", False):
            return effect()

        def counting(call: Callable[[], Any]) -> Any:
            self._inside.counting = True
            try:
                return call()
            finally:
                self._inside.counting = False

        return self._steps.step(name, place, partial(counting, effect), short and partial(counting, short))

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit hook: notes accesses to the directory that were not counted."""
        if event in _AUDITED and not getattr(self._inside, "counting", False):
            named = arguments[0] if arguments else None
            if isinstance(named, str | bytes) and self._place(named, None):
                self.unseen.append(f"{event} {os.fsdecode(named)}")


def _half(data: Any) -> Any:
    """The first half of a buffer, or of the first one of a list; at least one byte, for none would mean the end."""
    if isinstance(data, list):
        return [_half(memoryview(data[0]))]  # pyright: ignore[reportUnknownArgumentType]
    return data[: -(-len(data) // 2)]


@contextmanager
def disturbed_calls(root: str, steps: Steps) -> Generator[SystemCalls]:
    """Count and disturb this process's calls for the length of the block. The audit hook stays: use a child."""
    calls = SystemCalls(root, steps)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(os, "open", calls.open(os.open)))
        stack.enter_context(mock.patch.object(os, "close", calls.close(os.close)))
        for name in (*_BY_PATH, *_BY_DESCRIPTOR):
            stack.enter_context(mock.patch.object(os, name, calls.by_path(name, getattr(os, name))))
        for name in _BYTES:
            stack.enter_context(mock.patch.object(os, name, calls.by_bytes(name, getattr(os, name))))
        stack.enter_context(mock.patch.object(fcntl, "flock", calls.by_path("flock", fcntl.flock)))
        stack.enter_context(mock.patch.object(local_writes, "LIBC", calls.library(local_writes.LIBC)))
        sys.addaudithook(calls.audit)
        yield calls
