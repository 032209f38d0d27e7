"""A chunk of a local file on its way to the disk."""

from __future__ import annotations

import ctypes
import os

from reshard_engine.storage.local import translated

_WRITE = 2
_WRITEBACK_BYTES = 8 << 20
_START_WRITING = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)


class LocalChunkFile:
    """Writes windows at their offsets, and has the kernel send them on while the next ones are made.

    What is left to the sync at the end is then little. Starting the writing is a hint: its failures are those of the
    sync, which reports them.
    """

    def __init__(self, path: str) -> None:
        """Open or create the file."""
        self._path = path
        with translated(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._unsent = (0, 0)

    def put(self, offset: int, data: memoryview) -> None:
        """Write a window at its offset in the file."""
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
        """Let go of the file."""
        first, end = self._unsent
        if end - first >= _WRITEBACK_BYTES >> 3:
            self._send(first, end)
        os.close(self._descriptor)
