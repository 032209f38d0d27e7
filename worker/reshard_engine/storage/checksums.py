"""CRC-32 as zip and safetensors readers know it, at the speed of memory.

The package `isal` binds Intel's library; zlib's own is five to ten times slower (docs/performance.md), and a copy that
sums what it copies would wait for it.
"""

from __future__ import annotations

from typing import Protocol

from isal import isal_zlib


class _Crc32(Protocol):
    def __call__(self, data: bytes | memoryview, value: int = 0, /) -> int: ...


crc32: _Crc32 = isal_zlib.crc32  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
"""The CRC-32 of some bytes, or of what has the CRC-32 `value` with them behind it."""
