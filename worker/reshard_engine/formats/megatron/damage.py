"""Optimizer states that Megatron-core saved shifted: where the layout of buffers says so, proof, and repair.

With `fully_reshardable`, releases 0.15.3 to 0.19.2 gather a gradient buffer without the padding at the ends of its
buckets, and cut each parameter's states out of it at offsets that still count the padding. So a parameter holds what
lies `shift` elements further on in the gathered buffer: the rest of its own states, and the head of those of the next
parameter. `shift` is the padding of all buckets before its own. Past the end of the buffer it holds zeros.

The shifts follow from the layout of buffers, which is computed from the arguments of the run. Where these leave several
layouts, a few elements of masters and weights decide; and in each of them, states that are not shifted are an
explanation as well. Before anything is written, every repaired master is compared with its weight.

An element is lost if its place in the gathered buffer is read as padding: there nothing of it was cut out. Of
parameters that tensor-parallel ranks hold whole, only the first rank's states are in the files.

Source: megatron-core 0.16.1 and 0.19.2 `optimizer/distrib_optimizer.py` (`get_parameter_state_dp_zero` gathers,
`sharded_param_state_fully_reshardable` cuts), Megatron-LM#5077 (corrects it); verified by running both.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from math import lcm, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.choices import DamagedPolicy, TargetFormat
from reshard.errors import RequestError, SourceError, counted, listed, printable
from reshard.models.jobs import ConvertRequest, NotCarried
from reshard.options import MegatronOptions
from reshard_engine.checkpoint import Agreement, Checkpoint, Parameter
from reshard_engine.formats.megatron.buckets import Fit, SavedWeight
from reshard_engine.formats.megatron.buffers import (
    BUCKET_ALIGNMENT,
    Bucket,
    LayoutError,
    Member,
    aligned,
    closed_buckets,
    slots_of,
)
from reshard_engine.formats.megatron.common import CommonState
from reshard_engine.formats.megatron.model import DAMAGED, NOT_THOSE, MegatronFacts
from reshard_engine.formats.megatron.placement import Run
from reshard_engine.tensors.cuts import Cut, joined, local_grid, parts, rows_of, taken
from reshard_engine.tensors.dtypes import FLOAT32, Dtype
from reshard_engine.tensors.shard_map import LogicalTensor
from reshard_engine.tensors.views import Box, Derived, Splice, Spliced, View, composed

SHARDING = "fully_reshardable"
"""The kind of optimizer states that is saved so."""
MASTER = "fp32"
_BUS_ALIGNMENT = 1 << 16
"""Elements: with `pad_buckets_for_high_nccl_busbw` buckets end at a multiple of this as well."""
_WINDOW = 64
"""Elements that are compared at a time to choose between layouts."""
_MOST_BOXES = 256
"""Boxes of lost elements that a report lists for one parameter; their elements are counted in any case."""
_EXACT = ("bfloat16", "float16", "float32")
"""Types of weights whose elements fp32 holds exactly."""
_WEIGHTS = (TargetFormat.SAFETENSORS, TargetFormat.TORCH)
_DROP = "--damaged drop-optimizer takes the weights alone, which are right"
_ZEROS = "--damaged repair-with-zeros"
_SHIFTED = (
    ": Megatron-core 0.15.3 to 0.19.2 saves such states shifted where a gradient buffer has several padded buckets "
    "(Megatron-LM#5077)"
)
_REPAIR = f"--damaged repair puts back what the files hold, and says what they lost; {_DROP}"
_NOT_SHIFTED = ": these are not the states that Megatron-core shifts when it saves (Megatron-LM#5077)"


# Where a save took its slices: pure arithmetic.


@dataclass(frozen=True, slots=True)
class Cutout:
    """The slice of a parameter that a save cut out of the gathered buffer of a rank, in elements."""

    name: str
    begin: int
    """Where the slice begins: the place in the buffer with the padding of all buckets."""
    numel: int
    shift: int
    """How far before that the parameter begins in the gathered buffer, which has no padding between buckets."""


@dataclass(frozen=True, slots=True)
class Held:
    """A run of a parameter's elements, and where the files hold them."""

    begin: int
    """The first element in the parameter's part of a rank."""
    length: int
    name: str | None
    """The parameter whose slice holds them; None if none does."""
    source: int = 0
    """The first element in that slice."""


