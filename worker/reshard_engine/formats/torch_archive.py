"""Lays out a tree and its tensors as one torch archive, byte for byte as torch writes it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from math import prod

from reshard.choices import OpaquePolicy
from reshard.errors import SourceError, printable
from reshard_engine.checkpoint import Scalar
from reshard_engine.pickles.emit import emit_pickle
from reshard_engine.pickles.nodes import Node, PLiteral, PRuns, PRunsPart, PStorage, PTensor, PTensorRef
from reshard_engine.pickles.trees import foreign_paths, rewrite
from reshard_engine.storage.crc32 import crc32
from reshard_engine.tensors.dtypes import BY_NAME, UINT8, Dtype
from reshard_engine.tensors.layout import Body, FileTemplate
from reshard_engine.tensors.shard_map import ShardMap, packed_stride

# The layout of a torch zip archive, written as torch writes it: a pure function of names and sizes.
#
# Every record has flag bits 3 and 11, zeros in its local header and a data descriptor behind it; data
# begin at multiples of 64. Offsets are known before the data; CRC-32s of storages are not, and their
# places (descriptor and directory) are listed as slots.
#
# Source: torch 2.13.0 `caffe2/serialize/inline_container.cc` (`getPadding`, order of records),
# verified byte by byte against `torch.save`; PKWARE APPNOTE 6.3 for zip64.

_FLAGS = 0x0808
_EMPTY_FLAGS = 0x0800  # miniz writes no descriptor behind an empty record
_U32_MAX, _U16_MAX = 0xFFFFFFFF, 0xFFFF
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class StorageRecord:
    """One storage of the archive: its key, and the tensor runs that fill it in order."""

    key: str
    runs: tuple[tuple[int, int, int, Dtype], ...]
    """The runs that fill the storage, as (slot, begin, end, dtype) of `tensors.layout.Body`."""
    data: bytes | None = None
    """The bytes of the storage if they are known; it then has no runs."""

    @property
    def length_bytes(self) -> int:
        """Bytes of the record."""
        return sum((end - begin) * dtype.itemsize_bytes for _, begin, end, dtype in self.runs)


class _Archive:
    """Accumulates literals and slots in file order."""

    def __init__(self, root: str) -> None:
        self._root = root
        self.at = 0
        self.literals: list[tuple[int, bytes]] = []
        self.bodies: list[Body] = []
        self.records: list[tuple[int, int]] = []
        self.crc_slots: list[tuple[int, int]] = []
        self._entries: list[tuple[bytes, int, int, int, int | None]] = []

    def _literal(self, data: bytes) -> None:
        self.literals.append((self.at, data))
        self.at += len(data)

    def _header(self, name: bytes, size: int) -> None:
        start = self.at + 30 + len(name) + 4
        zip64 = b""
        if size >= _U32_MAX or self.at >= _U32_MAX:
            values = (struct.pack("<QQ", size, size) if size >= _U32_MAX else b"") + (
                struct.pack("<Q", self.at) if self.at >= _U32_MAX else b""
            )
            zip64 = struct.pack("<HH", 1, len(values)) + values
            start += len(zip64)
        padding = -start % ALIGNMENT
        extra = zip64 + b"FB" + struct.pack("<H", padding) + b"Z" * padding
        flags = _FLAGS if size else _EMPTY_FLAGS
        self._literal(
            struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 0, flags, 0, 0, 0, 0, 0, 0, len(name), len(extra))
            + name
            + extra
        )

    def _descriptor(self, size: int, crc: int, record: int | None) -> None:
        if not size:
            return
        if record is not None:
            self.crc_slots.append((self.at + 4, record))
        form = "<4sIQQ" if size >= _U32_MAX else "<4sIII"
        self._literal(struct.pack(form, b"PK\x07\x08", crc, size, size))

    def add_bytes(self, name: str, data: bytes) -> None:
        """Add a record whose bytes are known."""
        raw = f"{self._root}/{name}".encode()
        header_at, crc = self.at, crc32(data)
        self._header(raw, len(data))
        self._literal(data)
        self._descriptor(len(data), crc, None)
        self._entries.append((raw, header_at, len(data), crc, None))

    def add_storage(self, storage: StorageRecord) -> None:
        """Add a record that tensors fill."""
        raw = f"{self._root}/data/{storage.key}".encode()
        header_at, size = self.at, storage.length_bytes
        self._header(raw, size)
        record = None
        if size:
            record = len(self.records)
            self.records.append((self.at, size))
        for slot, begin, end, dtype in storage.runs:
            body = Body(self.at, slot, begin, end, dtype, record)
            self.bodies.append(body)
            self.at += body.length_bytes
        self._descriptor(size, 0, record)
        self._entries.append((raw, header_at, size, 0, record))

    def finish(self) -> FileTemplate:
        """Write the directory and return the whole file's template."""
        start = self.at
        directory: list[bytes] = []
        at = start
        for name, header_at, size, crc, record in self._entries:
            values = [v for v in (size, size, header_at) if v >= _U32_MAX]
            extra = struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""
            if record is not None:
                self.crc_slots.append((at + 16, record))
            flags = _FLAGS if size else _EMPTY_FLAGS
            entry = struct.pack(
                "<4sHHHHHHIIIHHHHHII",
                *(b"PK\x01\x02", 0, 0, flags, 0, 0, 0, crc, min(size, _U32_MAX), min(size, _U32_MAX)),
                *(len(name), len(extra), 0, 0, 0, 0, min(header_at, _U32_MAX)),
            )
            directory.append(entry + name + extra)
            at += len(directory[-1])
        self._literal(b"".join(directory) + self._end(start, at - start))
        return FileTemplate(
            self.at, tuple(self.literals), tuple(self.bodies), tuple(self.records), tuple(self.crc_slots)
        )

    def _end(self, start: int, size: int) -> bytes:
        count = len(self._entries)
        out = b""
        if count >= _U16_MAX or size >= _U32_MAX or start >= _U32_MAX:
            out += struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start)
            out += struct.pack("<4sIQI", b"PK\x06\x07", 0, start + size, 1)
        short = min(count, _U16_MAX)
        return out + struct.pack(
            "<4sHHHHIIH", b"PK\x05\x06", 0, 0, short, short, min(size, _U32_MAX), min(start, _U32_MAX), 0
        )


