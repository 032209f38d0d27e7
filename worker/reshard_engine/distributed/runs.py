"""Cuts the units of a plan into runs: contiguous ranges of units, each of which one worker executes.

A file with a CRC slot is finished by the unit that writes the slot, after all units that write the record's bytes. A
run is cut where no record is open, or where so few bytes of open records lie before the cut that the worker behind it
sums them once more (`Executor.run`). If the units between a record's begin and its slot are too many for one run, the
unit with the slot is left for the last wave, which begins when all other runs are done. What other units need of it is
summed again. `CrcParts` tells which CRC slots of units need bytes that earlier units write.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Generic, Protocol, TypeVar

from reshard_engine.plan.model import Chunk, Plan, RecordPart, Unit
from reshard_engine.tensors.layout import TargetFile


def copied_records(plan: Plan) -> frozenset[tuple[int, int]]:
    """The records, as (file, number), of which the store copies a part. Their CRC-32s are known by ranges of units."""
    return frozenset((o.file, o.record) for o in plan.server_copies if o.record is not None)


@dataclass(frozen=True)
class _WrittenChunk:
    """A chunk of a large file, and the place of its unit."""

    begin: int
    end: int
    place: int


class CrcParts:
    """The units of a plan, and what their CRC slots need of one another."""

    def __init__(
        self, units: Sequence[Unit], files: Sequence[TargetFile], copied: Container[tuple[int, int]] = ()
    ) -> None:
        """A place is a position in `units`.

        Args:
            units: The units, in order.
            files: The target's files.
            copied: Records whose parts no other worker can sum.
        """
        self._units = units
        self._files = files
        self._copied = copied
        self._chunks = _large_chunks(units, files)
        self._ends = {file: [chunk.end for chunk in chunks] for file, chunks in self._chunks.items()}
        self._first = {
            # For each chunk, the first place of a unit that writes it or a chunk behind it.
            file: list(accumulate((chunk.place for chunk in reversed(chunks)), min))[::-1]
            for file, chunks in self._chunks.items()
        }

    def first_needed(self) -> list[int]:
        """For each place, that of the first unit whose bytes its CRC slots sum; the place itself if there is none."""
        found = list(range(len(self._units)))
        for place, unit in enumerate(self._units):
            for chunk in unit.chunks:
                begins = [self._files[chunk.file].template.records[r][0] for r in self._records_of(chunk)]
                if begins:
                    first = self._first[chunk.file]
                    found[place] = min(found[place], first[bisect_right(self._ends[chunk.file], min(begins))])
        return found

    def again(self, place: int, of: Container[int]) -> int | None:
        """The bytes of units at the places `of` that the CRC slots of a unit need; None if nobody else can sum them."""
        parts = [part for part, other in self.parts_of(place) if other in of]
        if any((part.file, part.record) in self._copied for part in parts):
            return None
        return sum(part.length_bytes for part in parts)

    def open_bytes(self, places: Sequence[int]) -> list[int | None]:
        """For each unit of a wave, the bytes of the wave before it that a worker sums once more if it begins there.

        None stands where no worker may begin: behind a part of a record that the store copies.

        Args:
            places: The places of the wave's units, in order.
        """
        # Differences between neighbouring units of the wave, for bytes and for records that must not be cut.
        more, closed = [0] * (len(places) + 1), [0] * (len(places) + 1)
        numbers = {place: number for number, place in enumerate(places)}
        for number, place in enumerate(places):
            for part, of in self.parts_of(place):
                if of in numbers:
                    begin = numbers[of] + 1
                    is_copied = (part.file, part.record) in self._copied
                    for found, value in ((more, part.length_bytes), (closed, int(is_copied))):
                        found[begin] += value
                        found[number + 1] -= value
        summed = zip(accumulate(more[:-1]), accumulate(closed[:-1]), strict=True)
        return [None if cuts else length for length, cuts in summed]

    def _records_of(self, chunk: Chunk) -> list[int]:
        """The records of a large file for which a chunk has a slot."""
        if chunk.file not in self._chunks:
            return []
        template = self._files[chunk.file].template
        return [record for _, record in template.slots_in(chunk.offset, chunk.offset + chunk.length_bytes)]

    def parts_of(self, place: int) -> Iterator[tuple[RecordPart, int]]:
        """The parts of records for which a unit has slots, with the earlier places whose units write them."""
        for chunk in self._units[place].chunks:
            for record in self._records_of(chunk):
                offset, length = self._files[chunk.file].template.records[record]
                for other in self._overlapping(chunk.file, offset, offset + length):
                    if other.place < place:
                        low, high = max(offset, other.begin), min(offset + length, other.end)
                        yield RecordPart(chunk.file, record, low, high - low), other.place

    def _overlapping(self, file: int, begin: int, end: int) -> Iterator[_WrittenChunk]:
        chunks = self._chunks[file]
        # A slice would copy the rest of a file's chunks for each of its records.
        number = bisect_right(self._ends[file], begin)
        while number < len(chunks) and chunks[number].begin < end:
            yield chunks[number]
            number += 1


def _large_chunks(units: Sequence[Unit], files: Sequence[TargetFile]) -> Mapping[int, list[_WrittenChunk]]:
    """The chunks of files that several units write, in the order of their offsets."""
    found: dict[int, list[_WrittenChunk]] = {}
    for place, unit in enumerate(units):
        for chunk in unit.chunks:
            if chunk.length_bytes < files[chunk.file].size_bytes:
                written = _WrittenChunk(chunk.offset, chunk.offset + chunk.length_bytes, place)
                found.setdefault(chunk.file, []).append(written)
    return {file: sorted(chunks, key=lambda c: c.begin) for file, chunks in found.items()}


MAX_RUNS = 512
"""Number of runs of a large job: a claim and at least one segment are written for each of them."""
RUN_BYTES = 16 << 20
"""A run of so many bytes is long enough: the claim takes a tenth of its time or less. Runs are longer only in jobs that
would have more than `MAX_RUNS` of them, and shorter in jobs that would have less than `GROUPS`."""
GROUPS = 128
"""Units that belong together stay in one run, unless they are more than this fraction of the job."""
SMALL_GROUPS = 8
"""So many units that belong together stay in one run in any case, unless they are more than this fraction of the job:
in a job of few units, the last wave would otherwise hold a large part of it."""
SUMMED_AGAIN = 4
"""A run of the first wave is at least so many times as long as the bytes that the next one's worker sums once more."""
SHRINKING_RUNS = 32
"""Runs become shorter, down to a quarter, when a wave has less left than so many: the last ones end together."""
CALL_BYTES = 1 << 20
"""A file of its own costs as much time as so many bytes: a network's latency times its bandwidth."""


