"""Bytes that were written, read again and compared with the CRC-32s that were taken on the way."""

from __future__ import annotations

import zlib

from reshard_engine.storage.protocol import ObjectInfo, Store

_READ_BYTES = 8 << 20


def crc_of_range(store: Store, info: ObjectInfo, offset: int, length: int) -> int:
    """The CRC-32 of a byte range of an object, read in bounded pieces."""
    buffer = bytearray(min(_READ_BYTES, length))
    crc, done = 0, 0
    while done < length:
        view = memoryview(buffer)[: min(len(buffer), length - done)]
        store.read_into(info, offset + done, view)
        crc = zlib.crc32(view, crc)
        done += len(view)
    return crc
