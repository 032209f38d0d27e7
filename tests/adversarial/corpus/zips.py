"""Zip archives on which two readers would disagree, or that hold more than they have."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from adversarial.corpus import carriers
from adversarial.corpus.archives import FLAGS, Ending, Record, archive, torch_records
from adversarial.corpus.entry import OK, Entry

_AMBIGUOUS, _DIRECTORY, _OVERLAP, _UNSUPPORTED = "zip.ambiguous", "zip.bad_directory", "zip.overlap", "zip.unsupported"
_NAME = "name.invalid"
_U32 = 0xFFFFFFFF
Change = Callable[[list[Record]], bytes]


def _entry(number: int, name: str, expected: str, change: Change, *, why: str = "") -> Entry:
    return Entry(number, name, expected, carriers.zipped(change), why=why)


def _first(**fields: object) -> Change:
    """`data.pkl` with fields of its record replaced."""
    return lambda records: archive([replace(records[0], **fields), *records[1:]])


def _storage(**fields: object) -> Change:
    """The first storage's record with fields replaced."""
    return lambda records: archive([*records[:2], replace(records[2], **fields), *records[3:]])


def _with(*more: Record) -> Change:
    return lambda records: archive([*records, *more])


def _ending(ending: Ending) -> Change:
    return lambda records: archive(records, ending)


def _renamed(name: str | bytes) -> Change:
    return lambda records: archive([*records, Record(name, b"x")])


def _deflated(data: bytes) -> dict[str, object]:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return {"method": 8, "packed": packer.compress(data) + packer.flush(), "data": data}


def _overlapping(records: list[Record]) -> bytes:
    # Fifield's bomb: many directory entries over one record.
    again = [Record(f"archive/more/{i}", records[0].data, at=0, crc=records[0].crc32) for i in range(1_000)]
    return archive([*records, *again])


def _nested(records: list[Record]) -> bytes:
    inner = archive(records)
    return archive([*records, Record("archive/data/9", inner + inner)])


def _quine(records: list[Record]) -> bytes:
    # A record whose data reach over the next record's header.
    second = records[2]
    return archive([*records[:2], replace(second, central={"size": 200, "packed": 200}), *records[3:]])


def _million(records: list[Record]) -> bytes:
    # A directory of 46 bytes per entry; names are not even looked at.
    entry = struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", *([0] * 9), 3, *([0] * 6)) + b"a/b"
    count = 1_000_001
    body = archive(records[:1])
    start = len(body)
    zip64 = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(entry) * count, start)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, start + len(entry) * count, 1)
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, _U32, _U32, 0)
    return body + entry * count + zip64 + locator + end


def _claimed_million(records: list[Record]) -> bytes:
    return archive(records, Ending(zip64={"count": 1 << 40, "here": 1 << 40}, end={"count": 0xFFFF, "here": 0xFFFF}))


def _sparse(directory: Path) -> None:
    # Three gigabytes that take no space: what is read at once must be bounded by more than the file's size.
    carriers.plain(directory)
    with (directory / carriers.TAG / carriers.MODEL).open("wb") as file:
        start, size = 64, 3 << 30
        file.write(b"PK\x03\x04")
        file.seek(start + size)
        file.write(struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 1, 1, size, start, 0))


def _torn_pytorch(records: list[Record]) -> bytes:
    # pytorch issue 185440: 2.2 GB declared by a local header in a file of two kilobytes.
    huge = 2_200_000_000
    local = {"size": huge, "packed": huge, "crc": records[2].crc32}
    return archive([*records[:2], replace(records[2], flags=FLAGS & ~8, local=local), *records[3:]])


def _png(records: list[Record]) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"\0" * 56 + archive(records)


def _pickle_first(records: list[Record]) -> bytes:
    return b"\x80\x02N." + archive(records)


def _safetensors_first(records: list[Record]) -> bytes:
    return struct.pack("<Q", 2) + b"{}" + archive(records)


