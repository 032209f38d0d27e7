"""Gathers the elements of logical tensors, stored or computed, into items of target files."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self, assert_never

import numpy as np
import numpy.typing as npt

from reshard.errors import IntegrityError, printable
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.execute.casts.cast import (
    CastKernel,
    Losses,
    Matrix,
    Scaled,
    elements_of_rows,
)
from reshard_engine.execute.casts.placing import PlacedRows, Placer, ReadCounts
from reshard_engine.execute.casts.rows import ByteArray, Column, Kind, Rows
from reshard_engine.integrity.checksums import RecordReads
from reshard_engine.plan.budget import READ_BATCH_BYTES
from reshard_engine.plan.model import WriteItem
from reshard_engine.tensors.dtypes import FLOAT32, Dtype
from reshard_engine.tensors.layout import ZEROS, Body
from reshard_engine.tensors.shard_map import Piece, Pieces, ShardMap, Strides
from reshard_engine.tensors.views import (
    BLOCK_ROWS,
    LoraBias,
    LoraMerge,
    Mean,
    Merged,
    NewRows,
    Quantized,
    Spliced,
    Transposed,
    View,
)

# The request to a reader of tensors.


@dataclass(frozen=True, slots=True)
class ReadItem:
    """A run of elements of a tensor to read, their type in the target, and their place (`at`) in memory."""

    tensor: int
    dtype: Dtype
    begin: int
    end: int
    at: int
    counted: bool = True
    """True if cast losses are counted: elements that are read twice must be counted once."""


# Concurrent reads over a network.

CALLS_AT_ONCE = 32
"""Concurrent calls of one run, reads and writes together: with 1 MB and 30 ms a call, they fill 8 Gbit/s."""
READS_OF_A_UNIT = 16


@dataclass(frozen=True, slots=True)
class _PendingRead:
    """One read, its bytes beside the memory of the unit, and the function that finishes it when the bytes are there."""

    read: Future[None]
    staged_bytes: int
    finish: Callable[[], None]


class ConcurrentReads:
    """The reads of one gathering. The thread that starts them finishes them, in the order of their starts.

    The bytes that they hold beside the unit's memory are bounded; only a single read may be larger. Leaving the context
    waits for all reads, also after a failure, because the memory that they write to is reused.
    """

    def __init__(self, pool: Executor, staged_bytes: int) -> None:
        """Begin without reads. `staged_bytes` is the bound of the bytes beside the unit's memory."""
        self._pool = pool
        self._most_bytes = staged_bytes
        self._staged_bytes = 0
        self._pending: deque[_PendingRead] = deque()

    def start(self, read: Callable[[], None], finish: Callable[[], None], *, staged_bytes: int) -> None:
        """Start a read as soon as there is room for it; until then, finish earlier reads."""
        while self._pending and (
            self._staged_bytes + staged_bytes > self._most_bytes or len(self._pending) >= READS_OF_A_UNIT
        ):
            self._finish_first()
        self._staged_bytes += staged_bytes
        self._pending.append(_PendingRead(self._pool.submit(read), staged_bytes, finish))

    def _finish_first(self) -> None:
        pending = self._pending.popleft()
        pending.read.result()
        pending.finish()
        self._staged_bytes -= pending.staged_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Finish all reads or, after a failure, wait until no read writes to memory any more."""
        try:
            while error is None and self._pending:
                self._finish_first()
        finally:
            left = [f.read for f in self._pending]
            for read in left:
                read.cancel()
            wait(left)


# Extents: packed runs of source bytes and their places in memory, as columns. Neighbours are read together.
#
# A unit of small tensors has tens of thousands of extents, which are put in place together, by index. A unit of large
# tensors has a few extents, which are copied one by one.

GAP_BYTES = 64 << 10
"""Largest gap between two extents for which reading the gap is cheaper than a second read."""


@dataclass(frozen=True, slots=True)
class Extents:
    """Packed runs of elements in source files. `length` counts bytes of the source, `at` counts bytes of the memory."""

    file: Column
    offset: Column
    length: Column
    at: Column
    tensor: Column
    kind: Column
    """The number of the row's kind in `Placer.kinds`."""

    def __len__(self) -> int:
        return len(self.file)

    def rows(self, rows: slice | Column) -> Extents:
        """The extents with these indices."""
        return Extents(*(column[rows] for column in self.columns()))

    def columns(self) -> tuple[Column, ...]:
        """The columns in their order."""
        return self.file, self.offset, self.length, self.at, self.tensor, self.kind

    def placed(self) -> PlacedRows:
        """The extents as rows of a memory that holds the file's bytes from the first extent on."""
        return PlacedRows(Rows(self.offset - int(self.offset[0]), self.length, self.at), self.tensor, self.kind)

    @staticmethod
    def joined(several: Sequence[Extents]) -> Extents:
        """The extents of all arguments, in order."""
        if len(several) == 1:
            return several[0]
        return Extents(*map(np.concatenate, zip(*(e.columns() for e in several), strict=True)))


