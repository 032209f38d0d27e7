"""Tensors made of boxes in global coordinates: the chunks of a `.metadata`.

The files do not say how a tensor was sharded; nothing needs it.

Source: torch 2.13.0 `distributed/checkpoint/planner_helpers.py` (`_chunks_from_dtensor`, `_create_write_items`),
`distributed/tensor/_utils.py` (`compute_local_shape_and_global_offset`); verified by running.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from reshard.errors import SourceError, printable
from reshard_engine.checkpoint import Agreement, Scalar
from reshard_engine.containers.source_file import SourceFile, open_all
from reshard_engine.containers.torch_file import SharedPickles, open_torch_file
from reshard_engine.formats.dcp_files.metadata.model import Column, TensorEntry
from reshard_engine.formats.dcp_files.records import ChunkRecords, Kind, find_places
from reshard_engine.formats.dcp_files.saved_state import CarriedValues, SavedTensor
from reshard_engine.pickles.nodes import Node
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.trees import foreign_paths
from reshard_engine.tensors.dtypes import Dtype
from reshard_engine.tensors.shard_map import Boxes, LogicalTensor, ShardMapBuilder, add_boxes


@dataclass(frozen=True, slots=True)
class OpaqueChunk:
    """A chunk of an opaque tensor: a box in global coordinates, in elements, and the object that the file holds."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    value: Node


