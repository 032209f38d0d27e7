"""What happens in time: conditions that are waited for, and calls that run at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

PATIENCE_S = 240.0
"""How long a test waits for what must happen. A machine that runs other tests may need minutes for a second of work."""


def wait_until(
    ready: Callable[[], object],
    *,
    timeout_s: float = PATIENCE_S,
    pause_s: float = 0.02,
    what: Callable[[], object] = lambda: "it did not happen in time",
) -> None:
    """Return when `ready()` holds, or fail with what is so instead."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, what()
        time.sleep(pause_s)


def at_once(calls: Iterable[Callable[[], object]], *, timeout_s: float = PATIENCE_S) -> None:
    """Return when all calls have, each in a thread of its own."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), f"a call takes more than {timeout_s} s"
