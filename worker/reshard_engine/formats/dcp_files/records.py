"""Records of `.distcp` files: the places of chunks inside them, and records that are compressed.

The bytes before a chunk's data (headers and the pickle of one tensor) depend only on its element type, shape and
strides. So the first record of each kind is parsed, and the others are compared with it byte for byte. A record that
differs is parsed, too. The CRC-32 of the data stands right after it, in the zip data descriptor, which lies beside the
head of the next record: both are read at once.

Source: torch 2.13.0 `distributed/checkpoint/filesystem.py` (`_write_item`: `torch.save` of each tensor),
`caffe2/serialize/inline_container.cc`; PKWARE APPNOTE 6.3, 4.3.9 (data descriptor); verified by running.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from reshard.errors import SourceError, StorageError, listed, printable
from reshard_engine.containers.source_file import SourceFile, open_all
from reshard_engine.containers.torch_file import RecordExtent, open_torch_file
from reshard_engine.formats.dcp_files.metadata.model import BytesEntry, Column, Metadata, Narrow
from reshard_engine.pickles.nodes import Global, PTensor, configured_limits, kind_of
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.rebuild import MadeOfTensors, made_of_tensors
from reshard_engine.storage.protocol import Listing, ObjectInfo
from reshard_engine.tensors.dtypes import Dtype
from reshard_engine.tensors.shard_map import is_packed

MAX_SCALAR_BYTES = 16
"""Chunks of at most so many bytes are read with their heads: `step` of Adam is one."""
_SPAN_BYTES = 4 << 20
_GAP_BYTES = {True: 4 << 10, False: 256 << 10}
"""Gaps that are read along, on this machine and in an object store: a request costs as much as many bytes."""
_OTHER_SAVES = "the files are of different saves: copy the checkpoint again"
_UNEVEN = (
    "where FSDP and tensor parallelism cut one dimension and the parts are uneven, torch up to 2.13 notes other parts "
    "than it saves, and cannot load them either: save the full state dict, or choose a mesh that divides the dimension"
)
"""Verified by running torch 2.13.0: 7 rows on 3 ranks of FSDP by 2 of tensor parallelism lose the last row."""
_COMPRESSED = {b"\x28\xb5\x2f\xfd": "zstd"}
_DESCRIPTOR = b"PK\x07\x08"
_TAIL_BYTES = len(_DESCRIPTOR) + 4
"""The bytes after a chunk's data that are read: the signature of the descriptor, and the CRC-32."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of a chunk: its element type and its shape."""

    dtype: Dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChunkRecords:
    """Records of chunks, as columns."""

    kind: Narrow
    """Index into `kinds`."""
    file: Narrow
    """Index into the files."""
    offset: Column
    length: Column
    kinds: Sequence[Kind]


@dataclass(slots=True)
class Places:
    """The places of the data of chunks."""

    offset: Column
    """Byte offset of each chunk's data in its file."""
    strides: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """Strides in elements, by row, of the chunks that are not packed in row-major order."""
    scalars: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """The data, by row, of chunks of at most `MAX_SCALAR_BYTES` bytes."""
    classes: dict[int, Global] = field(default_factory=dict[int, Global])
    """The classes, by row, of chunks that are not plain tensors, but made of several, such as quantized ones."""


@dataclass(frozen=True, slots=True)
class _Head:
    data: bytes
    """Everything before the tensor's data."""
    stride: tuple[int, ...] | None
    """Strides if the tensor is not packed."""
    data_bytes: int
    record: tuple[int, int] | None = None
    """(offset, length) of the zip record that holds the data, if its CRC-32 stands in a descriptor after it."""
    crc32: int = 0
    """That CRC-32; 0 if none is known."""
    kind: Global | None = None
    """The class of a tensor that is made of others, of which the head has what comes before the first one's data."""


def find_places(files: Sequence[SourceFile], records: ChunkRecords, ledger: OpaqueLedger) -> Places:
    """Find the data of each chunk, and check that its record holds a tensor of its type and shape.

    Raises:
        SourceError: `zip.*`, `pickle.*`, `tensor.*`, `checkpoint.malformed` for records that are not as the metadata
            says, `source.unsupported` for compressed ones.
    """
    return _Finder(files, records, ledger).places()


