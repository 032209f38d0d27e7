"""Checks as work that is handed out: waves of items, the runs of these, and the records of results.

A check has no effect but its record. The elected worker reads the records and judges: what has no record, or one that
cannot be understood, is checked again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard_engine.distributed.epoch import FIRST_CHECKS
from reshard_engine.distributed.runs import RUN_BYTES, Run, RunWaves, runs_of
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
