"""Cuts the units of a plan into runs: contiguous ranges of units, each of which one worker executes.

A file with a CRC slot is finished by the unit that writes the slot, after all units that write the record's bytes. A
run is cut where no record is open. If the units between a record's begin and its slot are too many for one run, the
unit with the slot is left for the last wave, which begins when all other runs are done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Generic, Protocol, TypeVar

from reshard_engine.plan.model import Chunk, Plan, Unit
from reshard_engine.tensors.layout import TargetFile

MAX_RUNS = 512
"""Number of runs of a large job: a claim and at least one segment are written for each of them."""
GROUPS = 128
"""Units that belong together stay in one run, unless they are more than this fraction of the job."""
SMALL_GROUPS = 8
"""So many units that belong together stay in one run in any case, unless they are more than this fraction of the job:
in a job of few units, the last wave would otherwise hold a large part of it."""
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
    """0 for the first wave of units, 1 for the last one; `check_waves` has the others."""
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
    """For each item of a wave, True if a run may begin there: no later unit waits for a CRC of an earlier one."""

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
        ordered = [sorted(runs, key=lambda r: (-self.cost(r), r.first)) for runs in self.runs]
        return {run.name: place for runs in ordered for place, run in enumerate(runs)}


@dataclass(frozen=True)
class Waves(RunWaves[Unit]):
    """The runs of a plan, without its commit units, in two waves."""

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
    run_bytes = max(1, -(-total // most))
    largest = max((u.length_bytes for u in units), default=0)
    group_bytes = max(run_bytes, total // GROUPS, min(SMALL_GROUPS * largest, total // SMALL_GROUPS))
    needs = _first_needed(units, files)
    starts = _starts(units)
    last: set[int] = set()
    for place, first in enumerate(needs):
        between = starts[place] + units[place].length_bytes - starts[first]
        # A record of which the last wave writes a part is complete only then.
        if first < place and (between > group_bytes or not last.isdisjoint(range(first, place))):
            last.add(place)
    first_wave = tuple(u for place, u in enumerate(units) if place not in last)
    last_wave = tuple(u for place, u in enumerate(units) if place in last)
    first_cuts = _cuts(_first_needed(first_wave, files))
    last_cuts = _cuts(_first_needed(last_wave, files))
    runs = _runs(0, first_wave, first_cuts, run_bytes), _runs(1, last_wave, last_cuts, run_bytes)
    return Waves((first_wave, last_wave), runs, (first_cuts, last_cuts))


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
        return run.wave, mine, distance, place if distance == 0 else -place

    return sorted(free, key=key)


def _starts(units: Sequence[Unit]) -> list[int]:
    """The number of bytes that the units before each unit write."""
    found, at = list[int](), 0
    for unit in units:
        found.append(at)
        at += unit.length_bytes
    return found


def _first_needed(units: Sequence[Unit], files: Sequence[TargetFile]) -> list[int]:
    """For each unit, the place of the first unit whose bytes a CRC slot of the unit sums; its own place if none is."""
    places: dict[int, list[tuple[Chunk, int]]] = {}
    for place, unit in enumerate(units):
        for chunk in unit.chunks:
            if chunk.length_bytes < files[chunk.file].size_bytes:
                places.setdefault(chunk.file, []).append((chunk, place))
    found = list(range(len(units)))
    for file, chunks in places.items():
        template = files[file].template
        chunks.sort(key=lambda item: item[0].offset)
        ends = [chunk.offset + chunk.length_bytes for chunk, _ in chunks]
        # For each chunk, the first place of a unit that writes it or a chunk behind it.
        first = list(accumulate((place for _, place in reversed(chunks)), min))[::-1]
        for (chunk, place), end in zip(chunks, ends, strict=True):
            records = [template.records[r][0] for _, r in template.slots_in(chunk.offset, end)]
            if records:
                found[place] = min(found[place], first[bisect_right(ends, min(records))])
    return found


def _cuts(needs: Sequence[int]) -> tuple[bool, ...]:
    """For each place, True if no unit from there on needs one before it."""
    free = [True] * len(needs)
    lowest = len(needs)
    for place in reversed(range(len(needs))):
        lowest = min(lowest, needs[place])
        free[place] = lowest >= place
    return tuple(free)


def _runs(wave: int, units: Sequence[Unit], cuts: Sequence[bool], run_bytes: int) -> tuple[Run, ...]:
    runs: list[Run] = []
    first = held = 0
    for place, unit in enumerate(units):
        held += unit.length_bytes
        if place + 1 == len(units) or (cuts[place + 1] and held >= run_bytes):
            runs.append(Run(wave, first, place + 1))
            first, held = place + 1, 0
    return tuple(runs)