class _Finder:
    def __init__(self, files: Sequence[SourceFile], records: ChunkRecords, ledger: OpaqueLedger) -> None:
        self._files, self._records, self._ledger = files, records, ledger
        count = len(records.kind)
        self._found = Places(np.zeros(count, dtype=np.int64))
        same = np.stack([records.kind.astype(np.int64), records.length]) if count else np.zeros((2, 0), np.int64)
        _, first, group = np.unique(same, axis=1, return_index=True, return_inverse=True)
        self._group: list[int] = group.reshape(-1).tolist()
        self._first = first.tolist()
        self._heads: list[_Head] = []
        self._own_heads: dict[int, _Head] = {}
        """By row, of the records that are not as the first of their kind."""
        self._crc32 = np.zeros(count, dtype=np.int64)
        """By row, from the descriptor after the data; 0 where none is known."""

    def places(self) -> Places:
        if not len(self._records.kind):
            return self._found
        firsts = [self._part(row) for row in self._first]
        rows = dict(zip(map(id, firsts), self._first, strict=True))
        self._heads = open_all(firsts, lambda part: self._parsed(part, rows[id(part)]))
        spans = list(self._spans())
        rows_of = {id(part): (at, members) for part, at, members in spans}
        compared = open_all([part for part, _, _ in spans], lambda part: self._compare(part, *rows_of[id(part)]))
        for row in sorted({row for different in compared for row in different}):
            head = self._own_heads[row] = self._parsed(self._part(row), row)
            self._crc32[row] = head.crc32
            self._take(row, head)
        self._add_sums()
        return self._found

    def _add_sums(self) -> None:
        """Tell the files the CRC-32s of the chunks' data, and compare those of the scalars."""
        records = self._records
        places = np.array([h.record or (0, 0) for h in self._heads], dtype=np.int64)[self._group]
        for row, head in self._own_heads.items():
            places[row] = head.record or (0, 0)
        table = np.stack([records.offset + places[:, 0], places[:, 1], self._crc32])
        known = np.flatnonzero(self._crc32)
        known = known[np.argsort(records.file[known], kind="stable")]
        files, first = np.unique(records.file[known], return_index=True)
        for file, rows in zip(files.tolist(), np.split(known, first[1:].tolist()), strict=False):
            self._files[int(file)].sums.add(table[:, rows])
        for row, data in self._found.scalars.items():
            if not (expected := int(self._crc32[row])) or int(table[1, row]) != len(data):
                continue
            self._files[int(records.file[row])].compare(int(table[0, row]), data, expected)

    def _part(self, row: int) -> SourceFile:
        records = self._records
        return self._files[int(records.file[row])].part(int(records.offset[row]), int(records.length[row]))

    def _parsed(self, part: SourceFile, row: int) -> _Head:
        """The head of a record, from a whole parse of it."""
        kind = self._records.kinds[int(self._records.kind[row])]
        refuse_other_streams(part)
        parsed = open_torch_file(part, self._ledger)
        tensor = made_of_tensors(parsed.root) or parsed.root
        if not isinstance(tensor, PTensor | MadeOfTensors):
            raise _malformed(part, f"holds {kind_of(tensor)} where the metadata has a tensor")
        if (tensor.dtype, tensor.shape) != (kind.dtype.name, kind.shape):
            text = f"holds {tensor.dtype} {tensor.shape}, and the metadata has {kind.dtype.name} {kind.shape}"
            raise _malformed(part, text, fix=_UNEVEN if _is_longer(tensor, kind) else _OTHER_SAVES)
        if isinstance(tensor, MadeOfTensors):
            data_at = min((s.offset for s in parsed.storages.values()), default=part.size_bytes)
            return _Head(part.read(0, data_at), None, 0, kind=tensor.kind)
        data_at = parsed.tensor_offset(tensor)
        stride = None if is_packed(tensor.shape, tensor.stride) else tensor.stride
        extent = parsed.storage_extent(tensor.storage)
        record = _described(part, extent) if tensor.numel else None
        crc = extent.crc32 or 0 if record is not None else 0
        return _Head(part.read(0, data_at), stride, tensor.numel * kind.dtype.itemsize_bytes, record, crc)

    def _wanted(self) -> Iterator[tuple[int, int, int, int]]:
        """File, begin, end and row of every head; and of every tail, with the complement `~row`. In file order."""
        records = self._records
        heads = [len(h.data) + _scalar_bytes(h) for h in self._heads]
        tails = [-1 if h.record is None else sum(h.record) for h in self._heads]
        at_once: list[int] = np.lexsort((records.offset, records.file)).tolist()
        for row in at_once:
            file, at, group = int(records.file[row]), int(records.offset[row]), self._group[row]
            yield file, at, at + heads[group], row
            if tails[group] >= 0:
                yield file, at + tails[group], at + tails[group] + _TAIL_BYTES, ~row

    def _spans(self) -> Iterator[tuple[SourceFile, int, list[int]]]:
        """Ranges of files to read, each with its begin and the rows whose heads and tails lie in it (`_wanted`)."""
        rows: list[int] = []
        file, begin, end = -1, -1, -1
        for number, at, stop, row in self._wanted():
            gap = _GAP_BYTES[self._files[number].store.scheme == "file"]
            if rows and (number != file or at > end + gap or stop - begin > _SPAN_BYTES):
                yield self._files[file].part(begin, end - begin), begin, rows
                rows = []
            if not rows:
                file, begin, end = number, at, stop
            rows.append(row)
            end = max(end, stop)
        if rows:
            yield self._files[file].part(begin, end - begin), begin, rows

    def _compare(self, span: SourceFile, begin: int, rows: list[int]) -> list[int]:
        """Take the rows whose heads and tails are as those of their kind, and return the others."""
        data = span.read(0, span.size_bytes)
        different: list[int] = []
        for row in rows:
            if row < 0:
                if not self._take_tail(~row, data, begin):
                    different.append(~row)
                continue
            head = self._heads[self._group[row]]
            at = int(self._records.offset[row]) - begin
            if data[at : at + len(head.data)] != head.data:
                different.append(row)
                continue
            scalar = data[at + len(head.data) :][: head.data_bytes] if _scalar_bytes(head) else b""
            self._take(row, head, scalar)
        return different

    def _take_tail(self, row: int, data: bytes, begin: int) -> bool:
        """Take the CRC-32 of a chunk's data; false if no descriptor follows the data."""
        record = self._heads[self._group[row]].record
        assert record is not None
        at = int(self._records.offset[row]) + sum(record) - begin
        self._crc32[row] = int.from_bytes(data[at + len(_DESCRIPTOR) : at + _TAIL_BYTES], "little")
        return data.startswith(_DESCRIPTOR, at)

    def _take(self, row: int, head: _Head, scalar: bytes | None = None) -> None:
        self._found.offset[row] = int(self._records.offset[row]) + len(head.data)
        if head.kind is not None:
            self._found.classes[row] = head.kind
        if head.stride is not None:
            self._found.strides[row] = head.stride
        if size := _scalar_bytes(head):
            self._found.scalars[row] = self._part(row).read(len(head.data), size) if scalar is None else scalar


