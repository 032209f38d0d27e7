"""Where a run's time went: seconds by directory and by file, set-up and tear-down included."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest

_FILES = 15
"""Of the files, so many are listed: those that took longest."""
_LEAST_S = 60.0
"""Of a run as short as this nobody asks."""


def budget_lines(reports: Iterable[pytest.TestReport]) -> Iterator[str]:
    """A line for each directory, then one for each of the longest files; nothing of a short run."""
    directories: defaultdict[str, list[float]] = defaultdict(list)
    files: defaultdict[str, list[float]] = defaultdict(list)
    for report in reports:
        file = report.nodeid.partition("::")[0]
        directories[file.removeprefix("tests/").partition("/")[0]].append(report.duration)
        files[file].append(report.duration)
    total = sum(map(sum, directories.values()))
    if total < _LEAST_S:
        return
    for name, taken in sorted(directories.items(), key=lambda item: -sum(item[1])):
        yield f"{sum(taken):6.0f} s {sum(taken) / total:4.0%} {name}"
    for name, taken in sorted(files.items(), key=lambda item: -sum(item[1]))[:_FILES]:
        yield f"{sum(taken):6.0f} s      {name}"