def _shifted(records: list[Record]) -> bytes:
    # Bytes before the archive, with every offset corrected: begins with PK, but not with the first record.
    prefix = b"PK\x03\x04" + b"\0" * 60
    body = archive(records)
    moved: list[Record] = []
    at = 0
    for record in records:
        moved.append(replace(record, at=at + len(prefix)))
        at += len(archive([record])) - len(_directory([record]))
    shift = len(body) - len(_directory(records))
    return prefix + body[:shift] + archive(moved)[: -22] + struct.pack(
        "<4sHHHHIIH", b"PK\x05\x06", 0, 0, len(records), len(records), len(_directory(records)) - 22, shift + len(prefix), 0
    )  # fmt: skip


def _directory(records: list[Record]) -> bytes:
    """Directory and end record of an archive of these records."""
    data = archive(records)
    return data[data.index(b"PK\x01\x02") :]


def _bare(names: Mapping[str, bytes]) -> Change:
    return lambda _records: archive([Record(f"archive/{name}", data) for name, data in names.items()])


def _dropped(name: str) -> Change:
    return lambda records: archive([r for r in records if not str(r.name).endswith(name)])


def _replaced(name: str, data: bytes) -> Change:
    return lambda records: archive([replace(r, data=data) if str(r.name).endswith(name) else r for r in records])


def _descriptor(crc: int, packed: int, size: int) -> bytes:
    return struct.pack("<4sIII", b"PK\x07\x08", crc, packed, size)


def _wide(records: list[Record]) -> bytes:
    # Descriptors with 64-bit sizes, which the format allows and torch writes for large records only.
    return archive(
        [
            replace(r, descriptor=struct.pack("<4sIQQ", b"PK\x07\x08", r.crc32, len(r.data), len(r.data)))
            for r in records
        ]
    )


def _no_descriptor(records: list[Record]) -> bytes:
    return archive([replace(r, flags=0x800) for r in records])


def _zip64_form(records: list[Record]) -> bytes:
    return archive(records, Ending(zip64={}))


