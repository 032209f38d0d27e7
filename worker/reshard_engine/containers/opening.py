"""Reads the metadata of many files in parallel with a bounded pool of threads, because latency dominates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from reshard_engine.containers.source_file import SourceFile

_LOCAL_THREADS, _REMOTE_THREADS = 8, 32
_BATCH = 1_024
_Result = TypeVar("_Result")


def open_all(files: Sequence[SourceFile], parse: Callable[[SourceFile], _Result]) -> list[_Result]:
    """`parse(file)` of each file, in order. A remote file costs two or three round trips, a local one only work.

    Only one batch of files is in flight, because there may be a hundred thousand.
    """
    remote = any(file.store.scheme != "file" for file in files)
    found: list[_Result] = []
    with ThreadPoolExecutor(_REMOTE_THREADS if remote else _LOCAL_THREADS) as pool:
        for start in range(0, len(files), _BATCH):
            found += pool.map(parse, files[start : start + _BATCH])
    return found
