"""Compressed records: decompressed once into a nameless temporary file, from which all later reads are served.

A compressed stream cannot be read from its middle, and tensors are read in parts. The temporary file has no name, so it
is gone when the process ends, however it ends. Its directory is that of `TMPDIR`.

Source: torch 2.13.0 `distributed/checkpoint/_extension.py` (`ZStandard`: one frame for each record, descriptor
`stream.zstd/1`).
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from reshard.errors import SourceError, StorageError, listed, printable
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.formats.dcp.reader.metadata import BytesEntry, Metadata
from reshard_engine.pickles.limits import configured_limits
from reshard_engine.storage.protocol import Listing, ObjectInfo

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
            that are no frame; `zip.bomb` for a record that has more bytes than its tensor, and for values that have
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
        # The compressed records are no archives.
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
