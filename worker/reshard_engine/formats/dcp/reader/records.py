"""The places of chunks inside their records: each chunk is a torch archive of its own in a range of a file.

The bytes before a chunk's data (headers and the pickle of one tensor) depend only on its element type, shape and
strides. So the first record of each kind is parsed, and the others are compared with it byte for byte. A record that
differs is parsed, too.

Source: torch 2.13.0 `distributed/checkpoint/filesystem.py` (`_write_item`: `torch.save` of each tensor),
`caffe2/serialize/inline_container.cc`; verified by running.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from reshard.errors import SourceError, printable
from reshard_engine.containers.opening import open_all
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import open_torch_file
from reshard_engine.formats.dcp.reader.metadata import Column, Narrow
from reshard_engine.pickles.nodes import Global, PTensor, kind_of
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.rebuild import MadeOfTensors, made_of_tensors
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
    """The classes, by row, of chunks that are no plain tensors, but made of several, such as quantized ones."""


@dataclass(frozen=True, slots=True)
class _Head:
    data: bytes
    """Everything before the tensor's data."""
    stride: tuple[int, ...] | None
    """Strides if the tensor is not packed."""
    data_bytes: int
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

    def places(self) -> Places:
        if not len(self._records.kind):
            return self._found
        firsts = [self._part(row) for row in self._first]
        rows = dict(zip(map(id, firsts), self._first, strict=True))
        self._heads = open_all(firsts, lambda part: self._parsed(part, rows[id(part)]))
        spans = list(self._spans())
        rows_of = {id(part): (at, members) for part, at, members in spans}
        for different in open_all([part for part, _, _ in spans], lambda part: self._compare(part, *rows_of[id(part)])):
            for row in different:
                self._take(row, self._parsed(self._part(row), row))
        return self._found

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
            return _Head(part.read(0, data_at), None, 0, tensor.kind)
        data_at = parsed.tensor_offset(tensor)
        stride = None if is_packed(tensor.shape, tensor.stride) else tensor.stride
        return _Head(part.read(0, data_at), stride, tensor.numel * kind.dtype.itemsize_bytes)

    def _spans(self) -> Iterator[tuple[SourceFile, int, list[int]]]:
        """Ranges of files to read, each with its begin and the rows whose heads lie in it."""
        records = self._records
        order = np.lexsort((records.offset, records.file))
        wanted = [len(h.data) + _scalar_bytes(h) for h in self._heads]
        rows: list[int] = []
        file, begin, end = -1, -1, -1
        at_once: list[int] = order.tolist()
        for row in at_once:
            number, at = int(records.file[row]), int(records.offset[row])
            stop = at + wanted[self._group[row]]
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
        """Take the rows whose heads are as those of their kind, and return the others."""
        data = span.read(0, span.size_bytes)
        different: list[int] = []
        for row in rows:
            head = self._heads[self._group[row]]
            at = int(self._records.offset[row]) - begin
            if data[at : at + len(head.data)] != head.data:
                different.append(row)
                continue
            scalar = data[at + len(head.data) :][: head.data_bytes] if _scalar_bytes(head) else b""
            self._take(row, head, scalar)
        return different

    def _take(self, row: int, head: _Head, scalar: bytes | None = None) -> None:
        self._found.offset[row] = int(self._records.offset[row]) + len(head.data)
        if head.kind is not None:
            self._found.classes[row] = head.kind
        if head.stride is not None:
            self._found.strides[row] = head.stride
        if size := _scalar_bytes(head):
            self._found.scalars[row] = self._part(row).read(len(head.data), size) if scalar is None else scalar


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
    text = f"is compressed ({kind})" if kind else "is no torch archive"
    raise SourceError(
        "source.unsupported",
        f"{_where(part)} {text}",
        fix="save it without `_extensions` and with the default `serialization_format`"
        if kind
        else "the file is damaged, or was saved with another `serialization_format`: save it with the default one",
    )
