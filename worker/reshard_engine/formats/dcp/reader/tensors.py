"""Tensors made of boxes in global coordinates: chunks of a `.metadata`, and shards of safetensors.

The files do not say how a tensor was sharded; nothing needs it.

Source: torch 2.13.0 `distributed/checkpoint/planner_helpers.py` (`_chunks_from_dtensor`, `_create_write_items`),
`distributed/tensor/_utils.py` (`compute_local_shape_and_global_offset`); verified by running.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from reshard.dcp_options import Framework
from reshard.errors import SourceError, listed, printable
from reshard_engine.checkpoint import Agreement, Checkpoint, Parameter, Scalar
from reshard_engine.containers.safetensors import SafetensorsEntry, SafetensorsFile, open_safetensors_file
from reshard_engine.containers.source_file import SourceFile, open_all, parse_json
from reshard_engine.containers.torch_file import SharedPickles, open_torch_file
from reshard_engine.formats.carried import named
from reshard_engine.formats.dcp.facts import SHARD_FILE, DcpFacts, OpaqueChunk, OpaqueTensor, names_of
from reshard_engine.formats.dcp.metadata.model import Column
from reshard_engine.formats.dcp.reader.records import ChunkRecords, Kind, find_places
from reshard_engine.formats.dcp.reader.saved_state import CarriedValues, SavedTensor
from reshard_engine.formats.format import ReadOptions
from reshard_engine.formats.model_weights import checked_name
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing
from reshard_engine.tensors.shard_map import Boxes, LogicalTensor, ShardMapBuilder, add_boxes


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
        if (kind := self.class_of(saved)) is not None:
            raise SourceError(
                "source.unsupported",
                f"{printable(entry.key)} is not a plain tensor, but a {printable(kind)}",
                fix="save it as a plain tensor (dequantized), or leave it out of the state dict",
            )
        chunks = self._without_copies(fqn, state, self._chunks(saved), entry.shape, saved[0])
        strided = [r for r in chunks.row.tolist() if r in self._places.strides]
        if strided:
            return self._add_strided(fqn, state, chunks, saved[0])
        held = Boxes(chunks.boxes, chunks.file, chunks.offset)
        return add_boxes(self._builder, LogicalTensor(fqn, state, entry.dtype, entry.shape), held)

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

    def _add_strided(self, fqn: str, state: str, chunks: _Chunks, saved: SavedTensor) -> int:
        entry = saved.entry
        if len(chunks.row) == 1 and tuple(chunks.boxes[0, 1].tolist()) == entry.shape:
            return self._part(fqn, state, chunks, 0, saved)
        raise SourceError(
            "source.unsupported",
            f"chunks of {printable(entry.key)} are not in row-major order, as those of a transposed parameter",
            fix="make the parameter contiguous before it is sharded, and save again",
        )


# Reads the sharded files of torch's Hugging Face storage writer: safetensors whose tensors are boxes of larger ones.
#
# Each file lists the offset of each of its tensors in the global tensor. Nothing states the global shapes, so the loss
# of all shards that are last along a dimension cannot be noticed.
#
# Source: torch 2.13.0 `distributed/checkpoint/hf_storage.py` (`HuggingFaceStorageWriter`, `save_distributed=True`),
# `distributed/checkpoint/_hf_utils.py` (`_gen_file_name`, `DCP_SHARDING_INFO`); verified by running.

_INFO = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"
_MOST = 1 << 62
_FIX = "the files are of different saves: copy the checkpoint again"
_STATE = "it is an optimizer's state, and this writer keeps none of its param groups"
_NOT_PROVEN = (
    "the files do not state global shapes: if all shards that are last along a dimension were lost, nothing would tell"
)


class HuggingFaceShardsReader:
    """Reads weights in shards of each rank, `shard-00001-model-00001-of-00001.safetensors`."""

    family = "dcp"

    def recognises(self, listing: Listing) -> bool:
        """True if there are files with such names."""
        return any(map(SHARD_FILE.fullmatch, names_of(listing)))

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """Read the weights of a directory.

        Raises:
            SourceError: `safetensors.*`, `checkpoint.coverage`, `checkpoint.malformed`, `checkpoint.mixed`,
                `name.invalid`.
        """
        numbers = {n: i for n, i in names_of(listing).items() if SHARD_FILE.fullmatch(n)}
        sources = [SourceFile(location.store, n, (listing.files[i],)) for n, i in sorted(numbers.items())]
        found: dict[str, list[tuple[int, SafetensorsEntry, tuple[int, ...]]]] = {}
        shards = open_all(sources, open_safetensors_file)
        for number, shard in enumerate(shards):
            offsets = _offsets(shard)
            for entry in shard.tensors:
                found.setdefault(checked_name(entry.name), []).append((number, entry, offsets[entry.name]))
        builder = ShardMapBuilder()
        states = _states(found)
        parameters = [_parameter(builder, name, parts) for name, parts in found.items() if name not in states]
        return Checkpoint(
            url=location.url,
            tag=options.tag,
            format="dcp-safetensors",
            framework_version=None,
            world={},
            files=tuple(sources),
            shard_map=builder.build(),
            parameters=tuple(parameters),
            buffers=(),
            shared={},
            optimizer=None,
            foreign_globals=(),
            warnings=(_NOT_PROVEN,),
            facts=DcpFacts(Framework.STATE_DICT),
            not_carried=named(states, _STATE),
        )


def _states(names: Collection[str]) -> list[str]:
    """The names that are of an optimizer's states: `state.`, the end of another name, and the state's name."""
    ends = {name[at:] for name in names for at in _starts(name)}
    found: list[str] = []
    for name in names:
        parts = name.split(".")
        below = [i + 1 for i, part in enumerate(parts[:-2]) if part == "state"]
        if any(".".join(parts[at:-1]) in ends for at in below):
            found.append(name)
    return found


def _starts(name: str) -> list[int]:
    """The places in a name at which a part of it begins."""
    return [0, *(i + 1 for i, char in enumerate(name) if char == ".")]


def _offsets(shard: SafetensorsFile) -> dict[str, tuple[int, ...]]:
    """The offset of each tensor of a file in its global tensor."""
    name = printable(shard.file.name)
    text = shard.metadata.get(_INFO)
    if text is None:
        raise SourceError("checkpoint.malformed", f"{name} has no {_INFO} in its header", fix=_FIX)
    info = parse_json(text.encode(), code="checkpoint.malformed", what=f"{_INFO} of {name}")
    entries = cast("dict[str, Any]", info) if isinstance(info, dict) else {}
    found: dict[str, tuple[int, ...]] = {}
    for tensor in shard.tensors:
        entry: Any = entries.get(tensor.name)
        offsets: Any = cast("dict[str, Any]", entry).get(_OFFSETS) if isinstance(entry, dict) else None
        numbers = cast("list[Any]", offsets) if isinstance(offsets, list) else []
        if len(numbers) != len(tensor.shape) or not all(type(n) is int and 0 <= n < _MOST for n in numbers):
            raise SourceError(
                "checkpoint.malformed",
                f"{name}: {printable(tensor.name)} has no offsets for its {len(tensor.shape)} dimensions",
            )
        found[tensor.name] = tuple(numbers)
    return found


def _parameter(
    builder: ShardMapBuilder, name: str, parts: list[tuple[int, SafetensorsEntry, tuple[int, ...]]]
) -> Parameter:
    dtypes = {entry.dtype.name for _, entry, _ in parts}
    if len(dtypes) > 1 or len({len(entry.shape) for _, entry, _ in parts}) > 1:
        text = f"the shards of {printable(name)} have several types or numbers of dimensions: {listed(sorted(dtypes))}"
        raise SourceError("checkpoint.mixed", text, fix=_FIX)
    dims = len(parts[0][2])
    shape = tuple(max(offsets[d] + entry.shape[d] for _, entry, offsets in parts) for d in range(dims))
    full = [p for p in parts if 0 not in p[1].shape]
    boxes = np.array([[offsets, entry.shape] for _, entry, offsets in full], dtype=np.int64).reshape(len(full), 2, dims)
    file = np.array([number for number, _, _ in full], dtype=np.int64)
    offset = np.array([entry.offset for _, entry, _ in full], dtype=np.int64)
    tensor = LogicalTensor(name, "weight", parts[0][1].dtype, shape)
    return Parameter(name, shape, None, add_boxes(builder, tensor, Boxes(boxes, file, offset)))
