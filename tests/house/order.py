"""The order of the files of a run: longest first, those that wait beside those that compute."""

from __future__ import annotations

from itertools import zip_longest
from math import fsum

import pytest
from shares import Shares

WAITING = ("acceptance", "browser", "contract", "distributed", "faults", "integration", "recipes")
"""Folders whose tests start servers and processes, and wait for them more than they compute."""


def longest_first(items: list[pytest.Item], shares: Shares) -> None:
    """Sort the files of a run, so that its processes end at the same time and use both cores.

    pytest-xdist hands files out in this order. The tests of a file stay in their order.
    """
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0].removeprefix("tests/"), []).append(item)
    seconds = {
        # A set has another order in each process, and a plain sum another last bit.
        file: fsum(shares.seconds_of(unit) for unit in {shares.unit_of(item.nodeid) for item in tests})
        for file, tests in files.items()
    }
    by_length = sorted(files, key=lambda file: (-seconds[file], file))
    waiting = [file for file in by_length if file.startswith(WAITING)]
    busy = [file for file in by_length if not file.startswith(WAITING)]
    in_turn = [file for pair in zip_longest(waiting, busy) for file in pair if file is not None]
    items[:] = [item for file in in_turn for item in files[file]]
