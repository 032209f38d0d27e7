"""Affine maps: the place in the whole parameter of every element of a rank's shard.

A piece is a block of elements with two descriptions, as `torch.as_strided` takes them: in the whole and in the shard.
Pieces that are boxes in both are read. A scale other than 1 is refused; DeepSpeed refuses it for optimizer states.

Source: deepspeed 0.19.8 `checkpoint/affine.py` (`ParamAffineMap`, `AffinePiece`; format version 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import SourceError, printable
from reshard_engine.formats.deepspeed.rules.facts import as_items, as_lengths, as_mapping
from reshard_engine.formats.deepspeed.rules.patterns import Patterns
from reshard_engine.tensors.views import MAX_BOXES, Box, View

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
            SourceError: `rules.invalid` for a map of another form, `source.unsupported` for a piece that is no box.
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
        raise SourceError("source.unsupported", f"{what} has a piece that is no box")
    return Box(tensor, shard, part[0], whole[0], whole[1])


def _place(
    lengths: tuple[int, ...], where: tuple[int, tuple[int, ...]], grid: tuple[int, ...], what: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offset, lengths) of a strided block as a box of a row-major grid.

    Raises:
        SourceError: `source.unsupported` if it is none.
    """
    offset, strides = where
    steps: list[int] = []
    step = 1
    for n in reversed(grid):
        steps.append(step)
        step *= n
    steps.reverse()
    at = [offset // s % n if n else 0 for s, n in zip(steps, grid, strict=True)]
    box = [1] * len(grid)
    low = len(grid)
    for length, stride in sorted(zip(lengths, strides, strict=True), key=lambda p: p[1]):
        if length == 1:
            continue
        dim = next((d for d in range(low - 1, -1, -1) if steps[d] == stride and grid[d] >= length), None)
        if dim is None:
            raise SourceError("source.unsupported", f"{what} has a piece that is no box")
        box[dim], low = length, dim
    return tuple(at), tuple(box)


def _strided(value: Any, dims: int, what: str) -> tuple[int, tuple[int, ...]]:
    items = as_items(value, what)
    offset = items[0] if len(items) == 2 else None
    strides = as_lengths(items[1], what) if len(items) == 2 else ()
    if type(offset) is not int or not 0 <= offset < 1 << 48 or len(strides) != dims:
        raise SourceError("rules.invalid", f"{what} has a piece without offset and strides")
    return offset, strides
