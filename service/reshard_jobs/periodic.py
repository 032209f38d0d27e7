"""A call that a thread repeats until it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable


class PeriodicThread:
    """Makes a call at once and then every `interval_s`, until stopped.

    Args:
        call: The call; it raises nothing.
        interval_s: Seconds between the end of a call and the next one.
        name: The name of the thread.
    """

    def __init__(self, call: Callable[[], None], *, interval_s: float, name: str) -> None:
        self._call = call
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to call."""
        self._thread.start()

    def stop(self) -> None:
        """End after the call that runs now, for which this waits 5 s at most."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:
            self._call()
            if self._stop.wait(self._interval_s):
                return
