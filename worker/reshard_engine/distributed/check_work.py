"""One worker's part in the checks that are open, and the results of all workers."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from reshard_engine.distributed.check_waves import GATHERING, CheckItem, CheckRecord, CheckWaves, check_records
from reshard_engine.distributed.held_run import HeldRun
from reshard_engine.distributed.run_member import Wanted
from reshard_engine.distributed.worker import DistributedWorker


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
            ValueError, LookupError, TypeError: The JSON values are no result.
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
            EpochLostError: The epoch is not the newest one.
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
        threads = max(1, min(threads, -(-fewest // self._worker.present_count)))
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
        items, one_at_a_time = self._worker.taken(wanted, self._found), threading.Lock()
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
                self._worker.put_check(held, item.index, record)
        except BaseException:
            self._failed.set()
            raise

    def _absorb(self, names: Sequence[str]) -> None:
        """Take the results in segments, if they are results of these checks."""
        items = self._checks.waves.units
        planned = {wave: {item.index for item in items[wave]} for wave in range(len(items)) if items[wave]}
        for text in self._worker.texts_of(names):
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
            EpochLostError: The epoch is not the newest one.
            ReshardError: As `take_part`.
        """
        segments = self._worker.look().segments
        runs = {run for run in segments if self._is_open(run)}
        self._absorb([name for run in sorted(runs) for _, name in segments[run]])
        for wave, items in enumerate(self._checks.waves.units):
            for item in items:
                if item.index not in self._found[wave]:
                    self._worker.check()
                    self._found[wave][item.index] = self._checks.understood(
                        wave, item.index, self._checks.perform(item)
                    )
        return self._found

    def _is_open(self, run: str) -> bool:
        wave, waves = run.partition(".")[0], self._checks.waves.runs
        return wave.isdecimal() and int(wave) < len(waves) and bool(waves[int(wave)])