class Item(Protocol):
    """One piece of work in a wave: a unit, or a check."""

    @property
    def index(self) -> int:
        """Its number among the items of its kind."""
        ...


ItemT = TypeVar("ItemT", bound=Item)


@dataclass(frozen=True, slots=True)
class Run:
    """The items `[first, end)` of a wave. `first` names the run: no two runs of a wave begin at one item."""

    wave: int
    """0 for the first wave of units, 1 for the last one; `CheckWaves` has the others."""
    first: int
    end: int

    @property
    def name(self) -> str:
        """The name of the run, which is a part of the names of its claims and segments."""
        return f"{self.wave}.{self.first}"


@dataclass(frozen=True)
class RunWaves(ABC, Generic[ItemT]):
    """Waves of items, and their runs."""

    units: tuple[tuple[ItemT, ...], ...]
    """The items of each wave in order. A `Run` counts in these tuples."""
    runs: tuple[tuple[Run, ...], ...]
    cuts: tuple[tuple[bool, ...], ...]
    """For each item of a wave, True if a run may begin there."""

    @abstractmethod
    def cost_of(self, item: ItemT) -> int:
        """The time that an item takes, in bytes."""

    def units_of(self, run: Run) -> tuple[ItemT, ...]:
        """The items of a run."""
        return self.units[run.wave][run.first : run.end]

    def cost(self, run: Run) -> int:
        """The time that a run takes, in bytes."""
        return sum(map(self.cost_of, self.units_of(run)))

    @cached_property
    def places(self) -> dict[str, int]:
        """The place of each planned run among those of its wave, by its name, when the most expensive one is first."""
        return {run.name: place for runs in self.runs for place, run in enumerate(self._costly_first(runs))}

    def preference(self, run: Run) -> int:
        """Runs with a lower number are claimed before others."""
        return run.wave

    def ready(self, runs: Sequence[Run], is_done: Callable[[str], bool]) -> Callable[[Run], bool]:
        """A function that is True for a run whose work can begin.

        Args:
            runs: All runs as they are now.
            is_done: True for the name of a run whose records are written.
        """
        del runs, is_done
        return lambda _: True

    def _costly_first(self, runs: Sequence[Run]) -> list[Run]:
        return sorted(runs, key=lambda r: (-self.cost(r), r.first))


