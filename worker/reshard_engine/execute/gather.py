"""Filling a chunk: literals, and bodies from source extents; CRC sums of what other units pass stay open."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from reshard.errors import IntegrityError, printable
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.dtypes import Dtype
from reshard_engine.execute.cast import CastKernel, overflowed
from reshard_engine.execute.means import mean_of
from reshard_engine.layout import ZEROS, Body, TargetFile
from reshard_engine.plan.budget import READ_BATCH_BYTES
from reshard_engine.shardmap import Strides

GAP_BYTES = 64 << 10
"""Unwanted bytes between two extents that are still cheaper to read than to skip."""
STRIDED_ELEMS = READ_BATCH_BYTES // 4
"""Elements of a strided tensor that are put together at once."""
MEAN_ELEMS = 1 << 18
"""Elements of a mean that are computed at once."""
Buffer = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Copy:
    """One packed source extent and the bytes of the chunk that it fills."""

    file: int
    offset: int
    length_bytes: int
    target: Buffer
    source_dtype: Dtype
    target_dtype: Dtype
    tensor: int
    counted: bool = True
    """Whether what its cast loses counts: an element that two chunks share counts where it begins."""

    @property
    def types(self) -> tuple[Dtype, Dtype, int, bool]:
        """Source and target element types, the tensor, and whether losses count."""
        return self.source_dtype, self.target_dtype, self.tensor, self.counted

    @property
    def casts(self) -> bool:
        """Whether the bytes change on the way."""
        return self.source_dtype is not self.target_dtype


@dataclass
class ChunkFiller:
    """Fills chunks of one unit from a checkpoint; counts what it read and what casts lost."""

    checkpoint: Checkpoint
    kernel: CastKernel
    read_bytes: int = 0
    overflows: dict[str, int] = field(default_factory=dict[str, int])
    """Elements per parameter that were finite and became infinite."""

    def fill(self, file: TargetFile, *, begin: int, buffer: Buffer) -> None:
        """Fill `buffer` with the bytes of the target file from `begin` on, except CRC slots (left zero).

        Raises:
            SourceError: `source.changed`, or what the storage says.
        """
        end = begin + len(buffer)
        for offset, data in file.template.literals_in(begin, end):
            low, high = max(offset, begin), min(offset + len(data), end)
            buffer[low - begin : high - begin] = np.frombuffer(data, dtype=np.uint8)[low - offset : high - offset]
        copies: list[Copy] = []
        cut: list[tuple[Buffer, Buffer]] = []
        for body in file.template.bodies_in(begin, end):
            copies += self._body(file.tensors[body.slot], body, begin=begin, buffer=buffer, cut=cut)
        self._run(copies)
        for part, element in cut:
            part[:] = element

    def _body(
        self, tensor: int, body: Body, *, begin: int, buffer: Buffer, cut: list[tuple[Buffer, Buffer]]
    ) -> list[Copy]:
        """The extents behind the part of one body that lies in the chunk.

        A chunk may begin or end inside an element. Such an element is fetched whole, beside its neighbours, into
        memory of its own; `cut` gets the part of the chunk with the part of the element that belongs there.
        """
        size = body.dtype.itemsize_bytes
        low = max(body.offset, begin) - body.offset
        high = min(body.offset + body.length_bytes, begin + len(buffer)) - body.offset
        window = buffer[body.offset + low - begin : body.offset + high - begin]
        if tensor == ZEROS:
            window[:] = 0
            return []
        inner = range(-(-low // size), high // size)
        copies: list[Copy] = []
        if inner:
            whole = window[inner.start * size - low : inner.stop * size - low]
            copies = self._extents(tensor, body.dtype, body.begin + inner.start, whole)
        for number in {low // size, (high - 1) // size}:
            if number in inner:
                continue
            start, element = number * size, np.empty(size, dtype=np.uint8)
            copies += self._extents(tensor, body.dtype, body.begin + number, element, counted=start >= low)
            part = slice(max(low - start, 0), min(high - start, size))
            cut.append((window[start + part.start - low : start + part.stop - low], element[part]))
        return copies

    def elements(self, tensor: int, dtype: Dtype, begin: int, end: int) -> Buffer:
        """The elements `[begin, end)` of a tensor, in row-major order, as `dtype`."""
        whole = np.empty((end - begin) * dtype.itemsize_bytes, dtype=np.uint8)
        self._run(self._extents(tensor, dtype, begin, whole))
        return whole

    def _extents(self, tensor: int, dtype: Dtype, begin: int, window: Buffer, *, counted: bool = True) -> list[Copy]:
        """The extents of the elements from `begin` on that fill the window; strided ones are read at once."""
        shard_map = self.checkpoint.shard_map
        stored = shard_map.tensors[tensor]
        size = dtype.itemsize_bytes
        if shard_map.means and shard_map.averages(tensor):
            self._averaged(tensor, dtype, begin, window, counted=counted)
            return []
        pieces = shard_map.pieces(tensor, begin, begin + len(window) // size)
        if int((pieces.end - pieces.begin).sum()) * size != len(window):
            raise IntegrityError(
                "integrity.mismatch", f"{printable(stored.fqn)} has no source for some of its elements"
            )
        copies: list[Copy] = []
        for row in range(len(pieces.begin)):
            low, high = int(pieces.begin[row]), int(pieces.end[row])
            file, offset, strides = int(pieces.file[row]), int(pieces.offset[row]), int(pieces.strides[row])
            length = (high - low) * stored.dtype.itemsize_bytes
            target = window[(low - begin) * size : (high - begin) * size]
            copy = Copy(file, offset, length, target, stored.dtype, dtype, tensor, counted)
            if strides < 0:
                copies.append(copy)
                continue
            layout, itemsize = shard_map.strides[strides], stored.dtype.itemsize_bytes
            for at in range(low, high, STRIDED_ELEMS):
                # In pieces, so that no copy of the whole chunk stands beside it.
                stop = min(at + STRIDED_ELEMS, high)
                data = read_strided(self.checkpoint.files[file], offset, layout, itemsize, elements=(at, stop))
                part = Copy(file, offset, len(data), target[(at - low) * size : (stop - low) * size], *copy.types)
                self.read_bytes += len(data)
                self._place(part, data)
        return copies

    def _averaged(self, tensor: int, dtype: Dtype, begin: int, window: Buffer, *, counted: bool) -> None:
        """The elements from `begin` on of a mean, or of a view of means, that fill the window; computed at once."""
        shard_map = self.checkpoint.shard_map
        size, end = dtype.itemsize_bytes, begin + len(window) // dtype.itemsize_bytes
        view = shard_map.views.get(tensor)
        if view is not None:
            runs = view.runs(begin, end)
            for at, holder, source, length in zip(runs.begin, runs.tensor, runs.source, runs.length, strict=True):
                part = window[(int(at) - begin) * size : (int(at + length) - begin) * size]
                self._run(self._extents(int(holder), dtype, int(source), part, counted=counted))
            return
        copies, stored = shard_map.means[tensor], shard_map.tensors[tensor]
        own = shard_map.tensors[copies[0]].dtype
        for low in range(begin, end, MEAN_ELEMS):
            high = min(low + MEAN_ELEMS, end)
            mean = mean_of((self.elements(c, own, low, high) for c in copies), own, self.kernel)
            if stored.dtype is not own:
                mean = self.kernel.cast(mean, own, stored.dtype)
            part = window[(low - begin) * size : (high - begin) * size]
            self._place(Copy(0, 0, len(mean), part, stored.dtype, dtype, tensor, counted), mean)

    def _run(self, copies: list[Copy]) -> None:
        """Read the extents in file order, near ones together, and put each where it belongs."""
        batch: list[Copy] = []
        for copy in _bounded(sorted(copies, key=lambda c: (c.file, c.offset))):
            if batch and not _joins(batch, copy):
                self._run_batch(batch)
                batch = []
            batch.append(copy)
        if batch:
            self._run_batch(batch)

    def _run_batch(self, batch: list[Copy]) -> None:
        first = batch[0]
        file = self.checkpoint.files[first.file]
        if len(batch) == 1 and not first.casts:
            file.read_into(first.offset, first.target.data)
            self.read_bytes += first.length_bytes
            return
        start = first.offset
        staging = np.empty(max(c.offset + c.length_bytes for c in batch) - start, dtype=np.uint8)
        file.read_into(start, staging.data)
        self.read_bytes += len(staging)
        for copy in batch:
            self._place(copy, staging[copy.offset - start : copy.offset - start + copy.length_bytes])

    def _place(self, copy: Copy, data: Buffer) -> None:
        if not copy.casts:
            copy.target[:] = data
            return
        if data.ctypes.data % copy.source_dtype.itemsize_bytes:
            data = data.copy()  # numpy views of wider elements want aligned memory
        result = self.kernel.cast(data, copy.source_dtype, copy.target_dtype)
        copy.target[:] = result
        if copy.counted and (lost := overflowed(data, result, copy.source_dtype, copy.target_dtype)):
            fqn = self.checkpoint.shard_map.tensors[copy.tensor].fqn
            self.overflows[fqn] = self.overflows.get(fqn, 0) + lost


def _bounded(copies: list[Copy]) -> list[Copy]:
    """Copies cut so that none that needs staging is larger than a read batch."""
    result: list[Copy] = []
    for copy in copies:
        if not copy.casts or copy.length_bytes <= READ_BATCH_BYTES:
            result.append(copy)
            continue
        wide, narrow = copy.source_dtype.itemsize_bytes, copy.target_dtype.itemsize_bytes
        elems, step = copy.length_bytes // wide, READ_BATCH_BYTES // wide
        for first in range(0, elems, step):
            count = min(step, elems - first)
            target = copy.target[first * narrow : (first + count) * narrow]
            offset, length = copy.offset + first * wide, count * wide
            result.append(Copy(copy.file, offset, length, target, *copy.types))
    return result


def _joins(batch: list[Copy], copy: Copy) -> bool:
    start, last = batch[0].offset, batch[-1]
    end = max(last.offset + last.length_bytes, copy.offset + copy.length_bytes)
    near = copy.offset - (last.offset + last.length_bytes) <= GAP_BYTES
    return copy.file == batch[0].file and near and end - start <= READ_BATCH_BYTES


def read_strided(
    file: SourceFile, offset: int, layout: Strides, itemsize_bytes: int, *, elements: tuple[int, int]
) -> Buffer:
    """The elements `[low, high)` in row-major order of a tensor that lies strided in its file, packed.

    The span that they are scattered over is read once, in bounded blocks; the places of elements are
    computed in bounded tiles for each block.
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


_TILE_ELEMS = 1 << 18


def _places(layout: Strides, low: int, high: int) -> npt.NDArray[np.int64]:
    """Where the elements `[low, high)` lie, in elements from the tensor's first."""
    ids = np.arange(low, high, dtype=np.int64)
    places = np.zeros_like(ids)
    for length, stride in zip(reversed(layout.shape), reversed(layout.stride), strict=True):
        places += ids % length * stride
        ids //= length
    return places


def _last_place(layout: Strides) -> int:
    return sum((n - 1) * s for n, s in zip(layout.shape, layout.stride, strict=True))
