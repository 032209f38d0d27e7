"""A source file as the readers see it: one pinned object, or several that are byte ranges of one stream."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from io import BytesIO
from itertools import accumulate

from reshard.errors import SourceError, printable
from reshard_engine.storage.protocol import ObjectInfo, Store

_WINDOW_BYTES = 64 << 10
_WINDOW_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A stream of bytes, stored in one object or cut into consecutive ones."""

    store: Store
    name: str
    """Path relative to the checkpoint's directory, without part suffixes."""
    objects: tuple[ObjectInfo, ...]
    directory_sha256: str | None = field(default=None, compare=False)
    """Of names, sizes and CRC-32s of the file's records, once its container was parsed and if it keeps them."""
    checksums: tuple[tuple[int, int, int], ...] = field(default=(), compare=False, repr=False)
    """(offset, length, CRC-32) of its larger records in file order, where its container keeps checksums."""
    starts: tuple[int, ...] = field(init=False)
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        """Derive where each object starts in the stream."""
        ends = list(accumulate(o.size_bytes for o in self.objects))
        object.__setattr__(self, "starts", (0, *ends[:-1]))
        object.__setattr__(self, "size_bytes", ends[-1])

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the stream's bytes from `offset` on.

        Raises:
            SourceError: `checkpoint.incomplete` if the stream ends before, `source.changed` if it is not the
                pinned one any more.
        """
        if offset < 0 or offset + len(buffer) > self.size_bytes:
            raise SourceError(
                "checkpoint.incomplete",
                f"{printable(self.name)} has {self.size_bytes} bytes, {offset} to {offset + len(buffer)} are wanted",
                fix="the file is truncated: copy the checkpoint again",
            )
        done = 0
        while done < len(buffer):
            at = offset + done
            index = bisect_right(self.starts, at) - 1
            info = self.objects[index]
            count = min(len(buffer) - done, self.starts[index] + info.size_bytes - at)
            if count:
                self.store.read_into(info, at - self.starts[index], buffer[done : done + count])
            done += count

    def read(self, offset: int, length: int) -> bytes:
        """The stream's bytes `[offset, offset + length)`, held once: a skeleton may have hundreds of megabytes."""
        # `BytesIO` fills and gives back the one object it was made of; `bytes(bytearray)` would copy it.
        stream = BytesIO(bytes(length))
        if length:
            with stream.getbuffer() as buffer:
                self.read_into(offset, buffer)
        return stream.getvalue()


class Window:
    """A source file whose small reads are served from a few larger ones: metadata costs two requests, not fifty."""

    def __init__(self, file: SourceFile) -> None:
        """Nothing is read yet."""
        self.file = file
        self.size_bytes = file.size_bytes
        self._blocks: dict[int, bytes] = {}
        self._tail_at = max(0, file.size_bytes - _WINDOW_BYTES)

    def holds(self, offset: int, length: int) -> bool:
        """Whether `read` would answer without touching the store."""
        return any(at <= offset and offset + length <= at + len(block) for at, block in self._blocks.items())

    def spans(self) -> list[tuple[int, int]]:
        """Begin and end of what was read."""
        return [(at, at + len(block)) for at, block in self._blocks.items()]

    def read(self, offset: int, length: int) -> bytes:
        """Bytes `[offset, offset + length)`, fetching at least a window of them."""
        # The latest block first: headers are read in file order, and a large directory leaves many blocks behind.
        for at, block in reversed(self._blocks.items()):
            if at <= offset and offset + length <= at + len(block):
                return block[offset - at : offset - at + length]
        at = min(self._tail_at, offset)
        count = max(length + offset - at, min(_WINDOW_BYTES, self.size_bytes - at))
        block = self.file.read(at, count)
        self._blocks[at] = block
        if len(self._blocks) > _WINDOW_BLOCKS:
            # Headers of large records lie far apart: their blocks serve nothing else. The tail is the directory.
            del self._blocks[next(start for start in self._blocks if start != self._tail_at)]
        return block[offset - at : offset - at + length]
