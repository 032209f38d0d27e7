"""Which file holds which part of a tensor, from the shard map alone: for people to look at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from reshard.errors import RequestError, printable
from reshard.pictures import FileShare, LayoutPicture, Region, TensorPicture
from reshard_engine.checkpoint import Checkpoint, Parameter
from reshard_engine.formats.registry import format_of
from reshard_engine.tensors.shard_map import ShardMap
from reshard_engine.tensors.views import Box, View

MAX_REGIONS = 4_096
"""Of one tensor; more are counted, not listed."""
MAX_STRETCHES = 1 << 20
"""Of a tensor whose parts are no rectangles of the matrix: as many are looked at one by one."""
MAX_COPIES = 8
"""Files with the same elements that are named."""
MAX_NAME_CHARS = 1_024
"""Of a name; readers take half as many, and what is cut would no longer tell two names apart."""
BUFFER = "buffer"


def picture_of(checkpoint: Checkpoint, tensor: str | None) -> LayoutPicture:
    """The layout of a checkpoint.

    Args:
        checkpoint: What a reader found.
        tensor: `NAME` or `NAME/STATE` of a parameter or buffer whose parts are wanted, or None.

    Raises:
        RequestError: `request.invalid` for a name that is not there.
    """
    return LayoutPicture(
        url=checkpoint.url,
        format=checkpoint.format,
        world=dict(checkpoint.world),
        files=tuple(_shares(checkpoint)),
        tensors=tuple(_tensors(checkpoint, tensor)) if tensor is not None else (),
    )


def _name(text: str) -> str:
    return printable(text, max_chars=MAX_NAME_CHARS)


def _ranks(checkpoint: Checkpoint, file: str) -> str:
    return format_of(checkpoint).rank_label(file, checkpoint.world)


def _shares(checkpoint: Checkpoint) -> Iterator[FileShare]:
    """Bytes of each file by state, counted over pieces: what several tensors share counts for each."""
    shard_map = checkpoint.shard_map
    states = sorted({t.state for t in shard_map.tensors})
    code = {state: number for number, state in enumerate(states)}
    # In columns: a large run has millions of pieces.
    state_of = np.array([code[t.state] for t in shard_map.tensors], dtype=np.int64)
    itemsize_bytes = np.array([t.dtype.itemsize_bytes for t in shard_map.tensors], dtype=np.int64)
    held = np.zeros((len(checkpoint.files), len(states)), dtype=np.int64)
    lengths = (shard_map.end - shard_map.begin) * itemsize_bytes[shard_map.tensor]
    np.add.at(held, (shard_map.file, state_of[shard_map.tensor]), lengths)
    for file, row in sorted(zip(checkpoint.files, held.tolist(), strict=True), key=lambda pair: pair[0].name):
        yield FileShare(
            file=_name(file.name),
            rank=_ranks(checkpoint, file.name),
            size_bytes=file.size_bytes,
            bytes_by_state={_name(state): size for state, size in zip(states, row, strict=True) if size},
        )


def _tensors(checkpoint: Checkpoint, wanted: str) -> Iterator[TensorPicture]:
    fqn, state = _chosen(checkpoint, wanted)
    for parameter in checkpoint.parameters:
        if parameter.fqn == fqn:
            numbers = _numbers(parameter)
            for name in [state] if state else numbers:
                yield _picture(checkpoint, numbers[name], (fqn, name), _in_words(checkpoint, parameter, numbers[name]))
    for buffer in checkpoint.buffers:
        if buffer.fqn == fqn:
            yield _picture(checkpoint, buffer.tensor, (fqn, BUFFER), "")


def _numbers(parameter: Parameter) -> dict[str, int]:
    """The tensors of a parameter by state."""
    return dict(parameter.states) | ({} if parameter.weight is None else {"weight": parameter.weight})


def _chosen(checkpoint: Checkpoint, wanted: str) -> tuple[str, str]:
    """(name of the owner, state or nothing for all) that `NAME` or `NAME/STATE` means; tied names are their owner's.

    Raises:
        RequestError: `request.invalid` for a name that is not there.
    """
    states = {p.fqn: tuple(_numbers(p)) for p in checkpoint.parameters}
    states |= {b.fqn: (BUFFER,) for b in checkpoint.buffers}
    # Names may hold slashes: what is a name is taken for one first.
    head, _, tail = wanted.rpartition("/")
    for name, state in ((wanted, ""), (head, tail)):
        fqn = checkpoint.shared.get(name, name)
        if states.get(fqn) and (not state or state in states[fqn]):
            return fqn, state
    there = states.get(checkpoint.shared.get(head, head))
    known = f"; {printable(head)} has {', '.join(there)}" if there else ""
    raise RequestError(
        "request.invalid",
        f"no tensor is called {printable(wanted)!r}{known}",
        fix="reshard inspect SRC --tensors lists them",
    )


def _in_words(checkpoint: Checkpoint, parameter: Parameter, number: int) -> str:
    cut, tp = parameter.cut, checkpoint.world.get("tp", 1)
    if parameter.fqn in checkpoint.unexplained:
        words = f"nothing says how {tp} tensor-parallel ranks cut it: this is the first rank's part"
    elif cut is None:
        words = "nothing says how tensor parallelism cuts it"
    elif number in checkpoint.shard_map.means:
        words = f"the mean of {len(checkpoint.shard_map.means[number])} copies, of which this is the first"
    elif cut.dim is None:
        words = "whole on every tensor-parallel rank"
    else:
        words = f"cut along dimension {cut.dim}" + ("" if cut.grid is None else f" of {list(cut.grid)}")
        if len(cut.sections) > 1:
            words += f" in sections of {', '.join(map(str, cut.sections))}"
        if cut.vocabulary is not None:
            words += f"; {cut.vocabulary} rows are data, padding follows"
        words += f"; {cut.units} heads" if cut.units is not None else ""
    copies = [f"{_name(name)} ({rank})" if rank else _name(name) for name, rank in _copies(checkpoint, number)]
    more = ", ..." if len(copies) > MAX_COPIES else ""
    return words + (f"; also in {', '.join(copies[:MAX_COPIES])}{more}" if copies else "")


def _copies(checkpoint: Checkpoint, number: int) -> list[tuple[str, str]]:
    """(file, rank) of what must hold the same elements: replicas of other ranks, what is tied on other stages."""
    shard_map = checkpoint.shard_map
    others = [a.other for a in checkpoint.agreements if a.first == number and not a.rounded]
    others += shard_map.means.get(number, ())[1:]
    held = [b.tensor for n in others if n in shard_map.views for b in shard_map.views[n].boxes]
    held += [n for n in others if n not in shard_map.views]
    files: set[int] = {f for n in held for f in shard_map.pieces(n, 0, shard_map.tensors[n].numel).file.tolist()}
    names = sorted(checkpoint.files[f].name for f in files)
    return [(name, _ranks(checkpoint, name)) for name in names]


def _picture(checkpoint: Checkpoint, number: int, name: tuple[str, str], cut: str) -> TensorPicture:
    stored = checkpoint.shard_map.tensors[number]
    names = [_name(file.name) for file in checkpoint.files]
    ranks = [_ranks(checkpoint, file.name) for file in checkpoint.files]
    found = _rectangles(checkpoint.shard_map, number)
    listed = [
        Region(file=names[r.file], rank=ranks[r.file], rows=r.rows, columns=r.columns) for r in found[:MAX_REGIONS]
    ]
    return TensorPicture(
        fqn=_name(name[0]),
        state=_name(name[1]),
        dtype=stored.dtype.name,
        shape=stored.shape,
        cut=cut,
        regions=tuple(listed),
        left_out=max(0, len(found) - MAX_REGIONS),
    )


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """A part of a tensor seen as a matrix."""

    file: int
    rows: tuple[int, int]
    columns: tuple[int, int]


def _rectangles(shard_map: ShardMap, number: int) -> list[_Rectangle]:
    """The tensor's parts, from its first row on; equal columns of following rows in one file are one part.

    Raises:
        RequestError: `request.unsatisfiable` for too many stretches that are no rectangles.
    """
    # Of copies that are averaged the first is drawn: the others are where its like are.
    held = shard_map.means[number][0] if number in shard_map.means else number
    stored = shard_map.tensors[held]
    columns = max(prod(stored.shape[1:]), 1)
    view = shard_map.views.get(held)
    boxes = [_flat_box(box, view, columns) for box in view.boxes] if view is not None else []
    found = [r for box in boxes if box is not None for r in _inside(shard_map, box)]
    if view is None or None in boxes:
        count = sum(prod(box.lengths[:-1]) for box in view.boxes) if view is not None else 0
        if count > MAX_STRETCHES:
            raise RequestError(
                "request.unsatisfiable",
                f"the tensor lies in up to {count} stretches; up to {MAX_STRETCHES} are drawn (see --files)",
            )
        found = _stretches(shard_map, held, columns)
    return _merged(sorted(found, key=lambda r: (r.rows, r.columns)))


@dataclass(frozen=True, slots=True)
class _FlatBox:
    """A box of a view that is a rectangle of the matrix, and of the matrix that holds it."""

    tensor: int
    width: int
    """Columns of the matrix that holds it."""
    source: tuple[int, int]
    """(row, column) in that matrix."""
    place: tuple[int, int]
    size: tuple[int, int]


def _flat_box(box: Box, view: View, columns: int) -> _FlatBox | None:
    """The box with its dimensions joined to rows and columns; None if it is no rectangle then."""
    ends = [k for k in range(len(view.grid) + 1) if prod(view.grid[k:]) == columns]
    for split in ends:
        halves = (slice(None, split), slice(split, None))
        here = [_joined(view.grid[h], box.offset[h], box.lengths[h]) for h in halves]
        there = [_joined(box.grid[h], box.source[h], box.lengths[h]) for h in halves]
        starts, sources = [s for s in here if s is not None], [s for s in there if s is not None]
        if len(starts) == 2 and len(sources) == 2:
            return _FlatBox(
                box.tensor,
                prod(box.grid[split:]),
                (sources[0], sources[1]),
                (starts[0], starts[1]),
                (prod(box.lengths[:split]), prod(box.lengths[split:])),
            )
    return None


def _joined(grid: Sequence[int], offset: Sequence[int], lengths: Sequence[int]) -> int | None:
    """Where dimensions joined to one begin, if what is taken of them is one interval; None if it is several."""
    taken = [d for d, length in enumerate(lengths) if length != 1]
    if taken and any(lengths[d] != grid[d] for d in range(taken[0] + 1, len(grid))):
        return None
    return sum(offset[d] * prod(grid[d + 1 :]) for d in range(len(grid)))


def _inside(shard_map: ShardMap, box: _FlatBox) -> Iterator[_Rectangle]:
    """What the files of the tensor that holds a box have of it."""
    (row, column), (height, width) = box.source, box.size
    holder = shard_map.means[box.tensor][0] if box.tensor in shard_map.means else box.tensor
    first = row * box.width + column
    pieces = shard_map.pieces(holder, first, first + (height - 1) * box.width + width)
    down, across = box.place[0] - row, box.place[1] - column
    for begin, end, file in zip(pieces.begin.tolist(), pieces.end.tolist(), pieces.file.tolist(), strict=True):
        for rows, columns in _bands(begin, end, box.width):
            left, right = max(columns[0], column), min(columns[1], column + width)
            if left < right:
                yield _Rectangle(file, (rows[0] + down, rows[1] + down), (left + across, right + across))


def _stretches(shard_map: ShardMap, number: int, columns: int) -> list[_Rectangle]:
    pieces = shard_map.pieces(number, 0, shard_map.tensors[number].numel)
    rows = zip(pieces.begin.tolist(), pieces.end.tolist(), pieces.file.tolist(), strict=True)
    return [_Rectangle(file, *band) for begin, end, file in rows for band in _bands(begin, end, columns)]


def _merged(found: Sequence[_Rectangle]) -> list[_Rectangle]:
    done: list[_Rectangle] = []
    open_: dict[tuple[int, int, int], int] = {}
    for part in found:
        key = (part.file, *part.columns)
        last = open_.get(key)
        if last is not None and done[last].rows[1] == part.rows[0]:
            done[last] = _Rectangle(part.file, (done[last].rows[0], part.rows[1]), part.columns)
        else:
            open_[key] = len(done)
            done.append(part)
    return done


def _bands(begin: int, end: int, columns: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """An interval of row-major elements as at most three rectangles: the end of a row, whole rows, the start of one."""
    row, column = divmod(begin, columns)
    if column:
        stop = min(end, (row + 1) * columns)
        yield (row, row + 1), (column, column + stop - begin)
        begin, row = stop, row + 1
    whole = (end - begin) // columns
    if whole > 0:
        yield (row, row + whole), (0, columns)
        begin, row = begin + whole * columns, row + whole
    if begin < end:
        yield (row, row + 1), (0, end - begin)
