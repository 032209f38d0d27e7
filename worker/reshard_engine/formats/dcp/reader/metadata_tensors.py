"""Reads `state_dict_metadata`: the type, the shape and the chunks of every tensor, and the keys of other values.

Source: torch 2.13.0 `distributed/checkpoint/metadata.py` (`TensorStorageMetadata`, `ChunkStorageMetadata`,
`BytesStorageMetadata`, which has no attributes).
"""

from __future__ import annotations

import numpy as np

from reshard.errors import SourceError, printable
from reshard_engine.formats.dcp.reader import metadata_names as names
from reshard_engine.formats.dcp.reader.metadata_columns import Chunks
from reshard_engine.formats.dcp.reader.metadata_nodes import attributes_of, class_of, dtype_of, malformed, size_of
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
        if class_of(node) == names.BYTES:
            attributes_of(node, names.BYTES, _NOTHING, f"the entry of {printable(key)}")
        else:
            found.append(_tensor(number, key, node))
    return found


def _tensor(number: int, key: str, node: Node) -> Chunks:
    what = f"tensor {printable(key)}"
    parts = attributes_of(node, names.TENSOR, _TENSOR, what)
    dtype = dtype_of(parts.get("properties"), what)
    shape = size_of(parts.get("size"), f"the size of {what}")
    chunks = parts.get("chunks")
    if not isinstance(chunks, PList):
        raise malformed(f"the chunks of {what}", chunks, "a list")
    offsets: list[int] = []
    sizes: list[int] = []
    for chunk in chunks.items:
        ends = attributes_of(chunk, names.CHUNK, _CHUNK, f"a chunk of {what}")
        offsets += _corner(ends.get("offsets"), shape, what)
        sizes += _corner(ends.get("sizes"), shape, what)
    box = len(chunks.items), len(shape)
    columns = np.array(offsets, np.int64).reshape(box), np.array(sizes, np.int64).reshape(box)
    return Chunks(number, key, dtype, shape, *columns)


def _corner(node: Node, shape: tuple[int, ...], what: str) -> tuple[int, ...]:
    corner = size_of(node, f"a chunk of {what}")
    if len(corner) != len(shape):
        raise SourceError("tensor.bad_extent", f"{what} has {len(shape)} dimensions, but a chunk of it {len(corner)}")
    return corner
