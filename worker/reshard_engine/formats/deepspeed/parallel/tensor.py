"""Tensor parallelism: the place in the whole parameter of every element of a rank's shard, read and written.

Source: deepspeed 0.19.8 `checkpoint/constants.py` (`universal_checkpoint_info`); Megatron-DeepSpeed (July 2025)
`megatron/arguments.py` (names of `args`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from reshard.errors import RequestError, SourceError, printable
from reshard_engine.checkpoint import Checkpoint, Parameter
from reshard_engine.formats.deepspeed.facts import ARGS
from reshard_engine.formats.deepspeed.files import INFO
from reshard_engine.formats.deepspeed.native.target import LocalParameter
from reshard_engine.formats.deepspeed.parallel.rules import (
    AFFINE,
    BEHIND,
    DEFAULT,
    HEADED,
    HEADS,
    ORIGINAL_VOCAB,
    PADDED_VOCAB,
    VOCAB_DIVISOR,
    CutRules,
    Patterns,
    as_items,
    as_lengths,
    as_mapping,
)
from reshard_engine.formats.deepspeed.partitioning import Run
from reshard_engine.formats.deepspeed.rank_files import ModelStates
from reshard_engine.pickles.nodes import Node, is_mapping, namespace_items, plain_value
from reshard_engine.tensors.cuts import Cut, CutError, local_grid, parts, require_units, rows_of, taken
from reshard_engine.tensors.dtypes import Dtype
from reshard_engine.tensors.layout import ZEROS
from reshard_engine.tensors.shard_map import LogicalTensor, packed_stride
from reshard_engine.tensors.views import MAX_BOXES, Box, View

# Affine maps: the place in the whole parameter of every element of a rank's shard.
#
# A piece is a block of elements with two descriptions, as `torch.as_strided` takes them: in the whole and in the shard.
# Pieces that are boxes in both are read. A scale other than 1 is refused; DeepSpeed refuses it for optimizer states.
#
# Source: deepspeed 0.19.8 `checkpoint/affine.py` (`ParamAffineMap`, `AffinePiece`; format version 1).

FORMAT_VERSION = 1


class AffineMaps:
    """The affine maps of a checkpoint, by patterns of names."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        """Take in `affine_map` as plain values.

        Raises:
            SourceError: `rules.invalid`, `source.unsupported_version`.
        """
        version = facts.get("version", FORMAT_VERSION)
        if type(version) is not int or version > FORMAT_VERSION:
            raise SourceError(
                "source.unsupported_version", f"affine maps of version {version!r}; known is {FORMAT_VERSION}"
            )
        self._maps = as_mapping(facts.get("params"), "affine_map: params")
        self._patterns = Patterns([str(k) for k in self._maps], "affine_map")

    def view_of(self, name: str, tensors: Sequence[int]) -> View | None:
        """The whole parameter as a view of its ranks' shards; None for a parameter without a map.

        Raises:
            SourceError: `rules.invalid` for a map of another form, `source.unsupported` for a piece that is not a box.
            ValueError: The pieces do not tile the parameter.
        """
        pattern = self._patterns.match(name)
        if pattern is None:
            return None
        what = f"the affine map of {printable(name)}"
        entry = as_mapping(self._maps[pattern], what)
        logical = as_lengths(entry.get("logical_shape"), what)
        # Ranks are numbers, or texts where JSON was in between.
        ranks = {str(rank): shard for rank, shard in as_mapping(entry.get("ranks"), what).items()}
        if set(ranks) != {str(rank) for rank in range(len(tensors))}:
            raise SourceError("rules.invalid", f"{what} is for other ranks than the {len(tensors)} that have files")
        boxes: list[Box] = []
        written: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for rank, tensor in enumerate(tensors):
            shard = as_mapping(ranks[str(rank)], what)
            shape = as_lengths(shard.get("shard_shape"), what)
            for piece in as_items(shard.get("pieces"), what)[: MAX_BOXES + 1]:
                box = _box(as_mapping(piece, what), logical, shape, tensor, what)
                # One copy of a block that several ranks hold is enough; copies of whole parameters are compared later.
                if box.numel and (box.offset, box.lengths) not in written:
                    written.add((box.offset, box.lengths))
                    boxes.append(box)
        return View(logical, tuple(boxes))


def _box(piece: Mapping[str, Any], logical: tuple[int, ...], shard: tuple[int, ...], tensor: int, what: str) -> Box:
    if piece.get("scale", 1.0) != 1.0:
        raise SourceError(
            "source.unsupported", f"{what} scales its shards: optimizer states cannot be moved exactly through that"
        )
    lengths = as_lengths(piece.get("shape"), what)
    whole = _place(lengths, _strided(piece.get("source"), len(lengths), what), logical, what)
    part = _place(lengths, _strided(piece.get("dest"), len(lengths), what), shard, what)
    if whole[1] != part[1] or len(logical) != len(shard):
        raise SourceError("source.unsupported", f"{what} has a piece that is not a box")
    return Box(tensor, shard, part[0], whole[0], whole[1])


def _place(
    lengths: tuple[int, ...], where: tuple[int, tuple[int, ...]], grid: tuple[int, ...], what: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offset, lengths) of a strided block as a box of a row-major grid.

    Raises:
        SourceError: `source.unsupported` if it is none.
    """
    offset, strides = where
    steps = packed_stride(grid)
    at = [offset // s % n if n else 0 for s, n in zip(steps, grid, strict=True)]
    box = [1] * len(grid)
    low = len(grid)
    for length, stride in sorted(zip(lengths, strides, strict=True), key=lambda p: p[1]):
        if length == 1:
            continue
        dim = next((d for d in range(low - 1, -1, -1) if steps[d] == stride and grid[d] >= length), None)
        if dim is None:
            raise SourceError("source.unsupported", f"{what} has a piece that is not a box")
        box[dim], low = length, dim
    return tuple(at), tuple(box)


def _strided(value: Any, dims: int, what: str) -> tuple[int, tuple[int, ...]]:
    items = as_items(value, what)
    offset = items[0] if len(items) == 2 else None
    strides = as_lengths(items[1], what) if len(items) == 2 else ()
    if type(offset) is not int or not 0 <= offset < 1 << 48 or len(strides) != dims:
        raise SourceError("rules.invalid", f"{what} has a piece without offset and strides")
    return offset, strides


# Sets of rules in order of precedence: the user's file, then a family's rules, then the checkpoint's own rules.
#
# Each set of rules is a layer. A parameter takes its cut from the first layer that names it. Other layers add facts
# that this layer lacks: that the parameter is a vocabulary, or how many heads it has.


class RuleLayers:
    """Several sets of rules as one."""

    def __init__(self, layers: Sequence[CutRules]) -> None:
        """Take at least one layer, in order of precedence."""
        self._layers = tuple(layers)
        self.vocab_divisor = next((r.vocab_divisor for r in layers if r.vocab_divisor is not None), None)
        self.vocab_rows = next((r.padded_vocab_size for r in layers if r.padded_vocab_size is not None), None)
        """Rows of the vocabulary with padding in the run that the metadata describe."""

    def first_stage_counts(self, name: str) -> bool:
        """True if only the first stage's copy of a parameter is used; False for vocabularies, which are equal."""
        staged = any(rules.is_staged(name) for rules in self._layers)
        return staged and not any(rules.is_vocabulary(name) for rules in self._layers)

    def cut_of(self, name: str, locals_: Sequence[tuple[int, ...]]) -> Cut | None:
        """The cut of a parameter whose parts on the ranks have these shapes; None if no rule says it.

        Raises:
            SourceError: As `CutRules.cut_of`.
        """
        # A layer may cut parameters that it does not name: it is asked only if no layer names the parameter.
        naming = [rules for rules in self._layers if rules.names(name)][:1]
        asked = naming or self._layers
        cut = next((c for c in (rules.cut_of(name, locals_) for rules in asked) if c is not None), None)
        return cut if cut is None or cut.dim is None else self._completed(name, cut)

    def _completed(self, name: str, cut: Cut) -> Cut:
        if cut.units is None:
            counts = [n for rules in self._layers if (n := rules.units_of(name)) is not None]
            cut = replace(cut, units=min(counts, default=None))
        known = [r.original_vocab_size for r in self._layers if r.is_vocabulary(name) and not r.automatic]
        if cut.vocabulary is None and cut.dim == 0 and not cut.sections and not cut.near_even and known:
            cut = replace(cut, vocabulary=known[0])
        return cut


_CARRIED = (ORIGINAL_VOCAB, PADDED_VOCAB)
_REQUESTED = "the rules of the request"


def rules_of(model: ModelStates, wanted: Mapping[str, Any] | None) -> tuple[RuleLayers | None, AffineMaps | None]:
    """The rules for a checkpoint, and its affine maps.

    Args:
        model: Model states of model-parallel rank 0.
        wanted: Rules of the request, by DeepSpeed's keys. They come before the checkpoint's own rules, which say the
            rest, unless the request's `default` is `refuse`.

    Raises:
        SourceError: `rules.*`, `checkpoint.malformed`.
    """
    node = model.entries.get(INFO)
    info: dict[str, Any] = plain_value(node, what=INFO) if is_mapping(node) else {}
    if wanted is None and not info:
        return None, None
    args = namespace_items(model.entries.get(ARGS))
    shared: dict[str, Any] = {HEADS: _heads(args)}
    if type(args.get(VOCAB_DIVISOR)) is int:
        shared[VOCAB_DIVISOR] = args[VOCAB_DIVISOR]
    carried = shared | {k: info[k] for k in _CARRIED if k in info}
    layers: list[CutRules] = []
    given = dict(wanted or {})
    behind, default = given.pop(BEHIND, None), given.pop(DEFAULT, None)
    if given:
        layers.append(CutRules(carried | given, complete=False, what=_REQUESTED))
        carried |= {k: given[k] for k in _CARRIED if k in given}
    if behind is not None:
        layers.append(CutRules(carried | behind, complete=False, what="the family's rules"))
    if info and default != "refuse":
        layers.append(CutRules(shared | info, complete=True, what=INFO))
    if default == "column" or not layers:
        layers.append(CutRules(carried | given, complete=default == "column", stated=True, what=_REQUESTED))
    maps = info.get(AFFINE)
    return RuleLayers(layers), AffineMaps(as_mapping(maps, AFFINE)) if wanted is None and maps is not None else None


def _heads(args: Mapping[str | int, Node]) -> list[dict[str, Any]]:
    """The rule that tensor parallelism cuts attention between heads, or between groups of heads that share keys."""
    counts = [args.get(k) for k in ("num_key_value_heads", "num_attention_heads")]
    heads = next((c for c in counts if type(c) is int and c > 0), None)
    return [{"patterns": HEADED, "heads": heads}] if heads is not None else []


# A target rank's part of a parameter: its elements of the whole parameter, and its shape.


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
