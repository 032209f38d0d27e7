"""Which cases of a matrix run always, and which in `make full` only."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest


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
