"""What stands for DeepSpeed's compiled asynchronous I/O: Python that does the same system calls at once, in order."""

from __future__ import annotations

from typing import Any


class Handle:
    """The part of ``aio_handle`` that all of its users need: it counts what ``wait`` shall report."""

    def __init__(self, **_: Any) -> None:
        self._pending = 0

    def submitted(self) -> int:
        """One more operation, done already; the status that its caller expects."""
        self._pending += 1
        return 0

    def wait(self) -> int:
        """How many operations were submitted since the last time."""
        done, self._pending = self._pending, 0
        return done


class Builder:
    """Stands for ``AsyncIOBuilder``, whose ``load`` compiles; call it where the class would be called."""

    def __init__(self, handle: type[Handle]) -> None:
        self.aio_handle = handle

    def __call__(self) -> Builder:
        return self

    def load(self, **_: Any) -> Builder:
        """What is compiled otherwise."""
        return self
