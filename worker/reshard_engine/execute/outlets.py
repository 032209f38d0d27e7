"""What a unit hands its windows to: chunks written window by window, or whole where a store takes no less."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from reshard_engine.checksums import crc32
from reshard_engine.execute.journal import ChunkRecord
from reshard_engine.execute.offload import Offloader
from reshard_engine.execute.sink import ChunkFile, StreamSink, WholeSink
from reshard_engine.plan.model import Chunk, Unit


class Outlet(Protocol):
    """Takes the windows of one unit in order."""

    window_bytes: int
    """The largest window that it wants."""

    def take(self, chunk: Chunk, begin: int, data: memoryview) -> ChunkRecord:
        """Write the bytes of a chunk from `begin` in the file on; returns the record of the chunk so far."""
        ...


class WholeChunks:
    """Hands each chunk over at once: a window is a chunk."""

    def __init__(self, sink: WholeSink, unit: Unit, offloader: Offloader | None) -> None:
        """For one unit; what the store copies from the source itself is not sent."""
        self._sink = sink
        self._offloader = offloader
        self.window_bytes = max(unit.length_bytes, 1)

    def take(self, chunk: Chunk, begin: int, data: memoryview) -> ChunkRecord:
        """Write the chunk."""
        crc = crc32(data)
        etag = self._offloader.copy_read(chunk, crc) if self._offloader is not None else None
        return ChunkRecord(chunk, crc, self._sink.write(chunk, data, crc) if etag is None else etag)


class StreamedChunks:
    """Writes each window where it belongs; one file is open at a time."""

    def __init__(self, sink: StreamSink, window_bytes: int) -> None:
        """For one unit."""
        self._sink = sink
        self.window_bytes = window_bytes
        self._chunk: Chunk | None = None
        self._file: ChunkFile | None = None
        self._crc = 0

    def take(self, chunk: Chunk, begin: int, data: memoryview) -> ChunkRecord:
        """Write a window of the chunk."""
        if self._file is None or chunk is not self._chunk:
            self._close()
            self._chunk, self._file, self._crc = chunk, self._sink.open_chunk(chunk), 0
        self._crc = crc32(data, self._crc)
        self._file.put(begin, data)
        return ChunkRecord(chunk, self._crc)

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()
