"""Torch zip archives with every field open to lies; without any, what `torch.save` writes.

Source: PKWARE APPNOTE 6.3; torch 2.13.0 `caffe2/serialize/inline_container.cc` (flag bits 3 and 11, zeros in the
local header, a descriptor behind the data, data at multiples of 64).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

LOCAL = "<4sHHHHHIIIHH"
CENTRAL = "<4sHHHHHHIIIHHHHHII"
END = "<4sHHHHIIH"
FLAGS = 0x0808


@dataclass
class Record:
    """One record. `local`, `central` and `descriptor` replace fields of what is written about it."""

    name: str | bytes
    data: bytes
    flags: int = FLAGS
    method: int = 0
    crc: int | None = None
    packed: bytes | None = None
    """What is stored instead of `data`."""
    local: Mapping[str, int | bytes] = field(default_factory=dict[str, int | bytes])
    central: Mapping[str, int | bytes] = field(default_factory=dict[str, int | bytes])
    descriptor: bytes | None = None
    at: int | None = None
    """Where the directory says that it begins; nothing is written then."""

    @property
    def raw_name(self) -> bytes:
        """The name as bytes."""
        return self.name.encode() if isinstance(self.name, str) else self.name

    @property
    def stored(self) -> bytes:
        """The bytes behind the local header."""
        return self.data if self.packed is None else self.packed

    @property
    def crc32(self) -> int:
        """The CRC-32 that is written."""
        return zlib.crc32(self.data) if self.crc is None else self.crc


def _local(record: Record, at: int) -> bytes:
    name = bytes(record.local.get("name", record.raw_name))
    plain = not record.flags & 8
    padding = -(at + 30 + len(name) + 4) % 64
    extra = bytes(record.local.get("extra", b"FB" + struct.pack("<H", padding) + b"Z" * padding))
    fields = {
        "flags": record.flags,
        "method": record.method,
        "crc": record.crc32 if plain else 0,
        "packed": len(record.stored) if plain else 0,
        "size": len(record.data) if plain else 0,
    } | record.local
    return (
        struct.pack(
            LOCAL,
            *(b"PK\x03\x04", 0, fields["flags"], fields["method"], 0, 0),
            *(fields["crc"], fields["packed"], fields["size"], len(name), len(extra)),
        )
        + name
        + extra
    )


def _descriptor(record: Record) -> bytes:
    if record.descriptor is not None:
        return record.descriptor
    if not record.flags & 8:
        return b""
    return struct.pack("<4sIII", b"PK\x07\x08", record.crc32, len(record.stored), len(record.data))


def _central(record: Record, at: int) -> bytes:
    fields = {
        "flags": record.flags,
        "method": record.method,
        "crc": record.crc32,
        "packed": len(record.stored),
        "size": len(record.data),
        "extra": b"",
        "comment": b"",
        "disk": 0,
        "mode": 0,
        "header": at,
    } | record.central
    name = bytes(record.central.get("name", record.raw_name))
    extra, comment = bytes(fields["extra"]), bytes(fields["comment"])
    return (
        struct.pack(
            CENTRAL,
            *(b"PK\x01\x02", 0, 0, fields["flags"], fields["method"], 0, 0),
            *(fields["crc"], fields["packed"], fields["size"], len(name), len(extra), len(comment)),
            *(fields["disk"], 0, fields["mode"], fields["header"]),
        )
        + name
        + extra
        + comment
    )


@dataclass
class Ending:
    """What is written behind the records; `end` replaces fields of the end record."""

    end: Mapping[str, int] = field(default_factory=dict[str, int])
    comment: bytes = b""
    before_directory: bytes = b""
    before_end: bytes = b""
    """Such as a zip64 record and its locator."""
    zip64: Mapping[str, int] | None = None
    """Write the zip64 end record and locator, with these fields replaced."""


def archive(records: Sequence[Record], ending: Ending | None = None) -> bytes:
    """The archive as it is written."""
    ending = ending or Ending()
    out = bytearray()
    central: list[bytes] = []
    for record in records:
        at = len(out) if record.at is None else record.at
        if record.at is None:
            out += _local(record, at) + record.stored + _descriptor(record)
        central.append(_central(record, at))
    out += ending.before_directory
    start, directory = len(out), b"".join(central)
    out += directory
    if ending.zip64 is not None:
        out += _zip64(len(records), len(directory), start, ending.zip64)
    out += ending.before_end
    count = len(records)
    fields = {"disk": 0, "here": count, "count": count, "size": len(directory), "offset": start} | ending.end
    out += struct.pack(
        END,
        *(b"PK\x05\x06", fields["disk"], fields["disk"], fields["here"], fields["count"]),
        *(fields["size"], fields["offset"], len(ending.comment)),
    )
    return bytes(out + ending.comment)


def _zip64(count: int, length: int, start: int, replaced: Mapping[str, int]) -> bytes:
    fields = {
        "count": count,
        "here": count,
        "size": length,
        "offset": start,
        "at": start + length,
        "disk": 0,
    } | replaced
    record = struct.pack(
        "<4sQHHIIQQQQ",
        *(b"PK\x06\x06", 44, 45, 45, fields["disk"], fields["disk"]),
        *(fields["here"], fields["count"], fields["size"], fields["offset"]),
    )
    return record + struct.pack("<4sIQI", b"PK\x06\x07", 0, fields["at"], 1)


def torch_records(pickle: bytes, storages: Mapping[str, bytes], *, root: str = "archive") -> list[Record]:
    """The records that `torch.save` writes, in its order."""
    return [
        Record(f"{root}/data.pkl", pickle),
        Record(f"{root}/byteorder", b"little"),
        *(Record(f"{root}/data/{key}", data) for key, data in storages.items()),
        Record(f"{root}/version", b"3\n"),
    ]
