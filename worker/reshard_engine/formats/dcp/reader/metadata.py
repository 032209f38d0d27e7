"""The contents of `.metadata`: which chunks of which tensors, and which other values, lie where.

Chunks are columns of integers, not objects: 5,000 tensors on 1,024 ranks have five million of them.

Source: torch 2.13.0 `distributed/checkpoint/metadata.py` (`Metadata`, `TensorStorageMetadata`, `ChunkStorageMetadata`,
`BytesStorageMetadata`, `MetadataIndex`), `distributed/checkpoint/filesystem.py` (`_StorageInfo`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from reshard_engine.tensors.dtypes import Dtype

Column = npt.NDArray[np.int64]
Narrow = npt.NDArray[np.int32]
KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor. Its chunks are the rows `[first, first + count)` of `Metadata`'s columns."""

    key: str
    """The flat key of the state dict."""
    dtype: Dtype
    shape: tuple[int, ...]
    """The global shape."""
    first: int
    count: int
    boxes: Column
    """`[count, 2, dims]`: the offsets and the sizes of each chunk in the global tensor, in elements."""
    requires_grad: bool = False
    """True proves a parameter: `named_parameters()` was saved, or our own writer marked it. `state_dict()` detaches
    all tensors, so that False says nothing."""


@dataclass(frozen=True, slots=True)
class BytesEntry:
    """A value that is no tensor: a stream of `torch.save` in a range of a file."""

    key: str
    file: int
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Metadata:
    """The whole of `.metadata`. The constructor of the parser has matched every chunk with its place."""

    tensors: tuple[TensorEntry, ...]
    values: tuple[BytesEntry, ...]
    paths: Mapping[str, KeyPath] | None
    """`planner_data`: for each flat key the path of keys and list indices in the nested state dict; None if absent."""
    files: tuple[str, ...]
    """Relative paths of the `.distcp` files, each once, in the order in which they are first named."""
    file: Narrow
    """For each chunk the index of its file in `files`."""
    offset: Column
    """For each chunk the byte offset of its record in the file."""
    length: Column
    """For each chunk the length of its record in bytes."""
    transforms: Mapping[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    """Transform descriptors by row, for the chunks that have any."""
    original_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """`mcore_data`: the shapes of tensors that Megatron flattened, before that; their `shape` is the flattened one."""
    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    """Counters of the run that our own writer keeps in an attribute of its own, which torch ignores."""
    buffers: frozenset[str] | None = None
    """The keys of tensors that our own writer knew for buffers; None in files of others."""
