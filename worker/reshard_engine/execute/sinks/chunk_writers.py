"""Writers of the items of a unit: item by item to a file, or by whole chunks to an object store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, wait

from reshard_engine.execute.journal import ChunkRecord
from reshard_engine.execute.sinks.protocol import ChunkFile, CopyRead, Made
from reshard_engine.plan.model import Chunk
from reshard_engine.storage.checksums import crc32


def write_streamed(open_chunk: Callable[[Chunk], ChunkFile], made: Made) -> list[ChunkRecord]:
    """Write each item at its offset in its file. One file is open at a time."""
    written: list[ChunkRecord] = []
    chunk: Chunk | None = None
    file: ChunkFile | None = None
    crc = 0
    try:
        for item, data in made:
            if file is None or item.chunk is not chunk:
                if file is not None and chunk is not None:
                    closing, file = file, None
                    closing.close()
                    written.append(ChunkRecord(chunk, crc))
                chunk, file, crc = item.chunk, open_chunk(item.chunk), 0
            crc = crc32(data, crc)
            file.put(item.begin, data)
    finally:
        if file is not None:
            file.close()
    if chunk is not None:
        written.append(ChunkRecord(chunk, crc))
    return written


def write_whole(
    send: Callable[[Chunk, memoryview, int], str], made: Made, copy_read: CopyRead | None, pool: Executor | None
) -> list[ChunkRecord]:
    """Write whole chunks: each item is one chunk. With a pool, several chunks are sent concurrently."""

    def write(chunk: Chunk, data: memoryview) -> ChunkRecord:
        crc = crc32(data)
        etag = copy_read(chunk, crc) if copy_read is not None else None
        return ChunkRecord(chunk, crc, send(chunk, data, crc) if etag is None else etag)

    if pool is None:
        return [write(item.chunk, data) for item, data in made]
    sent: list[Future[ChunkRecord]] = []
    try:
        sent.extend(pool.submit(write, item.chunk, data) for item, data in made)
        return [s.result() for s in sent]
    finally:
        # When this function returns, also after a failure, no call may still read the unit's memory.
        for one in sent:
            one.cancel()
        wait(sent)
