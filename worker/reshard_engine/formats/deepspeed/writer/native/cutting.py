"""A target rank's part of a parameter: its elements of the whole parameter, and its shape."""

from __future__ import annotations

from math import prod

from reshard.errors import RequestError, printable
from reshard_engine.checkpoint import Checkpoint, Parameter
from reshard_engine.formats.deepspeed.partitioning import Run
from reshard_engine.formats.deepspeed.writer.native.model import LocalParameter
from reshard_engine.tensors.cuts import Cut, CutError, local_grid, parts, require_units, rows_of, taken
from reshard_engine.tensors.dtypes import Dtype
from reshard_engine.tensors.layout import ZEROS
from reshard_engine.tensors.shard_map import LogicalTensor
from reshard_engine.tensors.views import View


class Cutter:
    """Cuts whole parameters for the tensor-parallel ranks of a target, and collects the parts that are views."""

    def __init__(self, checkpoint: Checkpoint, tp: int, vocab_rows: int | None, *, dtype: Dtype) -> None:
        """Cut for `tp` ranks, which together hold `vocab_rows` rows of a padded vocabulary; `dtype` is the model's."""
        self._checkpoint, self._tp, self._vocab_rows, self._dtype = checkpoint, tp, vocab_rows, dtype
        self._first = len(checkpoint.shard_map.tensors)
        self.parts: list[tuple[LogicalTensor, View]] = []
        self._numbers: dict[tuple[int, int], int] = {}

    def local(self, parameter: Parameter, rank: int) -> LocalParameter:
        """A rank's part of a parameter.

        Raises:
            RequestError: `request.unsatisfiable` if it cannot be cut for these ranks, or nothing says how.
        """
        best = self._weight_of(parameter)
        cut = self._cut_of(parameter)
        try:
            shape = self._shape(cut, parameter.shape, rank)
            behind = parameter.padding
            states = {s: self._runs(cut, parameter, n, rank, behind.get(s)) for s, n in parameter.states.items()}
            shown = "weight" if best == parameter.weight else "fp32"
            weight = self._runs(cut, parameter, best, rank, behind.get(shown))
        except CutError as error:
            raise RequestError(
                "request.unsatisfiable",
                f"{printable(parameter.fqn)} {parameter.shape} cannot be cut over {self._tp} ranks: {error}",
                fix=f"--tp {self._largest(cut, parameter.shape)}",
            ) from None
        tensors = self._checkpoint.shard_map.tensors
        return LocalParameter(
            parameter.fqn,
            shape,
            parameter.group,
            states=states,
            weight=weight,
            dtypes={s: tensors[n].dtype for s, n in parameter.states.items()},
            weight_dtype=tensors[best].dtype,
            scalars=parameter.scalars,
            frozen_late=parameter.frozen_late,
        )

    def _weight_of(self, parameter: Parameter) -> int:
        """The tensor that a weight is made of: the stored weight if it has the model's type, else the master.

        A stored weight needs no cast and half the bytes of a master, and an object store can copy it by itself.
        """
        stored = parameter.weight
        if stored is not None and self._checkpoint.shard_map.tensors[stored].dtype is self._dtype:
            return stored
        return parameter.value()

    def _cut_of(self, parameter: Parameter) -> Cut:
        cut = parameter.cut
        if cut is None:
            if self._tp == 1:
                return Cut()
            raise RequestError(
                "request.unsatisfiable",
                f"nothing says how tensor parallelism cuts {printable(parameter.fqn)}: the source was not cut",
                fix="name the family (--family gpt-megatron|llama-megatron|bloom) or give rules (--rules FILE)",
            )
        ranks = len(cut.widths[0]) if cut.widths else self._tp
        return cut if ranks == self._tp else cut.even()

    def _rows(self, cut: Cut, shape: tuple[int, ...]) -> int:
        """Rows of a vocabulary, padding included."""
        wanted = self._vocab_rows or -(-shape[0] // self._tp) * self._tp
        if wanted < shape[0] or wanted % self._tp:
            raise CutError(f"{wanted} rows for a vocabulary of {shape[0]} over {self._tp} ranks")
        return wanted

    def _shape(self, cut: Cut, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        if cut.dim is None:
            return shape
        if cut.vocabulary is not None:
            return (self._rows(cut, shape) // self._tp, *shape[1:])
        numel = prod(local_grid(cut, shape, self._tp, rank))
        if cut.grid is None:
            return local_grid(cut, shape, self._tp, rank)
        return (numel // prod(shape[1:]), *shape[1:])

    def _runs(self, cut: Cut, parameter: Parameter, tensor: int, rank: int, padding: int | None) -> tuple[Run, ...]:
        shape = parameter.shape
        numel = prod(shape)
        if cut.dim is None:
            return ((tensor, 0, numel),)
        if cut.vocabulary is not None:
            return self._vocabulary_runs(cut, shape, (tensor, padding), rank)
        require_units(cut, self._tp)
        grid = cut.shape_in(shape)
        inside = parts(cut, grid[cut.dim], self._tp, rank)
        if cut.dim == 0 and len(inside) == 1:
            step = prod(grid[1:])
            return ((tensor, inside[0].start * step, (inside[0].start + inside[0].width) * step),)
        number = self._part(cut, shape, tensor, rank)
        return ((number, 0, prod(self.parts[number - self._first][1].grid)),)

    def _vocabulary_runs(
        self, cut: Cut, shape: tuple[int, ...], tensors: tuple[int, int | None], rank: int
    ) -> tuple[Run, ...]:
        """A rank's rows of a vocabulary: data, then the source's padding as far as it reaches, then zeros."""
        data, padding = tensors
        rows, row = self._rows(cut, shape) // self._tp, prod(shape[1:])
        kept = 0
        if padding is not None:
            padding_shape = self._checkpoint.shard_map.tensors[padding].shape
            kept = min(padding_shape[0], rows * self._tp - shape[0])
            padding = padding if kept == padding_shape[0] else self._padding_part(padding, padding_shape, kept)
        found: list[Run] = []
        first = 0
        for tensor, count in ((data, shape[0]), (padding, kept), (ZEROS, rows * self._tp - shape[0] - kept)):
            low, high = max(rank * rows, first), min((rank + 1) * rows, first + count)
            if tensor is not None and high > low:
                start = 0 if tensor == ZEROS else (low - first) * row
                found.append((tensor, start, start + (high - low) * row))
            first += max(count, 0)
        return tuple(found)

    def _padding_part(self, padding: int, padding_shape: tuple[int, ...], kept: int) -> int:
        """The number of a tensor with the first rows of a padding. Digests cover whole tensors, so it is one."""
        known = self._numbers.get((padding, -1))
        if known is None:
            stored, view = self._checkpoint.shard_map.tensors[padding], rows_of(padding_shape, padding, 0, kept)
            self.parts.append((LogicalTensor(stored.fqn, stored.state, stored.dtype, view.grid), view))
            known = self._numbers[padding, -1] = self._first + len(self.parts) - 1
        return known

    def _part(self, cut: Cut, shape: tuple[int, ...], tensor: int, rank: int) -> int:
        known = self._numbers.get((tensor, rank))
        if known is not None:
            return known
        view = taken(cut, shape, tensor, self._tp, rank)
        stored = self._checkpoint.shard_map.tensors[tensor]
        name = f"{stored.fqn}@tp{rank}of{self._tp}"
        self.parts.append((LogicalTensor(name, stored.state, stored.dtype, view.grid), view))
        self._numbers[tensor, rank] = self._first + len(self.parts) - 1
        return self._numbers[tensor, rank]

    def _largest(self, cut: Cut, shape: tuple[int, ...]) -> int:
        """The largest number of ranks below the wanted number for which the parameter can be cut."""
        for ranks in range(self._tp - 1, 1, -1):
            try:
                taken(cut.even(), shape, 0, ranks, ranks - 1)
            except CutError:
                continue
            return ranks
        return 1
