"""Pauses Python's cycle collector while many values are made that are all kept."""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses: list[bool] = []
"""One entry for each open pause, in any thread. The first one is True if the collector was on before."""


@contextmanager
def collector_paused() -> Generator[None]:
    """Stop the collection of cycles until the last pause ends.

    The collector visits every node repeatedly while the interpreter makes nodes by the million: 30 % of the time of a
    parse, measured with 20,000 parameters. No node is garbage, and the size of a parse is bounded.
    """
    with _lock:
        _pauses.append(gc.isenabled() if not _pauses else _pauses[0])
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            if _pauses.pop() and not _pauses:
                gc.enable()
