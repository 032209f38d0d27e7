"""The writer of one chunk of a local file."""

from __future__ import annotations

import ctypes
import os

from reshard_engine.storage.local import translated

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
