"""Which cases of a matrix run always, and which in `make full` only."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from house.repository import ROOT


def rest_full(cases: Iterable[Any], *always: Any) -> list[Any]:
    """The cases as parameters of a test; those that `always` does not name are marked `full`.

    A case that takes several arguments is a tuple.
    """
    listed = list(cases)
    assert not (unknown := [a for a in always if a not in listed]), f"no such cases: {unknown}"
    return [case if case in always else _full(case) for case in listed]


def _full(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.full)


def take_turns(items: Iterable[pytest.Item], parameter: str, values: Sequence[str]) -> None:
    """Mark all cases but one `full`, of each test with a parameter that has these values.

    The cases take turns by the name of the test, so that each file has some of each value, and a new test changes no
    other one's turn. Tests of which not all values are there stay as they are.
    """
    cases: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        params: Mapping[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
        if params.get(parameter) in values:
            rest = "-".join(f"{name}={params[name]}" for name in sorted(params) if name != parameter)
            test = f"{item.nodeid.partition('[')[0]} {rest}"
            cases.setdefault(test, {}).setdefault(params[parameter], []).append(item)
    for test, found in cases.items():
        if set(found) != set(values):
            continue
        chosen = values[zlib.crc32(test.encode()) % len(values)]
        for value, others in found.items():
            for item in others if value != chosen else ():
                item.add_marker(pytest.mark.full)


STORES = ("s3", "gs", "az")
"""Kinds of object stores that the fixture `store` knows (`servers.fixtures`), by their schemes."""
SHARES: Mapping[str, int] = {
    "acceptance": 8,
    "acceptance/test_a_week.py": 8,
    "adversarial": 8,
    "browser": 8,
    "contract": 8,
    "distributed": 8,
    "faults": 8,
    "faults/test_random_kills.py": 8,
    "integration": 12,
    "integrity": 4,
    "laws": 8,
    "memory": 8,
    "oracle": 12,
    "packaging": 2,
    "packaging/test_tutorial.py": 8,
    "planted": 3,
    "plugin": 4,
    "recipes": 8,
    "unit/engine/test_megatron_buckets.py": 8,
}
"""`make test` runs one test of so many, of each of these files and of each file in these folders below tests/.

A file with fewer tests takes no part in some turns.
"""


def sampling_turn() -> int:
    """The number that draws the sample: RESHARD_TURN, or one of the commit, so that a commit has one sample.

    Another commit draws anew, and so does another minor version of Python. Where there is no git, as in an unpacked
    sdist, only the version counts.
    """
    if given := os.environ.get("RESHARD_TURN"):
        return int(given)
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return zlib.crc32(done.stdout.strip().encode()) % 1000 + sys.version_info.minor


def sample_files(items: Iterable[pytest.Item], shares: Mapping[str, int], turn: int, *, others: int = 1) -> None:
    """Mark tests `full`, but for the sample of this turn: of each file every n-th test.

    As many turns in a row as the share says have each test. The first test differs from file to file. `others` is the
    share of files that `shares` does not cover; each of them has at least one test in a turn.
    """
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("full") is None and item.get_closest_marker("gpu") is None:
            files.setdefault(item.nodeid.partition("::")[0].removeprefix("tests/"), []).append(item)
    for file, found in files.items():
        share = shares.get(file) or shares.get(file.partition("/")[0]) or min(others, len(found))
        chosen = found[(zlib.crc32(file.encode()) + turn) % share :: share]
        for item in found if share > 1 else ():
            if item not in chosen:
                item.add_marker(pytest.mark.full)
