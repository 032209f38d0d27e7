"""Reads a file of `torch.save`, archive or legacy stream: its value as inert nodes, its tensors as byte extents."""

from __future__ import annotations

import hashlib
import shlex
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from reshard.errors import SourceError, printable
from reshard_engine.containers.foreign import foreign_file
from reshard_engine.containers.source_file import CachedFile, SourceFile
from reshard_engine.containers.zip_reader import ZipDirectory, ZipEntry, read_record, read_zip_directory
from reshard_engine.pickles.nodes import (
    Node,
    PDict,
    PickleLimits,
    PList,
    PObject,
    PSet,
    PStorage,
    PTensor,
    PTensorRef,
    PTuple,
    configured_limits,
    mapping_items,
)
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.trees import rewrite
from reshard_engine.pickles.vm import parse_pickle
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.tensors.shard_map import ShardMapBuilder

# Legacy `torch.save` streams: five pickles, then each storage as an element count and its bytes.
#
# DeepSpeed's FAST writer writes the same form; its part files are byte ranges of one such stream.
#
# Source: torch 2.13.0 `torch/serialization.py` (`_legacy_save`, `_legacy_load`, MAGIC_NUMBER),
# deepspeed 0.19.8 `io/fast_file_writer.py` (`_save_storage_list`).

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001
_FIRST_READ_BYTES = 256 << 10
_MAX_STORAGES = 1_000_000


def read_legacy_stream(
    cached: CachedFile, ledger: OpaqueLedger, limits: PickleLimits
) -> tuple[Node, dict[str, tuple[int, int]]]:
    """Read the value, and (offset, bytes) of each storage by key.

    Raises:
        SourceError: `source.unknown_kind` if the file is a pickle but not a torch stream, `pickle.*`,
            `checkpoint.incomplete` if the file ends inside a storage.
    """
    name = printable(cached.file.name)
    at = 0
    values: list[Node] = []
    for number in range(5):
        value, at = _next_pickle(cached, at, ledger, limits)
        values.append(value)
        if number == 0 and value != MAGIC_NUMBER:
            raise SourceError(
                "source.unknown_kind",
                f"{name} is a pickle, but not a torch stream",
                fix="name a file of torch.save, or the checkpoint's directory",
            )
        if number == 1 and value != PROTOCOL_VERSION:
            raise SourceError(
                "pickle.malformed", f"{name}: torch stream protocol {printable(str(value), max_chars=40)}"
            )
    system = mapping_items(values[2], what="sys_info")
    if system.get("little_endian") is not True:
        raise _other_endian(name)
    keys = values[4].items if isinstance(values[4], PList) else None
    well_formed = keys is not None and len(keys) <= _MAX_STORAGES and all(type(k) is str for k in keys)
    if keys is None or not well_formed or len(set(keys)) != len(keys):
        raise SourceError("pickle.malformed", f"{name}: the list of storage keys is malformed")
    return values[3], _storage_offsets(cached, at, keys, storages_in(values[3]))


def _next_pickle(cached: CachedFile, at: int, ledger: OpaqueLedger, limits: PickleLimits) -> tuple[Node, int]:
    # The length of a pickle is known only after reading it: read a little first, then eight times as much.
    count = _FIRST_READ_BYTES
    while True:
        available = min(count, cached.size_bytes - at)
        try:
            value, used = parse_pickle(cached.read(at, available), ledger, limits=limits, allow_trailing=True)
            return value, at + used
        except SourceError as error:
            grown = min(count * 8, limits.stream_bytes)
            if error.code != "pickle.truncated" or available == cached.size_bytes - at or grown == count:
                raise
            count = grown


def storages_in(root: Node) -> dict[str, PStorage]:
    """All storages that a value refers to, by key."""
    found: dict[str, PStorage] = {}
    for node in walk(root):
        if isinstance(node, PTensor):
            known = found.setdefault(node.storage.key, node.storage)
            if (known.dtype, known.root_numel) != (node.storage.dtype, node.storage.root_numel):
                raise SourceError("tensor.bad_extent", f"storage {printable(known.key)} has two types or sizes")
    return found


