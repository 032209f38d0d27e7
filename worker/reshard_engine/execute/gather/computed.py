"""Elements that no file holds (means, and weights with a merged adapter), which are computed in blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, assert_never

import numpy as np

from reshard_engine.execute.casts.cast import CastKernel
from reshard_engine.execute.casts.rows import ByteArray
from reshard_engine.execute.gather.lora_merge import ROW_BLOCK_ELEMS, Matrix, merged_rows, replace_rows, shifted
from reshard_engine.execute.gather.mean import mean_of
from reshard_engine.execute.gather.read_item import ReadItem
from reshard_engine.tensors.derived import LoraBias, LoraMerge, Mean, Merged, NewRows
from reshard_engine.tensors.dtypes import FLOAT32, Dtype
from reshard_engine.tensors.shard_map import ShardMap

_MATRICES = 3
"""Number of an adapter's factors that are kept in memory: those of one weight."""
MEAN_ELEMS = 1 << 18
"""Number of elements of a mean that are computed at once."""
Block = tuple[int, ByteArray]
"""The number of the block's first element, and its elements in the tensor's own type."""


class Elements(Protocol):
    """A function that reads elements of other tensors."""

    def __call__(self, tensor: int, dtype: Dtype, begin: int, end: int, *, counted: bool) -> ByteArray:
        """The elements `[begin, end)` of a tensor as `dtype`."""
        ...


class ComputedElements:
    """Computes elements from those of other tensors."""

    def __init__(self, shard_map: ShardMap, kernel: CastKernel, elements: Elements) -> None:
        """Begin without any factor in memory."""
        self._map = shard_map
        self._kernel = kernel
        self._elements = elements
        self._matrices: dict[int, Matrix] = {}

    def blocks(self, item: ReadItem, origin: Mean | Merged) -> Iterator[Block]:
        """The elements of an item, a block at a time."""
        match origin:
            case Mean():
                return self._mean(item, origin)
            case LoraMerge():
                return self._merged(item, origin)
            case LoraBias() | NewRows():
                return self._changed(item, origin)
            case _:
                assert_never(origin)

    def _mean(self, item: ReadItem, mean: Mean) -> Iterator[Block]:
        dtype, own = self._map.tensors[item.tensor].dtype, self._map.tensors[mean.copies[0]].dtype
        for low in range(item.begin, item.end, MEAN_ELEMS):
            high = min(low + MEAN_ELEMS, item.end)
            copies = (self._elements(c, own, low, high, counted=item.counted) for c in mean.copies)
            data = mean_of(copies, own, self._kernel)
            yield low, data if dtype is own else self._kernel.cast(data, own, dtype)

    def _merged(self, item: ReadItem, merge: LoraMerge) -> Iterator[Block]:
        """The elements of a merged weight, by blocks of rows."""
        columns = self._map.tensors[item.tensor].shape[1]
        step = max(1, ROW_BLOCK_ELEMS // columns)
        left, right = self._matrix(merge.left, item), self._matrix(merge.right, item)
        if merge.transposed:
            left, right = left.T, right.T
        lengths = None if merge.magnitude is None else self._matrix(merge.magnitude, item).reshape(-1)
        end = -(-item.end // columns)
        for row in range(item.begin // columns, end, step):
            last = min(row + step, end)
            base = self._values(merge.base, item, row * columns, last * columns)
            some = None if lengths is None else lengths[row:last]
            rows = merged_rows(base.reshape(-1, columns), left[row:last], right, merge.scale, some)
            low, high = max(row * columns, item.begin), min(last * columns, item.end)
            yield low, rows.reshape(-1)[low - row * columns : high - row * columns].view(np.uint8)

    def _changed(self, item: ReadItem, rule: LoraBias | NewRows) -> Iterator[Block]:
        """The elements of a base weight with some rows replaced, or with a scaled bias added, a block at a time."""
        for low in range(item.begin, item.end, ROW_BLOCK_ELEMS):
            high = min(low + ROW_BLOCK_ELEMS, item.end)
            values = self._values(rule.base, item, low, high)
            if isinstance(rule, LoraBias):
                values = shifted(values, self._matrix(rule.other, item)[low:high], rule.scale)
            else:
                replace_rows(values, low, rule.rows, self._matrix(rule.source, item))
            yield low, values.view(np.uint8)

    def _values(self, tensor: int, item: ReadItem, begin: int, end: int) -> Matrix:
        return self._elements(tensor, FLOAT32, begin, end, counted=item.counted).view(np.float32)

    def _matrix(self, tensor: int, item: ReadItem) -> Matrix:
        """A factor in fp32. It is kept in memory for all blocks of one weight."""
        if tensor not in self._matrices:
            stored = self._map.tensors[tensor]
            while len(self._matrices) >= _MATRICES:
                self._matrices.pop(next(iter(self._matrices)))
            self._matrices[tensor] = self._values(tensor, item, 0, stored.numel).reshape(stored.shape)
        return self._matrices[tensor]