@dataclass(frozen=True, slots=True)
class ExtentReader:
    """Reads extents and has a `Placer` put them in place."""

    files: Sequence[SourceFile]
    placer: Placer
    counts: ReadCounts
    pool: Executor | None
    """The pool for concurrent reads over a network. Without a pool, reads run one after another."""
    reads: RecordReads | None = None
    """Compares the records that are read with their CRC-32s; None if they are not compared."""

    def read_of(self, file: int) -> Callable[[int, memoryview], None]:
        """The function that reads bytes of a file."""
        read_into = self.files[file].read_into
        return read_into if self.reads is None else partial(self.reads.read_into, file, read_into)

    def read_one(self, file: int, offset: int, target: ByteArray) -> None:
        """Read one run of bytes directly into its place."""
        self.read_of(file)(offset, target.data)
        self.counts.read_bytes += len(target)

    def read(self, extents: Extents, memory: ByteArray) -> None:
        """Read all extents in file order, with one read for neighbours, and put each in place."""
        batches = self._batches(self._bounded(extents))
        if self.pool is None:
            for batch in batches:
                self._read_batch(batch, memory)
            return
        with ConcurrentReads(self.pool, READ_BATCH_BYTES) as reads:
            for batch in batches:
                self._start(reads, batch, memory)

    def _bounded(self, extents: Extents) -> Extents:
        """The extents; those that must be staged and are larger than a read batch are cut."""
        long = extents.length > READ_BATCH_BYTES
        if not long.any():
            return extents
        parts = [extents.rows(np.flatnonzero(~long))]
        for row in _positions(long):
            kind = self.placer.kinds[int(extents.kind[row])]
            if kind.source is kind.target and self.pool is None:
                parts.append(extents.rows(slice(row, row + 1)))
                continue
            starts = np.arange(0, int(extents.length[row]), READ_BATCH_BYTES, dtype=np.int64)
            count = len(starts)
            parts.append(
                Extents(
                    np.repeat(extents.file[row], count),
                    extents.offset[row] + starts,
                    np.minimum(int(extents.length[row]) - starts, READ_BATCH_BYTES),
                    extents.at[row] + starts // kind.source.itemsize_bytes * kind.target.itemsize_bytes,
                    np.repeat(extents.tensor[row], count),
                    np.repeat(extents.kind[row], count),
                )
            )
        return Extents.joined(parts)

    def _batches(self, extents: Extents) -> Iterator[Extents]:
        """Groups of neighbouring extents of a file, in file order. A group of several is at most a read batch long."""
        if len(extents) < 2:
            if len(extents):
                yield extents
            return
        ordered = extents.rows(np.lexsort((extents.offset, extents.file)))
        ends = ordered.offset + ordered.length
        far = (ordered.file[1:] != ordered.file[:-1]) | (ordered.offset[1:] - ends[:-1] > GAP_BYTES)
        breaks = [number + 1 for number in _positions(far)]
        for low, high in zip([0, *breaks], [*breaks, len(ordered)], strict=True):
            first = low
            while first < high:
                limit = int(ordered.offset[first]) + READ_BATCH_BYTES
                within = int(np.searchsorted(ordered.offset[first:high], limit))
                past = _positions(ends[first : first + within] > limit)
                last = first + max(1, past[0] if past else within)
                yield ordered.rows(slice(first, last))
                first = last

    def _read_batch(self, batch: Extents, memory: ByteArray) -> None:
        file, start = int(batch.file[0]), int(batch.offset[0])
        if self._is_straight(batch):
            at = int(batch.at[0])
            self.read_one(file, start, memory[at : at + int(batch.length[0])])
            return
        length = _span(batch)
        self.placer.read_and_place(partial(self.read_of(file), start), length, batch.placed(), memory)
        self.counts.read_bytes += length

    def _start(self, reads: ConcurrentReads, batch: Extents, memory: ByteArray) -> None:
        """Start the read of a batch, concurrently with other batches."""
        file, start = int(batch.file[0]), int(batch.offset[0])
        length, straight = _span(batch), self._is_straight(batch)
        at = int(batch.at[0])
        place = memory[at : at + length] if straight else np.empty(length, dtype=np.uint8)

        def finish() -> None:
            self.counts.read_bytes += length
            if not straight:
                self.placer.place(batch.placed(), place, memory)

        reads.start(partial(self.read_of(file), start, place.data), finish, staged_bytes=0 if straight else length)

    def _is_straight(self, batch: Extents) -> bool:
        """True if a batch is one extent whose bytes are not cast, so that it is read directly into its place."""
        kind = self.placer.kinds[int(batch.kind[0])]
        return len(batch) == 1 and kind.source is kind.target


