"""Reading of tensors that lie strided in their file, in pieces of bounded size."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from reshard_engine.containers.source_file import SourceFile
from reshard_engine.execute.casts.rows import ByteArray
from reshard_engine.plan.budget import READ_BATCH_BYTES
from reshard_engine.tensors.shard_map import Strides

STRIDED_ELEMS = READ_BATCH_BYTES // 4
"""Number of elements of a strided tensor that are read at once."""
_TILE_ELEMS = 1 << 18


def read_strided(
    file: SourceFile, offset: int, layout: Strides, itemsize_bytes: int, *, elements: tuple[int, int]
) -> ByteArray:
    """The elements `[low, high)`, in row-major order, of a tensor that lies strided in its file; the result is packed.

    The span of the file that holds the elements is read once, in bounded blocks. For each block, the places of the
    elements are computed in bounded tiles.
    """
    low, high = elements
    result = np.empty(((high - low), itemsize_bytes), dtype=np.uint8)
    tiles = [(at, min(at + _TILE_ELEMS, high)) for at in range(low, high, _TILE_ELEMS)]
    spans = [_places(layout, *tile) for tile in tiles[:1] + tiles[-1:]]
    first = 0 if len(tiles) > 2 else min(int(p.min()) for p in spans)
    last = _last_place(layout) if len(tiles) > 2 else max(int(p.max()) for p in spans)
    block_elems = READ_BATCH_BYTES // itemsize_bytes
    for start in range(first, last + 1, block_elems):
        count = min(block_elems, last + 1 - start)
        block = np.empty(count * itemsize_bytes, dtype=np.uint8)
        file.read_into(offset + start * itemsize_bytes, block.data)
        values = block.reshape(-1, itemsize_bytes)
        for begin, end in tiles:
            places = _places(layout, begin, end) - start
            inside = (places >= 0) & (places < count)
            result[begin - low : end - low][inside] = values[places[inside]]
    return result.reshape(-1)


def _places(layout: Strides, low: int, high: int) -> npt.NDArray[np.int64]:
    """The places of the elements `[low, high)`, counted in elements from the tensor's first element."""
    ids = np.arange(low, high, dtype=np.int64)
    places = np.zeros_like(ids)
    for length, stride in zip(reversed(layout.shape), reversed(layout.stride), strict=True):
        places += ids % length * stride
        ids //= length
    return places


def _last_place(layout: Strides) -> int:
    return sum((n - 1) * s for n, s in zip(layout.shape, layout.stride, strict=True))
