"""Reads `state_dict_metadata`: the type, the shape and the chunks of every tensor, and the keys of other values.

Source: torch 2.13.0 `distributed/checkpoint/metadata.py` (`TensorStorageMetadata`, `ChunkStorageMetadata`,
`BytesStorageMetadata`, which has no attributes).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np

from reshard.errors import SourceError, printable
from reshard_engine.formats.dcp.reader import metadata_names as names
from reshard_engine.formats.dcp.reader.metadata import Column
from reshard_engine.formats.dcp.reader.metadata_chunk_runs import ChunkRun
from reshard_engine.formats.dcp.reader.metadata_columns import Chunks
from reshard_engine.formats.dcp.reader.metadata_nodes import attributes_of, class_of, malformed, properties_of, size_of
from reshard_engine.formats.dcp.reader.metadata_tensor_runs import RegularTensor
from reshard_engine.pickles.nodes import Node, PList

_TENSOR = frozenset({"properties", "size", "chunks"})
_CHUNK = frozenset({"offsets", "sizes"})
_NOTHING: frozenset[str] = frozenset()


def tensors_of(items: dict[str, Node]) -> list[Chunks]:
    """The tensors among the entries of `state_dict_metadata`.

    Raises:
        SourceError: `checkpoint.malformed`, `tensor.bad_extent`, `tensor.unsupported`.
    """
    found: list[Chunks] = []
    for number, (key, node) in enumerate(items.items()):
        if isinstance(node, RegularTensor):
            dtype, requires_grad = properties_of(node.properties, f"tensor {printable(key)}")
            found.append(Chunks(number, key, dtype, node.shape, node.offsets, node.sizes, requires_grad))
        elif class_of(node) == names.BYTES:
            attributes_of(node, names.BYTES, _NOTHING, f"the entry of {printable(key)}")
        else:
            found.append(_tensor(number, key, node))
    return found


def _tensor(number: int, key: str, node: Node) -> Chunks:
    what = f"tensor {printable(key)}"
    parts = attributes_of(node, names.TENSOR, _TENSOR, what)
    dtype, requires_grad = properties_of(parts.get("properties"), what)
    shape = size_of(parts.get("size"), f"the size of {what}")
    chunks = parts.get("chunks")
    if not isinstance(chunks, PList):
        raise malformed(f"the chunks of {what}", chunks, "a list")
    parts = [_columns(run, shape, what) for run in _runs(chunks.items)]
    if len(parts) == 1:
        return Chunks(number, key, dtype, shape, *parts[0], requires_grad)
    empty = np.empty((0, len(shape)), np.int64)
    offsets, sizes = (np.concatenate([empty, *(part[end] for part in parts)]) for end in (0, 1))
    return Chunks(number, key, dtype, shape, offsets, sizes, requires_grad)


def _runs(items: list[Node]) -> Iterator[ChunkRun | list[Node]]:
    """The chunks of a list: runs of them, and those between."""
    for regular, run in groupby(items, lambda item: isinstance(item, ChunkRun)):
        if regular:
            yield from run
        else:
            yield list(run)


def _columns(run: ChunkRun | list[Node], shape: tuple[int, ...], what: str) -> tuple[Column, Column]:
    if isinstance(run, ChunkRun):
        _check_dims(run.offsets.shape[1], shape, what)
        return run.offsets, run.sizes
    offsets: list[int] = []
    sizes: list[int] = []
    for chunk in run:
        ends = attributes_of(chunk, names.CHUNK, _CHUNK, f"a chunk of {what}")
        for end, numbers in (("offsets", offsets), ("sizes", sizes)):
            corner = size_of(ends.get(end), f"a chunk of {what}")
            _check_dims(len(corner), shape, what)
            numbers.extend(corner)
    box = len(run), len(shape)
    return np.array(offsets, np.int64).reshape(box), np.array(sizes, np.int64).reshape(box)


def _check_dims(dims: int, shape: tuple[int, ...], what: str) -> None:
    if dims != len(shape):
        raise SourceError("tensor.bad_extent", f"{what} has {len(shape)} dimensions, but a chunk of it {dims}")
