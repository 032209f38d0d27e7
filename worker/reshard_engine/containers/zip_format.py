"""Shared definitions of the two readers of zip directories: a record, the flag bits that torch sets, the bounds.

Source: PKWARE APPNOTE 6.3; torch 2.13.0 `caffe2/serialize/inline_container.cc`.
"""

from __future__ import annotations

from typing import NamedTuple

DESCRIPTOR_FLAG, UTF8_FLAG = 1 << 3, 1 << 11
PLAIN_FILES = (0, 8)
"""The allowed file types in a record's Unix mode: none, or a regular file. A link is refused."""
U32_MAX = 0xFFFFFFFF
ALIGNMENT = 64
MAX_NAME_BYTES = 512


class ZipEntry(NamedTuple):
    """One stored record. Offsets are absolute in the file."""

    name: str
    crc32: int
    size_bytes: int
    header_offset: int
    data_offset: int
