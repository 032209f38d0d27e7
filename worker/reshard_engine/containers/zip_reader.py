"""Reads the directory of a torch zip archive with ranged reads, and accepts the canonical form only.

Readers of ambiguous zips disagree about their content, so anything that torch does not write is
refused. The canonical form is one archive with nothing before, between or after its records; no compression,
encryption or comments; unique names below one root; local headers that match the directory.

`zip_columns` checks archives with many records first. It makes the same checks for all records at once, and leaves an
archive that fails one to this module.

Source: PKWARE APPNOTE 6.3 (records); torch 2.13.0 `caffe2/serialize/inline_container.cc`
(`getPadding`: data begins at multiples of 64; flag bit 3 with a data descriptor; `FB` extra field).
"""

from __future__ import annotations

import struct
import unicodedata
from dataclasses import dataclass

from reshard.errors import SourceError, counted, printable
from reshard_engine.containers.source_file import CachedFile
from reshard_engine.containers.zip_columns import COLUMNS_FROM, entries_in_columns
from reshard_engine.containers.zip_format import (
    ALIGNMENT,
    DESCRIPTOR_FLAG,
    MAX_NAME_BYTES,
    PLAIN_FILES,
    U32_MAX,
    UTF8_FLAG,
    ZipEntry,
)
from reshard_engine.storage.checksums import crc32

_EOCD = struct.Struct("<4sHHHHIIH")
_EOCD64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_U16_MAX = 0xFFFF
MAX_ENTRIES = 1_000_000
MAX_DIRECTORY_BYTES = 128 << 20
"""Largest directory in bytes; it is read at once. A million records of torch take 80 MB."""


@dataclass(frozen=True, slots=True)
class _Central:
    name: str
    raw_name_bytes: int
    flags: int
    crc32: int
    size_bytes: int
    header_offset: int


@dataclass(frozen=True, slots=True)
class ZipDirectory:
    """A canonical archive: its root name, and its entries by name below the root."""

    root: str
    entries: dict[str, ZipEntry]


def _bad(code: str, cached: CachedFile, message: str) -> SourceError:
    return SourceError(f"zip.{code}", f"{printable(cached.file.name)}: {message}")


def read_zip_directory(cached: CachedFile) -> ZipDirectory:
    """Read the directory of the archive.

    Raises:
        SourceError: `zip.*` for anything that torch's writer does not write.
    """
    offset, size, count = _end_record(cached)
    if count > MAX_ENTRIES or size > MAX_DIRECTORY_BYTES:
        raise _bad(
            "too_many",
            cached,
            f"{count} records in {size} bytes, the limits are {MAX_ENTRIES} and {MAX_DIRECTORY_BYTES}",
        )
    data = cached.read(offset, size)
    if count >= COLUMNS_FROM and (found := entries_in_columns(cached, data, offset, count)) is not None:
        root, listed = found
        return ZipDirectory(root, {e.name: e for e in listed})
    central = _central_entries(cached, data, offset, count)
    if not central:
        raise _bad("bad_directory", cached, "the archive is empty")
    central.sort(key=lambda e: e.header_offset)
    if central[0].header_offset != 0:
        raise _bad("ambiguous", cached, f"{central[0].header_offset} bytes before the first record")
    roots = {e.name.partition("/")[0] for e in central}
    if len(roots) != 1 or any("/" not in e.name for e in central):
        raise _bad("ambiguous", cached, f"{len(roots)} roots in one archive")
    root = roots.pop()
    _refuse_twins(cached, central)
    entries: dict[str, ZipEntry] = {}
    for index, entry in enumerate(central):
        stop = central[index + 1].header_offset if index + 1 < len(central) else offset
        data_offset = _data_offset(cached, entry, stop)
        name = entry.name[len(root) + 1 :]
        entries[name] = ZipEntry(name, entry.crc32, entry.size_bytes, entry.header_offset, data_offset)
    return ZipDirectory(root, entries)


def read_record(cached: CachedFile, entry: ZipEntry, *, limit_bytes: int) -> bytes:
    """Read the bytes of a small record, checked against its CRC-32 unless that is 0 (not computed).

    Raises:
        SourceError: `zip.bomb` beyond `limit_bytes`, `zip.crc` on a mismatch.
    """
    if entry.size_bytes > limit_bytes:
        raise _bad(
            "bomb", cached, f"record {printable(entry.name)} has {entry.size_bytes} bytes, the limit is {limit_bytes}"
        )
    data = cached.read(entry.data_offset, entry.size_bytes)
    if entry.crc32 and crc32(data) != entry.crc32:
        raise _bad("crc", cached, f"record {printable(entry.name)} does not match its CRC-32: the file is damaged")
    return data


