"""Reads written bytes again, to compare them with the CRC-32s that were computed while they were written."""

from __future__ import annotations

from functools import partial

from reshard_engine.storage.checksums import crc32
from reshard_engine.storage.pieces import pieces_of
from reshard_engine.storage.protocol import ObjectInfo, Store


def crc_of_range(store: Store, info: ObjectInfo, offset: int, length: int) -> int:
    """The CRC-32 of a byte range of an object, read in bounded pieces."""
    crc = 0
    for _, view in pieces_of(partial(store.read_into, info), offset, offset + length):
        crc = crc32(view, crc)
    return crc
