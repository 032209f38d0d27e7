"""The runs of shares: which tests of a share ran, and how they ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from datetime import UTC, datetime

import pytest
from shares import FULL, Record, Run, Shares, commit_of, keep_seconds

from house.measured import say


class ShareRuns:
    """A plugin of pytest that records the runs of shares, once all their tests have run."""

    def __init__(self, shares: Collection[int]) -> None:
        self._shares = shares
        self._tally = Tally()
        self._commit = commit_of()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of a test, which may have run in another process."""
        self._tally.add(report.nodeid, report.outcome, report.duration, full="full" in report.keywords)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the record and the seconds of the tests, unless the run ended early."""
        if exitstatus not in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
            say("the run ended early; no share is recorded")
            return
        keep_seconds(self._tally.seconds)
        commit, record, table = commit_of(), Record.read(), Shares.read()
        if commit is None or commit != self._commit:
            say("tracked files differ from the commit; no share is recorded")
            return
        at = datetime.now(UTC).isoformat(timespec="seconds")
        for share in self._shares:
            if run := self._tally.run_of(share, table, commit, at):
                record.note(share, run)
        record.write()
        say(*record.lines())


class Tally:
    """The outcomes and seconds of the tests of a run, as their reports arrive."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.failed: set[str] = set()
        self.skipped: set[str] = set()
        self.full: set[str] = set()

    def add(self, nodeid: str, outcome: str, seconds: float, *, full: bool = False) -> None:
        """Add one phase of a test; `full` is True for a test with that marker."""
        if full:
            self.full.add(nodeid)
        self.seconds[nodeid] += seconds
        if outcome == "failed":
            self.failed.add(nodeid)
        elif outcome == "skipped":
            self.skipped.add(nodeid)

    def run_of(self, share: int, table: Shares, commit: str, at: str) -> Run | None:
        """The run of a share; None if none of its tests ran."""
        tests = {n for n in self.seconds if (FULL if n in self.full else table.share_of(n)) == share}
        if not tests:
            return None
        seconds = round(sum(self.seconds[nodeid] for nodeid in tests), 1)
        failed = tuple(sorted(tests & self.failed))
        return Run(commit, at, len(tests), len(tests & self.skipped), failed, seconds)
