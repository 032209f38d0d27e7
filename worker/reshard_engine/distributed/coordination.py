"""The small named texts by which the workers of one conversion agree, and the protocol of the stores that keep them.

The protocol needs one atomic operation: to create a text under a name that is still free. Object stores (conditional
puts) and file systems (hard links, exclusive creation) both have it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from reshard.errors import IntegrityError, printable

MAX_TEXT_BYTES = 64 << 20
"""Largest text that is read. The ids of a hundred thousand uploads take 20 MB, a part of a pack up to 24 MB."""


class CoordinationStore(Protocol):
    """Named texts that all workers of a conversion see. Any method may raise a `StorageError`."""

    def create(self, name: str, text: bytes) -> bool:
        """Write a text under a free name; False, and nothing changes, if the name is taken.

        The caller makes its text unlike all others, so that a lost acknowledgement can be told from another's text.
        """
        ...

    def put(self, name: str, text: bytes) -> None:
        """Write a text, whether or not the name is taken."""
        ...

    def read(self, name: str) -> bytes | None:
        """The text under a name, or None.

        Raises:
            IntegrityError: `integrity.journal` for a text of more than `MAX_TEXT_BYTES`, which no worker wrote.
        """
        ...

    def names(self) -> Mapping[str, str]:
        """All names. Each has a version, which changes whenever the text is written again."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Remove texts. A missing one is no error."""
        ...


class Clock(Protocol):
    """The worker's own clock. No two clocks are ever compared."""

    def monotonic(self) -> float:
        """Seconds since some moment."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class SystemClock:
    """The clock of this process."""

    def monotonic(self) -> float:
        """See `time.monotonic`."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """See `time.sleep`."""
        time.sleep(seconds)


def refuse_large(path: str, size_bytes: int) -> None:
    """Refuse a text that is too large to be one of a worker.

    Raises:
        IntegrityError: `integrity.journal`.
    """
    if size_bytes > MAX_TEXT_BYTES:
        raise IntegrityError(
            "integrity.journal",
            f"{printable(path)} has {size_bytes} bytes: reshard did not write it",
            fix="remove it if no conversion into this target is running",
        )
