"""Lays out the files of one `dcp.save`: records of chunks and values in `.distcp` files, and `.metadata`.

Large tensors are cut along their first dimension into a power of two of chunks, up to 64, so that a rank of a mesh of
any size reads little more than its own rows: torch reads whole records. Equal chunks share the bytes of their headers.

Source: torch 2.13.0 `distributed/checkpoint/filesystem.py` (`_write_item`; values come first in a file),
`distributed/checkpoint/planner_helpers.py`, `distributed/tensor/placement_types.py` (`Shard` cuts as `torch.chunk`);
verified by running.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

from reshard.choices import OpaquePolicy
from reshard_engine.formats.dcp_files.metadata.model import BUFFERS, METADATA_FILE, OWN_STATE, KeyPath
from reshard_engine.formats.dcp_files.tensors import OpaqueTensor
from reshard_engine.formats.torch_archive import StorageRecord, output_tensor, tree_template, zip_template
from reshard_engine.pickles.emit import emit_pickle
from reshard_engine.pickles.nodes import Global, Node, PDict, PList, PLiteral, PObject, PTuple, mapping_of
from reshard_engine.pickles.rebuild import made_of_tensors
from reshard_engine.tensors.dtypes import BY_NAME, Dtype
from reshard_engine.tensors.layout import Body, FileTemplate, TargetFile, literal_template, require_distinct
from reshard_engine.tensors.shard_map import ShardMap

# The entries of a state dict as torch flattens it: tensors and values by paths of keys.
#
# Source: torch 2.13.0 `distributed/checkpoint/_traverse.py` (`traverse_state_dict`: dicts are entered, lists only if
# they contain tensors or dicts; keys become texts), `distributed/checkpoint/_nested_dict.py` (paths joined by dots).

Kind = Literal["parameter", "buffer"] | None
"""What a tensor of the model is known to be. `.metadata` keeps it for a reader of ours: torch ignores both marks."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of the state dict, filled from a tensor of the shard map, or with zeros."""

    path: KeyPath
    tensor: int
    """Number in the shard map, or `tensors.layout.ZEROS`."""
    dtype: Dtype
    shape: tuple[int, ...]
    kind: Kind = None
    whole: bool = False
    """True for a tensor that is one chunk, whatever its size: buffers, which FSDP does not shard."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor that is filled from one tensor of the shard map, or with zeros."""

    tensor: int
    """Number in the shard map, or `tensors.layout.ZEROS`."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    axis: int = 0
    """The axis along which chunks are cut; those before it have one index each."""


@dataclass(frozen=True, slots=True)
class JoinedEntry:
    """A tensor of the state dict whose boxes are tensors of their own elsewhere, such as layers."""

    path: KeyPath
    dtype: Dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    """The boxes, which tile the tensor."""
    kind: Kind = None


@dataclass(frozen=True, slots=True)
class RunsEntry:
    """A tensor of the state dict whose chunks are put together from runs of other tensors, such as vectors of them."""

    path: KeyPath
    dtype: Dtype
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, int, int], ...]], ...]
    """Offsets and sizes of each chunk, and its runs as in `PRuns`. They tile the tensor."""


@dataclass(frozen=True, slots=True)
class LiteralEntry:
    """A tensor whose bytes are known, such as a step count."""

    path: KeyPath
    literal: PLiteral


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """A value that is not a tensor."""

    path: KeyPath
    value: Node


@dataclass(frozen=True, slots=True)
class OpaqueEntry:
    """A tensor of a class of its own, whose chunks stay as they are."""

    path: KeyPath
    tensor: OpaqueTensor


StateEntry = TensorEntry | LiteralEntry | ValueEntry | OpaqueEntry
AnyEntry = StateEntry | JoinedEntry | RunsEntry


def key_of(path: KeyPath) -> str:
    """The flat key of a path."""
    return ".".join(map(str, path))


# Writes `.metadata`: the pickle of a `Metadata`, as torch's own writer makes it but for the pickle's protocol.
#
# Source: torch 2.13.0 `distributed/checkpoint/metadata.py`, `distributed/checkpoint/filesystem.py` (`finish`,
# `_StorageInfo`); verified by loading with torch.

_METADATA = "torch.distributed.checkpoint.metadata"
_VERSION = "1.0.0"
"""Source: torch 2.13.0 `distributed/checkpoint/metadata.py` (`CURRENT_DCP_VERSION`)."""
_CONTIGUOUS = 0
"""`_MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT`."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a tensor in global coordinates, or a value, with the place of its record."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Saved:
    """An entry of the state dict with its records."""

    path: KeyPath
    dtype: Dtype | None
    """None for a value that is not a tensor."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    kind: Kind = None


def metadata_bytes(saved: Sequence[Saved], files: Sequence[str], counters: Mapping[str, int]) -> bytes:
    """The content of `.metadata` for these entries, the names of their files and the run's counters."""
    described: dict[str | int, Node] = {}
    places: list[Node] = []
    sizes = _Sizes()
    for entry in saved:
        key = key_of(entry.path)
        described[key] = _value() if entry.dtype is None else _tensor(entry, entry.dtype, sizes)
        for number, chunk in enumerate(entry.chunks):
            places.append(_index(key, None if entry.dtype is None else sizes.of(chunk.offsets), number))
            places.append(_place(files[chunk.file], chunk))
    state: dict[str | int, Node] = {
        "state_dict_metadata": mapping_of(described),
        "planner_data": mapping_of({key_of(e.path): PTuple(e.path) for e in saved}),
        "storage_data": PDict(places),
        "storage_meta": None,
        "version": _VERSION,
    }
    state[OWN_STATE] = mapping_of({**counters, BUFFERS: PList([key_of(e.path) for e in saved if e.kind == "buffer"])})
    return emit_pickle(_object("Metadata", state), keep_foreign=True)