def _end_record(cached: CachedFile) -> tuple[int, int, int]:
    """Offset, size and count of the central directory."""
    end = cached.size_bytes - _EOCD.size
    if end < 0:
        raise _bad(
            "bad_directory", cached, f"{counted(cached.size_bytes, 'byte is', 'bytes are')} too few for an archive"
        )
    magic, disk, cd_disk, here, count, size, offset, comment = _EOCD.unpack(cached.read(end, _EOCD.size))
    if magic != b"PK\x05\x06":
        raise SourceError(
            "zip.bad_directory",
            f"{printable(cached.file.name)}: no end record at the end of its {counted(cached.size_bytes, 'byte')}",
            fix="the file is truncated or was appended to: copy it again",
        )
    if comment or disk or cd_disk or here != count:
        raise _bad("ambiguous", cached, "a comment or several disks")
    expected_end = end
    locator_at = end - _LOCATOR64.size
    if locator_at >= 0 and cached.read(locator_at, 4) == b"PK\x06\x07":
        _, l_disk, at, disks = _LOCATOR64.unpack(cached.read(locator_at, _LOCATOR64.size))
        if l_disk or disks != 1 or at != locator_at - _EOCD64.size:
            raise _bad("bad_directory", cached, "the zip64 locator does not point to the record before it")
        record = _EOCD64.unpack(cached.read(at, _EOCD64.size))
        sig, rec_size, _, _, d1, d2, here64, count64, size64, offset64 = record
        if sig != b"PK\x06\x06" or rec_size != _EOCD64.size - 12 or d1 or d2 or here64 != count64:
            raise _bad("bad_directory", cached, "the zip64 end record is malformed")
        for short, full, top in ((count, count64, _U16_MAX), (size, size64, U32_MAX), (offset, offset64, U32_MAX)):
            if short not in (top, full):
                raise _bad("ambiguous", cached, "the zip64 end record disagrees with the end record")
        count, size, offset, expected_end = count64, size64, offset64, at
    if offset + size != expected_end:
        raise _bad("bad_directory", cached, f"a directory of {size} bytes at {offset} does not end at {expected_end}")
    return offset, size, count


def _central_entries(cached: CachedFile, data: bytes, offset: int, count: int) -> list[_Central]:
    size = len(data)
    found: list[_Central] = []
    at = 0
    for _ in range(count):
        if at + _CENTRAL.size > size:
            raise _bad("bad_directory", cached, f"the directory ends after {len(found)} of {counted(count, 'record')}")
        fields = _CENTRAL.unpack_from(data, at)
        (magic, _, _, flags, method, _, _, crc, packed, length, *rest) = fields
        n_name, n_extra, n_comment, disk, _, mode, header = rest
        stop = at + _CENTRAL.size + n_name + n_extra + n_comment
        if magic != b"PK\x01\x02" or stop > size or n_comment or disk:
            raise _bad("bad_directory", cached, f"directory record {len(found)} is malformed")
        raw = data[at + _CENTRAL.size : at + _CENTRAL.size + n_name]
        extra = data[at + _CENTRAL.size + n_name : stop]
        if method != 0 or flags & ~(DESCRIPTOR_FLAG | UTF8_FLAG) or mode >> 28 not in PLAIN_FILES:
            raise _bad(
                "unsupported",
                cached,
                f"record {printable(raw)}: method {method}, flags 0x{flags:x}, attributes 0x{mode:x}; "
                "torch stores plain files",
            )
        length, packed, header = _zip64_sizes(cached, extra, length, packed, header)
        if packed != length or header + length > offset:
            raise _bad(
                "bad_directory", cached, f"record {printable(raw)} of {length} bytes at {header} reaches the directory"
            )
        found.append(_Central(_clean_name(raw), n_name, flags, crc, length, header))
        at = stop
    if at != size:
        raise _bad("bad_directory", cached, f"{size - at} bytes after the last directory record")
    return found


def _zip64_sizes(cached: CachedFile, extra: bytes, length: int, packed: int, header: int) -> tuple[int, int, int]:
    at = 0
    values: list[int] = []
    while at + 4 <= len(extra):
        kind, count = struct.unpack_from("<HH", extra, at)
        if at + 4 + count > len(extra):
            raise _bad("bad_directory", cached, "an extra field reaches outside its record")
        if kind == 1:
            values = [v[0] for v in struct.iter_unpack("<Q", extra[at + 4 : at + 4 + count - count % 8])]
        at += 4 + count
    result: list[int] = []
    for value in (length, packed, header):
        if value == U32_MAX and not values:
            raise _bad("bad_directory", cached, "a 64-bit size is missing")
        result.append(values.pop(0) if value == U32_MAX else value)
    return result[0], result[1], result[2]