def zip_template(root: str, pickle: bytes, storages: Sequence[StorageRecord]) -> FileTemplate:
    """The template of a torch archive.

    Args:
        root: Name of the archive's root; as in torch, the file's stem.
        pickle: Bytes of `data.pkl`.
        storages: The storages in key order.
    """
    archive = _Archive(root)
    archive.add_bytes("data.pkl", pickle)
    archive.add_bytes(".format_version", b"1")
    archive.add_bytes(".storage_alignment", str(ALIGNMENT).encode())
    archive.add_bytes("byteorder", b"little")
    for storage in storages:
        if storage.data is not None:
            archive.add_bytes(f"data/{storage.key}", storage.data)
        else:
            archive.add_storage(storage)
    archive.add_bytes("version", b"3\n")
    # torch writes a hash of names and CRCs here. Any 40 digits are valid, and ours must not depend on data.
    serial = int.from_bytes(hashlib.sha256(pickle).digest()[:16], "big") % 10**40
    archive.add_bytes(".data/serialization_id", f"{serial:040d}".encode())
    return archive.finish()


_REHEARSED: ContextVar[bool] = ContextVar("rehearsed", default=False)


@contextmanager
def dry_run() -> Generator[None]:
    """Make `tree_template` return empty archives within the block: most of a layout's time goes into the real ones.

    Writers refuse the same sources as outside of the block, and only that matters to a dry_run.
    """
    token = _REHEARSED.set(True)
    try:
        yield
    finally:
        _REHEARSED.reset(token)


@cache
def _empty_archive() -> FileTemplate:
    return zip_template("dry_run", emit_pickle(None), [])