def _span(batch: Extents) -> int:
    """The number of bytes from the begin of the first extent to the last end."""
    return int((batch.offset + batch.length).max()) - int(batch.offset[0])


def _positions(marks: npt.NDArray[np.bool_]) -> list[int]:
    return np.flatnonzero(marks).tolist()


# Reading of tensors that lie strided in their file, in pieces of bounded size.

STRIDED_ELEMS = READ_BATCH_BYTES // 4
"""Number of elements of a strided tensor that are read at once."""
_TILE_ELEMS = 1 << 18


def read_strided(
    read_into: Callable[[int, memoryview], None],
    offset: int,
    layout: Strides,
    itemsize_bytes: int,
    *,
    elements: tuple[int, int],
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
        read_into(offset + start * itemsize_bytes, block.data)
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


# Merging of LoRA adapters: weights (base plus scale times B A, DoRA's magnitudes), biases and trained tokens.
#
# All sums are in fp32 and are taken term by term over the rank. So an element has the same bits in whichever block of
# rows it is computed. A matrix product would sum in an order that depends on the block.
#
# Source: peft 0.21.2 `tuners/lora/layer.py` (`get_delta_weight`, `merge`), `tuners/lora/dora.py` (`get_weight_norm`),
# `tuners/trainable_tokens/layer.py` (`merge`).

ROW_BLOCK_ELEMS = 1 << 18
"""Number of elements that are merged at once; a longer row is merged whole."""


def merged_rows(base: Matrix, left: Matrix, right: Matrix, scale: float, magnitude: Matrix | None) -> Matrix:
    """Rows of a merged weight.

    Args:
        base: Rows of the weight, `[rows, columns]`.
        left: The rows of the adapter's left factor, `[rows, rank]`.
        right: The adapter's right factor, `[rank, columns]`.
        scale: The scale of the product of both factors.
        magnitude: The length of each row in DoRA, `[rows]`; None without DoRA.
    """
    delta = np.zeros_like(base)
    term = np.empty_like(base)
    with np.errstate(over="ignore", invalid="ignore"):
        for k in range(right.shape[0]):
            np.multiply(left[:, k : k + 1], right[k : k + 1], out=term)
            delta += term
        delta *= np.float32(scale)
        delta += base
        if magnitude is not None:
            squares = np.square(delta, dtype=np.float64).sum(axis=1)
            delta *= (magnitude / np.sqrt(squares).astype(np.float32))[:, None]
    return delta


def shifted(base: Matrix, other: Matrix, scale: float) -> Matrix:
    """Elements of a bias with the adapter's own bias merged."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.add(base, other * np.float32(scale), dtype=np.float32)


def replace_rows(values: Matrix, begin: int, rows: Sequence[int], source: Matrix) -> None:
    """Replace rows of a matrix by rows of a source.

    Args:
        values: Elements of the matrix from `begin` on, in row-major order. They are changed in place.
        begin: The number of the first of these elements.
        rows: For each row of the source the row that it replaces.
        source: The new rows.
    """
    columns, end = source.shape[1], begin + len(values)
    for row, new in zip(rows, source, strict=True):
        low, high = max(row * columns, begin), min((row + 1) * columns, end)
        if low < high:
            values[low - begin : high - begin] = new[low - row * columns : high - row * columns]


# The mean of copies that differ after training. This is the only rule whose result is not a copy bit for bit.
#
# The copies are added in the order of their ranks and divided by their number. Each step is rounded to their own
# element type, as in DeepSpeed. An element with the same bits in all copies is kept unchanged; in DeepSpeed, the sum of
# such elements may be rounded or overflow, and -0.0 becomes 0.0.
#
# Source: deepspeed 0.19.8 `checkpoint/ds_to_universal.py` (`merge_tp_slices`: `sum(slices) / len(slices)`).


def mean_of(copies: Iterable[ByteArray], dtype: Dtype, kernel: CastKernel) -> ByteArray:
    """The mean of at least one copy, element by element.

    Args:
        copies: Packed elements, equally many in each copy. A copy is released before the next one is taken.
        dtype: Element type of the copies: float64, or a type that `kernel` casts to float32 and back.
        kernel: The kernel for casts between float32 and 16-bit types.
    """
    remaining = iter(copies)
    first = next(remaining)
    same = np.ones(len(first) // dtype.itemsize_bytes, dtype=np.bool_)
    total, count = first, 1
    for copy in remaining:
        same &= (_bits(copy, dtype) == _bits(first, dtype)).all(axis=1)
        with np.errstate(over="ignore", invalid="ignore"):
            total = _rounded(_values(total, dtype, kernel) + _values(copy, dtype, kernel), dtype, kernel)
        count += 1
    mean = _rounded(_values(total, dtype, kernel) / count, dtype, kernel)
    _bits(mean, dtype)[same] = _bits(first, dtype)[same]
    return mean


def _bits(data: ByteArray, dtype: Dtype) -> ByteArray:
    return data.reshape(-1, dtype.itemsize_bytes)


def _values(data: ByteArray, dtype: Dtype, kernel: CastKernel) -> npt.NDArray[np.floating]:
    if dtype.name == "float64":
        return data.view(np.float64)
    return (data if dtype is FLOAT32 else kernel.cast(data, dtype, FLOAT32)).view(np.float32)


def _rounded(values: npt.NDArray[np.floating], dtype: Dtype, kernel: CastKernel) -> ByteArray:
    data = values.view(np.uint8)
    return data if values.dtype == np.float64 or dtype is FLOAT32 else kernel.cast(data, FLOAT32, dtype)


# Elements that no file holds as they are (means, transposes, and weights with a merged adapter), computed in blocks.

_MATRICES = 3
"""Number of an adapter's factors that are kept in memory: those of one weight."""
MEAN_ELEMS = 1 << 18
"""Number of elements of a mean that are computed at once."""
TRANSPOSED_BYTES = READ_BATCH_BYTES
"""Bytes of a transpose that are made at once, and bytes of its base that are read for them at once."""
_TURNED_ROWS = 64
"""Rows of the base that are turned at once: the cache holds a line of each."""
Block = tuple[int, ByteArray]
"""The number of the block's first element, and its elements in the tensor's own type."""


class Elements(Protocol):
    """A function that reads elements of other tensors."""

    def __call__(self, tensor: int, dtype: Dtype, begin: int, end: int, *, counted: bool) -> ByteArray:
        """The elements `[begin, end)` of a tensor as `dtype`."""
        ...


class ComputedElements:
    """Computes elements from those of other tensors."""

    def __init__(self, shard_map: ShardMap, kernel: CastKernel, elements: Elements, losses: dict[int, Losses]) -> None:
        """Begin without any factor in memory. Errors of quantized tensors are added to the losses."""
        self._losses = losses
        self._map = shard_map
        self._kernel = kernel
        self._elements = elements
        self._matrices: dict[int, Matrix] = {}
        self._turned: tuple[tuple[int, int], npt.NDArray[Any]] | None = None

    def blocks(self, item: ReadItem, origin: Mean | Transposed | Quantized | Merged) -> Iterator[Block]:
        """The elements of an item, a block at a time."""
        match origin:
            case Mean():
                return self._mean(item, origin)
            case Transposed():
                return self._transposed(item, origin)
            case Quantized():
                return self._quantized(item, origin)
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

    def _transposed(self, item: ReadItem, turned: Transposed) -> Iterator[Block]:
        """The elements of a transpose, by blocks of rows, of which the last one is kept: the next item begins in it."""
        stored = self._map.tensors[turned.base]
        length, size = stored.shape[0], stored.dtype.itemsize_bytes
        step = max(1, TRANSPOSED_BYTES // (length * size))
        for number in range(item.begin // (length * step), -(-item.end // (length * step))):
            first = number * step
            if self._turned is None or self._turned[0] != (turned.base, number):
                self._turned = (turned.base, number), self._turn(turned.base, first, first + step, item)
            rows = self._turned[1]
            low, high = max(first * length, item.begin), min(first * length + rows.size, item.end)
            yield low, rows.reshape(-1)[low - first * length : high - first * length].view(np.uint8)

    def _turn(self, base: int, first: int, last: int, item: ReadItem) -> npt.NDArray[Any]:
        """Some columns of a matrix as rows, elements as integers or as bytes that belong together.

        All of the matrix is read for them, by its own rows.
        """
        stored = self._map.tensors[base]
        (length, columns), size = stored.shape, stored.dtype.itemsize_bytes
        element = np.dtype(f"u{size}" if size <= 8 else f"V{size}")
        found = np.empty((min(last, columns) - first, length), dtype=element)
        rows = max(1, TRANSPOSED_BYTES // (columns * size))
        for begin in range(0, length, rows):
            stop = min(begin + rows, length)
            data = self._elements(base, stored.dtype, begin * columns, stop * columns, counted=item.counted)
            held = data.view(element).reshape(stop - begin, columns)
            for low in range(begin, stop, _TURNED_ROWS):
                high = min(low + _TURNED_ROWS, stop)
                found[:, low:high] = held[low - begin : high - begin, first:last].T
        return found

    def _quantized(self, item: ReadItem, rule: Quantized) -> Iterator[Block]:
        """The elements of a quantized matrix, or its scales, by runs of rows."""
        rows, columns = self._map.tensors[rule.base].shape
        made = elements_of_rows(rule, columns)
        counted = item.counted and not rule.scales
        for number in range(item.begin // made, -(-item.end // made)):
            first = number * BLOCK_ROWS
            last = min(first + BLOCK_ROWS, rows)
            data = self._elements(rule.base, FLOAT32, first * columns, last * columns, counted=counted)
            values = data.view(np.float32).reshape(-1, columns)
            scaled = Scaled.of(values, rule)
            found = scaled.scales if rule.scales else scaled.quantized()
            low, high = max(number * made, item.begin), min((number + 1) * made, item.end)
            own = low - number * made, high - number * made
            if counted:
                self._losses[item.tensor] = self._losses.get(item.tensor, Losses()) + scaled.errors(found, own)
            yield low, found.reshape(-1)[slice(*own)].view(np.uint8)

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


# The reader of tensors: it takes each request apart into the reads and computations above.

STRAIGHT_BYTES = 128 << 10
"""Least bytes in one piece that are read by a separate read. Shorter runs are read together with their neighbours."""


class TensorReader:
    """Reads elements of a checkpoint's tensors."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        kernel: CastKernel,
        *,
        saturate: bool = False,
        pool: Executor | None = None,
        counts: ReadCounts | None = None,
        reads: RecordReads | None = None,
    ) -> None:
        """Make a reader; nothing is read yet.

        Args:
            checkpoint: The source of all elements.
            kernel: The kernel that casts them.
            saturate: True to turn finite elements that would become infinite into the largest number of their sign.
            pool: The pool for concurrent reads, if any.
            counts: The object that counts read bytes and losses; None for a new one.
            reads: The object that compares the records that are read with their CRC-32s, if they are compared.
        """
        self.counts = ReadCounts() if counts is None else counts
        self._files = checkpoint.files
        self._map = checkpoint.shard_map
        self._placer = Placer(kernel, self.counts.losses, saturate=saturate)
        self._extents = ExtentReader(checkpoint.files, self._placer, self.counts, pool, reads)
        self._computed = ComputedElements(checkpoint.shard_map, kernel, self.elements, self.counts.losses)
        self._piece: Piece | None = None
        self._numbers: dict[Kind, int] = {}

    def elements(self, tensor: int, dtype: Dtype, begin: int, end: int, *, counted: bool = True) -> ByteArray:
        """The elements `[begin, end)` of a tensor, in row-major order, as `dtype`."""
        memory = np.empty((end - begin) * dtype.itemsize_bytes, dtype=np.uint8)
        self.read([ReadItem(tensor, dtype, begin, end, 0, counted)], memory)
        return memory

    def elements_into(self, tensor: int, dtype: Dtype, begin: int, memory: ByteArray) -> None:
        """Fill memory with the elements of a tensor from `begin` on, in row-major order, as `dtype`."""
        self.read([ReadItem(tensor, dtype, begin, begin + len(memory) // dtype.itemsize_bytes, 0)], memory)

    def read(self, items: Iterable[ReadItem], memory: ByteArray) -> None:
        """Read all items. Elements that files hold are read together.

        Raises:
            SourceError: `source.changed`, or an error of the storage.
        """
        found: list[Extents] = []
        whole: list[ReadItem] = []
        tensors, derived = self._map.tensors, self._map.derived
        for item in items:
            if item.begin == item.end:
                continue
            if item.tensor in derived:
                found += self._extents_of_derived(item, memory)
            elif self._read_straight(item, memory):
                continue
            elif item.end - item.begin < tensors[item.tensor].numel:
                found += self._extents_of(item, memory)
            else:
                whole.append(item)
        if len(whole) == 1:
            found += self._extents_of(whole[0], memory)
        elif whole:
            found += self._extents_of_whole(whole, memory)
        if found:
            self._extents.read(Extents.joined(found), memory)

    def _extents_of_derived(self, item: ReadItem, memory: ByteArray) -> list[Extents]:
        """The extents of elements of a derived tensor. Elements that no file holds are computed at once instead."""
        origin = self._map.derived[item.tensor]
        match origin:
            case View() if self._map.is_computed(item.tensor):
                self.read(_items_of_view(item, origin), memory)
            case View():
                return self._extents_of(item, memory)
            case Spliced():
                return self._extents_of_spliced(item, origin, memory)
            case Mean() | Transposed() | Quantized() | LoraMerge() | LoraBias() | NewRows():
                self._compute(item, origin, memory)
            case _:
                assert_never(origin)
        return []

    def _extents_of_spliced(self, item: ReadItem, spliced: Spliced, memory: ByteArray) -> list[Extents]:
        """The extents of elements that are runs of other tensors, so that runs of one file are read together."""
        found: list[Extents] = []
        size = item.dtype.itemsize_bytes
        for begin, run in spliced.within(item.begin, item.end):
            at = item.at + (begin - item.begin) * size
            if run.tensor is None:
                memory[at : at + run.length * size] = 0
                continue
            one = ReadItem(run.tensor, item.dtype, run.source, run.source + run.length, at, item.counted)
            derived = run.tensor in self._map.derived
            found += self._extents_of_derived(one, memory) if derived else self._extents_of(one, memory)
        return found

    def _compute(self, item: ReadItem, origin: Mean | Transposed | Quantized | Merged, memory: ByteArray) -> None:
        kind, size = self._kind(item), item.dtype.itemsize_bytes
        for low, data in self._computed.blocks(item, origin):
            at = item.at + (low - item.begin) * size
            end = at + len(data) // kind.source.itemsize_bytes * size
            self._placer.place_one(item.tensor, data, memory[at:end], kind)

    def _number(self, kind: Kind) -> int:
        number = self._numbers.setdefault(kind, len(self._numbers))
        if number == len(self._placer.kinds):
            self._placer.kinds.append(kind)
        return number

    def _kind(self, item: ReadItem) -> Kind:
        return Kind(self._map.tensors[item.tensor].dtype, item.dtype, item.counted)

    def _read_straight(self, item: ReadItem, memory: ByteArray) -> bool:
        """Read elements that lie in one piece and are not cast (most items of large tensors); False for other items."""
        stored = self._map.tensors[item.tensor].dtype
        length = (item.end - item.begin) * stored.itemsize_bytes
        if self._extents.pool is not None or stored is not item.dtype or length < STRAIGHT_BYTES:
            return False
        if self._piece is None or not self._piece.holds(item.tensor, item.begin, item.end):
            self._piece = self._map.piece_holding(item.tensor, item.begin, item.end)
            if self._piece is None:
                return False
        offset = self._piece.offset + (item.begin - self._piece.begin) * stored.itemsize_bytes
        self._extents.read_one(self._piece.file, offset, memory[item.at : item.at + length])
        return True

    def _extents_of(self, item: ReadItem, memory: ByteArray) -> list[Extents]:
        """The extents of some elements of one tensor. Elements of strided pieces are read at once instead."""
        stored = self._map.tensors[item.tensor]
        pieces = self._map.pieces(item.tensor, item.begin, item.end)
        if int((pieces.end - pieces.begin).sum()) != item.end - item.begin:
            raise IntegrityError("integrity.mismatch", f"no file holds some elements of {printable(stored.fqn)}")
        if self._map.strides:
            for row in np.flatnonzero(pieces.strides >= 0).tolist():
                self._read_strided(item, pieces, row, memory)
            pieces = pieces.rows(pieces.strides < 0)
        if not len(pieces.begin):
            return []
        at = item.at + (pieces.begin - item.begin) * item.dtype.itemsize_bytes
        length = (pieces.end - pieces.begin) * stored.dtype.itemsize_bytes
        tensor, kind = _filled(len(at), item.tensor), _filled(len(at), self._number(self._kind(item)))
        return [Extents(pieces.file.astype(np.int64), pieces.offset, length, at, tensor, kind)]

    def _extents_of_whole(self, items: Sequence[ReadItem], memory: ByteArray) -> list[Extents]:
        """The extents of many whole tensors, found by column operations instead of one by one."""
        tensors = np.array([i.tensor for i in items], dtype=np.int64)
        rows, owner = self._map.rows_of(tensors)
        if self._map.strides and bool((self._map.strides_of[rows] >= 0).any()):
            return [e for item in items for e in self._extents_of(item, memory)]
        stored = [self._map.tensors[i.tensor].dtype for i in items]
        kinds = [self._number(Kind(s, i.dtype, i.counted)) for s, i in zip(stored, items, strict=True)]
        size, narrow, at, kind = (
            np.array(values, dtype=np.int64)[owner]
            for values in (
                [s.itemsize_bytes for s in stored],
                [i.dtype.itemsize_bytes for i in items],
                [i.at for i in items],
                kinds,
            )
        )
        begin, end = self._map.begin[rows], self._map.end[rows]
        file = self._map.file[rows].astype(np.int64)
        return [Extents(file, self._map.offset[rows], (end - begin) * size, at + begin * narrow, tensors[owner], kind)]

    def _read_strided(self, item: ReadItem, pieces: Pieces, row: int, memory: ByteArray) -> None:
        """Read elements of a strided piece in parts, so that no second copy of a whole chunk is in memory."""
        kind, size = self._kind(item), item.dtype.itemsize_bytes
        read_into, offset = self._extents.read_of(int(pieces.file[row])), int(pieces.offset[row])
        layout, itemsize = self._map.strides[int(pieces.strides[row])], kind.source.itemsize_bytes
        begin, end = int(pieces.begin[row]), int(pieces.end[row])
        for low in range(begin, end, STRIDED_ELEMS):
            stop = min(low + STRIDED_ELEMS, end)
            data = read_strided(read_into, offset, layout, itemsize, elements=(low, stop))
            self.counts.read_bytes += len(data)
            target = memory[item.at + (low - item.begin) * size : item.at + (stop - item.begin) * size]
            self._placer.place_one(item.tensor, data, target, kind)


def _items_of_view(item: ReadItem, view: View) -> Iterator[ReadItem]:
    """The items that read the elements of a view from the tensors that it consists of."""
    runs, size = view.runs(item.begin, item.end), item.dtype.itemsize_bytes
    columns = (c.tolist() for c in (runs.begin, runs.tensor, runs.source, runs.length))
    for begin, holder, source, length in zip(*columns, strict=True):
        at = item.at + (begin - item.begin) * size
        yield ReadItem(holder, item.dtype, source, source + length, at, item.counted)


def _filled(count: int, value: int) -> Column:
    return np.full(count, value, dtype=np.int64)


# Making items of target files in memory: literals, and bodies from source extents. CRC slots stay zero.


def fill(reader: TensorReader, items: Sequence[WriteItem], memory: ByteArray) -> None:
    """Make items of target files; their sources are read together. CRC slots are left zero.

    Raises:
        SourceError: `source.changed`, or an error of the storage.
    """
    wanted: list[ReadItem] = []
    view = memory.data
    for item in items:
        image = item.file.template.image
        if image is not None and item.length_bytes == len(image):
            view[item.at : item.at + len(image)] = image
            wanted += _all_bodies(item)
        else:
            _put_literals(item, image, memory)
            wanted += _bodies(item, reader, memory)
    reader.read(wanted, memory)


def _put_literals(item: WriteItem, image: bytes | None, memory: ByteArray) -> None:
    begin, end = item.begin, item.begin + item.length_bytes
    shift = item.at - begin
    for offset, data in [(0, image)] if image is not None else item.file.template.literals_in(begin, end):
        low, high = max(offset, begin), min(offset + len(data), end)
        memory[low + shift : high + shift] = np.frombuffer(data, dtype=np.uint8)[low - offset : high - offset]


def _all_bodies(item: WriteItem) -> list[ReadItem]:
    """The bodies of a whole file, except bodies of zeros, which the file's image already holds."""
    at, tensors = item.at, item.file.tensors
    return [
        ReadItem(tensors[b.slot], b.dtype, b.begin, b.end, at + b.offset)
        for b in item.file.template.filled_bodies
        if tensors[b.slot] != ZEROS
    ]


def _bodies(item: WriteItem, reader: TensorReader, memory: ByteArray) -> Iterator[ReadItem]:
    """The elements of bodies that lie wholly in an item. Zeros, and elements that it cuts, are written at once."""
    begin, end = item.begin, item.begin + item.length_bytes
    for body in item.file.template.bodies_in(begin, end):
        tensor, size = item.file.tensors[body.slot], body.dtype.itemsize_bytes
        low, high = max(body.offset, begin) - body.offset, min(body.offset + body.length_bytes, end) - body.offset
        at = item.at + body.offset - begin  # place of the body's first byte, which may lie before the item
        if tensor == ZEROS:
            memory[at + low : at + high] = 0
            continue
        whole = range(-(-low // size), high // size)
        for number in {low // size, (high - 1) // size}:
            if number not in whole:
                _put_cut_element(reader, (tensor, body, number), (low, high), memory, at)
        if whole:
            yield ReadItem(
                tensor, body.dtype, body.begin + whole.start, body.begin + whole.stop, at + whole.start * size
            )


def _put_cut_element(
    reader: TensorReader, element: tuple[int, Body, int], inside: tuple[int, int], memory: ByteArray, at: int
) -> None:
    """Put a part of one element in place. Its losses are counted only in the item where the element begins."""
    (tensor, body, number), (low, high), size = element, inside, element[1].dtype.itemsize_bytes
    first, start = body.begin + number, number * size
    data = reader.elements(tensor, body.dtype, first, first + 1, counted=start >= low)
    part = slice(max(low - start, 0), min(high - start, size))
    memory[at + start + part.start : at + start + part.stop] = data[part]
