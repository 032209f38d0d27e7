"""The entries of a state dict as torch flattens it: tensors and values by paths of keys.

Source: torch 2.13.0 `distributed/checkpoint/_traverse.py` (`traverse_state_dict`: dicts are entered, lists only if they
contain tensors or dicts; keys become texts), `distributed/checkpoint/_nested_dict.py` (paths joined by dots).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from reshard.errors import SourceError, printable
from reshard_engine.checkpoint import Scalar
from reshard_engine.formats.dcp.facts import OpaqueTensor
from reshard_engine.pickles.nodes import (
    Node,
    PDict,
    PList,
    PLiteral,
    PTensorRef,
    check_depth,
    is_mapping,
    mapping_items,
)
from reshard_engine.tensors.dtypes import FLOAT32, Dtype

KeyPath = tuple[str | int, ...]
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
class LiteralEntry:
    """A tensor whose bytes are known, such as a step count."""

    path: KeyPath
    literal: PLiteral


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """A value that is no tensor."""

    path: KeyPath
    value: Node


@dataclass(frozen=True, slots=True)
class OpaqueEntry:
    """A tensor of a class of its own, whose chunks stay as they are."""

    path: KeyPath
    tensor: OpaqueTensor


StateEntry = TensorEntry | LiteralEntry | ValueEntry | OpaqueEntry


def key_of(path: KeyPath) -> str:
    """The flat key of a path."""
    return ".".join(map(str, path))


def flattened(path: KeyPath, node: Node) -> Iterator[tuple[KeyPath, Node]]:
    """The leaves of a value as torch flattens it: tensors, and values without tensors in them.

    Raises:
        SourceError: `pickle.too_deep`, `checkpoint.malformed` for a dict whose keys are neither texts nor integers.
    """
    check_depth(len(path))
    if isinstance(node, PDict) or is_mapping(node):
        for key, value in mapping_items(node, what=printable(key_of(path))).items():
            yield from flattened((*path, str(key)), value)
    elif _is_entered(node, len(path)):
        for number, item in enumerate(node.items):
            yield from flattened((*path, number), item)
    else:
        yield path, node


def _is_entered(node: Node, depth: int) -> bool:
    """True for a list with tensors, dicts, or lists that have some."""
    check_depth(depth)
    return isinstance(node, PList) and any(
        isinstance(i, PTensorRef | PLiteral) or is_mapping(i) or _is_entered(i, depth + 1) for i in node.items
    )


def number_entry(path: KeyPath, scalar: Scalar) -> StateEntry:
    """A number per parameter as torch's optimizers keep it: a tensor of one element; a Python number becomes fp32.

    Source: torch 2.13.0 `optim/adam.py` (`_init_group`: `step` is a tensor of `_get_scalar_dtype()`).
    """
    if scalar.dtype is not None:
        return LiteralEntry(path, PLiteral(scalar.dtype.name, scalar.shape, scalar.raw))
    try:
        raw = struct.pack("<f", scalar.value)
    except OverflowError as error:
        raise SourceError("checkpoint.malformed", f"{printable(key_of(path))} is {scalar.value}") from error
    return LiteralEntry(path, PLiteral(FLOAT32.name, (), raw))