def _clean_name(raw: bytes) -> str:
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise SourceError("name.invalid", f"a record called {printable(raw)}") from None
    parts = name.split("/")
    if len(raw) > MAX_NAME_BYTES or not name.isprintable() or "\\" in name or any(p in ("", ".", "..") for p in parts):
        raise SourceError("name.invalid", f"a record called {printable(name)}")
    return name


def _refuse_twins(cached: CachedFile, central: list[_Central]) -> None:
    seen: set[str] = set()
    for entry in central:
        key = unicodedata.normalize("NFC", entry.name).casefold()
        if key in seen:
            raise _bad("ambiguous", cached, f"two records are called {printable(entry.name)}")
        seen.add(key)


def _descriptor_sizes(entry: _Central) -> tuple[int, ...]:
    # miniz writes no descriptor behind an empty record, and 64-bit sizes only where they are needed.
    return (16, 24, 12, 20) if entry.flags & DESCRIPTOR_FLAG else (0,)


def _data_offset(cached: CachedFile, entry: _Central, stop: int) -> int:
    """The offset of the record's data; `stop` is the offset of the next header (or of the directory).

    torch's alignment rule predicts the offset, and then exactly the descriptor must fit between the data and `stop`.
    If it does not, or if the local header is in memory already, the record is checked against its local header.
    """
    base = entry.header_offset + _LOCAL.size + entry.raw_name_bytes
    start = base + 4
    if entry.size_bytes >= U32_MAX or entry.header_offset >= U32_MAX:
        start += 4 + 16 * (entry.size_bytes >= U32_MAX) + 8 * (entry.header_offset >= U32_MAX)
    predicted = -(-start // ALIGNMENT) * ALIGNMENT
    exact = any(predicted + entry.size_bytes + d == stop for d in _descriptor_sizes(entry))
    at_hand = cached.file.store.scheme == "file" or cached.holds(
        entry.header_offset, _LOCAL.size + entry.raw_name_bytes
    )
    if exact and not at_hand:
        return predicted
    return _checked_local(cached, entry, stop)


def _checked_local(cached: CachedFile, entry: _Central, stop: int) -> int:
    header = cached.read(entry.header_offset, _LOCAL.size + entry.raw_name_bytes)
    magic, _, flags, method, _, _, crc, packed, length, n_name, n_extra = _LOCAL.unpack_from(header)
    name = header[_LOCAL.size :]
    data_offset = entry.header_offset + _LOCAL.size + n_name + n_extra
    plain = (crc, packed, length) == (0, 0, 0) and flags & DESCRIPTOR_FLAG
    sizes_agree = crc == entry.crc32 and all(v in (entry.size_bytes, U32_MAX) for v in (packed, length))
    same_name = name == entry.name.encode() and n_name == entry.raw_name_bytes
    if magic != b"PK\x03\x04" or not same_name or flags != entry.flags or method:
        raise _bad("ambiguous", cached, f"the header of record {printable(entry.name)} does not match the directory")
    if not (
        plain
        or sizes_agree
        or (flags & DESCRIPTOR_FLAG and crc == 0 and {packed, length} <= {0, U32_MAX, entry.size_bytes})
    ):
        raise _bad("ambiguous", cached, f"sizes of record {printable(entry.name)} are not what the directory says")
    gap = stop - data_offset - entry.size_bytes
    if gap not in _descriptor_sizes(entry) or gap < 0:
        code = "overlap" if gap < 0 else "ambiguous"
        raise _bad(code, cached, f"{gap} bytes between record {printable(entry.name)} and the next")
    if gap:
        _check_descriptor(cached, entry, data_offset + entry.size_bytes, gap)
    return data_offset


def _check_descriptor(cached: CachedFile, entry: _Central, at: int, length: int) -> None:
    # Only where it costs nothing: behind large records of remote files it is a request of its own.
    if cached.file.store.scheme != "file" and not cached.holds(at, length):
        return
    data = cached.read(at, length)
    body = data[4:] if length in (16, 24) else data
    crc, packed, size = struct.unpack("<IQQ" if len(body) == 20 else "<III", body)
    signed = length in (12, 20) or data[:4] == b"PK\x07\x08"
    if not signed or (crc, packed, size) != (entry.crc32, entry.size_bytes, entry.size_bytes):
        raise _bad(
            "ambiguous", cached, f"the descriptor of record {printable(entry.name)} does not match the directory"
        )
