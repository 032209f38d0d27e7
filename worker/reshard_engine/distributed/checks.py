"""Checks as work that is handed out: waves of items, a worker's part in them, and the results of all workers.

A check has no effect but its record. The elected worker reads the records and judges: what has no record, or one that
cannot be understood, is checked again.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from reshard_engine.distributed.claimed_runs import HeldRun, Wanted
from reshard_engine.distributed.runs import RUN_BYTES, Run, RunWaves, runs_of
from reshard_engine.distributed.session import FIRST_CHECKS
from reshard_engine.distributed.worker import DistributedWorker
from reshard_engine.execute.journal import facts_in, line_of

AGREEMENTS, SOURCE, FILES, GATHERING, COMMIT_FILES = range(FIRST_CHECKS, FIRST_CHECKS + 5)
"""The waves: tensors that must agree; source files; target files; units, which are gathered again; commit files."""
_MOST_RUNS, _LEAST_RUNS = 256, 16


@dataclass(frozen=True, slots=True)
class CheckItem:
    """One check."""

    wave: int
    index: int
    cost_bytes: int
    """The time that it takes, in bytes."""


@dataclass(frozen=True)
class CheckWaves(RunWaves[CheckItem]):
    """The checks that are open at a time. A wave that is not open has no items."""

    def cost_of(self, item: CheckItem) -> int:
        """The cost of a check."""
        return item.cost_bytes

    @property
    def is_worth_sharing(self) -> bool:
        """True if the checks take longer than it takes to hand them out."""
        costs = [item.cost_bytes for items in self.units for item in items]
        return len(costs) > 1 and sum(costs) > RUN_BYTES


def cut_checks(costs: Mapping[int, Sequence[tuple[int, int]]]) -> CheckWaves:
    """Cut checks into runs; `costs` has (index, cost) of each item, by wave. All workers cut alike."""
    waves = [tuple(CheckItem(wave, *item) for item in costs.get(wave, ())) for wave in range(max(costs) + 1)]
    return CheckWaves(
        tuple(waves),
        tuple(_runs(wave, items) for wave, items in enumerate(waves)),
        tuple((True,) * len(items) for items in waves),
    )


def _runs(wave: int, items: Sequence[CheckItem]) -> tuple[Run, ...]:
    costs = [item.cost_bytes for item in items]
    run_bytes = max(1, sum(costs) // _MOST_RUNS, min(RUN_BYTES, sum(costs) // _LEAST_RUNS))
    return runs_of(wave, costs, [0] * len(costs), run_bytes)


@dataclass(frozen=True, slots=True)
class CheckRecord:
    """The result of one check."""

    wave: int
    index: int
    tie: str
    """The digest of what was compared with: a result for other facts is none."""
    result: Any
    """JSON values."""

    def to_line(self) -> bytes:
        """The record as a line of a segment."""
        return line_of({"check": [self.wave, self.index], "tie": self.tie, "result": self.result})

    @staticmethod
    def from_line(line: bytes) -> CheckRecord | None:
        """The record in a line; None if the line holds none, because a crash cut it off or it was damaged."""
        try:
            facts: dict[str, Any] = facts_in(line)
            wave, index = facts["check"]
            return CheckRecord(int(wave), int(index), str(facts["tie"]), facts["result"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return None


def check_records(text: bytes) -> Iterator[CheckRecord]:
    """The records in a segment of checks."""
    for line in text.split(b"\n"):
        if line and (record := CheckRecord.from_line(line)) is not None:
            yield record


class Checks(ABC):
    """Checks that are open at a time: their runs, and how one is made."""

    waves: CheckWaves

    @abstractmethod
    def tie_of(self, wave: int) -> str:
        """The digest of what the checks of a wave compare with."""

    @abstractmethod
    def perform(self, item: CheckItem) -> Any:
        """Make one check; returns its result as JSON values. A failed comparison is a result, and no error."""

    @abstractmethod
    def understood(self, wave: int, index: int, result: Any) -> Any:
        """The result of the check with this number.

        Raises:
            ValueError, LookupError, TypeError: The JSON values are not a result.
        """


class CheckWork:
    """Takes runs of checks, and collects what all workers found. One object serves one opening of checks."""

    def __init__(self, worker: DistributedWorker, checks: Checks) -> None:
        """`checks` are the same for all workers."""
        self._worker = worker
        self._checks = checks
        self._found: dict[int, dict[int, Any]] = {wave: {} for wave in range(len(checks.waves.runs))}
        self._failed = threading.Event()

    def take_part(self, groups: Sequence[tuple[Sequence[int], int]]) -> None:
        """Make checks, until every check of all groups has been made by a worker.

        Args:
            groups: The numbers of waves, and the number of threads that make their checks, in the order of preference.

        Raises:
            SessionLostError: The session is not the newest one.
            ReshardError: A check could not be made, or the conversion cannot succeed.
        """
        if groups[1:]:
            for waves, threads in groups:
                self._take(waves, threads, lingers=False)
        self._take([wave for waves, _ in groups for wave in waves], min(n for _, n in groups), lingers=True)

    def _take(self, waves: Sequence[int], threads: int, *, lingers: bool) -> None:
        runs, items_of = self._checks.waves.runs, self._checks.waves.units
        fewest = min((len(items_of[wave]) for wave in waves if items_of[wave]), default=0)
        # More checks at a time than its share would keep the others from taking theirs: a run of one file has no parts.
        threads = max(1, min(threads, -(-fewest // self._worker.member.present_count)))
        wanted = Wanted(
            self._checks.waves,
            [run for wave in waves for run in runs[wave]],
            self._absorb,
            self._failed.is_set,
            lingers=lingers,
            own={GATHERING: self._worker.own_units},
        )
        if not wanted.planned:
            return
        items, one_at_a_time = self._worker.runs.taken(wanted, self._found), threading.Lock()
        if threads == 1:
            self._make(items, one_at_a_time)
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="check") as pool:
            futures = [pool.submit(self._make, items, one_at_a_time) for _ in range(threads)]
        for future in futures:
            future.result()

    def _make(self, items: Iterator[tuple[HeldRun[CheckItem], CheckItem]], one_at_a_time: threading.Lock) -> None:
        """Make checks of the runs that this worker claims, in one of its threads."""
        try:
            while True:
                with one_at_a_time:
                    taken = next(items, None)
                if taken is None:
                    return
                held, item = taken
                result = self._checks.perform(item)
                self._found[item.wave][item.index] = self._checks.understood(item.wave, item.index, result)
                record = CheckRecord(item.wave, item.index, self._checks.tie_of(item.wave), result)
                self._worker.runs.put_check(held, item.index, record)
        except BaseException:
            self._failed.set()
            raise

    def _absorb(self, names: Sequence[str]) -> None:
        """Take the results in segments, if they are results of these checks."""
        items = self._checks.waves.units
        planned = {wave: {item.index for item in items[wave]} for wave in range(len(items)) if items[wave]}
        for text in self._worker.runs.texts_of(names):
            for record in check_records(text):
                wave = record.wave
                if record.index not in planned.get(wave, ()) or record.tie != self._checks.tie_of(wave):
                    continue
                try:
                    self._found[wave][record.index] = self._checks.understood(wave, record.index, record.result)
                except (ValueError, LookupError, TypeError):
                    continue  # the item counts as not checked

    def results(self) -> Mapping[int, Mapping[int, Any]]:
        """The results of all workers, by wave and index. A check without a result is made now.

        Raises:
            SessionLostError: The session is not the newest one.
            ReshardError: As `take_part`.
        """
        segments = self._worker.member.look().segments
        runs = {run for run in segments if self._is_open(run)}
        self._absorb([name for run in sorted(runs) for _, name in segments[run]])
        for wave, items in enumerate(self._checks.waves.units):
            for item in items:
                if item.index not in self._found[wave]:
                    self._worker.member.check()
                    self._found[wave][item.index] = self._checks.understood(
                        wave, item.index, self._checks.perform(item)
                    )
        return self._found

    def _is_open(self, run: str) -> bool:
        wave, waves = run.partition(".")[0], self._checks.waves.runs
        return wave.isdecimal() and int(wave) < len(waves) and bool(waves[int(wave)])
