"""What a unit hands its windows to: chunks written window by window, or whole where a store takes no less."""

from __future__ import annotations

from concurrent.futures import Executor, Future, wait
from types import TracebackType
from typing import Protocol, Self

from reshard_engine.execute.journal import ChunkRecord
from reshard_engine.execute.server_copy.copier import ServerCopier
from reshard_engine.execute.sinks.protocol import ChunkFile, StreamSink, WholeSink
from reshard_engine.plan.model import Chunk, Unit
from reshard_engine.storage.checksums import crc32


class Outlet(Protocol):
    """Takes the windows of one unit in order. Leaving it waits for what is still being written."""

    window_bytes: int
    """The largest window that it wants."""

    def take(self, chunk: Chunk, begin: int, data: memoryview) -> None:
        """Write the bytes of a chunk from `begin` in the file on; they stay as they are until `records`."""
        ...

    def records(self) -> list[ChunkRecord]:
        """The chunks, written, in the order in which they came."""
        ...

    def __enter__(self) -> Self:
        """For one unit."""
        ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Let go."""
        ...


class WholeChunks:
    """Hands each chunk over at once: a window is a chunk. Several are on their way together if there is a pool."""

    def __init__(self, sink: WholeSink, unit: Unit, copier: ServerCopier | None, pool: Executor | None) -> None:
        """For one unit; what the store copies from the source itself is not sent."""
        self._sink = sink
        self._copier = copier
        self._pool = pool if len(unit.chunks) > 1 else None
        self._sent: list[ChunkRecord | Future[ChunkRecord]] = []
        self.window_bytes = max(unit.length_bytes, 1)

    def take(self, chunk: Chunk, begin: int, data: memoryview) -> None:
        """Write the chunk, or have it written."""
        if self._pool is None:
            self._sent.append(self._write(chunk, data))
        else:
            self._sent.append(self._pool.submit(self._write, chunk, data))

    def _write(self, chunk: Chunk, data: memoryview) -> ChunkRecord:
        crc = crc32(data)
        etag = self._copier.copy_read(chunk, crc) if self._copier is not None else None
        return ChunkRecord(chunk, crc, self._sink.write(chunk, data, crc) if etag is None else etag)

    def records(self) -> list[ChunkRecord]:
        """The receipts, when all are there."""
        return [sent.result() if isinstance(sent, Future) else sent for sent in self._sent]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Wait, so that nothing reads the unit's memory any more, also after a failure."""
        flying = [sent for sent in self._sent if isinstance(sent, Future)]
        for sent in flying:
            sent.cancel()
        wait(flying)


class StreamedChunks:
    """Writes each window where it belongs; one file is open at a time."""

    def __init__(self, sink: StreamSink, window_bytes: int) -> None:
        """For one unit."""
        self._sink = sink
        self.window_bytes = window_bytes
        self._written: list[ChunkRecord] = []
        self._chunk: Chunk | None = None
        self._file: ChunkFile | None = None
        self._crc = 0

    def take(self, chunk: Chunk, begin: int, data: memoryview) -> None:
        """Write a window of the chunk."""
        if self._file is None or chunk is not self._chunk:
            self._close()
            self._chunk, self._file, self._crc = chunk, self._sink.open_chunk(chunk), 0
        self._crc = crc32(data, self._crc)
        self._file.put(begin, data)

    def records(self) -> list[ChunkRecord]:
        """What was written."""
        self._close()
        return self._written

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
            assert self._chunk is not None
            self._written.append(ChunkRecord(self._chunk, self._crc))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()