@dataclass(frozen=True)
class Waves(RunWaves[Unit]):
    """The runs of a plan, without its commit units, in two waves."""

    parts: CrcParts
    """What the CRC slots of the plan's units, without commit units, need of one another."""

    def parts_before(self, unit: int, run: Run | None) -> list[RecordPart]:
        """The parts of records that a unit (its index) has CRC slots for, and whose units others execute.

        Those of earlier waves are left out: their records are known when the run begins. All parts count for a unit
        that is executed again, outside its run.
        """
        parts = self.parts.parts_of(self._places[unit])
        if run is None:
            return [part for part, _ in parts]
        own = (run.wave, run.first), (run.wave, run.end)
        return [p for p, of in parts if self._spot[of] >= (run.wave, 0) and not own[0] <= self._spot[of] < own[1]]

    @cached_property
    def _places(self) -> dict[int, int]:
        """The place of each unit among all of them, by its index."""
        ordered = sorted(unit.index for units in self.units for unit in units)
        return {index: place for place, index in enumerate(ordered)}

    @cached_property
    def _spot(self) -> dict[int, tuple[int, int]]:
        """The wave of each unit and its place there, by its place among all of them."""
        return {
            self._places[unit.index]: (wave, number)
            for wave, units in enumerate(self.units)
            for number, unit in enumerate(units)
        }

    @cached_property
    def places(self) -> dict[str, int]:
        """The place of each planned run, by its name. Those of the last wave are first, and begin when they can."""
        return {run.name: n for n, run in enumerate(r for runs in self.runs[::-1] for r in self._costly_first(runs))}

    def preference(self, run: Run) -> int:
        """No wave is preferred: `places` has the order of both."""
        del run
        return 0

    def ready(self, runs: Sequence[Run], is_done: Callable[[str], bool]) -> Callable[[Run], bool]:
        """A run of the last wave can begin when the runs are done that write what it needs."""
        starts = [run.first for run in self.runs[0]]
        undone = {bisect_right(starts, r.first) - 1 for r in runs if r.wave == 0 and not is_done(r.name)}
        if not undone:
            return lambda _: True
        return lambda run: (
            run.wave == 0 or all(undone.isdisjoint(self._awaited[number]) for number in range(run.first, run.end))
        )

    @cached_property
    def _awaited(self) -> list[frozenset[int]]:
        """For each unit of the last wave, the numbers of the planned runs that write what it needs."""
        starts = [run.first for run in self.runs[0]]
        return [frozenset(bisect_right(starts, place) - 1 for place in of) for of in self._needed]

    def needed_by(self, run: Run) -> list[int]:
        """The places of the units of the first wave whose records a run of the last wave needs."""
        if run.wave == 0:
            return []
        return sorted({place for number in range(run.first, run.end) for place in self._needed[number]})

    @cached_property
    def _needed(self) -> list[frozenset[int]]:
        """For each unit of the last wave, the places of the units of the first wave that it needs records of."""
        return [
            frozenset(
                number
                for _, of in self.parts.parts_of(self._places[unit.index])
                for wave, number in (self._spot[of],)
                if wave == 0
            )
            for unit in self.units[1]
        ]

    def cost_of(self, item: Unit) -> int:
        """The bytes that a unit writes, and more for each of its files."""
        return item.length_bytes + CALL_BYTES * len(item.chunks)

    @property
    def last_bytes(self) -> int:
        """Number of bytes that the last wave writes."""
        return sum(u.length_bytes for u in self.units[1])