@dataclass(frozen=True, slots=True)
class OpaqueTensor:
    """A tensor of a class of its own, such as a quantized state of an optimizer.

    It is made of tensors whose blocks may not fit other boxes, so its chunks stay as they are.
    """

    kind: str
    """The class."""
    dtype: Dtype
    """The element type that it stands for."""
    shape: tuple[int, ...]
    chunks: tuple[OpaqueChunk, ...]

    @property
    def is_foreign(self) -> bool:
        """True if the class is not on the allow-list of pickles."""
        return any(foreign_paths(chunk.value, "") for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The chunks of one tensor, of all ranks that saved some, in columns."""

    boxes: Column
    file: Column
    offset: Column
    row: Column
    """The row of each chunk among all chunks of the checkpoint."""

    def rows(self, rows: npt.NDArray[np.intp]) -> _Chunks:
        return _Chunks(self.boxes[rows], self.file[rows], self.offset[rows], self.row[rows])


class ChunkTensors:
    """Registers tensors of a saved state in a shard map."""

    def __init__(
        self,
        builder: ShardMapBuilder,
        files: Sequence[SourceFile],
        wanted: Iterable[SavedTensor],
        ledger: OpaqueLedger,
    ) -> None:
        """Find the data of all chunks of the wanted tensors.

        Raises:
            SourceError: As `find_places`.
        """
        self.agreements: list[Agreement] = []
        self._builder, self._files = builder, files
        self._tensors = list(wanted)
        self._first: dict[int, int] = {}
        self._places = find_places(files, self._records(), ledger)
        self._pickles, self._carried = SharedPickles(ledger), CarriedValues(builder)

    def _records(self) -> ChunkRecords:
        kinds: dict[Kind, int] = {}
        columns: list[list[Column]] = [[], [], [], []]
        count = 0
        for tensor in self._tensors:
            entry, metadata = tensor.entry, tensor.part.metadata
            self._first[id(tensor)] = count
            count += entry.count
            rows = slice(entry.first, entry.first + entry.count)
            shapes, inverse = np.unique(entry.boxes[:, 1], axis=0, return_inverse=True)
            known = [kinds.setdefault(Kind(entry.dtype, tuple(s)), len(kinds)) for s in shapes.tolist()]
            of_kind = np.array(known, dtype=np.int64)[inverse.reshape(-1)]
            file = metadata.file[rows].astype(np.int64) + tensor.part.first_file
            for column, part in zip(
                columns, (of_kind, file, metadata.offset[rows], metadata.length[rows]), strict=True
            ):
                column.append(part)
        kind, file, offset, length = (np.concatenate(c) if c else np.zeros(0, np.int64) for c in columns)
        return ChunkRecords(kind.astype(np.int32), file.astype(np.int32), offset, length, list(kinds))

    def scalar(self, tensor: SavedTensor) -> Scalar | None:
        """The number of a tensor with one element; None if it is not a plain number, or has several chunks."""
        entry = tensor.entry
        raw = self._places.scalars.get(self._first[id(tensor)]) if entry.count == 1 else None
        if raw is None or len(raw) != entry.dtype.itemsize_bytes:
            return None
        return Scalar.of_element(raw, entry.dtype, entry.shape)

    def class_of(self, saved: Sequence[SavedTensor]) -> str | None:
        """The class of a tensor that is made of others, such as a quantized one; None for plain tensors."""
        rows = (self._first[id(s)] + i for s in saved for i in range(s.entry.count)) if self._places.classes else ()
        return next((self._places.classes[row].dotted for row in rows if row in self._places.classes), None)

    def opaque(self, saved: Sequence[SavedTensor], kind: str) -> OpaqueTensor:
        """A tensor of a class of its own, whose chunks are objects that hold tensors.

        Raises:
            SourceError: `source.unsupported` for a save without collectives: nothing compares the copies of ranks.
        """
        entry = saved[0].entry
        if len(saved) > 1:
            raise SourceError(
                "source.unsupported",
                f"{printable(entry.key)} is a {printable(kind)}, and each rank saved alone (use_collectives=False)",
                fix="save with collectives, as dcp.save does by default",
            )
        metadata, rows = saved[0].part.metadata, range(entry.first, entry.first + entry.count)
        files = [int(metadata.file[row]) + saved[0].part.first_file for row in rows]
        parts = [
            self._files[file].part(int(metadata.offset[row]), int(metadata.length[row]))
            for file, row in zip(files, rows, strict=True)
        ]
        parsed = open_all(parts, lambda part: open_torch_file(part, self._pickles.ledger, pickles=self._pickles))
        values = [self._carried.carried(one, file) for one, file in zip(parsed, files, strict=True)]
        boxes = [(tuple(offsets), tuple(sizes)) for offsets, sizes in entry.boxes.tolist()]
        chunks = tuple(OpaqueChunk(*box, value) for box, value in zip(boxes, values, strict=True))
        return OpaqueTensor(kind, entry.dtype, entry.shape, chunks)

    def add(self, fqn: str, state: str, saved: Sequence[SavedTensor]) -> int:
        """Register a tensor, given the entries of all ranks that saved some of it; returns its number.

        Raises:
            SourceError: `checkpoint.coverage`, `checkpoint.too_large`, `source.unsupported`, among others for a tensor
                that is made of several.
        """
        entry = saved[0].entry
        chunks = self._plain_chunks(fqn, state, saved)
        if self._is_strided(chunks) and len(chunks.row) == 1 and tuple(chunks.boxes[0, 1].tolist()) == entry.shape:
            return self._part(fqn, state, chunks, 0, saved[0])
        return add_boxes(self._builder, LogicalTensor(fqn, state, entry.dtype, entry.shape), self._held(chunks, entry))

    def boxes(self, fqn: str, state: str, saved: Sequence[SavedTensor]) -> Boxes:
        """The boxes of a tensor that becomes several ones, each once; the tensor itself is not registered.

        Raises:
            SourceError: `source.unsupported`, among others for a tensor that is made of several.
        """
        return self._held(self._plain_chunks(fqn, state, saved), saved[0].entry)

    def _plain_chunks(self, fqn: str, state: str, saved: Sequence[SavedTensor]) -> _Chunks:
        entry = saved[0].entry
        if (kind := self.class_of(saved)) is not None:
            raise SourceError(
                "source.unsupported",
                f"{printable(entry.key)} is not a plain tensor, but a {printable(kind)}",
                fix="save it as a plain tensor (dequantized), or leave it out of the state dict",
            )
        return self._without_copies(fqn, state, self._chunks(saved), entry.shape, saved[0])

    def _is_strided(self, chunks: _Chunks) -> bool:
        return any(row in self._places.strides for row in chunks.row.tolist())

    def _held(self, chunks: _Chunks, entry: TensorEntry) -> Boxes:
        if self._is_strided(chunks):
            raise SourceError(
                "source.unsupported",
                f"chunks of {printable(entry.key)} are not in row-major order, as those of a transposed parameter",
                fix="make the parameter contiguous before it is sharded, and save again",
            )
        return Boxes(chunks.boxes, chunks.file, chunks.offset)

    def _chunks(self, saved: Sequence[SavedTensor]) -> _Chunks:
        boxes, files, rows = list[Column](), list[Column](), list[Column]()
        for tensor in saved:
            entry, metadata = tensor.entry, tensor.part.metadata
            first = self._first[id(tensor)]
            boxes.append(entry.boxes)
            file = metadata.file[entry.first : entry.first + entry.count]
            files.append(file.astype(np.int64) + tensor.part.first_file)
            rows.append(np.arange(first, first + entry.count, dtype=np.int64))
        row = np.concatenate(rows)
        return _Chunks(np.concatenate(boxes), np.concatenate(files), self._places.offset[row], row)

    def _without_copies(
        self, fqn: str, state: str, chunks: _Chunks, shape: tuple[int, ...], saved: SavedTensor
    ) -> _Chunks:
        """The chunks, each box once. Copies must hold the same elements, which is checked before anything is written.

        Without collectives, ranks do not know what others save: what all of them hold is in the file of each.
        """
        if len(chunks.row) < 2:
            return chunks
        flat = chunks.boxes.reshape(len(chunks.row), -1)
        _, first, inverse = np.unique(flat, axis=0, return_index=True, return_inverse=True)
        if len(first) == len(flat):
            return chunks
        inverse = inverse.reshape(-1)
        for row in np.flatnonzero(first[inverse] != np.arange(len(flat))).tolist():
            pair = (int(first[inverse[row]]), row)
            one, other = (self._part(fqn, state, chunks, at, saved) for at in pair)
            where = self._files[int(chunks.file[row])].name
            self.agreements.append(Agreement(fqn, state, one, other, where))
        return chunks.rows(np.sort(first))

    def _part(self, fqn: str, state: str, chunks: _Chunks, at: int, saved: SavedTensor) -> int:
        """Register one chunk as a tensor of its own."""
        shape = tuple(chunks.boxes[at, 1].tolist())
        number = self._builder.tensor(fqn, state, saved.entry.dtype, shape)
        stride = self._places.strides.get(int(chunks.row[at]))
        self._builder.whole(number, file=int(chunks.file[at]), offset=int(chunks.offset[at]), stride=stride)
        return number


def restored_boxes(boxes: Boxes, entry: TensorEntry, original: tuple[int, ...]) -> Boxes:
    """The boxes of a tensor in its own shape, from those of an entry with a row for each part of it.

    Megatron-core up to 0.14 saves states of a shape [X, Y], whose parts are [x, y], as [X/x, Y/y, x*y]: the last axis
    counts the elements of a part in row-major order, and each data-parallel rank saved a run of them.

    Args:
        boxes: Those of the entry.
        entry: The entry.
        original: The shape of the tensor: `nd_reformulated_orig_global_shape` of the metadata.

    Raises:
        SourceError: `checkpoint.malformed` for shapes or boxes that do not fit this.

    Source: megatron-core 0.12.3 to 0.14.0 `dist_checkpointing/strategies/resharding.py`
    (`nd_flattened_tensor_reformulated_global_shape`), `strategies/torch.py` (`sharded_tensor_to_torch_sharded_tensor`);
    verified by running 0.12.3, 0.13.1 and 0.14.0.
    """
    *parts, numel = entry.shape or (0,)
    fits = len(parts) == len(original) > 0 and all(
        count > 0 and size > 0 and size % count == 0 for size, count in zip(original, parts, strict=True)
    )
    local = np.array([size // count for size, count in zip(original, parts, strict=True)] if fits else [], np.int64)
    place, size = boxes.boxes[:, 0], boxes.boxes[:, 1]
    if not fits or prod(local.tolist()) != numel or (size[:, :-1] != 1).any():
        raise SourceError(
            "checkpoint.malformed",
            f"{printable(entry.key)} is {entry.shape} in the file, and its tensor {original}: these are no parts of it",
            fix="the metadata is damaged: copy the checkpoint again",
        )
    # A run of elements is cut into boxes: rows that it begins within, whole ones, and those that it ends within. `at`
    # moves on from axis to axis, outwards and back.
    width = np.array([prod(local[dim + 1 :].tolist()) for dim in range(len(local))], np.int64)
    corner, begin = place[:, :-1] * local, place[:, -1]
    at, end = begin.copy(), begin + size[:, -1]
    found: list[tuple[npt.NDArray[np.int64], ...]] = []
    outwards = [*range(len(local) - 1, 0, -1)]
    for dim, out in [*((d, True) for d in outwards), *((d, False) for d in range(len(local)))]:
        unit = int(width[dim])
        until = end // unit * unit
        if out:
            row = unit * int(local[dim])
            until = np.minimum(until, -(-at // row) * row)
        kept = np.flatnonzero(until > at)
        inner = np.zeros((len(kept), 2, len(local)), np.int64)
        inner[:, 0, : dim + 1] = at[kept, None] // width[: dim + 1] % local[: dim + 1]
        inner[:, 1, :dim], inner[:, 1, dim] = 1, (until - at)[kept] // unit
        inner[:, 1, dim + 1 :] = local[dim + 1 :]
        inner[:, 0] += corner[kept]
        found.append((inner, boxes.file[kept], boxes.offset[kept] + (at - begin)[kept] * entry.dtype.itemsize_bytes))
        at = np.maximum(at, until)
    inner, file, offset = (np.concatenate(column) for column in zip(*found, strict=True))
    return Boxes(inner, file, offset)
