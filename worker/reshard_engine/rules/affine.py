"""Affine maps: where every element of a rank's shard lies in the whole parameter, as tools that cut models write it.

A piece is a block of elements described twice, as `torch.as_strided` takes it: in the whole and in the shard. Pieces
that are boxes in both are read; a scale other than 1 is refused, as DeepSpeed refuses it for optimizer states.

Source: deepspeed 0.19.8 `checkpoint/affine.py` (`ParamAffineMap`, `AffinePiece`; format version 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reshard.errors import SourceError, printable
from reshard_engine.rules.patterns import Patterns
from reshard_engine.views import MAX_BOXES, Box, View

FORMAT_VERSION = 1
MAX_DIMS = 16


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
        params = facts.get("params")
        self._maps: Mapping[str, Any] = params if isinstance(params, Mapping) else {}
        self._patterns = Patterns([str(k) for k in self._maps], "affine_map")

    def view_of(self, name: str, tensors: Sequence[int]) -> View | None:
        """The whole parameter as a view of its ranks' shards; None for a parameter without a map.

        Raises:
            SourceError: `rules.invalid` for a map of another form, `source.unsupported` for what is no box.
            ValueError: The pieces do not tile the parameter.
        """
        pattern = self._patterns.match(name)
        if pattern is None:
            return None
        entry = self._maps[pattern]
        logical = _lengths(entry.get("logical_shape") if isinstance(entry, Mapping) else None, name)
        ranks = entry.get("ranks") if isinstance(entry, Mapping) else None
        if not isinstance(ranks, Mapping) or {int(r) for r in ranks} != set(range(len(tensors))):
            raise _invalid(name, f"ranks other than the {len(tensors)} that have files")
        boxes: list[Box] = []
        written: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for key in sorted(ranks, key=int):
            shard = ranks[key]
            shape = _lengths(shard.get("shard_shape") if isinstance(shard, Mapping) else None, name)
            pieces = shard.get("pieces") if isinstance(shard, Mapping) else None
            if not isinstance(pieces, list | tuple) or len(pieces) > MAX_BOXES:
                raise _invalid(name, "no list of pieces")
            for piece in pieces:
                box = _box(piece, logical, shape, tensors[int(key)], name)
                # Of a block that several ranks hold, one is enough; copies of whole parameters are compared elsewhere.
                if box.numel and (box.offset, box.lengths) not in written:
                    written.add((box.offset, box.lengths))
                    boxes.append(box)
        return View(logical, tuple(boxes))


def _box(piece: Any, logical: tuple[int, ...], shard: tuple[int, ...], tensor: int, name: str) -> Box:
    if not isinstance(piece, Mapping):
        raise _invalid(name, "a piece that is no mapping")
    if piece.get("scale", 1.0) != 1.0:
        raise SourceError(
            "source.unsupported",
            f"{printable(name)} is stored scaled by a factor: its optimizer states cannot be moved exactly",
        )
    lengths = _lengths(piece.get("shape"), name)
    source, dest = (_strided(piece.get(side), len(lengths), name) for side in ("source", "dest"))
    offset, there = _place(lengths, *source, logical, name), _place(lengths, *dest, shard, name)
    if offset[1] != there[1] or len(logical) != len(shard):
        raise SourceError(
            "source.unsupported", f"{printable(name)}: a piece of its affine map is no box in both shapes"
        )
    return Box(tensor, shard, there[0], offset[0], offset[1])


def _place(
    lengths: tuple[int, ...], offset: int, strides: tuple[int, ...], grid: tuple[int, ...], name: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offset, lengths) of a strided block as a box of a row-major grid.

    Raises:
        SourceError: `source.unsupported` if it is none.
    """
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
            raise SourceError("source.unsupported", f"{printable(name)}: a piece of its affine map is no box")
        box[dim], low = length, dim
    return tuple(at), tuple(box)


def _lengths(value: Any, name: str) -> tuple[int, ...]:
    items = list(value) if isinstance(value, list | tuple) else [None]
    if len(items) > MAX_DIMS or not all(type(n) is int and 0 <= n < 1 << 48 for n in items):
        raise _invalid(name, "a shape that is none")
    return tuple(items)


def _strided(value: Any, dims: int, name: str) -> tuple[int, tuple[int, ...]]:
    if not isinstance(value, list | tuple) or len(value) != 2 or type(value[0]) is not int:
        raise _invalid(name, "no offset with strides")
    strides = _lengths(value[1], name)
    if len(strides) != dims or not 0 <= value[0] < 1 << 48:
        raise _invalid(name, "strides of another number of dimensions")
    return value[0], strides


def _invalid(name: str, reason: str) -> SourceError:
    return SourceError("rules.invalid", f"the affine map of {printable(name)} has {reason}")
