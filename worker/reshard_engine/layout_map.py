"""Which file holds which part of a tensor, from the shard map alone: for people to look at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import prod

from reshard.errors import RequestError, printable
from reshard.pictures import FileShare, LayoutPicture, Region, TensorPicture
from reshard_engine.checkpoint import Checkpoint, Parameter
from reshard_engine.readers.deepspeed.files import rank_of

MAX_REGIONS = 4_096
"""Of one tensor; more are counted, not listed."""
MAX_STRETCHES = 1 << 20
"""Stretches of a tensor that are looked at: a matrix of a million rows cut along its columns has as many."""


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


def _ranks(checkpoint: Checkpoint, file: str) -> str:
    return rank_of(file, tp=checkpoint.world.get("tp", 1))


def _shares(checkpoint: Checkpoint) -> Iterator[FileShare]:
    """Bytes of each file by state, counted over pieces: what several tensors share counts for each."""
    shard_map = checkpoint.shard_map
    held: list[dict[str, int]] = [defaultdict(int) for _ in checkpoint.files]
    for row in range(shard_map.piece_count):
        stored = shard_map.tensors[int(shard_map.tensor[row])]
        length = int(shard_map.end[row] - shard_map.begin[row]) * stored.dtype.itemsize_bytes
        held[int(shard_map.file[row])][stored.state] += length
    for file, states in sorted(zip(checkpoint.files, held, strict=True), key=lambda pair: pair[0].name):
        yield FileShare(
            file=printable(file.name),
            rank=_ranks(checkpoint, file.name),
            size_bytes=file.size_bytes,
            bytes_by_state=dict(sorted(states.items())),
        )


def _tensors(checkpoint: Checkpoint, wanted: str) -> Iterator[TensorPicture]:
    for parameter in checkpoint.parameters:
        if wanted != parameter.fqn and not wanted.startswith(f"{parameter.fqn}/"):
            continue
        state = wanted.removeprefix(parameter.fqn).removeprefix("/")
        numbers = dict(parameter.states) | ({} if parameter.weight is None else {"weight": parameter.weight})
        chosen = {state: numbers[state]} if state in numbers else {} if state else numbers
        for name, number in chosen.items():
            yield _picture(checkpoint, number, parameter.fqn, name, _in_words(parameter))
        if chosen:
            return
    for buffer in checkpoint.buffers:
        if wanted == buffer.fqn:
            yield _picture(checkpoint, buffer.tensor, buffer.fqn, "buffer", "")
            return
    raise RequestError(
        "request.invalid", f"no tensor is called {printable(wanted)!r}", fix="reshard inspect SRC --tensors lists them"
    )


def _in_words(parameter: Parameter) -> str:
    cut = parameter.cut
    if cut is None:
        return "nothing says how tensor parallelism cuts it"
    if cut.dim is None:
        return "whole on every tensor-parallel rank"
    words = f"cut along dimension {cut.dim}"
    if len(cut.sections) > 1:
        words += f" in sections of {', '.join(map(str, cut.sections))}"
    if cut.vocabulary is not None:
        words += f"; {cut.vocabulary} rows are data, padding follows"
    return words + (f"; {cut.units} heads" if cut.units is not None else "")


def _picture(checkpoint: Checkpoint, number: int, fqn: str, state: str, cut: str) -> TensorPicture:
    stored = checkpoint.shard_map.tensors[number]
    columns = prod(stored.shape[1:]) if len(stored.shape) > 1 else 1
    names = [printable(file.name) for file in checkpoint.files]
    ranks = [_ranks(checkpoint, file.name) for file in checkpoint.files]
    found = _rectangles(checkpoint, number, max(columns, 1))
    listed = [
        Region(file=names[file], rank=ranks[file], rows=rows, columns=across)
        for file, rows, across in found[:MAX_REGIONS]
    ]
    return TensorPicture(
        fqn=printable(fqn),
        state=printable(state),
        dtype=stored.dtype.name,
        shape=stored.shape,
        cut=cut,
        regions=tuple(listed),
        left_out=max(0, len(found) - MAX_REGIONS),
    )


def _rectangles(
    checkpoint: Checkpoint, number: int, columns: int
) -> list[tuple[int, tuple[int, int], tuple[int, int]]]:
    """(file, rows, columns) of the tensor's parts, stretches of equal columns in following rows put together."""
    shard_map = checkpoint.shard_map
    # Of copies that are averaged the first is drawn: the others are where its like are.
    held = shard_map.means[number][0] if number in shard_map.means else number
    pieces = shard_map.pieces(held, 0, shard_map.tensors[held].numel)
    if len(pieces.begin) > MAX_STRETCHES:
        raise RequestError(
            "request.unsatisfiable",
            f"the tensor lies in {len(pieces.begin)} stretches; up to {MAX_STRETCHES} are drawn",
        )
    done: list[tuple[int, tuple[int, int], tuple[int, int]]] = []
    open_: dict[tuple[int, int, int], int] = {}
    for begin, end, file in zip(pieces.begin.tolist(), pieces.end.tolist(), pieces.file.tolist(), strict=True):
        for rows, across in _boxes(begin, end, columns):
            key = (file, *across)
            last = open_.get(key)
            if last is not None and done[last][1][1] == rows[0]:
                done[last] = (file, (done[last][1][0], rows[1]), across)
            else:
                open_[key] = len(done)
                done.append((file, rows, across))
    return done


def _boxes(begin: int, end: int, columns: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
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