def cutouts(members: Sequence[Member], most: int | None, unit: int) -> tuple[Cutout, ...]:
    """The slices of all parameters of a buffer, in the order of the buffer.

    Args:
        members: The parameters in the order of their registration.
        most: As for `closed_buckets`.
        unit: Buckets end at multiples of it, in elements; itself a multiple of `BUCKET_ALIGNMENT`.

    Raises:
        LayoutError: The parameters do not fill the buckets.
    """
    buckets = [Bucket(aligned(stored, unit), stored) for stored in closed_buckets(members, most)]
    begins = [0, *accumulate(b.numel for b in buckets)]
    shifts = [0, *accumulate(b.numel - b.unpadded for b in buckets)]
    return tuple(
        Cutout(s.name, begins[s.bucket] + s.begin, s.end - s.begin, shifts[s.bucket])
        for s in slots_of(members, buckets)
    )


class Way:
    """One layout that a buffer may have had."""

    def __init__(self, slices: Sequence[Cutout]) -> None:
        """Take the slices in the order of the buffer."""
        self.slices = tuple(slices)
        self._begins = [s.begin for s in slices]
        self._by_name = {s.name: s for s in slices}
        self._end = max((s.begin + s.numel - s.shift for s in slices), default=0)

    @cached_property
    def shifted(self) -> tuple[str, ...]:
        """The parameters whose slices are not their own states."""
        return tuple(s.name for s in self.slices if s.shift)

    def zeros(self, name: str) -> int:
        """The number of elements of a slice that are zeros, its last ones: they lie past the gathered buffer."""
        own = self._by_name[name]
        return min(max(own.begin + own.numel - self._end, 0), own.numel)

    def held(self, name: str, is_there: Callable[[str], bool] = lambda _: True) -> list[Held]:
        """Where the elements of a parameter are, in their order.

        Args:
            name: The parameter.
            is_there: True for a parameter whose slice of this rank is in the files.
        """
        own = self._by_name[name]
        first = at = own.begin - own.shift
        end = first + own.numel
        found: list[Held] = []
        number = max(bisect_right(self._begins, at) - 1, 0)
        while at < end:
            one = self.slices[number] if number < len(self.slices) else None
            if one is not None and at >= one.begin + one.numel:
                number += 1
                continue
            inside = one is not None and at >= one.begin
            stop = end if one is None else min(end, one.begin + one.numel if inside else one.begin)
            holder = one.name if inside and one is not None and is_there(one.name) else None
            if holder is None and found and found[-1].name is None:
                found[-1] = replace(found[-1], length=found[-1].length + stop - at)
            else:
                source = 0 if holder is None or one is None else at - one.begin
                found.append(Held(at - first, stop - at, holder, source))
            at = stop
        return found


@dataclass(frozen=True, slots=True)
class ShiftedBuffer:
    """A buffer of model-parallel ranks that hold parts of the same parameters, with all layouts it may have had."""

    where: str
    """The ranks, in words for people."""
    ranks: int
    """How many hold parts of a parameter that tensor parallelism cuts."""
    ways: tuple[Way, ...]


@dataclass(frozen=True, slots=True)
class Shifts:
    """Everything that says which states may be shifted, and by how much."""

    buffers: tuple[ShiftedBuffer, ...]
    """Those in which some layout shifts a parameter."""
    cuts: Mapping[str, Cut]
    """How tensor parallelism cuts each of their parameters."""

    def names(self) -> set[str]:
        """The parameters that some layout shifts."""
        return {name for b in self.buffers for way in b.ways for name in way.shifted} & self.cuts.keys()


