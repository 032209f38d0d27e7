"""Metadata of many files at once: a bounded pool of threads, because latency is what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from reshard_engine.containers.source_file import SourceFile

LOCAL_THREADS, REMOTE_THREADS = 8, 32
_BATCH = 1_024
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def open_all(files: Sequence[SourceFile], parse: Callable[[SourceFile], _Result]) -> list[_Result]:
    """`parse(file)` of each, in order: a remote file is two or three round trips, a local one is work."""
    remote = any(file.store.scheme != "file" for file in files)
    return list(parse_all(files, parse, threads=REMOTE_THREADS if remote else LOCAL_THREADS))


def parse_all(items: Sequence[_Item], parse: Callable[[_Item], _Result], *, threads: int) -> Iterator[_Result]:
    """`parse(item)` of each, in order. Only a batch is in flight: there may be a hundred thousand."""
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(items), _BATCH):
            yield from pool.map(parse, items[start : start + _BATCH])
