"""Boxes of a tensor as pieces and views of the shard map.

Boxes that are runs of elements, such as rows, become pieces of the tensor. Other boxes, such as those of a mesh with
two axes, become tensors of their own, of which the whole tensor is a view.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from reshard.errors import SourceError, printable
from reshard_engine.formats.dcp.reader.metadata import Column
from reshard_engine.tensors.shard_map import LogicalTensor, ShardMapBuilder
from reshard_engine.tensors.views import MAX_BOXES, Box, View

_FIX = "a file is missing, or is of another save: compare the directory with that of the writer"


@dataclass(frozen=True, slots=True)
class Boxes:
    """The boxes of one tensor, packed in row-major order in files, as columns."""

    boxes: Column
    """`[count, 2, dims]`: offsets and sizes in the global tensor, in elements."""
    file: Column
    offset: Column
    """Byte offset of each box's first element in its file."""


def add_boxes(builder: ShardMapBuilder, tensor: LogicalTensor, held: Boxes) -> int:
    """Register a tensor that these boxes make up; returns its number.

    Raises:
        SourceError: `checkpoint.coverage`, `checkpoint.too_large` for more boxes than a view may have. The shard map
            proves the coverage of boxes that are runs.
    """
    begin, end, runs = _intervals(held.boxes, tensor.shape)
    if not runs.all():
        return _add_view(builder, tensor, held)
    number = builder.tensor(tensor.fqn, tensor.state, tensor.dtype, tensor.shape)
    numbers = np.full(len(begin), number, dtype=np.int64)
    builder.pieces(numbers, begin, end, file=held.file, offset=held.offset)
    return number


def _add_view(builder: ShardMapBuilder, tensor: LogicalTensor, held: Boxes) -> int:
    count = len(held.file)
    if count > MAX_BOXES:
        raise SourceError(
            "checkpoint.too_large",
            f"{printable(tensor.fqn)} has {count} chunks that are no runs of rows, the limit is {MAX_BOXES}",
        )
    boxes: list[Box] = []
    for at in range(count):
        offset, lengths = map(tuple, held.boxes[at].tolist())
        part = builder.tensor(tensor.fqn, tensor.state, tensor.dtype, lengths)
        builder.whole(part, file=int(held.file[at]), offset=int(held.offset[at]))
        boxes.append(Box(part, lengths, (0,) * len(lengths), offset, lengths))
    try:
        return builder.view(tensor.fqn, tensor.state, View(tensor.shape, tuple(boxes)), tensor.shape)
    except ValueError as error:
        raise SourceError(
            "checkpoint.coverage",
            f"chunks of {printable(tensor.fqn)}/{tensor.state} {tensor.shape} do not cover it exactly once: {error}",
            fix=_FIX,
        ) from error


def _intervals(boxes: Column, shape: tuple[int, ...]) -> tuple[Column, Column, npt.NDArray[np.bool_]]:
    """First element and end of each box in row-major order, and True for each box that is one run of elements."""
    offsets, sizes = boxes[:, 0], boxes[:, 1]
    dims = len(shape)
    strides = np.array([prod(shape[d + 1 :]) for d in range(dims)], dtype=np.int64)
    begin: Column = offsets @ strides
    end: Column = begin + np.multiply.reduce(sizes, axis=1)
    whole, single = sizes == np.array(shape, dtype=np.int64), sizes == 1
    runs: npt.NDArray[np.bool_] = np.full(len(boxes), not dims)
    for dim in range(dims):
        runs |= single[:, :dim].all(axis=1) & whole[:, dim + 1 :].all(axis=1)
    return begin, end, runs
