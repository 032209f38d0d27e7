"""Reads the directory of a torch zip archive with ranged reads, and accepts the canonical form only.

Readers of ambiguous zips disagree about their content, so anything that torch does not write is
refused. The canonical form is one archive with nothing before, between or after its records; no compression,
encryption or comments; unique names below one root; local headers that match the directory.

`entries_in_columns` checks archives with many records first. It makes the same checks for all records at once, and
leaves an archive that fails one to the checks of single records.

Source: PKWARE APPNOTE 6.3 (records); torch 2.13.0 `caffe2/serialize/inline_container.cc`
(`getPadding`: data begins at multiples of 64; flag bit 3 with a data descriptor; `FB` extra field).
"""

from __future__ import annotations

import struct
import unicodedata
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.errors import SourceError, counted, printable
from reshard_engine.containers.source_file import CachedFile
from reshard_engine.storage.crc32 import crc32

# What the checks in columns and those of single records share: a record, the flag bits that torch sets, the bounds.
#
# Source: PKWARE APPNOTE 6.3; torch 2.13.0 `caffe2/serialize/inline_container.cc`.

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


# Checks the directory of an archive with many records in numpy columns, in a fraction of the time of single checks.
#
# `entries_in_columns` makes every check of single records for all records at once, for the form that torch writes. It
# leaves any other archive (a damaged one, or one of an allowed but rare form) to the checks of single records, which
# name the bad record. So it refuses nothing, and accepts nothing that these checks would refuse.

COLUMNS_FROM = 32
"""Number of records from which on columns are faster."""
_MADE = (("magic", "<u4"), ("made_by", "<u2"))
_FORM = (("needs", "<u2"), ("flags", "<u2"), ("method", "<u2"), ("time", "<u2"), ("date", "<u2"))
_SIZES = (("crc", "<u4"), ("packed", "<u4"), ("length", "<u4"), ("name", "<u2"), ("extra", "<u2"))
_PLACE = (("comment", "<u2"), ("disk", "<u2"), ("internal", "<u2"), ("mode", "<u4"), ("header", "<u4"))
_CENTRAL_COLUMNS = np.dtype([*_MADE, *_FORM, *_SIZES, *_PLACE])
_LOCAL_COLUMNS = np.dtype([("magic", "<u4"), *_FORM, *_SIZES])
_DESCRIPTOR = np.dtype([("magic", "<u4"), ("crc", "<u4"), ("packed", "<u4"), ("length", "<u4")])
_FAR_OFFSET = np.dtype([("kind", "<u2"), ("bytes", "<u2"), ("header", "<u8")])
"""The extra field of a record that lies beyond the first 4 GiB."""
_CENTRAL_MAGIC = b"PK\x01\x02"
_LOCAL_MAGIC, _DESCRIPTOR_MAGIC = 0x04034B50, 0x08074B50
_WINDOW_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class _Columns:
    """The fields of the directory's records, in file order."""

    raw_names: list[bytes]
    crc: NDArray[np.int64]
    size: NDArray[np.int64]
    header: NDArray[np.int64]
    stop: NDArray[np.int64]
    """The offset at which the next header, or the directory, begins."""
    flags: NDArray[np.int64]
    name_bytes: NDArray[np.int64]
    descriptor: NDArray[np.int64]
    """Bytes of the descriptor behind the data: 16, or 0 behind an empty record."""


def entries_in_columns(
    cached: CachedFile, directory: bytes, offset: int, count: int
) -> tuple[str, list[ZipEntry]] | None:
    """The root and the entries of an archive that is as torch writes it, in file order; None for any other.

    Args:
        cached: The file.
        directory: Its central directory.
        offset: Offset of the directory in the file.
        count: Number of records of the directory.
    """
    columns = _columns(directory, offset, count)
    named = None if columns is None else _names(columns.raw_names)
    if columns is None or named is None:
        return None
    data = _data_offsets(cached, columns)
    if data is None:
        return None
    root, names = named
    facts = (c.tolist() for c in (columns.crc, columns.size, columns.header, data))
    return root, list(map(ZipEntry, names, *facts))


