"""Reads a file of `torch.save`, archive or legacy stream: its value as inert nodes, its tensors as byte extents."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from reshard.errors import SourceError, printable
from reshard_engine.containers import legacy_stream
from reshard_engine.containers.shared_pickles import SharedPickles
from reshard_engine.containers.source_file import CachedFile, SourceFile
from reshard_engine.containers.zip_format import ZipEntry
from reshard_engine.containers.zip_reader import ZipDirectory, read_record, read_zip_directory
from reshard_engine.pickles.limits import PickleLimits, configured_limits
from reshard_engine.pickles.nodes import Node, PStorage, PTensor
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.tensors.dtypes import BY_NAME

_ZIP_MAGIC = b"PK\x03\x04"
_SMALL_RECORD_BYTES = 16
_MOST_PASSED = 64
_LARGER_RECORD_BYTES = 1 << 10
"""Smallest record, in bytes, whose checksum is kept: smaller ones are read faster than looked up."""


@dataclass(frozen=True, slots=True)
class RecordExtent:
    """The byte range of one storage in the file, with its CRC-32 if the container has one."""

    offset: int
    length_bytes: int
    crc32: int | None


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A parsed file. `storages` holds every storage by key."""

    file: SourceFile
    root: Node
    storages: Mapping[str, RecordExtent]
    kind: str
    """`zip` or `legacy`."""
    passed: Mapping[int, bytes] = field(default_factory=dict[int, bytes], repr=False, compare=False)
    """Small records by offset, kept if they were in a block that was read anyway. Step counts lie in the first block;
    one more request for each of a thousand ranks would take longer than all other reads."""

    def storage_extent(self, storage: PStorage) -> RecordExtent:
        """The byte range of a storage reference.

        Raises:
            SourceError: `checkpoint.incomplete` if the file has no such record, `tensor.bad_extent` if the
                size of the record differs from the reference.
        """
        record = self.storages.get(storage.key)
        name = printable(f"{self.file.name}:{storage.key}")
        if record is None:
            raise SourceError("checkpoint.incomplete", f"{name}: the record of a tensor is missing")
        itemsize = BY_NAME[storage.dtype].itemsize_bytes
        if storage.root_numel * itemsize != record.length_bytes:
            raise SourceError(
                "tensor.bad_extent",
                f"{name}: {storage.root_numel} elements of {itemsize} bytes in {record.length_bytes} bytes",
            )
        if storage.view_offset:
            offset = record.offset + storage.view_offset * itemsize
            return RecordExtent(offset, storage.numel * itemsize, None)
        return record

    def tensor_offset(self, tensor: PTensor) -> int:
        """Absolute byte offset of the tensor's first element in the file."""
        return self.storage_extent(tensor.storage).offset + tensor.offset * BY_NAME[tensor.dtype].itemsize_bytes

    def read_scalar_bytes(self, tensor: PTensor) -> bytes:
        """Read the bytes of a tensor with one element."""
        offset, length = self.tensor_offset(tensor), BY_NAME[tensor.dtype].itemsize_bytes
        passed = self.passed.get(offset, b"")
        return passed[:length] if len(passed) >= length else self.file.read(offset, length)


def open_torch_file(
    file: SourceFile,
    ledger: OpaqueLedger,
    *,
    limits: PickleLimits | None = None,
    pickles: SharedPickles | None = None,
) -> TorchFile:
    """Parse a torch file's metadata. The magic number decides the kind, never the name.

    Args:
        file: The file.
        ledger: Policy for names that are not on the allow-list; collects them.
        limits: Bounds of its pickles; by default those of the environment.
        pickles: The pickles that this read of the checkpoint has parsed, with the same ledger.

    Raises:
        SourceError: `source.unknown_kind` if torch did not write it; `zip.*`, `pickle.*`, `tensor.*`.
    """
    if file.size_bytes == 0:
        raise SourceError("checkpoint.incomplete", f"{printable(file.name)} is empty", fix="copy the checkpoint again")
    cached, limits = CachedFile(file), limits or configured_limits()
    head = cached.read(0, min(4, file.size_bytes))
    if head == _ZIP_MAGIC:
        return _open_zip(cached, pickles or SharedPickles(ledger), limits)
    if head[:1] == b"\x80":
        root, storages = legacy_stream.read_legacy_stream(cached, ledger, limits)
        return TorchFile(file, root, {k: RecordExtent(o, n, None) for k, (o, n) in storages.items()}, "legacy")
    raise SourceError(
        "source.unknown_kind",
        f"{printable(file.name)} begins with {head.hex()}: neither a torch zip archive nor a legacy torch stream",
        fix="check that the file is complete and was written by torch.save",
    )