def tree_template(
    root: str, node: Node, shard_map: ShardMap, *, opaque: OpaquePolicy
) -> tuple[FileTemplate, tuple[int, ...]]:
    """The template of an archive whose value is `node`, and the tensors of its slots.

    Each tensor gets a storage of its own, exactly as long as it is; two references to one tensor
    share it, so that tied weights stay tied, and so do the parts of one whole.

    Args:
        root: Root name inside the archive.
        node: The value; its tensors are `PTensorRef`s, or `PRuns` of several, or parts of these.
        shard_map: Where the references point to.
        opaque: The policy for objects whose classes are not on the allow-list.

    Raises:
        SourceError: `pickle.forbidden_global` under the policy `refuse`.
    """
    if _REHEARSED.get():
        return _empty_archive(), ()
    slots: dict[int, int] = {}
    placed_tensors: dict[PTensorRef | PRuns, PTensor] = {}
    storages: list[StorageRecord] = []

    def slot(number: int) -> int:
        return slots.setdefault(number, len(slots))

    wholes: dict[int, PTensor] = {}

    def part(ref: PRunsPart) -> PTensor:
        # Keys are identities: hashing a tensor by its runs for each parameter would take quadratic time.
        whole = wholes.get(id(ref.whole)) or wholes.setdefault(id(ref.whole), placed(ref.whole))
        return PTensor(whole.storage, whole.dtype, ref.offset, ref.shape, packed_stride(ref.shape))

    def placed(ref: PTensorRef | PLiteral | PRuns | PRunsPart) -> PTensor:
        if isinstance(ref, PRunsPart):
            return part(ref)
        key = str(len(storages))
        if isinstance(ref, PLiteral):
            storages.append(StorageRecord(key, (), ref.data))
            return output_tensor(key, BY_NAME[ref.dtype], ref.shape)
        if ref in placed_tensors:
            return placed_tensors[ref]
        if isinstance(ref, PTensorRef):
            stored = shard_map.tensors[ref.index]
            dtype, shape, runs = stored.dtype, stored.shape, ((ref.index, 0, stored.numel),)
        else:
            dtype, shape, runs = BY_NAME[ref.dtype], ref.shape, ref.runs
        storages.append(StorageRecord(key, tuple((slot(t), begin, end, dtype) for t, begin, end in runs)))
        placed_tensors[ref] = output_tensor(key, dtype, shape)
        return placed_tensors[ref]

    tree = rewrite(node, placed, lambda foreign: None if opaque is OpaquePolicy.DROP else foreign)
    pickle = emit_pickle(tree, keep_foreign=opaque is OpaquePolicy.KEEP)
    return zip_template(root, pickle, storages), tuple(slots)


def output_tensor(key: str, dtype: Dtype, shape: tuple[int, ...]) -> PTensor:
    """A packed tensor over a storage of its own."""
    numel = prod(shape)
    untyped = dtype.storage_class is None
    storage = PStorage(
        UINT8.name if untyped else dtype.name, key, "cpu", numel * dtype.itemsize_bytes if untyped else numel, untyped
    )
    return PTensor(storage, dtype.name, 0, shape, packed_stride(shape))


def scalar_node(scalar: Scalar) -> Node:
    """A number as a value of a tree, of the kind that the source had: Python number or one-element tensor."""
    return scalar.value if scalar.dtype is None else PLiteral(scalar.dtype.name, scalar.shape, scalar.raw)


def single_tensor_template(
    root: str,
    dtype: Dtype,
    shape: tuple[int, ...],
    wrap: Callable[[Node], Node],
    *,
    cache: dict[object, FileTemplate],
    kind: object = None,
) -> FileTemplate:
    """The template of an archive that holds one tensor, in the value that `wrap` makes around it.

    Cached by shape, and by what the caller says of the value around the tensor.
    """
    key = (root, dtype.name, shape, kind)
    found = cache.get(key)
    if found is None:
        tensor = output_tensor("0", dtype, shape)
        pickle = emit_pickle(wrap(tensor))
        found = zip_template(root, pickle, [StorageRecord("0", ((0, 0, tensor.numel, dtype),))])
        cache[key] = found
    return found


def under_policy(node: Node, policy: OpaquePolicy) -> Node:
    """A tree of the source to be written, under the policy for objects of classes that are not on the allow-list.

    Raises:
        SourceError: `pickle.forbidden_global` under the policy `refuse`.
    """
    if policy is OpaquePolicy.KEEP or not (strange := foreign_paths(node, "")):
        return node
    if policy is OpaquePolicy.DROP:
        return rewrite(node, lambda tensor: tensor, lambda _: None)
    raise SourceError(
        "pickle.forbidden_global",
        f"{printable(strange[0])} would be written out, and is not on the allow-list",
        fix="--opaque keep writes such objects out again, unexecuted; --opaque drop writes None instead",
    )