def _described(part: SourceFile, record: RecordExtent) -> tuple[int, int] | None:
    """(offset, length) of a record whose CRC-32 stands after its data, as in the directory; else None."""
    if not record.crc32:
        return None
    tail = part.read(record.offset + record.length_bytes, _TAIL_BYTES)
    return (record.offset, record.length_bytes) if tail == _DESCRIPTOR + record.crc32.to_bytes(4, "little") else None


def _scalar_bytes(head: _Head) -> int:
    return head.data_bytes if head.data_bytes <= MAX_SCALAR_BYTES else 0


def _where(part: SourceFile) -> str:
    return f"{printable(part.name)}: the record at byte {part.extent[0] if part.extent else 0}"


def _malformed(part: SourceFile, text: str, *, fix: str = _OTHER_SAVES) -> SourceError:
    return SourceError("checkpoint.malformed", f"{_where(part)} {text}", fix=fix)


def _is_longer(tensor: PTensor | MadeOfTensors, kind: Kind) -> bool:
    """True if record and metadata differ in the length of one dimension only."""
    if tensor.dtype != kind.dtype.name or len(tensor.shape) != len(kind.shape):
        return False
    return sum(a != b for a, b in zip(tensor.shape, kind.shape, strict=True)) == 1


def refuse_other_streams(part: SourceFile) -> None:
    """Refuse streams that torch can write in place of its archives.

    Raises:
        SourceError: `source.unsupported`.
    """
    head = part.read(0, min(4, part.size_bytes))
    if head.startswith(b"PK"):
        return
    kind = _COMPRESSED.get(head)
    text = f"is compressed ({kind})" if kind else "is not a torch archive"
    raise SourceError(
        "source.unsupported",
        f"{_where(part)} {text}",
        fix="save it without `_extensions` and with the default `serialization_format`"
        if kind
        else "the file is damaged, or was saved with another `serialization_format`: save it with the default one",
    )