def possible_shifts(
    common: CommonState,
    weights: Mapping[str, SavedWeight],
    in_order: Callable[[Mapping[str, SavedWeight], Run], bool],
) -> Shifts | None:
    """The shifts that a save with these arguments may have; None if it has none with any layout.

    Args:
        common: The state that is not a tensor.
        weights: The weights of parameters with optimizer states, with the padding of the vocabulary, in the order of
            the file.
        in_order: As for `Fit`.

    Raises:
        LayoutError: The arguments do not say the layout.
    """
    run = Run.of(common)
    fit = Fit(run, weights, {}, {}, in_order)
    if (run.bucket_sizes(0, 0, 1) == (None,) and not fit.tied) or _have_no_padding(fit, run):
        return None
    ways: dict[_BufferKey, dict[tuple[Cutout, ...], None]] = {}
    orders, problems = fit.orders(), list[LayoutError]()
    for order in orders:
        try:
            for key, slices in _buffers(fit, run, order):
                ways.setdefault(key, {})[slices] = None
        except LayoutError as error:
            problems.append(error)
    if len(problems) == len(orders):
        raise problems[0]
    found: list[ShiftedBuffer] = []
    for (chained, stage, chunk, expert_rank, dtype), layouts in ways.items():
        if not any(s.shift for slices in layouts for s in slices):
            continue
        place = f"{dtype} of pipeline stage {stage}" + (f", chunk {chunk}" if run.chunks > 1 else "")
        place += f", experts of rank {expert_rank}" if chained else ""
        found.append(ShiftedBuffer(place, run.expert_tensor if chained else run.tensor, tuple(map(Way, layouts))))
    names = {s.name for b in found for way in b.ways for s in way.slices} & weights.keys()
    return Shifts(tuple(found), {name: fit.cut(name) for name in weights if name in names}) if found else None


def _have_no_padding(fit: Fit, run: Run) -> bool:
    """True if buckets end at multiples wherever they close, because every parameter has such a length."""
    units = {*_units(run.common, run.data_ranks), *_units(run.common, run.expert_data_ranks)}
    owners = {name: (0 if run.is_shared(name) else 1, 0) for name in fit.names}
    return not any(prod(fit.local_shape(owner, name)) % lcm(*units) for name, owner in owners.items())


_BufferKey = tuple[int, int, int, int, str]
"""Number of the chained optimizer, stage, chunk, expert-parallel rank and element type."""


def _buffers(fit: Fit, run: Run, order: Sequence[str]) -> Iterator[tuple[_BufferKey, tuple[Cutout, ...]]]:
    """The layouts of all buffers with one order of registration, but for those that can have no padding within.

    Only the first chunk of the first stage closes buckets by size, and only chunks with an embedding that two stages
    share close some otherwise.
    """
    by_rank: dict[tuple[int, int], list[str]] = {}
    for name in order:
        rank = None if run.is_shared(name) else fit.expert_rank(name)
        by_rank.setdefault((0, 0) if rank is None else (1, rank), []).append(name)
    for stage, chunk in dict.fromkeys(((0, 0), (run.pipeline - 1, run.chunks - 1) if fit.tied else (0, 0))):
        for (chained, expert_rank), names in by_rank.items():
            inner = run.expert_tensor * run.experts if chained else run.tensor
            owner = chained, stage * inner + expert_rank * run.expert_tensor * chained
            ranks = run.expert_data_ranks if chained else run.data_ranks
            for dtype, members in fit.members_in(chunk, names, owner, stage, expert_rank).items():
                for most in run.bucket_sizes(stage, chunk, _elements(fit, run, by_rank)):
                    for unit in _units(run.common, ranks):
                        one_bucket = most is None and not any(m.alone for m in members)
                        if one_bucket or all(m.numel % unit == 0 for m in members):
                            continue
                        yield (chained, stage, chunk, expert_rank, dtype), cutouts(members, most, unit)


def _elements(fit: Fit, run: Run, by_rank: Mapping[tuple[int, int], Sequence[str]]) -> int:
    """The elements of all parameters of the first rank, where the arguments ask for a number of buckets; else 0."""
    if run.common.number("ddp_num_buckets") is None:
        return 0
    mine = {owner: names for owner, names in by_rank.items() if not owner[1]}
    held = [fit.members_in(c, names, owner, 0, 0) for owner, names in mine.items() for c in range(run.chunks)]
    return sum(m.numel for by_type in held for members in by_type.values() for m in members)


