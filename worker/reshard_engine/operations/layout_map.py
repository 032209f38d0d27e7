"""Pictures of layouts: the file that holds each part of a tensor, of a checkpoint or of a planned target."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np

from reshard.choices import OpaquePolicy
from reshard.errors import RequestError, ReshardError, printable
from reshard.models.jobs import ConvertRequest
from reshard.models.reports import FileShare, LayoutPair, LayoutPicture, Region, TensorPicture
from reshard_engine.checkpoint import Checkpoint, Parameter
from reshard_engine.formats.registry import format_of
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import Location
from reshard_engine.tensors.layout import PlannedStore, TargetLayout
from reshard_engine.tensors.shard_map import ShardMap
from reshard_engine.tensors.views import Box, Mean, View

MAX_REGIONS = 16_384
"""The most regions of one tensor that are listed; the rest are only counted. 4,096 ranks hold three or fewer each."""
MAX_STRETCHES = 1 << 20
"""The most runs of elements that are looked at one by one, where a tensor's parts are not rectangles of the matrix."""
MAX_COPIES = 8
"""The most files with copies of the same elements that are named."""
MAX_NAME_CHARS = 1_024
"""The most characters of a name. Readers accept names of half this length, so no two names become equal here."""
BUFFER = "buffer"


def picture_of(checkpoint: Checkpoint, tensor: str | None) -> LayoutPicture:
    """The layout of a checkpoint.

    Args:
        checkpoint: The checkpoint that a reader made.
        tensor: `NAME` or `NAME/STATE` of a parameter or buffer whose parts to list, or None.

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
    return format_of(checkpoint).presentation.rank_label(file, checkpoint.world)


def _shares(checkpoint: Checkpoint) -> Iterator[FileShare]:
    """The bytes of each file by state. Bytes that several tensors share count once for each tensor."""
    shard_map = checkpoint.shard_map
    states = sorted({t.state for t in shard_map.tensors})
    code = {state: number for number, state in enumerate(states)}
    # With numpy columns, because a large run has millions of pieces.
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
    """(owner's name, state or an empty text for all states) that `NAME` or `NAME/STATE` means.

    Raises:
        RequestError: `request.invalid` for a name that is not there.
    """
    states = {p.fqn: tuple(_numbers(p)) for p in checkpoint.parameters}
    states |= {b.fqn: (BUFFER,) for b in checkpoint.buffers}
    # Names may have slashes: the whole text is tried as a name first.
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
        fix=f"to list them: reshard inspect {shlex.quote(checkpoint.url)} --tensors",
    )


def _in_words(checkpoint: Checkpoint, parameter: Parameter, number: int) -> str:
    cut, tp, origin = parameter.cut, checkpoint.world.get("tp", 1), checkpoint.shard_map.origin(number)
    if parameter.fqn in checkpoint.unexplained:
        words = f"nothing says how {tp} tensor-parallel ranks cut it: this is the first rank's part"
    elif cut is None:
        words = "nothing says how tensor parallelism cuts it" if tp > 1 else ""
    elif isinstance(origin, Mean):
        words = f"the mean of {len(origin.copies)} copies, of which this is the first"
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
    also = f"also in {', '.join(copies[:MAX_COPIES])}{more}" if copies else ""
    return "; ".join(filter(None, (words, also)))


def _copies(checkpoint: Checkpoint, number: int) -> list[tuple[str, str]]:
    """(file, rank) of all copies that must have the same elements: on other ranks, or tied on other stages."""
    shard_map = checkpoint.shard_map
    others = [a.other for a in checkpoint.agreements if a.first == number and not a.rounded]
    origin = shard_map.origin(number)
    others += origin.copies[1:] if isinstance(origin, Mean) else ()
    origins = [(n, shard_map.origin(n)) for n in others]
    held = [b.tensor for _, o in origins if isinstance(o, View) for b in o.boxes]
    held += [n for n, o in origins if not isinstance(o, View)]
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
    """The tensor's parts, by row; consecutive rows with equal columns in one file are one part.

    Raises:
        RequestError: `request.unsatisfiable` for too many runs of elements that form no rectangles.
    """
    held = _drawn(shard_map, number)
    columns = max(prod(shard_map.tensors[held].shape[1:]), 1)
    origin = shard_map.origin(held)
    # A drawn tensor is stored or a view: no reader makes means of means, or merges adapters.
    view = isinstance(origin, View)
    found = _of_view(shard_map, held, origin, columns) if view else _runs(shard_map, held, columns)
    return _merged(sorted(found, key=lambda r: (r.rows, r.columns)))


def _drawn(shard_map: ShardMap, number: int) -> int:
    """The tensor that is drawn: for a mean of copies the first copy, as the others have the same layout."""
    origin = shard_map.origin(number)
    return origin.copies[0] if isinstance(origin, Mean) else number


def _of_view(shard_map: ShardMap, number: int, view: View, columns: int) -> list[_Rectangle]:
    boxes = [_flat_box(box, view, columns) for box in view.boxes]
    if None not in boxes:
        return [r for box in boxes if box is not None for r in _inside(shard_map, box)]
    count = sum(prod(box.lengths[:-1]) for box in view.boxes)
    if count > MAX_STRETCHES:
        raise RequestError(
            "request.unsatisfiable",
            f"the tensor is stored in up to {count} separate runs; up to {MAX_STRETCHES} are drawn (see --files)",
            fix="leave --tensor out, or list the files: --files",
        )
    return _runs(shard_map, number, columns)


@dataclass(frozen=True, slots=True)
class _FlatBox:
    """A box of a view that is a rectangle in the drawn matrix, and in the matrix of the tensor that holds it."""

    tensor: int
    width: int
    """Columns of the matrix of the tensor that holds it."""
    source: tuple[int, int]
    """(row, column) in that matrix."""
    place: tuple[int, int]
    size: tuple[int, int]


def _flat_box(box: Box, view: View, columns: int) -> _FlatBox | None:
    """The box with its dimensions joined to rows and columns; None if it is not a rectangle then."""
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
    """The first element of a box in dimensions joined to one; None if the box is several intervals there."""
    taken = [d for d, length in enumerate(lengths) if length != 1]
    if taken and any(lengths[d] != grid[d] for d in range(taken[0] + 1, len(grid))):
        return None
    return sum(offset[d] * prod(grid[d + 1 :]) for d in range(len(grid)))


def _inside(shard_map: ShardMap, box: _FlatBox) -> Iterator[_Rectangle]:
    """The rectangles of a box, one or more for each file of the tensor that holds it."""
    (row, column), (height, width) = box.source, box.size
    holder = _drawn(shard_map, box.tensor)
    first = row * box.width + column
    pieces = shard_map.pieces(holder, first, first + (height - 1) * box.width + width)
    down, across = box.place[0] - row, box.place[1] - column
    for begin, end, file in zip(pieces.begin.tolist(), pieces.end.tolist(), pieces.file.tolist(), strict=True):
        for rows, columns in _bands(begin, end, box.width):
            left, right = max(columns[0], column), min(columns[1], column + width)
            if left < right:
                yield _Rectangle(file, (rows[0] + down, rows[1] + down), (left + across, right + across))


def _runs(shard_map: ShardMap, number: int, columns: int) -> list[_Rectangle]:
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
    """An interval of row-major elements as at most three rectangles: end of a row, whole rows, start of a row."""
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


# The target of a conversion that has not run, as a checkpoint: its readers read the layout instead of files.
#
# A layout knows every byte but those of tensors, and readers read only metadata. So the picture of a planned target is
# made by the code that makes the picture of a finished one.


class PlannedConversion(Protocol):
    """A conversion that is planned: into a directory, a bucket, or a repository of the hub."""

    @property
    def request(self) -> ConvertRequest:
        """The request."""
        ...

    @property
    def checkpoint(self) -> Checkpoint:
        """The source."""
        ...

    @property
    def layout(self) -> TargetLayout:
        """The files of the target."""
        ...

    @property
    def target(self) -> Location:
        """The place of the target."""
        ...


def planned_pictures(conversion: PlannedConversion, tensor: str | None) -> LayoutPair:
    """The layouts of the source and of the target that a conversion would write; nothing is written.

    Args:
        conversion: The conversion.
        tensor: `NAME` or `NAME/STATE` of a tensor of the source whose parts to list on both sides; None for the
            largest one of those that the most files share.

    Raises:
        RequestError: `request.invalid` for a name that the source does not have.
    """
    source = conversion.checkpoint
    wanted = _most_divided(source) if tensor is None else tensor
    return LayoutPair(source=picture_of(source, wanted), target=_picture_of_target(conversion, wanted))


def _picture_of_target(conversion: PlannedConversion, wanted: str | None) -> LayoutPicture:
    layout, target = conversion.layout, conversion.target
    store = PlannedStore(target.path, layout)
    try:
        planned = read_checkpoint(Location(store, target.path, target.url), None, OpaqueLedger(OpaquePolicy.KEEP))
    except ReshardError:
        # A format that can be written and not read: its files are all that can be said.
        files = tuple(
            FileShare(file=printable(f.path), rank="", size_bytes=f.size_bytes, bytes_by_state={}) for f in layout.files
        )
        return LayoutPicture(url=target.url, format=conversion.request.to, world={}, files=files)
    return _pictured(planned, wanted)


def _pictured(target: Checkpoint, wanted: str | None) -> LayoutPicture:
    """The layout of a target with the parts of a tensor of the source, in the state that holds its elements there."""
    fqns = {p.fqn for p in target.parameters} | {b.fqn for b in target.buffers} | set(target.shared)
    head, _, tail = (wanted or "").rpartition("/")
    # Names may have slashes: the whole text is tried as a name first.
    name, state = next(((n, s) for n, s in ((wanted, ""), (head, tail)) if n in fqns), (None, ""))
    picture = picture_of(target, name)
    for held in (state, "weight"):
        # Weights without masters hold what the masters held.
        if state and (found := tuple(t for t in picture.tensors if t.state == held)):
            return picture.model_copy(update={"tensors": found})
    return picture


def _most_divided(checkpoint: Checkpoint) -> str | None:
    """The tensor whose picture says most: of those in the most files, the largest; None without parameters."""
    shard_map = checkpoint.shard_map

    def said(number: int) -> tuple[int, int]:
        numel = shard_map.tensors[number].numel
        return len(set(shard_map.pieces(number, 0, numel).file.tolist())), numel

    found: list[tuple[tuple[int, int], str]] = []
    for parameter in checkpoint.parameters:
        # One state is enough: the others of an optimizer lie as it does.
        held = dict(parameter.states) or ({} if parameter.weight is None else {"weight": parameter.weight})
        state = "fp32" if "fp32" in held else next(iter(held), None)
        if state is not None:
            found.append((said(held[state]), f"{parameter.fqn}/{state}"))
    return max(found, key=lambda pair: pair[0])[1] if found else None