# Compressed records: decompressed once into a nameless temporary file, from which all later reads are served.
#
# A compressed stream cannot be read from its middle, and tensors are read in parts. The temporary file has no name, so
# it is gone when the process ends, however it ends. Its directory is that of `TMPDIR`.
#
# Source: torch 2.13.0 `distributed/checkpoint/_extension.py` (`ZStandard`: one frame for each record, descriptor
# `stream.zstd/1`).

_ZSTD = "stream.zstd/1"
_CODEC = "zstandard"
_BLOCK_BYTES = 1 << 20
_STEP_BYTES = 1 << 10
"""Bytes that are decompressed at once: they make up to 32 MiB, as four bytes of a frame can stand for 128 KiB."""
_OVERHEAD_BYTES = 1 << 20
"""More than torch's archive around one tensor takes."""


class SpoolStore:
    """A store of one nameless temporary file. It offers only what readers of a source need."""

    scheme = "spool"

    def __init__(self) -> None:
        """Create the file."""
        self._file = tempfile.TemporaryFile(prefix="reshard-")  # noqa: SIM115 - it lives as long as the store
        weakref.finalize(self, self._file.close)
        self.size_bytes = 0
        self._info: ObjectInfo | None = None

    def append(self, data: bytes) -> None:
        """Write bytes at the end.

        Raises:
            StorageError: `storage.no_space`, `storage.unavailable`.
        """
        with _typed_errors():
            self._file.write(data)
        self.size_bytes += len(data)

    def finish(self, name: str, pin: str) -> ObjectInfo:
        """Make all bytes readable, as an object of this name and pin.

        Raises:
            StorageError: as `append`.
        """
        with _typed_errors():
            self._file.flush()
        self._info = ObjectInfo(name, self.size_bytes, pin)
        return self._info

    def list_directory(self, path: str, *, most: int | None = None) -> Listing:
        """No files: the one file has no name."""
        return Listing((), ())

    def list_tree(self, path: str) -> list[ObjectInfo]:
        """No files, as in `list_directory`."""
        return []

    def stat(self, path: str) -> ObjectInfo | None:
        """The one object under its name. It does not change: the files that it was made of have pins of their own."""
        return self._info if self._info is not None and path == self._info.path else None

    def read_into(self, info: ObjectInfo, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the file's bytes from `offset` on."""
        done = 0
        while done < len(buffer):
            count = os.preadv(self._file.fileno(), [buffer[done:]], offset + done)
            if not count:
                raise SourceError("checkpoint.incomplete", "a temporary file of decompressed records is too short")
            done += count


@contextmanager
def _typed_errors() -> Generator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StorageError(
            "storage.no_space" if full else "storage.unavailable",
            f"a temporary file in {printable(tempfile.gettempdir())}: {error.strerror}",
            fix="set TMPDIR to a directory with room for the checkpoint without compression",
        ) from error


@dataclass(frozen=True, slots=True)
class Decompressed:
    """Metadata whose records are all torch archives, with the files that it names."""

    metadata: Metadata
    files: tuple[SourceFile, ...]


def decompressed(metadata: Metadata, files: Sequence[SourceFile]) -> Decompressed:
    """Decompress the records that have transforms; nothing is done if there are none.

    Raises:
        SourceError: `source.unsupported` for other transforms, and without the codec; `checkpoint.malformed` for bytes
            that are not a frame; `zip.bomb` for a record that has more bytes than its tensor, and for values that have
            more bytes together than one pickle may have.
        StorageError: `storage.no_space`.
    """
    kinds = {*metadata.transforms.values(), *(v.transforms for v in metadata.values)} - {()}
    if not kinds:
        return Decompressed(metadata, tuple(files))
    if others := sorted({name for kind in kinds for name in kind} - {_ZSTD}):
        raise SourceError(
            "source.unsupported",
            f"records went through {listed(others)} when they were saved",
            fix="save it without these `_extensions`",
        )
    if find_spec(_CODEC) is None:
        raise SourceError(
            "source.unsupported",
            f"records are compressed ({_ZSTD}), and the codec is not installed",
            fix=f"pip install {_CODEC}, on every machine that converts",
        )
    return _Spooling(metadata, files).run()


def _require_room(need_bytes: int) -> None:
    """Refuse records for which the disk has no room, before anything is written.

    Raises:
        StorageError: `storage.no_space`.
    """
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if need_bytes > free:
        raise StorageError(
            "storage.no_space",
            f"compressed tensors have {need_bytes} bytes without compression, and "
            f"{printable(tempfile.gettempdir())} has {free} bytes free",
            fix="set TMPDIR to a directory with room for the checkpoint without compression",
        )


class _Spooling:
    """Writes the decompressed records of all files one after another into one temporary file."""

    def __init__(self, metadata: Metadata, files: Sequence[SourceFile]) -> None:
        self._metadata, self._files = metadata, files
        self._store = SpoolStore()
        codec: Any = import_module(_CODEC)
        self._new_frame: Callable[[], Any] = lambda: codec.ZstdDecompressor().decompressobj()
        self._error: type[Exception] = codec.ZstdError

    def run(self) -> Decompressed:
        metadata, spool = self._metadata, len(self._files)
        file, offset, length = metadata.file.copy(), metadata.offset.copy(), metadata.length.copy()
        archives: list[tuple[int, int]] = []
        numels = self._limits()
        _require_room(sum(numels[row] - _OVERHEAD_BYTES for row in metadata.transforms))
        for row in sorted(metadata.transforms):
            at = self._take(int(file[row]), int(offset[row]), int(length[row]), int(numels[row]))
            file[row], offset[row], length[row] = spool, *at
            archives.append(at)
        values: list[BytesEntry] = []
        left = configured_limits().stream_bytes
        for value in metadata.values:
            if value.transforms:
                at = self._take(value.file, value.offset, value.length, left)
                left -= at[1]
                archives.append(at)
                value = replace(value, file=spool, offset=at[0], length=at[1], transforms=())  # noqa: PLW2901
            values.append(value)
        names = (*metadata.files, "decompressed")
        plain = replace(
            metadata, files=names, file=file, offset=offset, length=length, transforms={}, values=tuple(values)
        )
        pins = "|".join(f"{i.path}@{i.pin}" for f in self._files for i in f.objects)
        info = self._store.finish(f"decompressed from {self._files[0].name}", pins)
        whole = SourceFile(
            self._store, "decompressed", (info,), archives=np.array(archives, dtype=np.int64).reshape(-1, 2)
        )
        # The compressed records are not archives.
        return Decompressed(plain, (*(replace(f, archives=None) for f in self._files), whole))

    def _limits(self) -> Sequence[int]:
        """For each row the most bytes that its record may have."""
        found = np.zeros(len(self._metadata.file), dtype=np.int64)
        for entry in self._metadata.tensors:
            numel = np.multiply.reduce(entry.boxes[:, 1], axis=1) * entry.dtype.itemsize_bytes
            found[entry.first : entry.first + entry.count] = numel + _OVERHEAD_BYTES
        return found.tolist()

    def _take(self, number: int, offset: int, length: int, limit_bytes: int) -> tuple[int, int]:
        """Decompress one record; returns its offset and length in the temporary file."""
        part, frame, begin = self._files[number].part(offset, length), self._new_frame(), self._store.size_bytes
        where = f"{printable(part.name)}: the compressed record at byte {offset}"
        try:
            for at in range(0, length, _BLOCK_BYTES):
                block = part.read(at, min(_BLOCK_BYTES, length - at))
                for step in range(0, len(block), _STEP_BYTES):
                    data = frame.decompress(block[step : step + _STEP_BYTES])
                    if self._store.size_bytes - begin + len(data) > limit_bytes:
                        raise SourceError("zip.bomb", f"{where} has more than {limit_bytes} bytes")
                    self._store.append(data)
        except self._error as error:
            raise SourceError("checkpoint.malformed", f"{where}: {printable(str(error))}") from error
        if not frame.eof or frame.unused_data:
            raise SourceError("checkpoint.malformed", f"{where} is not one whole frame", fix="copy the file again")
        return begin, self._store.size_bytes - begin
