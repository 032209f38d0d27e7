"""Which cases of a matrix run always, and which in `make full` only."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from house.repository import head_commit


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


def sampling_turn() -> int:
    """The number that draws a sample: RESHARD_TURN, or one of the commit, so that a commit has one sample.

    Another commit draws anew, and so does another minor version of Python. Where there is no git, as in an unpacked
    sdist, only the version counts.
    """
    if given := os.environ.get("RESHARD_TURN"):
        return int(given)
    return zlib.crc32(head_commit().encode()) % 1000 + sys.version_info.minor


def one_of(count: int, items: Iterable[pytest.Item], turn: int) -> None:
    """Mark tests `full`, but for every n-th test of each file, which the turn draws.

    As many turns in a row as `count` says have each test; a file with fewer tests has at least one in each turn.
    """
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("full") is None and item.get_closest_marker("gpu") is None:
            files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    for file, tests in files.items():
        share = min(count, len(tests))
        chosen = tests[(zlib.crc32(file.encode()) + turn) % share :: share]
        for item in tests:
            if item not in chosen:
                item.add_marker(pytest.mark.full)
