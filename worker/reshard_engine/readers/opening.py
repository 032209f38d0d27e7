"""Metadata of many files at once: a bounded pool of threads, because latency is what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_BATCH = 1_024
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def parse_all(items: Sequence[_Item], parse: Callable[[_Item], _Result], *, threads: int = 8) -> Iterator[_Result]:
    """`parse(item)` of each, in order. Only a batch is in flight: there may be a hundred thousand."""
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(items), _BATCH):
            yield from pool.map(parse, items[start : start + _BATCH])