ENTRIES = (
    _entry(71, "entries-over-one-record", _OVERLAP, _overlapping),
    _entry(71, "archive-in-archive", OK, _nested, why="a record that no tensor names is not looked at, let alone expanded"),
    _entry(71, "record-over-the-next", _OVERLAP, _quine),
    _entry(72, "deflate-zeros", _UNSUPPORTED, lambda records: archive([*records, Record("archive/data/9", **_deflated(bytes(50 << 20)))]), why="torch never compresses: nothing is expanded at all"),
    _entry(72, "deflated-data-pkl", _UNSUPPORTED, lambda records: archive([replace(records[0], **_deflated(records[0].data)), *records[1:]]), why="as above"),
    _entry(73, "two-archives", _DIRECTORY, lambda records: archive(records) + archive(records), why="the second directory counts its offsets from its own beginning: it does not describe the file"),
    _entry(73, "two-archives-shifted", _AMBIGUOUS, _shifted),
    _entry(73, "archive-and-a-byte", _DIRECTORY, lambda records: archive(records) + b"\0", why="no end record at the end"),
    _entry(74, "pickle-then-zip", "source.unknown_kind", _pickle_first, why="the first bytes decide the kind, and nothing else is tried"),
    _entry(74, "png-then-zip", "source.unknown_kind", _png, why="as above"),
    _entry(74, "safetensors-then-zip", "source.unknown_kind", _safetensors_first, why="as above"),
    _entry(74, "bytes-between-records", _AMBIGUOUS, _first(descriptor=_descriptor(0, 0, 0) + b"\0" * 64)),
    _entry(74, "bytes-before-directory", _AMBIGUOUS, _ending(Ending(before_directory=b"\0" * 64))),
    _entry(75, "data-pkl-twice", _AMBIGUOUS, lambda records: archive([*records, records[0]])),
    _entry(75, "storage-twice", _AMBIGUOUS, lambda records: archive([*records, replace(records[2], data=bytes(48))])),
    _entry(76, "twin-by-case", _AMBIGUOUS, _with(Record("archive/DATA.pkl", b"N."))),
    _entry(76, "twin-by-normal-form", _AMBIGUOUS, _with(Record("archive/data/\u00e9", b"x"), Record("archive/data/e\u0301", b"y"))),
    _entry(76, "twin-by-dot", _NAME, _renamed("archive/./data.pkl")),
    _entry(76, "twin-by-backslash", _NAME, _renamed("archive\\data.pkl")),
    _entry(76, "twin-by-two-slashes", _NAME, _renamed("archive//data.pkl")),
    _entry(77, "two-roots", _AMBIGUOUS, _with(Record("other/data.pkl", b"N."))),
    _entry(77, "no-root", _AMBIGUOUS, _with(Record("data.pkl", b"N."))),
    _entry(78, "local-name-differs", _AMBIGUOUS, _first(local={"name": b"archive/evil.pkl"})),
    _entry(78, "local-size-differs", _AMBIGUOUS, _first(local={"size": 5, "packed": 5})),
    _entry(78, "local-method-differs", _AMBIGUOUS, _first(local={"method": 8})),
    _entry(78, "local-crc-differs", _AMBIGUOUS, _first(local={"crc": 0x12345678})),
    _entry(78, "local-flags-differ", _AMBIGUOUS, _first(local={"flags": 0x800})),
    _entry(78, "local-header-missing", _AMBIGUOUS, lambda records: archive(records)[:4] + b"\0" * 26 + archive(records)[30:]),
    _entry(78, "descriptor-differs", _AMBIGUOUS, _first(descriptor=_descriptor(1, 2, 3))),
    _entry(78, "descriptor-missing", _AMBIGUOUS, _first(descriptor=b"")),
    _entry(78, "torch-own-form", OK, archive),
    _entry(78, "descriptor-with-64-bits", OK, _wide),
    _entry(78, "no-descriptors", OK, _no_descriptor),
    _entry(79, "encrypted", _UNSUPPORTED, _first(flags=FLAGS | 1)),
    _entry(79, "strong-encryption", _UNSUPPORTED, _first(flags=FLAGS | 0x40)),
    _entry(79, "masked-directory", _UNSUPPORTED, _first(flags=FLAGS | 0x2000)),
    _entry(79, "patched-data", _UNSUPPORTED, _first(flags=FLAGS | 0x20)),
    _entry(79, "flag-in-directory-only", _UNSUPPORTED, _first(central={"flags": FLAGS | 1})),
    _entry(80, "crc-wrong", "zip.crc", lambda records: archive([replace(records[0], crc=records[0].crc32 ^ 1), *records[1:]])),
    Entry(80, "storage-crc-wrong", "zip.crc", carriers.zipped(_storage(crc=0x12345678)), inspect=OK, why="inspect reads no tensor; a conversion compares what it reads whole"),
    Entry(80, "storage-crc-wrong-verified", "zip.crc", carriers.zipped(_storage(crc=0x12345678)), inspect=OK, verify="full"),
    _entry(81, "crc-zero", OK, lambda records: archive([replace(r, crc=0) for r in records])),
    _entry(82, "comment", _DIRECTORY, _ending(Ending(comment=b"hello")), why="no end record where it must be"),
    _entry(82, "comment-65535", _DIRECTORY, _ending(Ending(comment=b"x" * 65_535)), why="as above"),
    _entry(82, "end-record-in-comment", _DIRECTORY, lambda records: archive(records, Ending(comment=archive(records)[-22:])), why="the directory does not end where the last end record begins"),
    _entry(82, "two-end-records", _DIRECTORY, lambda records: archive(records) + archive(records)[-22:], why="the directory does not end where the last end record begins"),
    _entry(82, "end-record-says-comment", _AMBIGUOUS, lambda records: archive(records)[:-2] + b"\x05\x00"),
    _entry(83, "zip64-locator-to-nowhere", _DIRECTORY, _ending(Ending(zip64={"at": 1 << 60}))),
    _entry(83, "zip64-size-2-64", _AMBIGUOUS, _ending(Ending(zip64={"size": (1 << 64) - 1})), why="the two end records disagree; that is seen first"),
    _entry(83, "zip64-size-2-64-agreed", _DIRECTORY, _ending(Ending(zip64={"size": (1 << 64) - 1}, end={"size": _U32}))),
    _entry(83, "zip64-offset-2-63", _DIRECTORY, _ending(Ending(zip64={"offset": 1 << 63}, end={"offset": _U32}))),
    _entry(83, "count-too-large", _DIRECTORY, _ending(Ending(end={"count": 9, "here": 9}))),
    _entry(83, "count-too-small", _DIRECTORY, _ending(Ending(end={"count": 2, "here": 2}))),
    _entry(83, "count-ffff-without-zip64", _DIRECTORY, _ending(Ending(end={"count": 0xFFFF, "here": 0xFFFF}))),
    _entry(83, "record-size-2-64", _DIRECTORY, _storage(central={"size": _U32, "packed": _U32, "extra": struct.pack("<HHQQ", 1, 16, (1 << 64) - 1, (1 << 64) - 1)})),
    _entry(83, "record-size-missing", _DIRECTORY, _storage(central={"size": _U32, "packed": _U32})),
    _entry(83, "extra-field-outside", _DIRECTORY, _storage(central={"extra": struct.pack("<HH", 1, 500)})),
    _entry(83, "zip64-form", OK, _zip64_form),
    _entry(84, "million-entries", "zip.too_many", _million),
    Entry(84, "directory-of-three-gigabytes", "zip.too_many", _sparse),
    _entry(84, "2-40-entries-claimed", "zip.too_many", _claimed_million),
    _entry(85, "data-in-directory", _DIRECTORY, _storage(central={"header": 1_000_000})),
    _entry(85, "size-into-directory", _DIRECTORY, _storage(central={"size": 1 << 20, "packed": 1 << 20})),
    _entry(85, "record-in-itself", _OVERLAP, lambda records: archive([*records, Record("archive/data/9", records[0].data, at=0, crc=records[0].crc32)])),
    _entry(86, "name-parent", _NAME, _renamed("archive/../x")),
    _entry(86, "name-absolute", _NAME, _renamed("/etc/passwd")),
    _entry(86, "name-nul", _NAME, _renamed("archive/a\0b")),
    _entry(86, "name-not-utf8", _NAME, _renamed(b"archive/\xff")),
    _entry(86, "name-long", _NAME, _renamed("archive/" + "a" * 600)),
    _entry(86, "name-drive", OK, _renamed("archive/C:x"), why="a plain name where it is never a path: records are read, not unpacked"),
    _entry(86, "symlink-mode", _UNSUPPORTED, _storage(central={"mode": 0o120777 << 16})),
    _entry(87, "method-bzip2", _UNSUPPORTED, _first(method=12)),
    _entry(87, "method-lzma", _UNSUPPORTED, _first(method=14)),
    _entry(87, "method-99", _UNSUPPORTED, _first(method=99)),
    _entry(88, "local-size-2-gb", _AMBIGUOUS, _torn_pytorch, why="the local header disagrees with the directory: that is what makes it ambiguous"),
    _entry(89, "multi-disk", _AMBIGUOUS, _ending(Ending(end={"disk": 1})), why="an end record of another disk: no reader agrees on what it means"),
    _entry(89, "multi-disk-record", _DIRECTORY, _storage(central={"disk": 1}), why="a directory record of another disk is malformed"),
    _entry(89, "multi-disk-zip64", _DIRECTORY, _ending(Ending(zip64={"disk": 1})), why="as above"),
    _entry(90, "storage-missing", "checkpoint.incomplete", _dropped("data/0")),
    _entry(90, "storage-nobody-names", OK, _with(Record("archive/data/77", b"orphan"))),
    _entry(90, "data-pkl-missing", "source.unknown_kind", _dropped("data.pkl")),
    _entry(91, "byteorder-garbage", "zip.bad_record", _replaced("byteorder", b"middle")),
    _entry(91, "byteorder-big", "zip.bad_record", _replaced("byteorder", b"big")),
    _entry(91, "byteorder-long", "zip.bad_record", _replaced("byteorder", b"l" * 1_000)),
    _entry(91, "version-million-digits", "zip.bad_record", _replaced("version", b"9" * 1_000_000)),
    _entry(91, "version-text", "zip.bad_record", _replaced("version", b"latest")),
    _entry(92, "torchscript", "source.unknown_kind", _with(Record("archive/constants.pkl", b"\x80\x02)."), Record("archive/code/__torch__.py", b"import os"))),
    _entry(92, "empty-archive", "source.unknown_kind", lambda _records: archive([]), why="begins with an end record"),
    _entry(92, "zip-of-nothing-of-ours", "source.unknown_kind", _bare({"readme.txt": b"hello"})),
    Entry(92, "records-of-a-root-called-archive", OK, carriers.zipped(lambda records: archive(torch_records(records[0].data, {"0": records[2].data, "1": records[3].data}, root="mp_rank_00")))),
)  # fmt: skip