def _columns(directory: bytes, offset: int, count: int) -> _Columns | None:
    starts = _starts(directory, count)
    if starts is None:
        return None
    at = np.array(starts, np.int64)
    records = _records_at(directory, _CENTRAL_COLUMNS, at)
    name, header = _column(records, "name"), _column(records, "header")
    packed, size, flags = _column(records, "packed"), _column(records, "length"), _column(records, "flags")
    far = header == U32_MAX
    if far.any():
        extra_at = (at + _CENTRAL_COLUMNS.itemsize + name)[far]
        if int(extra_at.max()) + _FAR_OFFSET.itemsize > len(directory):
            return None
        extras = _records_at(directory, _FAR_OFFSET, extra_at)
        if not ((extras["kind"] == 1) & (extras["bytes"] == 8) & (extras["header"] <= offset)).all():
            return None
        header[far] = extras["header"]
    as_written = (
        (at + _CENTRAL_COLUMNS.itemsize + name + _column(records, "extra") == np.append(at[1:], len(directory)))
        & (records["extra"] == np.where(far, _FAR_OFFSET.itemsize, 0))
        & (records["comment"] == 0)
        & (records["disk"] == 0)
        & (records["method"] == 0)
        & (flags & ~(DESCRIPTOR_FLAG | UTF8_FLAG) == 0)
        & np.isin(records["mode"] >> 28, PLAIN_FILES)
        & (packed == size)
        & (size < U32_MAX)
        & (name <= MAX_NAME_BYTES)
    )
    stop = np.append(header[1:], offset)
    descriptor = np.where(flags & DESCRIPTOR_FLAG, _DESCRIPTOR.itemsize, 0)
    room = header + _LOCAL_COLUMNS.itemsize + name + size + descriptor <= stop
    if int(header[0]) != 0 or not (as_written & room).all():
        return None
    after = _CENTRAL_COLUMNS.itemsize
    raw = [directory[s + after : s + after + n] for s, n in zip(starts, name.tolist(), strict=True)]
    return _Columns(raw, _column(records, "crc"), size, header, stop, flags, name, descriptor)


def _starts(directory: bytes, count: int) -> list[int] | None:
    """The offsets of `count` records, found by magic numbers. The caller compares them with the records' lengths."""
    starts: list[int] = []
    at = 0 if directory.startswith(_CENTRAL_MAGIC) else -1
    while at >= 0 and len(starts) <= count:
        starts.append(at)
        at = directory.find(_CENTRAL_MAGIC, at + _CENTRAL_COLUMNS.itemsize)
    # A magic number too near the end for a whole record does not count.
    whole = bool(starts) and starts[-1] + _CENTRAL_COLUMNS.itemsize <= len(directory)
    return starts if whole and len(starts) == count else None


def _records_at(data: bytes, kind: np.dtype[np.void], at: NDArray[np.int64]) -> NDArray[np.void]:
    """The records at these offsets; all of them end inside the data."""
    # A view with a record at every byte, of which the wanted ones are copied: numpy has no other way to read records at
    # unaligned offsets.
    everywhere = np.ndarray((len(data) - kind.itemsize + 1,), kind, data, strides=(1,))
    return everywhere[at]


def _column(records: NDArray[np.void], name: str) -> NDArray[np.int64]:
    return records[name].astype(np.int64)


def _names(raw_names: list[bytes]) -> tuple[str, list[str]] | None:
    """The root and the names below it; None if a name is unsafe or two names are equal."""
    joined = b"\n".join(raw_names)
    if not joined.isascii():
        return None
    # All names are joined into one text, by lines and by slashes: a check of one text, not of a million.
    lines, parts = joined.decode(), f"/{joined.decode()}/".replace("\n", "/")
    root = lines.partition("/")[0]
    lead = f"\n{root}/"
    listed = f"\n{lines}"
    if listed.count("\n") != len(raw_names) or listed.count(lead) != len(raw_names):
        return None
    if not parts.isprintable() or any(bad in parts for bad in ("\\", "//", "/./", "/../")):
        return None
    if len(set(lines.lower().split("\n"))) != len(raw_names):
        return None
    return root, listed.replace(lead, "\n")[1:].split("\n")