def _units(common: CommonState, ranks: int | None) -> tuple[int, ...]:
    """The numbers of elements at whose multiples buckets may end."""
    instances = common.number("num_distributed_optimizer_instances") or 1
    unit = lcm(max((ranks or 1) // instances, 1), BUCKET_ALIGNMENT)
    wide = lcm(unit, _BUS_ALIGNMENT)
    said = common.args.get("ddp_pad_buckets_for_high_nccl_busbw")
    return (wide,) if said is True else (unit,) if said is False else (unit, wide)


# The tensors of the files by rank, and the tensors that are made of them.


class _Parts:
    """The parts of tensor-parallel ranks of what the files hold, and new tensors beside those of the checkpoint."""

    def __init__(self, checkpoint: Checkpoint, saved: Sequence[Parameter], cuts: Mapping[str, Cut]) -> None:
        self.checkpoint, self.cuts = checkpoint, cuts
        self._map = checkpoint.shard_map
        self.parameters = {p.fqn: p for p in saved}
        self.added: list[tuple[LogicalTensor, Derived]] = []
        self._derived: dict[int, object] = {**self._map.derived}
        self._whole: dict[tuple[str, str], int] = {}
        self._local: dict[tuple[str, str, int], int] = {}

    def tensor(self, number: int) -> LogicalTensor:
        """A tensor of the checkpoint, or a new one."""
        known = len(self._map.tensors)
        return self._map.tensors[number] if number < known else self.added[number - known][0]

    def add(self, name: str, state: str, dtype: Dtype, made: Derived, shape: tuple[int, ...]) -> int:
        """Add a tensor; returns its number."""
        made = composed(made, self._derived) if isinstance(made, View) else made
        number = len(self._map.tensors) + len(self.added)
        self.added.append((LogicalTensor(name, state, dtype, shape), made))
        self._derived[number] = made
        return number

    def has(self, name: str, state: str) -> bool:
        """True if the files hold it."""
        parameter = self.parameters.get(name)
        return parameter is not None and (
            state in parameter.states if state != "weight" else parameter.weight is not None
        )

    def whole(self, name: str, state: str) -> int:
        """The number of the whole tensor that the files hold under a name, with the padding of a vocabulary."""
        key = name, state
        if key not in self._whole:
            parameter = self.parameters[name]
            data = parameter.states[state] if state != "weight" else parameter.weight
            assert data is not None  # `has` was asked
            padding = parameter.padding.get(state)
            self._whole[key] = data if padding is None else self._stacked(name, state, data, padding)
        return self._whole[key]

    def _stacked(self, name: str, state: str, data: int, padding: int) -> int:
        upper, lower = self.tensor(data), self.tensor(padding)
        rows, rest = upper.shape[0], upper.shape[1:]
        shape, zero = (rows + lower.shape[0], *rest), (0,) * len(rest)
        boxes = (
            Box(data, upper.shape, (0, *zero), (0, *zero), upper.shape),
            Box(padding, lower.shape, (0, *zero), (rows, *zero), lower.shape),
        )
        return self.add(name, state, upper.dtype, View(shape, boxes), shape)

    def local(self, name: str, state: str, rank: int, ranks: int) -> int:
        """The part that a tensor-parallel rank holds."""
        whole, cut = self.whole(name, state), self.cuts[name]
        if ranks == 1 or cut.dim is None:
            return whole
        key = name, state, rank
        if key not in self._local:
            held = self.tensor(whole)
            view = taken(cut, held.shape, whole, ranks, rank)
            self._local[key] = self.add(name, state, held.dtype, view, view.grid)
        return self._local[key]

    # A few elements, to choose between layouts.

    def read(self, number: int, begin: int, end: int) -> npt.NDArray[np.uint8]:
        """Elements of a tensor that files hold, or of a view of such tensors, as bytes."""
        size = self.tensor(number).dtype.itemsize_bytes
        found = np.zeros((end - begin) * size, dtype=np.uint8)
        view = self._derived.get(number)
        if not isinstance(view, View):
            self._read_stored(number, begin, end, found)
            return found
        runs = view.runs(begin, end)
        columns = (c.tolist() for c in (runs.begin, runs.tensor, runs.source, runs.length))
        for first, holder, source, length in zip(*columns, strict=True):
            at = (first - begin) * size
            self._read_stored(holder, source, source + length, found[at : at + length * size])
        return found

    def _read_stored(self, number: int, begin: int, end: int, memory: npt.NDArray[np.uint8]) -> None:
        pieces, size = self._map.pieces(number, begin, end), self.tensor(number).dtype.itemsize_bytes
        columns = (c.tolist() for c in (pieces.begin, pieces.end, pieces.file, pieces.offset))
        for low, high, file, offset in zip(*columns, strict=True):
            place = memory[(low - begin) * size : (high - begin) * size]
            self.checkpoint.files[int(file)].read_into(offset, place.data)


def _rounded(masters: npt.NDArray[np.uint8], dtype: Dtype) -> npt.NDArray[Any]:
    """Elements of fp32 as bits of a weight's type, rounded to the nearest, of two equally near ones to the even one."""
    if dtype.name == "bfloat16":
        bits = masters.view(np.uint32)
        return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
            np.uint16
        )
    if dtype.name == "float16":
        with np.errstate(over="ignore"):
            return masters.view(np.float32).astype(np.float16).view(np.uint16)
    return masters.view(np.uint32)


# The layout that a save had.


def _found_ways(held: _Parts, shifts: Shifts) -> list[tuple[ShiftedBuffer, Way | None]]:
    """The layout of each buffer by which its masters round to its weights; None for one whose states are not shifted.

    A few elements are read. What they decide is not proven: every master of the repaired states is compared later.

    Raises:
        SourceError: `checkpoint.damaged` where no layout explains the masters, or several do.
    """
    return [(buffer, _found_way(held, buffer)) for buffer in shifts.buffers]


def _explained_by_shifts(held: _Parts, shifts: Shifts) -> Iterator[str]:
    """The parameters whose masters a shift explains, as far as a few elements of each show it.

    Raises:
        SourceError: As `_found_ways`.
    """
    for buffer, way in _found_ways(held, shifts):
        for name in () if way is None else way.shifted:
            if _can_compare(held, name):
                runs = way.held(name, lambda other: held.has(other, MASTER)) if way is not None else []
                if way is not None and _fits(held, buffer.ranks, name, way.zeros(name), runs):
                    yield name


def _found_way(held: _Parts, buffer: ShiftedBuffer) -> Way | None:
    alive: list[Way | None] = [None, *buffer.ways]
    numel = {s.name: s.numel for s in buffer.ways[0].slices}
    names = [n for n in sorted(numel, key=numel.__getitem__, reverse=True) if _can_compare(held, n)]

    def explained(way: Way | None, name: str) -> tuple[int, tuple[Held, ...]]:
        if way is None:
            return 0, (Held(0, numel[name], name),)
        return way.zeros(name), tuple(way.held(name, lambda other: held.has(other, MASTER)))

    for name in names:
        said = [explained(way, name) for way in alive]
        if len({*said}) == 1:
            continue
        alive = [way for way, one in zip(alive, said, strict=True) if _fits(held, buffer.ranks, name, *one)]
        if not alive:
            raise SourceError(
                DAMAGED,
                f"the masters of {printable(name)} do not round to its weights, and none of "
                f"{counted(len(buffer.ways), 'layout')} of the buffer ({buffer.where}) explains it{_NOT_SHIFTED}",
                fix=NOT_THOSE,
            )
    # Layouts that take every element from the same place are one.
    differing = {tuple(explained(way, name)[1] for name in names): way for way in reversed(alive)}
    if len(differing) > 1:
        raise SourceError(
            DAMAGED,
            f"{len(differing)} layouts of the buffer ({buffer.where}) explain its masters, and nothing says which it "
            "had",
            fix=_DROP,
        )
    return next(iter(differing.values()))


def _can_compare(held: _Parts, name: str) -> bool:
    if not (held.has(name, MASTER) and held.has(name, "weight")):
        return False
    weight, master = held.tensor(held.whole(name, "weight")), held.tensor(held.whole(name, MASTER))
    return weight.dtype.name in _EXACT and master.dtype is FLOAT32


def _fits(held: _Parts, ranks: int, name: str, zeros: int, runs: Iterable[Held]) -> bool:
    """True if a few masters of each run round to the weights of the first rank, and the last ones are zeros.

    Args:
        held: The tensors of the files.
        ranks: The tensor-parallel ranks.
        name: The parameter.
        zeros: The elements at the end of its slice that must be zeros.
        runs: Where its masters are.
    """
    own = held.local(name, MASTER, 0, ranks)
    end = held.tensor(own).numel
    if any(held.read(own, at, min(at + _WINDOW, end)).any() for at in (end - zeros, end - min(zeros, _WINDOW))):
        return False
    weight = held.local(name, "weight", 0, ranks)
    dtype = held.tensor(weight).dtype
    bits = np.uint32 if dtype is FLOAT32 else np.uint16
    for run in runs:
        if run.name is None:
            continue
        length, source = min(_WINDOW, run.length), held.local(run.name, MASTER, 0, ranks)
        for at in {0, (run.length - length) // 2, run.length - length}:
            masters = held.read(source, run.source + at, run.source + at + length)
            first = run.begin + at
            if not np.array_equal(_rounded(masters, dtype), held.read(weight, first, first + length).view(bits)):
                return False
    return True


# Repair.


@dataclass(frozen=True, slots=True)
class SuspectFacts(MegatronFacts):
    """The facts of a save whose arguments leave it open if its states are shifted."""

    shifts: Shifts | str | None = None
    """The reason, a part of a sentence, where the arguments do not say the layout; None after a repair."""
    saved: tuple[Parameter, ...] = ()
    """The parameters under the names of the files: a checkpoint may be renamed when its tensors are compared."""

    @classmethod
    def of(cls, facts: MegatronFacts, shifts: Shifts | str, saved: tuple[Parameter, ...]) -> SuspectFacts:
        """The facts with the shifts that are possible."""
        return cls(**{f.name: getattr(facts, f.name) for f in fields(MegatronFacts)}, shifts=shifts, saved=saved)

    def cause(self, checkpoint: Checkpoint, differing: Sequence[Agreement]) -> tuple[str, str] | None:
        """Tell shifted states from others that are not those of the weights."""
        names = {a.fqn for a in differing if a.code == DAMAGED}
        if not names:
            return None
        if isinstance(self.shifts, str):
            return f"; the buffers of the run are not known: {self.shifts}", _DROP
        if self.shifts is None:
            return _NOT_SHIFTED, NOT_THOSE
        try:
            explained = {*_explained_by_shifts(_Parts(checkpoint, self.saved, self.shifts.cuts), self.shifts)}
        except SourceError:
            return _NOT_SHIFTED, NOT_THOSE
        return (_SHIFTED, _REPAIR) if names <= explained else (_NOT_SHIFTED, NOT_THOSE)

    def caution(self) -> str | None:
        """A note for a save whose states may be shifted, found without reading any; None if they cannot be."""
        names = self.shifts.names() if isinstance(self.shifts, Shifts) else ()
        if not names:
            return None
        return (
            f"by the arguments of the run, the optimizer states of {counted(len(names), 'parameter')} may be shifted "
            "(Megatron-LM#5077): --compare compares masters with weights, as every conversion does"
        )


@dataclass(slots=True)
class _Lost:
    """Elements of one parameter that are nowhere in the files, as boxes of the whole parameter."""

    rows: int | None
    """The rows of a vocabulary that hold data; None where all of them do."""
    boxes: list[tuple[tuple[int, int], ...]] = field(default_factory=list[tuple[tuple[int, int], ...]])
    padding: int = 0
    """Lost elements of the padding behind a vocabulary."""

    def add(self, box: tuple[tuple[int, int], ...]) -> None:
        """Add a box of the parameter with its padding."""
        if self.rows is None:
            self.boxes.append(box)
            return
        (low, high), rest = box[0], box[1:]
        self.boxes += [((low, min(high, self.rows)), *rest)] if low < self.rows else []
        self.padding += max(high - max(low, self.rows), 0) * prod(b - a for a, b in rest)

    @property
    def count(self) -> int:
        """Lost elements that are not padding."""
        return sum(prod(high - low for low, high in box) for box in self.boxes)

    def __str__(self) -> str:
        """How many elements of data in which boxes, and how many of padding."""
        listed_ = [f"[{', '.join(f'{low}:{high}' for low, high in box)}]" for box in self.boxes[:_MOST_BOXES]]
        more = len(self.boxes) - _MOST_BOXES
        boxes = ", ".join(listed_) + (f" and {more} more" if more > 0 else "")
        said = [f"{counted(self.count, 'element')}: {boxes}"] if boxes else []
        return "; ".join([*said, *([f"{self.padding} of the padding behind it"] if self.padding else [])])


def repaired(checkpoint: Checkpoint, facts: SuspectFacts, request: ConvertRequest) -> Checkpoint:
    """The checkpoint with every shifted state taken from where the files hold it.

    Masters of lost elements are the weights; moments are zeros, if the request says so.

    Raises:
        SourceError: `checkpoint.damaged` where the shifts are not known.
        RequestError: `request.unsatisfiable` if moments are lost and the request does not say what they become.
    """
    if facts.shifts is None:
        return checkpoint
    if isinstance(facts.shifts, str):
        raise SourceError(DAMAGED, f"the buffers of the run are not known: {facts.shifts}", fix=_DROP)
    held = _Parts(checkpoint, facts.saved, facts.shifts.cuts)
    made: dict[str, dict[str, int]] = {}
    padding: dict[str, dict[str, int]] = {}
    lost: dict[str, _Lost] = {}
    for buffer, way in _found_ways(held, facts.shifts):
        for name in () if way is None else way.shifted:
            if way is None or name not in held.parameters:
                continue
            one = _Repair(held, buffer.ranks, way, name)
            lost[name] = one.lost()
            for state in held.parameters[name].states:
                number = one.state(state)
                whole, data = held.tensor(number), held.parameters[name].shape
                if whole.shape != data:
                    rows, end = data[0], whole.shape[0]
                    view = rows_of(whole.shape, number, rows, end)
                    rest = held.add(name, state, whole.dtype, view, (end - rows, *data[1:]))
                    padding.setdefault(name, {})[state] = rest
                    number = held.add(name, state, whole.dtype, rows_of(whole.shape, number, 0, rows), data)
                made.setdefault(name, {})[state] = number
    if not made:
        note = "--damaged repair: no states are shifted, and they are taken as they are"
        return replace(checkpoint, warnings=(*checkpoint.warnings, note))
    _refuse_unsaid(lost, made, request)
    numbers = {name: states[MASTER] for name, states in made.items()}
    where = "the weight of that name"
    proven = tuple(
        Agreement(
            name, MASTER, number, _weight_of(held, name), where, rounded=True, every=True, fix=NOT_THOSE, code=DAMAGED
        )
        for name, number in numbers.items()
    )
    kept = tuple(a for a in checkpoint.agreements if a.code != DAMAGED or a.fqn not in made)
    return replace(
        checkpoint,
        shard_map=checkpoint.shard_map.with_derived(held.added),
        parameters=tuple(
            replace(p, states={**p.states, **made.get(p.fqn, {})}, padding={**p.padding, **padding.get(p.fqn, {})})
            for p in checkpoint.parameters
        ),
        agreements=(*kept, *proven),
        warnings=(*checkpoint.warnings, _summary(lost, made, request)),
        not_carried=(*checkpoint.not_carried, *_lost_elements(lost, made, request)),
        facts=replace(facts, shifts=None),
    )


def _weight_of(held: _Parts, name: str) -> int:
    weight = held.parameters[name].weight
    if weight is None:
        raise SourceError(DAMAGED, f"{printable(name)} has no weight, which would prove its states", fix=_DROP)
    return weight


def _refuse_unsaid(lost: Mapping[str, _Lost], made: Mapping[str, Mapping[str, int]], request: ConvertRequest) -> None:
    """Refuse lost moments unless the request says that they become zeros; targets of weights hold none."""
    count = sum(one.count for one in lost.values())
    moments = {state for states in made.values() for state in states} - {MASTER}
    zero = request.options.of(MegatronOptions).damaged is DamagedPolicy.REPAIR_WITH_ZEROS
    if not count or not moments or zero or request.to in _WEIGHTS:
        return
    names = [printable(name) for name, one in lost.items() if one.count]
    raise RequestError(
        "request.unsatisfiable",
        f"--damaged repair: of {listed(sorted(moments))}, {counted(count, 'element')} each are nowhere in the files, "
        f"in {counted(len(names), 'parameter')}: {listed(names)}",
        fix=f"{_ZEROS} writes zeros there, with which an optimizer begins; {_DROP}",
    )


def _summary(lost: Mapping[str, _Lost], made: Mapping[str, Mapping[str, int]], request: ConvertRequest) -> str:
    count = sum(one.count for one in lost.values())
    said = (
        f"{counted(count, 'element')} of each state are nowhere in the files, and are listed as not carried: masters "
        f"there are the weights{'' if request.to in _WEIGHTS else ', moments are zeros'}"
        if count
        else "the files hold every element"
    )
    return f"--damaged repair put back the optimizer states of {counted(len(made), 'parameter')}; {said}"


def _lost_elements(
    lost: Mapping[str, _Lost], made: Mapping[str, Mapping[str, int]], request: ConvertRequest
) -> Iterator[NotCarried]:
    """The elements that are nowhere in the files, of the states that the target holds."""
    for name, one in lost.items():
        for state in made[name] if one.count or one.padding else ():
            if request.to in _WEIGHTS and state != MASTER:
                continue
            instead = "masters there are the weight" if state == MASTER else "they are zeros, as asked"
            yield NotCarried(
                path=f"{printable(name)}/{printable(state)} ({one})",
                reason=f"elements that are nowhere in the files: {instead}",
            )


class _Repair:
    """The states of one parameter, made of the slices that hold them."""

    def __init__(self, held: _Parts, ranks: int, way: Way, name: str) -> None:
        self._held, self._name = held, name
        self._cut = held.cuts[name]
        # All ranks hold the same of a parameter that is not cut, and the files hold the first rank's.
        self._all_ranks = ranks
        self._ranks = range(ranks if self._cut.dim is not None else 1)
        self._runs = [way.held(name, lambda other, rank=rank: self._is_there(other, rank)) for rank in self._ranks]
        self._shape = held.tensor(held.whole(name, MASTER)).shape

    def _is_there(self, other: str, rank: int) -> bool:
        return self._held.has(other, MASTER) and (rank == 0 or self._held.cuts[other].dim is not None)

    def state(self, state: str) -> int:
        """The number of a repaired state, with the padding of a vocabulary."""
        held, name = self._held, self._name
        dtype = held.tensor(held.whole(name, state)).dtype
        made: list[int] = []
        for rank, runs in zip(self._ranks, self._runs, strict=True):
            splices = tuple(self._splice(run, state, dtype, rank) for run in runs)
            shape = local_grid(self._cut, self._shape, len(self._ranks), rank)
            made.append(held.add(name, state, dtype, Spliced(splices), shape))
        if len(made) == 1:
            return made[0]
        return held.add(name, state, dtype, joined(self._cut, self._shape, made), self._shape)

    def _splice(self, run: Held, state: str, dtype: Dtype, rank: int) -> Splice:
        held, name = self._held, self._name
        if run.name is None and state != MASTER:
            return Splice(run.length, None)
        if run.name is None:
            weight = held.local(name, "weight", rank, self._all_ranks) if held.has(name, "weight") else None
            if weight is None or held.tensor(weight).dtype.name not in _EXACT or dtype is not FLOAT32:
                raise SourceError(DAMAGED, f"no weight tells the lost masters of {printable(name)}", fix=_DROP)
            return Splice(run.length, weight, run.begin)
        if not held.has(run.name, state) or held.tensor(held.whole(run.name, state)).dtype is not dtype:
            raise SourceError(
                DAMAGED,
                f"{printable(state)} of {printable(name)} should lie in that of {printable(run.name)}, which is not "
                "there or is of another type",
                fix=_DROP,
            )
        return Splice(run.length, held.local(run.name, state, rank, self._all_ranks), run.source)

    def lost(self) -> _Lost:
        """The elements that are nowhere in the files."""
        data = self._held.parameters[self._name].shape
        found = _Lost(data[0] if data != self._shape else None)
        for rank, runs in zip(self._ranks, self._runs, strict=True):
            shape = local_grid(self._cut, self._shape, len(self._ranks), rank)
            for run in runs:
                if run.name is None:
                    for box in _boxes(shape, run.begin, run.begin + run.length):
                        for one in self._in_whole(box, rank):
                            found.add(one)
        return found

    def _in_whole(self, box: tuple[tuple[int, int], ...], rank: int) -> Iterator[tuple[tuple[int, int], ...]]:
        """The boxes of the whole parameter for a box of a rank's part."""
        dim = self._cut.dim
        if dim is None or len(self._ranks) == 1:
            yield box
            return
        low, high = box[dim]
        for part in parts(self._cut, self._shape[dim], len(self._ranks), rank):
            first, last = max(low, part.local), min(high, part.local + part.width)
            if first < last:
                moved = part.start - part.local
                yield (*box[:dim], (first + moved, last + moved), *box[dim + 1 :])


def _boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """The boxes of the elements `[begin, end)` of a tensor in row-major order."""
    if len(shape) < 2:
        yield from [((begin, end),)] if shape else [()]
        return
    row, at = prod(shape[1:]), begin
    while at < end:
        number, inner = divmod(at, row)
        if inner == 0 and end - at >= row:
            count = (end - at) // row
            yield ((number, number + count), *((0, n) for n in shape[1:]))
            at += count * row
            continue
        stop = min(end, (number + 1) * row)
        yield from (((number, number + 1), *b) for b in _boxes(shape[1:], at - number * row, stop - number * row))
        at = stop
