"""The CRC-32 of zip archives at the speed of memory, and long ranges read for it in bounded pieces.

The package `isal` binds Intel's library. zlib's CRC-32 is five to ten times slower (docs/performance.md), so
conversions would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from isal import isal_zlib


class _Crc32(Protocol):
    def __call__(self, data: bytes | memoryview, value: int = 0, /) -> int: ...


crc32: _Crc32 = isal_zlib.crc32  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
"""The CRC-32 of some bytes. With `value`, the CRC-32 of earlier bytes, it is that of both together."""


# Reading of long ranges in bounded pieces, for checks that read bytes again.

PIECE_BYTES = 1 << 20


def pieces_of(read_into: Callable[[int, memoryview], None], begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
    """(offset, bytes) of each piece of a range, in order. The bytes are valid until the next piece is requested."""
    buffer = bytearray(min(PIECE_BYTES, end - begin))
    for at in range(begin, end, max(1, len(buffer))):
        view = memoryview(buffer)[: min(len(buffer), end - at)]
        read_into(at, view)
        yield at, view