def _data_offsets(cached: CachedFile, columns: _Columns) -> NDArray[np.int64] | None:
    """The offset of each record's data: from its local header, or predicted if that would cost a request."""
    start = columns.header + _LOCAL_COLUMNS.itemsize + columns.name_bytes + 4 + 12 * (columns.header >= U32_MAX)
    data = -(-start // ALIGNMENT) * ALIGNMENT
    at_hand = np.flatnonzero(
        _at_hand(cached, columns.header, columns.header + _LOCAL_COLUMNS.itemsize + columns.name_bytes)
    )
    if len(at_hand):
        said = _checked_locals(cached, columns, at_hand)
        if said is None:
            return None
        data[at_hand] = said
    return data if (data + columns.size + columns.descriptor == columns.stop).all() else None


def _at_hand(cached: CachedFile, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
    """A mask of the ranges that cost no request: all of a local file, those already read of a remote one."""
    if cached.file.store.scheme == "file":
        return np.ones(len(begins), np.bool_)
    found = np.zeros(len(begins), np.bool_)
    for first, last in cached.spans():
        found |= (first <= begins) & (ends <= last)
    return found


def _checked_locals(cached: CachedFile, columns: _Columns, index: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """The offsets of the data from the local headers of these records; None if a header or descriptor disagrees."""
    header, stop, name_bytes = columns.header[index], columns.stop[index], columns.name_bytes[index]
    descriptor_at = stop - columns.descriptor[index]
    described = (descriptor_at < stop) & _at_hand(cached, descriptor_at, stop)
    begins = np.concatenate([header, descriptor_at[described]])
    ends = np.concatenate([header + _LOCAL_COLUMNS.itemsize + name_bytes, stop[described]])
    order = np.argsort(begins, kind="stable")
    read, lengths = _read(cached, begins[order], ends[order]), (ends - begins)[order]
    place = np.empty_like(begins)
    place[order] = np.cumsum(lengths) - lengths
    heads = _records_at(read, _LOCAL_COLUMNS, place[: len(index)])
    name_at = place[: len(index)] + _LOCAL_COLUMNS.itemsize
    names = [read[a:b] for a, b in zip(name_at.tolist(), (name_at + name_bytes).tolist(), strict=True)]
    if names != [columns.raw_names[i] for i in index.tolist()] or not _agree(heads, columns, index):
        return None
    if described.any():
        found = _records_at(read, _DESCRIPTOR, place[len(index) :])
        if found.tobytes() != _descriptors(columns, index[described]):
            return None
    return header + _LOCAL_COLUMNS.itemsize + _column(heads, "name") + _column(heads, "extra")


def _agree(found: NDArray[np.void], columns: _Columns, index: NDArray[np.int64]) -> bool:
    size, flags = columns.size[index], columns.flags[index]
    said = found["packed"], found["length"]
    told = [(s == size) | (s == U32_MAX) for s in said]
    told_later = [t | (s == 0) for t, s in zip(told, said, strict=True)]
    later = (flags & DESCRIPTOR_FLAG != 0) & (found["crc"] == 0) & told_later[0] & told_later[1]
    now = (found["crc"] == columns.crc[index]) & told[0] & told[1]
    same = (
        (found["magic"] == _LOCAL_MAGIC)
        & (found["flags"] == flags)
        & (found["method"] == 0)
        & (found["name"] == columns.name_bytes[index])
        & (later | now)
    )
    return bool(same.all())


def _descriptors(columns: _Columns, index: NDArray[np.int64]) -> bytes:
    """The descriptors that these records must have."""
    expected = np.empty(len(index), _DESCRIPTOR)
    expected["magic"], expected["crc"] = _DESCRIPTOR_MAGIC, columns.crc[index]
    expected["packed"] = expected["length"] = columns.size[index]
    return expected.tobytes()


def _read(cached: CachedFile, all_begins: NDArray[np.int64], all_ends: NDArray[np.int64]) -> bytes:
    """Read ranges of the file, given in file order, as one byte string."""
    if cached.file.store.scheme != "file":
        ranges = zip(all_begins.tolist(), all_ends.tolist(), strict=True)
        return b"".join(cached.read(begin, end - begin) for begin, end in ranges)
    # A descriptor and the header behind it are one range.
    cuts = all_begins[1:] != all_ends[:-1]
    begins = all_begins[np.append(np.True_, cuts)].tolist()
    ends = all_ends[np.append(cuts, np.True_)].tolist()
    # Read a block if the next range is near, else only the range. No block is kept: one for each of twenty thousand
    # large records would take a gigabyte.
    pieces: list[bytes] = []
    block, at, until = b"", 0, 0
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        if end > until:
            near = ends[min(number + 1, len(ends) - 1)] - begin < _WINDOW_BYTES
            wanted = max(end - begin, _WINDOW_BYTES if near else 0)
            at, until = begin, min(begin + wanted, cached.size_bytes)
            block = cached.file.read(at, until - at)
        pieces.append(block[begin - at : end - at])
    return b"".join(pieces)


# Checks an archive record by record: the reader of every archive that the checks in columns leave.

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
