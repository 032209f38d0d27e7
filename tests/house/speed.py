"""How slow this machine is at the moment, for tests that bound processor time."""

from __future__ import annotations

import time
from functools import cache

_ITERATIONS = 1_000_000
_USUAL_S = 0.05
"""Of the loop below on the machines that the bounds were measured on (CPython 3.11, 3 GHz)."""


@cache
def slowness() -> float:
    """How many times as long as usual Python takes here, 1 at least: a shared host has slow hours."""
    return max(1.0, min(_loop_s() for _ in range(5)) / _USUAL_S)


def _loop_s() -> float:
    begin, total = time.process_time(), 0
    for number in range(_ITERATIONS):
        total += number & 7
    assert total == 7 * _ITERATIONS // 2
    return time.process_time() - begin