class _Sizes:
    """`torch.Size` objects; equal ones are one object, as a pickle then refers to the first one."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Node] = {}

    def of(self, numbers: tuple[int, ...]) -> Node:
        if numbers not in self._known:
            self._known[numbers] = PObject("reduce", Global("torch", "Size"), PTuple((PTuple(numbers),)))
        return self._known[numbers]


def _object(name: str, state: Mapping[str | int, Node], module: str = _METADATA) -> PObject:
    return PObject("newobj", Global(module, name), PTuple(), state=mapping_of({**state}), has_state=True)


def _value() -> Node:
    return PObject("newobj", Global(_METADATA, "BytesStorageMetadata"), PTuple())


def _tensor(entry: Saved, dtype: Dtype, sizes: _Sizes) -> Node:
    layout = PObject("reduce", Global("torch.serialization", "_get_layout"), PTuple(("torch.strided",)))
    memory = PObject("reduce", Global(_METADATA, "_MEM_FORMAT_ENCODING"), PTuple((_CONTIGUOUS,)))
    state = PTuple((Global("torch", dtype.name), layout, entry.kind == "parameter", memory, False))
    properties = PObject("newobj", Global(_METADATA, "TensorProperties"), PTuple(), state=state, has_state=True)
    chunks: list[Node] = [
        _object("ChunkStorageMetadata", {"offsets": sizes.of(c.offsets), "sizes": sizes.of(c.sizes)})
        for c in entry.chunks
    ]
    return _object(
        "TensorStorageMetadata",
        {"properties": properties, "size": sizes.of(entry.shape), "chunks": PList(chunks)},
    )


def _index(key: str, offset: Node, number: int) -> Node:
    if offset is None:
        return _object("MetadataIndex", {"fqn": key, "index": None})
    return _object("MetadataIndex", {"fqn": key, "index": number, "offset": offset})


def _place(file: str, chunk: Chunk) -> Node:
    state: dict[str | int, Node] = {"relative_path": file, "offset": chunk.offset, "length": chunk.length}
    return _object("_StorageInfo", state, "torch.distributed.checkpoint.filesystem")


# Lays out the records of one save in files.

_NONE: Mapping[str, int] = {}
_ROOT = "archive"
"""Root of the archives that torch saves into a stream."""
_MOST_CHUNKS = 64
_LEAST_CHUNK_BYTES = 1 << 20
_FILE_BYTES = 4_000_000_000
MOST_DEFAULT_FILES = 256


@dataclass(slots=True)
class _File:
    """A `.distcp` file being laid out."""

    at: int = 0
    literals: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    bodies: list[Body] = field(default_factory=list[Body])
    records: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    crc_slots: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    slots: dict[int, int] = field(default_factory=dict[int, int])
    archives: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def add(self, template: FileTemplate, tensors: Sequence[int], begin: int = 0) -> tuple[int, int]:
        """Append an archive; returns its offset and length. Bodies begin at element `begin` of their tensors."""
        at, first = self.at, len(self.records)
        self.literals += [(at + offset, data) for offset, data in template.literals]
        for body in template.bodies:
            slot = self.slots.setdefault(tensors[body.slot], len(self.slots))
            record = None if body.record is None else body.record + first
            self.bodies.append(
                replace(
                    body, offset=at + body.offset, slot=slot, begin=body.begin + begin, end=body.end + begin,
                    record=record,
                )
            )  # fmt: skip
        self.records += [(at + offset, length) for offset, length in template.records]
        self.crc_slots += [(at + offset, record + first) for offset, record in template.crc_slots]
        self.at += template.size_bytes
        self.archives.append((at, template.size_bytes))
        return self.archives[-1]

    def add_runs(self, template: FileTemplate, runs: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
        """Append an archive of one tensor, which runs of others fill; returns its offset and length."""
        (body,) = template.bodies
        at, first = self.at + body.offset, len(self.records)
        found = self.add(template, (runs[0][0],))
        # In place of the body that `add` made for the whole tensor.
        self.bodies.pop()
        for tensor, begin, end in runs:
            slot = self.slots.setdefault(tensor, len(self.slots))
            record = None if body.record is None else body.record + first
            self.bodies.append(replace(body, offset=at, slot=slot, begin=begin, end=end, record=record))
            at += self.bodies[-1].length_bytes
        return found

    def target(self, path: str) -> TargetFile:
        """The whole file."""
        template = FileTemplate(
            self.at, tuple(self.literals), tuple(self.bodies), tuple(self.records), tuple(self.crc_slots)
        )
        return TargetFile(path, template, tuple(self.slots), archives=tuple(self.archives))


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """The way in which a state dict is divided."""

    shard_map: ShardMap
    opaque: OpaquePolicy
    files: int | None = None
    """Number of files; None for one per 4 GB."""


class Shards:
    """Lays out state dicts; equal archives are made once."""

    def __init__(self, options: ShardOptions) -> None:
        """Start without archives."""
        self._options = options
        self._chunks: dict[tuple[str, tuple[int, ...]], FileTemplate] = {}
        self._values: dict[object, tuple[Node, FileTemplate, Sequence[int]]] = {}

    def lay_out(
        self, entries: Sequence[AnyEntry], *, folder: str = "", counters: Mapping[str, int] = _NONE
    ) -> list[TargetFile]:
        """The files of one directory; `.metadata`, without which nothing is loaded, is the last one.

        Args:
            entries: The state dict.
            folder: The directory's name in the target; empty for the target itself.
            counters: Counters of the run, which `.metadata` keeps for a reader of ours.

        Raises:
            SourceError: `checkpoint.ambiguous` if two entries have one key; `pickle.forbidden_global`.
        """
        require_distinct(key_of(e.path) for e in entries)
        files = [_File() for _ in range(self._count(entries))]
        saved: dict[int, Saved] = {}
        # torch writes values before tensors. They are small: the first file takes them.
        for number, entry in enumerate(entries):
            if isinstance(entry, LiteralEntry | ValueEntry):
                saved[number] = self._small(entry, files[0])
        for number, entry in enumerate(entries):
            if isinstance(entry, TensorEntry | JoinedEntry):
                saved[number] = self._tensor(entry, files)
            elif isinstance(entry, RunsEntry):
                saved[number] = self._runs(entry, files)
            elif isinstance(entry, OpaqueEntry):
                saved[number] = self._opaque(entry, files)
        prefix = f"{folder}/" if folder else ""
        names = [f"__{rank}_0.distcp" for rank in range(len(files))]
        laid = [file.target(prefix + name) for file, name in zip(files, names, strict=True)]
        metadata = metadata_bytes([saved[number] for number in range(len(entries))], names, counters)
        return [*laid, TargetFile(f"{prefix}{METADATA_FILE}", literal_template(metadata), (), commit=True)]

    def _count(self, entries: Sequence[AnyEntry]) -> int:
        plain = (e for e in entries if isinstance(e, TensorEntry | JoinedEntry | RunsEntry))
        size = sum(prod(e.shape) * e.dtype.itemsize_bytes for e in plain)
        size += sum(prod(e.tensor.shape) for e in entries if isinstance(e, OpaqueEntry))  # a byte for an element
        return self._options.files or min(MOST_DEFAULT_FILES, max(1, -(-size // _FILE_BYTES)))

    def _small(self, entry: LiteralEntry | ValueEntry, file: _File) -> Saved:
        value: Node = entry.literal if isinstance(entry, LiteralEntry) else entry.value
        # A flattened optimizer has each hyper-parameter for each parameter: the same object thousands of times.
        key = value if isinstance(value, PLiteral) else id(value)
        if key not in self._values:
            made = tree_template(_ROOT, value, self._options.shard_map, opaque=self._options.opaque)
            self._values[key] = (value, *made)
        _, template, slots = self._values[key]
        offset, length = file.add(template, slots)
        if (made := made_of_tensors(value)) is not None:
            # A tensor to torch, which saves it as one, with a record of its own.
            whole = Chunk((0,) * len(made.shape), made.shape, 0, offset, length)
            return Saved(entry.path, BY_NAME[made.dtype], made.shape, (whole,))
        if isinstance(entry, ValueEntry):
            return Saved(entry.path, None, (), (Chunk((), (), 0, offset, length),))
        shape = entry.literal.shape
        place = Chunk((0,) * len(shape), shape, 0, offset, length)
        return Saved(entry.path, BY_NAME[entry.literal.dtype], shape, (place,))

    def _tensor(self, entry: TensorEntry | JoinedEntry, files: Sequence[_File]) -> Saved:
        if isinstance(entry, JoinedEntry):
            chunks = [chunk for part in entry.parts for chunk in self._chunks_of(part, entry.dtype, files)]
        else:
            part = Part(entry.tensor, (0,) * len(entry.shape), entry.shape)
            chunks = self._chunks_of(part, entry.dtype, files, most=1 if entry.whole else _MOST_CHUNKS)
        return Saved(entry.path, entry.dtype, entry.shape, tuple(chunks), entry.kind)

    def _chunks_of(self, part: Part, dtype: Dtype, files: Sequence[_File], *, most: int = _MOST_CHUNKS) -> list[Chunk]:
        """The records of one box of a tensor."""
        axis, shape = part.axis, part.sizes
        rows, row = (shape[axis], prod(shape[axis + 1 :])) if shape else (1, 1)
        count = min(most, _chunk_count(rows, rows * row * dtype.itemsize_bytes))
        step = -(-rows // count) if rows else 0
        found: list[Chunk] = []
        smallest = min(range(len(files)), key=lambda i: files[i].at)
        for number, start in enumerate(range(0, rows, step) if step else (0,)):
            taken = min(step, rows - start)
            sizes = (*shape[:axis], taken, *shape[axis + 1 :]) if shape else ()
            offsets = tuple(o + start if at == axis else o for at, o in enumerate(part.offsets))
            place = number * len(files) // count if count >= len(files) else (smallest + number) % len(files)
            offset, length = files[place].add(self._chunk(dtype, sizes), (part.tensor,), start * row)
            found.append(Chunk(offsets, sizes, place, offset, length))
        return found

    def _runs(self, entry: RunsEntry, files: Sequence[_File]) -> Saved:
        chunks: list[Chunk] = []
        for offsets, sizes, runs in entry.chunks:
            place = min(range(len(files)), key=lambda i: files[i].at)
            offset, length = files[place].add_runs(self._chunk(entry.dtype, sizes), runs)
            chunks.append(Chunk(offsets, sizes, place, offset, length))
        return Saved(entry.path, entry.dtype, entry.shape, tuple(chunks))

    def _opaque(self, entry: OpaqueEntry, files: Sequence[_File]) -> Saved:
        """The chunks of a tensor of a class of its own."""
        chunks: list[Chunk] = []
        for chunk in entry.tensor.chunks:
            template, slots = tree_template(_ROOT, chunk.value, self._options.shard_map, opaque=self._options.opaque)
            place = min(range(len(files)), key=lambda i: files[i].at)
            offset, length = files[place].add(template, slots)
            chunks.append(Chunk(chunk.offsets, chunk.sizes, place, offset, length))
        return Saved(entry.path, entry.tensor.dtype, entry.tensor.shape, tuple(chunks), None)

    def _chunk(self, dtype: Dtype, shape: tuple[int, ...]) -> FileTemplate:
        key = (dtype.name, shape)
        if key not in self._chunks:
            tensor = output_tensor("0", dtype, shape)
            pickle = emit_pickle(tensor)
            storage = StorageRecord("0", ((0, 0, tensor.numel, dtype),))
            self._chunks[key] = _merged(zip_template(_ROOT, pickle, [storage]))
        return self._chunks[key]


def _chunk_count(rows: int, size_bytes: int) -> int:
    """Number of chunks: a power of two, so that the meshes of most runs read whole records."""
    count = 1
    while 2 * count <= min(_MOST_CHUNKS, rows) and size_bytes >= 2 * count * _LEAST_CHUNK_BYTES:
        count *= 2
    return count


def _merged(template: FileTemplate) -> FileTemplate:
    """The template with neighbouring literals joined: one before the data and one behind it, which chunks share."""
    joined: list[tuple[int, bytes]] = []
    for offset, data in template.literals:
        if joined and joined[-1][0] + len(joined[-1][1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + data)
        else:
            joined.append((offset, data))
    return replace(template, literals=tuple(joined))