def _open_zip(cached: CachedFile, pickles: SharedPickles, limits: PickleLimits) -> TorchFile:
    directory = read_zip_directory(cached)
    entries = directory.entries
    name = printable(cached.file.name)
    if "constants.pkl" in entries or any(n.startswith("code/") for n in entries):
        raise SourceError(
            "source.unknown_kind",
            f"{name} is a TorchScript archive, not a checkpoint",
            fix="save the state dict: torch.save(model.state_dict(), FILE)",
        )
    if "data.pkl" not in entries:
        raise SourceError(
            "source.unknown_kind",
            f"{name} is a zip archive without data.pkl: torch.save did not write it",
            fix="name a file of torch.save, or the checkpoint's directory",
        )
    if _small_record(cached, entries, "byteorder", b"little") != b"little":
        raise SourceError(
            "zip.bad_record",
            f"{name} was not written on a little-endian machine",
            fix="save it again on a little-endian machine",
        )
    if not _small_record(cached, entries, "version", b"3").strip().isdigit():
        raise SourceError("zip.bad_record", f"{name}: the record `version` is not a number")
    data = read_record(cached, entries["data.pkl"], limit_bytes=limits.stream_bytes)
    root = pickles.parse(data, limits)
    storages = {n.removeprefix("data/"): _extent(e) for n, e in entries.items() if n.startswith("data/")}
    file = replace(cached.file, directory_sha256=_directory_sha256(directory), checksums=_checksums(directory))
    return TorchFile(file, root, storages, "zip", _passed(cached, storages))


def _passed(cached: CachedFile, storages: Mapping[str, RecordExtent]) -> dict[int, bytes]:
    few = (s for s in storages.values() if 0 < s.length_bytes <= _SMALL_RECORD_BYTES)
    held = (s for s in few if cached.holds(s.offset, s.length_bytes))
    return {s.offset: cached.read(s.offset, s.length_bytes) for s in islice(held, _MOST_PASSED)}


def _small_record(cached: CachedFile, entries: Mapping[str, ZipEntry], name: str, default: bytes) -> bytes:
    entry = entries.get(name)
    if entry is None:
        return default
    if entry.size_bytes > _SMALL_RECORD_BYTES:
        raise SourceError(
            "zip.bad_record", f"{printable(cached.file.name)}: the record `{name}` has {entry.size_bytes} bytes"
        )
    return read_record(cached, entry, limit_bytes=_SMALL_RECORD_BYTES)


def _checksums(directory: ZipDirectory) -> tuple[tuple[int, int, int], ...]:
    """(offset, length, CRC-32) of larger records. A CRC-32 of 0 means that the writer did not compute one."""
    entries = (e for e in directory.entries.values() if e.crc32 and e.size_bytes >= _LARGER_RECORD_BYTES)
    return tuple(sorted((e.data_offset, e.size_bytes, e.crc32) for e in entries))


def _directory_sha256(directory: ZipDirectory) -> str:
    digest = hashlib.sha256()
    for name, entry in sorted(directory.entries.items()):
        digest.update(f"{name}\0{entry.size_bytes}\0{entry.crc32:08x}\n".encode())
    return digest.hexdigest()


def checksummed_spans(file: SourceFile) -> list[tuple[int, int, int]]:
    """(offset, length, CRC-32) of the records of a file whose container stores checksums, in file order.

    The list is empty for other containers. A CRC-32 of 0 means that the writer did not compute one.

    Raises:
        SourceError: `zip.*`.
    """
    if file.archives is not None:
        parts = ((at, checksummed_spans(file.part(at, length))) for at, length in file.archives.tolist())
        return [(at + offset, length, crc) for at, spans in parts for offset, length, crc in spans]
    cached = CachedFile(file)
    if cached.read(0, min(4, file.size_bytes)) != _ZIP_MAGIC:
        return []
    entries = read_zip_directory(cached).entries.values()
    return sorted((e.data_offset, e.size_bytes, e.crc32) for e in entries if e.crc32 and e.size_bytes)


def _extent(entry: ZipEntry) -> RecordExtent:
    return RecordExtent(entry.data_offset, entry.size_bytes, entry.crc32 or None)
