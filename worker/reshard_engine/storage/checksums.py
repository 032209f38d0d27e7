"""The CRC-32 of zip archives, computed at the speed of memory.

The package `isal` binds Intel's library. zlib's CRC-32 is five to ten times slower (docs/performance.md), so
conversions would wait for it.
"""

from __future__ import annotations

from typing import Protocol

from isal import isal_zlib


class _Crc32(Protocol):
    def __call__(self, data: bytes | memoryview, value: int = 0, /) -> int: ...


crc32: _Crc32 = isal_zlib.crc32  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
"""The CRC-32 of some bytes. With `value`, the CRC-32 of earlier bytes, it is that of both together."""