def walk(root: Node) -> Iterator[Node]:
    """Yield every node of a value once, in no particular order. It does not recurse."""
    seen: set[int] = set()
    todo: list[Node] = [root]
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        match node:
            case PList() | PTuple() | PSet():
                todo.extend(node.items)
            case PDict():
                todo.extend(node.pairs)
            case PObject():
                todo += [node.args, node.kwargs, node.state, *node.items, *node.appends]
            case _:
                continue


def _storage_offsets(
    cached: CachedFile, at: int, keys: list[str], storages: dict[str, PStorage]
) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    name = printable(cached.file.name)
    for key in keys:
        storage = storages.get(key)
        if storage is None:
            raise SourceError("checkpoint.malformed", f"{name}: storage {printable(key)} belongs to no tensor")
        count = int.from_bytes(cached.file.read(at, 8), "little", signed=True)
        if count != storage.root_numel:
            raise SourceError(
                "tensor.bad_extent", f"{name}: storage {printable(key)} has {count} of {storage.root_numel} elements"
            )
        length = count * BY_NAME[storage.dtype].itemsize_bytes
        if at + 8 + length > cached.size_bytes:
            raise SourceError(
                "checkpoint.incomplete",
                f"{name} ends inside storage {printable(key)}",
                fix="the file is truncated: copy the checkpoint again",
            )
        found[key] = (at + 8, length)
        at += 8 + length
    if at != cached.size_bytes:
        raise SourceError("pickle.trailing", f"{name}: {cached.size_bytes - at} bytes after the last storage")
    return found


# Interprets equal pickles of one checkpoint only once: files of many ranks hold the same pickle, byte for byte.

_KEPT = 16
"""Number of pickles that are kept. torch writes the device into pickles, so hosts with 8 devices have 8 different
ones of each of two kinds."""


class SharedPickles:
    """The values of the latest pickles of one read. Nodes are never changed after parsing, so files may share them.

    All pickles use one ledger: the names of an equal pickle are in it already, and refused pickles are not kept.
    """

    def __init__(self, ledger: OpaqueLedger) -> None:
        """Start with no pickles."""
        self.ledger = ledger
        self._values: OrderedDict[bytes, Node] = OrderedDict()
        self._lock = threading.Lock()

    def parse(self, data: bytes, limits: PickleLimits) -> Node:
        """The value of a pickle, or of an equal pickle before it.

        One thread interprets at a time. Threads would wait for Python's own lock anyway, and equal pickles of
        files that are opened in parallel must not be interpreted twice.

        Raises:
            SourceError: As `parse_pickle`.
        """
        key = hashlib.sha256(data).digest()
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            else:
                self._values[key], _ = parse_pickle(data, self.ledger, limits=limits)
                if len(self._values) > _KEPT:
                    self._values.popitem(last=False)
            return self._values[key]


# Opens one file of `torch.save`, of either form.

_ZIP_MAGIC = b"PK\x03\x04"
_SMALL_RECORD_BYTES = 16
"""Size, in bytes, of records that are read with the metadata: `step` of Adam is one."""
_MOST_PASSED = 64


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
        """Read the bytes of a tensor with one element. A small record is read whole, and compared with its CRC-32."""
        offset, length = self.tensor_offset(tensor), BY_NAME[tensor.dtype].itemsize_bytes
        record = self.storages[tensor.storage.key]
        if record.length_bytes > _SMALL_RECORD_BYTES:
            return self.file.read(offset, length)
        data = self.passed.get(record.offset) or self.file.read(record.offset, record.length_bytes)
        if record.crc32 is not None:
            self.file.compare(record.offset, data, record.crc32)
        return data[offset - record.offset :][:length]


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
    if (other := foreign_file(file, cached.read)) is not None:
        raise other
    head = cached.read(0, min(4, file.size_bytes))
    if head == _ZIP_MAGIC:
        return _open_zip(cached, pickles or SharedPickles(ledger), limits)
    if head[:1] == b"\x80":
        root, storages = read_legacy_stream(cached, ledger, limits)
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
            fix=f"unpack it, and name what is in it: unzip {shlex.quote(name)}",
        )
    if _small_record(cached, entries, "byteorder", b"little") != b"little":
        raise _other_endian(name)
    if not _small_record(cached, entries, "version", b"3").strip().isdigit():
        raise SourceError("zip.bad_record", f"{name}: the record `version` is not a number")
    data = read_record(cached, entries["data.pkl"], limit_bytes=limits.stream_bytes)
    root = pickles.parse(data, limits)
    storages = {n.removeprefix("data/"): _extent(e) for n, e in entries.items() if n.startswith("data/")}
    cached.file.sums.add(_checksums(directory, cached.file.begin))
    file = replace(cached.file, directory_sha256=_directory_sha256(directory))
    return TorchFile(file, root, storages, "zip", _passed(cached, storages))


