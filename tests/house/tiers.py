"""Which cases of a matrix run always, and which in `make full` only."""

from __future__ import annotations

from collections.abc import Iterable
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
