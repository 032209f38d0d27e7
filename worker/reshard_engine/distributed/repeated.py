"""A call that is repeated in the background while a worker does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def repeated(call: Callable[[], bool], *, every_s: float, name: str) -> Generator[None]:
    """Make a call now, and again after each pause, until the block ends.

    Args:
        call: The call. It raises nothing, and returns False if it need not be made again.
        every_s: The pause in seconds.
        name: The name of the thread.
    """
    ended = threading.Event()

    def repeat() -> None:
        again = call()
        while again and not ended.wait(every_s):
            again = call()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