def cut_into_runs(plan: Plan, files: Sequence[TargetFile], *, most: int = MAX_RUNS) -> Waves:
    """Cut the units of a plan, except its commit units, into at most about `most` runs.

    The result follows from the plan, so all workers cut alike.
    """
    units = [u for u in plan.units if not u.commit]
    total = sum(u.length_bytes for u in units)
    run_bytes = max(1, -(-total // most), min(RUN_BYTES, total // GROUPS))
    largest = max((u.length_bytes for u in units), default=0)
    group_bytes = max(run_bytes, total // GROUPS, min(SMALL_GROUPS * largest, total // SMALL_GROUPS))
    parts = CrcParts(units, files, copied_records(plan))
    starts = _starts(units)
    last: set[int] = set()
    for place, first in enumerate(parts.first_needed()):
        if first == place:
            continue
        if starts[place] + units[place].length_bytes - starts[first] > group_bytes:
            last.add(place)
        elif not last.isdisjoint(range(first, place)):
            # A record of which the last wave writes a part is complete only then, if the part is large.
            again = parts.again(place, last)
            if again is None or again > largest:
                last.add(place)
    waves = [p for p in range(len(units)) if p not in last], sorted(last)
    # A worker sums at most as much once more as one unit writes.
    before = [[n if n is not None and n <= largest else None for n in parts.open_bytes(places)] for places in waves]
    # A run of the last wave is as short as can be: at the end, workers without a run wait for the others.
    runs = tuple(
        runs_of(wave, [units[p].length_bytes for p in places], before[wave], *limits)
        for wave, (places, limits) in enumerate(zip(waves, ((run_bytes, SUMMED_AGAIN), (1, 1)), strict=True))
    )
    cuts = tuple(tuple(n is not None for n in wave) for wave in before)
    return Waves(tuple(tuple(units[p] for p in places) for places in waves), runs, cuts, parts)


def runs_of(
    wave: int, sizes: Sequence[int], before: Sequence[int | None], run_bytes: int, again: int = SUMMED_AGAIN
) -> tuple[Run, ...]:
    """Cut a wave into runs of at least `run_bytes`, except the last ones.

    Args:
        wave: The number of the wave.
        sizes: The bytes of each item.
        before: For each item, the bytes that a run which begins there sums once more; None if none may begin there.
        run_bytes: Length of a run that is long enough.
        again: A run is at least so many times as long as what the next one sums once more.
    """
    runs: list[Run] = []
    first = held = 0
    left = sum(sizes)
    for place, size in enumerate(sizes, 1):
        held += size
        long_enough = max(run_bytes // 4, min(run_bytes, left // SHRINKING_RUNS))
        summed = before[place] if place < len(sizes) else 0
        if place == len(sizes) or (summed is not None and held >= max(long_enough, again * summed)):
            runs.append(Run(wave, first, place))
            first, left, held = place, left - held, 0
    return tuple(runs)


def is_share_of(run: Run, waves: RunWaves[Any], number: int, count: int) -> bool:
    """True if `in_order` leaves a run to worker `number` of `count` as long as that one has others."""
    return (waves.places.get(run.name, run.first) - number) % max(1, count) == 0


def in_order(
    free: Sequence[Run],
    waves: RunWaves[Any],
    number: int,
    count: int,
    *,
    own: Mapping[int, Container[int]] | None = None,
) -> list[Run]:
    """The free runs in the order in which worker `number` of `count` claims them.

    Each worker has every `count`-th of the planned runs, the largest first. Then it takes what is left to the next
    worker, from the other end. So two workers seldom claim one run, however old their listings are. Runs with one of
    the items `own`, by wave, come last in their wave: another worker should check what this one made.
    """
    places = waves.places
    count = max(1, count)

    def key(run: Run) -> tuple[int, bool, int, int]:
        place = places.get(run.name, run.first)
        distance = (place - number) % count
        made = (own or {}).get(run.wave)
        mine = made is not None and any(item.index in made for item in waves.units_of(run))
        return waves.preference(run), mine, distance, place if distance == 0 else -place

    return sorted(free, key=key)


def _starts(units: Sequence[Unit]) -> list[int]:
    """The number of bytes that the units before each unit write."""
    return list(accumulate((u.length_bytes for u in units), initial=0))
