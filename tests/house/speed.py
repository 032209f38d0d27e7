"""How slow this machine is at the moment, for tests that bound processor time."""

from __future__ import annotations

import time
from functools import cache

_COUNT = 200_000
_USUAL_S = 0.07
"""Of the loop below on the machines that the bounds were measured on (CPython 3.11, 3 GHz)."""


class _Node:
    """What readers of metadata make by the million, and what a shared host's memory makes slow."""

    __slots__ = ("depth", "items")

    def __init__(self) -> None:
        self.items: list[object] = []
        self.depth = 1


@cache
def slowness() -> float:
    """How many times as long as usual Python takes here, 1 at least: a shared host has slow hours."""
    return max(1.0, min(_loop_s() for _ in range(5)) / _USUAL_S)


def _loop_s() -> float:
    begin = time.process_time()
    kept = [_Node() for _ in range(_COUNT)]
    took = time.process_time() - begin
    assert len(kept) == _COUNT
    return took
