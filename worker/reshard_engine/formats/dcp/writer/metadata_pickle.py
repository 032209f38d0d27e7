"""Writes `.metadata`: the pickle of a `Metadata`, as torch's own writer makes it but for the pickle's protocol.

Source: torch 2.13.0 `distributed/checkpoint/metadata.py`, `distributed/checkpoint/filesystem.py` (`finish`,
`_StorageInfo`); verified by loading with torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reshard_engine.formats.dcp.names import BUFFERS, OWN_STATE
from reshard_engine.formats.dcp.writer.entries import KeyPath, Kind, key_of
from reshard_engine.pickles.emit import emit_pickle
from reshard_engine.pickles.nodes import Global, Node, PDict, PList, PObject, PTuple, mapping_of
from reshard_engine.tensors.dtypes import Dtype

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
    """None for a value that is no tensor."""
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