def _passed(cached: CachedFile, storages: Mapping[str, RecordExtent]) -> dict[int, bytes]:
    few = (s for s in storages.values() if 0 < s.length_bytes <= _SMALL_RECORD_BYTES)
    held = (s for s in few if cached.holds(s.offset, s.length_bytes))
    return {s.offset: cached.read(s.offset, s.length_bytes) for s in islice(held, _MOST_PASSED)}


def _other_endian(name: str) -> SourceError:
    return SourceError(
        "zip.bad_record",
        f"{name} was not written on a little-endian machine",
        fix="save it again on a little-endian machine",
    )


def _small_record(cached: CachedFile, entries: Mapping[str, ZipEntry], name: str, default: bytes) -> bytes:
    entry = entries.get(name)
    if entry is None:
        return default
    if entry.size_bytes > _SMALL_RECORD_BYTES:
        raise SourceError(
            "zip.bad_record", f"{printable(cached.file.name)}: the record `{name}` has {entry.size_bytes} bytes"
        )
    return read_record(cached, entry, limit_bytes=_SMALL_RECORD_BYTES)


def _checksums(directory: ZipDirectory, begin: int) -> npt.NDArray[np.int64]:
    """`[3, count]`: offset, length and CRC-32 of the records of tensors. A CRC-32 of 0 means that none was computed.

    Source: torch 2.13.0 `caffe2/serialize/inline_container.cc`: `set_crc32_options(False)` and `skip_data`, after
    which the caller writes the data itself, leave 0; verified by running. Other records are metadata, which
    `read_record` compares.
    """
    records = (e for n, e in directory.entries.items() if n.startswith("data/") and e.crc32 and e.size_bytes)
    rows = sorted((begin + e.data_offset, e.size_bytes, e.crc32) for e in records)
    return np.ascontiguousarray(np.array(rows, dtype=np.int64).reshape(-1, 3).T)


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


# Tensors that one torch file holds whole: their places in the file, and aliases among them.


def add_whole_tensor(
    builder: ShardMapBuilder, name: str, state: str, tensor: PTensor, *, torch_file: TorchFile, file: int
) -> int:
    """Register a tensor that one file holds whole, packed or strided; returns its number."""
    index = builder.tensor(name, state, BY_NAME[tensor.dtype], tensor.shape)
    if tensor.numel:
        builder.whole(index, file=file, offset=torch_file.tensor_offset(tensor), stride=tensor.stride)
    return index


def place_of(tensor: PTensor) -> tuple[object, ...]:
    """A key that is equal for two tensors of one file if they are the same elements in the same order."""
    stride = tuple(s for n, s in zip(tensor.shape, tensor.stride, strict=True) if n != 1)
    return (tensor.storage.key, tensor.dtype, tensor.offset, tensor.shape, stride)


# Non-tensor state as trees that can be written again, with their tensors in the shard map.


class TreeTensors:
    """Replaces the tensors of trees by references into the shard map that is being built."""

    def __init__(self, builder: ShardMapBuilder, number: Mapping[SourceFile, int]) -> None:
        """Add tensors of file `number` to the checkpoint's builder."""
        self._builder = builder
        self._number = number
        self._count = 0

    def carried(self, node: Node, torch_file: TorchFile) -> Node:
        """Copy the tree and replace its tensors by references; foreign objects stay as they are."""

        def reference(tensor: PTensor) -> PTensorRef:
            self._count += 1
            file = self._number[torch_file.file]
            name = f"state.{self._count}"
            return PTensorRef(add_whole_tensor(self._builder, name, "value", tensor, torch_file=torch_file, file=file))

        return rewrite(node, reference, lambda foreign: foreign)
