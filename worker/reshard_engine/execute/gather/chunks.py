"""Filling parts of target files: literals, and bodies from source extents. CRC slots stay open."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reshard.errors import IntegrityError, printable
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.execute.casts.cast import CastKernel
from reshard_engine.execute.casts.losses import Losses
from reshard_engine.execute.casts.rows import Buffer, Column, Kind
from reshard_engine.execute.gather.lora_merge import ROW_BLOCK_ELEMS, merged_rows, replace_rows, shifted
from reshard_engine.execute.gather.mean import mean_of
from reshard_engine.execute.gather.scattered_reads import Mover, Stretches
from reshard_engine.execute.gather.strided import STRIDED_ELEMS, read_strided
from reshard_engine.tensors.dtypes import FLOAT32, Dtype
from reshard_engine.tensors.layout import ZEROS, Body, TargetFile
from reshard_engine.tensors.merge_rules import Merge, NewRows, Shift
from reshard_engine.tensors.shard_map import Piece

STRAIGHT_BYTES = 128 << 10
"""Of elements in one piece that are worth a read of their own: shorter ones are read together with their neighbours."""
_MATRICES = 3
"""Factors of an adapter that are kept: those of one weight."""
MEAN_ELEMS = 1 << 18
"""Elements of a mean that are computed at once."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a target file, and where in memory they go."""

    file: TargetFile
    begin: int
    at: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Elements of a tensor as an element type, and where in memory they go."""

    tensor: int
    dtype: Dtype
    begin: int
    end: int
    at: int


class ChunkFiller:
    """Fills parts of files from a checkpoint; counts what it read and what casts lost."""

    def __init__(
        self, checkpoint: Checkpoint, kernel: CastKernel, *, saturate: bool = False, pool: Executor | None = None
    ) -> None:
        """Nothing is read yet.

        Args:
            checkpoint: Where elements come from.
            kernel: What casts them.
            saturate: Whether finite elements that become infinite are to be the largest number of their sign.
            pool: Where reads run beside one another, if there is one.
        """
        self._checkpoint = checkpoint
        self._map = checkpoint.shard_map
        self._kernel = kernel
        self._mover = Mover(checkpoint.files, kernel, saturate, pool)
        self._piece: Piece | None = None
        self._matrices: dict[int, npt.NDArray[np.float32]] = {}

    @property
    def read_bytes(self) -> int:
        """Source bytes that were read."""
        return self._mover.read_bytes

    @property
    def losses(self) -> dict[str, Losses]:
        """What casts lost, per parameter."""
        found: dict[str, Losses] = {}
        for tensor, lost in self._mover.losses.items():
            fqn = self._map.tensors[tensor].fqn
            found[fqn] = found.get(fqn, Losses()) + lost
        return found

    def fill(self, file: TargetFile, *, begin: int, buffer: Buffer) -> None:
        """Fill `buffer` with the bytes of one target file from `begin` on; see `fill_parts`."""
        self.fill_parts([Part(file, begin, 0, len(buffer))], buffer)

    def fill_parts(self, parts: Sequence[Part], memory: Buffer) -> None:
        """Fill memory with parts of target files, except CRC slots (left zero); their sources are read together.

        Raises:
            SourceError: `source.changed`, or what the storage says.
        """
        wanted: list[_Wanted] = []
        view = memory.data
        for part in parts:
            image = part.file.template.image
            if image is not None and part.length_bytes == len(image):
                view[part.at : part.at + len(image)] = image
                wanted += _all_elements(part)
                continue
            begin, end = part.begin, part.begin + part.length_bytes
            shift = part.at - begin
            literals = [(0, image)] if image is not None else part.file.template.literals_in(begin, end)
            for offset, data in literals:
                low, high = max(offset, begin), min(offset + len(data), end)
                memory[low + shift : high + shift] = np.frombuffer(data, dtype=np.uint8)[low - offset : high - offset]
            for body in part.file.template.bodies_in(begin, end):
                window = max(body.offset, begin), min(body.offset + body.length_bytes, end)
                inner = self._whole_elements(part.file.tensors[body.slot], body, window, memory, shift)
                if inner is not None:
                    wanted.append(inner)
        self._gather(wanted, memory)

    def _whole_elements(
        self, tensor: int, body: Body, window: tuple[int, int], memory: Buffer, shift: int
    ) -> _Wanted | None:
        """The elements that lie wholly in the window of a file; those that it cuts are put in place here.

        A chunk may begin or end inside an element. Such an element is fetched whole, beside its neighbours, into
        memory of its own.
        """
        low, high = window[0] - body.offset, window[1] - body.offset
        at = window[0] + shift
        if tensor == ZEROS:
            memory[at : at + high - low] = 0
            return None
        size = body.dtype.itemsize_bytes
        inner = range(-(-low // size), high // size)
        for number in {low // size, (high - 1) // size}:
            if number in inner:
                continue
            start = number * size
            element = self._elements(tensor, body.dtype, body.begin + number, 1, counted=start >= low)
            part = slice(max(low - start, 0), min(high - start, size))
            memory[at + start + part.start - low : at + start + part.stop - low] = element[part]
        if not inner:
            return None
        first = body.begin + inner.start
        return _Wanted(tensor, body.dtype, first, first + len(inner), at + inner.start * size - low)

    def elements(self, tensor: int, dtype: Dtype, begin: int, end: int) -> Buffer:
        """The elements `[begin, end)` of a tensor, in row-major order, as `dtype`."""
        return self._elements(tensor, dtype, begin, end - begin, counted=True)

    def elements_into(self, tensor: int, dtype: Dtype, begin: int, memory: Buffer) -> None:
        """Fill memory with the elements of a tensor from `begin` on, in row-major order, as `dtype`."""
        count = len(memory) // dtype.itemsize_bytes
        self._gather([_Wanted(tensor, dtype, begin, begin + count, 0)], memory)

    def _elements(self, tensor: int, dtype: Dtype, begin: int, count: int, *, counted: bool) -> Buffer:
        memory = np.empty(count * dtype.itemsize_bytes, dtype=np.uint8)
        self._gather([_Wanted(tensor, dtype, begin, begin + count, 0)], memory, counted=counted)
        return memory

    def _gather(self, wanted: Sequence[_Wanted], memory: Buffer, *, counted: bool = True) -> None:
        found: list[Stretches] = []
        whole: list[_Wanted] = []
        for one in wanted:
            if one.begin == one.end or self._read_straight(one, memory):
                continue
            if one.tensor in self._map.merges:
                self._merged(one, memory, counted=counted)
            elif self._map.means and self._map.averages(one.tensor):
                self._averaged(one, memory, counted=counted)
            elif one.tensor in self._map.views or one.end - one.begin < self._map.tensors[one.tensor].numel:
                found += self._some(one, memory, counted=counted)
            else:
                whole.append(one)
        if len(whole) == 1:
            found += self._some(whole[0], memory, counted=counted)
        elif whole:
            found += self._all_of(whole, memory, counted=counted)
        if found:
            self._mover.move(Stretches.joined(found), memory)

    def _read_straight(self, one: _Wanted, memory: Buffer) -> bool:
        """Read elements that lie in one piece and do not change, as most windows of large tensors do; else False."""
        stored = self._map.tensors[one.tensor].dtype
        length = (one.end - one.begin) * stored.itemsize_bytes
        if self._mover.pool is not None or stored is not one.dtype or length < STRAIGHT_BYTES:
            return False
        if one.tensor in self._map.views:
            return False
        if self._piece is None or not self._piece.holds(one.tensor, one.begin, one.end):
            self._piece = self._map.piece_holding(one.tensor, one.begin, one.end)
            if self._piece is None:
                return False
        offset = self._piece.offset + (one.begin - self._piece.begin) * stored.itemsize_bytes
        self._mover.read(self._piece.file, offset, memory[one.at : one.at + length])
        return True

    def _some(self, one: _Wanted, memory: Buffer, *, counted: bool) -> list[Stretches]:
        """The stretches of some elements of one tensor."""
        stored = self._map.tensors[one.tensor]
        pieces = self._map.pieces(one.tensor, one.begin, one.end)
        if int((pieces.end - pieces.begin).sum()) != one.end - one.begin:
            raise IntegrityError(
                "integrity.mismatch", f"{printable(stored.fqn)} has no source for some of its elements"
            )
        at = one.at + (pieces.begin - one.begin) * one.dtype.itemsize_bytes
        length = (pieces.end - pieces.begin) * stored.dtype.itemsize_bytes
        if self._map.strides:
            for row in np.flatnonzero(pieces.strides >= 0).tolist():
                interval = int(pieces.begin[row]), int(pieces.end[row])
                place = int(pieces.file[row]), int(pieces.offset[row]), int(pieces.strides[row])
                self._strided(one, interval, place, memory, counted=counted)
            packed = pieces.strides < 0
            at, length, offset = at[packed], length[packed], pieces.offset[packed]
            file = pieces.file[packed].astype(np.int64)
        else:
            file, offset = pieces.file.astype(np.int64), pieces.offset
        kind = self._mover.kind(stored.dtype, one.dtype, counted=counted)
        count = len(at)
        return [Stretches(file, offset, length, at, _filled(count, one.tensor), _filled(count, kind))] if count else []

    def _all_of(self, wanted: Sequence[_Wanted], memory: Buffer, *, counted: bool) -> list[Stretches]:
        """The stretches of many whole tensors, without a look at each."""
        tensors = np.array([w.tensor for w in wanted], dtype=np.int64)
        rows, owner = self._map.rows_of(tensors)
        if self._map.strides and bool((self._map.strides_of[rows] >= 0).any()):
            return [s for one in wanted for s in self._some(one, memory, counted=counted)]
        stored = [self._map.tensors[w.tensor].dtype for w in wanted]
        kinds = [self._mover.kind(s, w.dtype, counted=counted) for s, w in zip(stored, wanted, strict=True)]
        size, narrow, at, kind = (
            np.array(values, dtype=np.int64)[owner]
            for values in (
                [s.itemsize_bytes for s in stored],
                [w.dtype.itemsize_bytes for w in wanted],
                [w.at for w in wanted],
                kinds,
            )
        )
        begin, end = self._map.begin[rows], self._map.end[rows]
        return [
            Stretches(
                self._map.file[rows].astype(np.int64),
                self._map.offset[rows],
                (end - begin) * size,
                at + begin * narrow,
                tensors[owner],
                kind,
            )
        ]

    def _strided(
        self, one: _Wanted, interval: tuple[int, int], place: tuple[int, int, int], memory: Buffer, *, counted: bool
    ) -> None:
        """Elements of a piece that lies strided in its file, put in place."""
        stored, (low, high), (file, offset, strides) = self._map.tensors[one.tensor].dtype, interval, place
        size, layout = one.dtype.itemsize_bytes, self._map.strides[strides]
        for at in range(low, high, STRIDED_ELEMS):
            # In pieces, so that no copy of the whole chunk stands beside it.
            stop = min(at + STRIDED_ELEMS, high)
            data = read_strided(
                self._checkpoint.files[file], offset, layout, stored.itemsize_bytes, elements=(at, stop)
            )
            self._mover.read_bytes += len(data)
            target = memory[one.at + (at - one.begin) * size : one.at + (stop - one.begin) * size]
            self._mover.place_one(one.tensor, data, target, Kind(stored, one.dtype, counted))

    def _averaged(self, one: _Wanted, memory: Buffer, *, counted: bool) -> None:
        """Elements of a mean, or of a view of means, computed at once."""
        size, view = one.dtype.itemsize_bytes, self._map.views.get(one.tensor)
        if view is not None:
            runs = view.runs(one.begin, one.end)
            for begin, holder, source, length in zip(
                runs.begin.tolist(), runs.tensor.tolist(), runs.source.tolist(), runs.length.tolist(), strict=True
            ):
                at = one.at + (begin - one.begin) * size
                self._gather([_Wanted(holder, one.dtype, source, source + length, at)], memory, counted=counted)
            return
        copies, stored = self._map.means[one.tensor], self._map.tensors[one.tensor]
        own = self._map.tensors[copies[0]].dtype
        for low in range(one.begin, one.end, MEAN_ELEMS):
            high = min(low + MEAN_ELEMS, one.end)
            mean = mean_of((self.elements(c, own, low, high) for c in copies), own, self._kernel)
            if stored.dtype is not own:
                mean = self._kernel.cast(mean, own, stored.dtype)
            part = memory[one.at + (low - one.begin) * size : one.at + (high - one.begin) * size]
            self._mover.place_one(one.tensor, mean, part, Kind(stored.dtype, one.dtype, counted))

    def _merged(self, one: _Wanted, memory: Buffer, *, counted: bool) -> None:
        """Elements of a weight with its adapter merged: the rows that hold them, a block at a time."""
        merge, stored = self._map.merges[one.tensor], self._map.tensors[one.tensor]
        if not isinstance(merge, Merge):
            self._changed(merge, one, memory, counted=counted)
            return
        columns, size = stored.shape[1], one.dtype.itemsize_bytes
        step = max(1, ROW_BLOCK_ELEMS // columns)
        left, right = self._matrix(merge.left), self._matrix(merge.right)
        if merge.transposed:
            left, right = left.T, right.T
        lengths = None if merge.magnitude is None else self._matrix(merge.magnitude)
        for row in range(one.begin // columns, -(-one.end // columns), step):
            last = min(row + step, -(-one.end // columns))
            base = self.elements(merge.base, FLOAT32, row * columns, last * columns).view(np.float32)
            some = None if lengths is None else lengths.reshape(-1)[row:last]
            rows = merged_rows(base.reshape(-1, columns), left[row:last], right, merge.scale, some)
            low, high = max(row * columns, one.begin), min(last * columns, one.end)
            packed = rows.reshape(-1)[low - row * columns : high - row * columns].view(np.uint8)
            target = memory[one.at + (low - one.begin) * size : one.at + (high - one.begin) * size]
            self._mover.place_one(one.tensor, packed, target, Kind(stored.dtype, one.dtype, counted))

    def _changed(self, rule: Shift | NewRows, one: _Wanted, memory: Buffer, *, counted: bool) -> None:
        """Elements of a weight that is another one but for some rows, or for what is added to each element."""
        stored, size = self._map.tensors[one.tensor], one.dtype.itemsize_bytes
        for low in range(one.begin, one.end, ROW_BLOCK_ELEMS):
            high = min(low + ROW_BLOCK_ELEMS, one.end)
            values = self.elements(rule.base, FLOAT32, low, high).view(np.float32)
            if isinstance(rule, Shift):
                values = shifted(values, self._matrix(rule.other)[low:high], rule.scale)
            else:
                replace_rows(values, low, rule.rows, self._matrix(rule.source))
            target = memory[one.at + (low - one.begin) * size : one.at + (high - one.begin) * size]
            self._mover.place_one(one.tensor, values.view(np.uint8), target, Kind(stored.dtype, one.dtype, counted))

    def _matrix(self, tensor: int) -> npt.NDArray[np.float32]:
        """A factor in fp32, kept while the weight is the same."""
        if tensor not in self._matrices:
            stored = self._map.tensors[tensor]
            while len(self._matrices) >= _MATRICES:
                self._matrices.pop(next(iter(self._matrices)))
            self._matrices[tensor] = (
                self.elements(tensor, FLOAT32, 0, stored.numel).view(np.float32).reshape(stored.shape)
            )
        return self._matrices[tensor]


def _all_elements(part: Part) -> list[_Wanted]:
    """What the bodies of a whole file are filled with, but for those that its image holds already: zeros."""
    at, tensors = part.at, part.file.tensors
    return [
        _Wanted(tensors[b.slot], b.dtype, b.begin, b.end, at + b.offset)
        for b in part.file.template.filled_bodies
        if tensors[b.slot] != ZEROS
    ]


def _filled(count: int, value: int) -> Column:
    return np.full(count, value, dtype=np.int64)
