"""Python's cycle collector, paused while many values are made that all stay."""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses: list[bool] = []
"""One entry for each pause that is open, in any thread; the first says whether the collector was on before."""


@contextmanager
def collector_paused() -> Generator[None]:
    """No collection of cycles until the last pause ends.

    The collector looks at every node again and again while an interpreter makes them by the million: 30 % of the
    time of a parse, measured with 20,000 parameters. None of it is garbage, and what a parse makes is bounded.
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
