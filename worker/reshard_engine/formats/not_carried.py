"""Collects the keys of a checkpoint's files that no reader uses, so that every such key is reported once."""

from __future__ import annotations

from collections.abc import Iterable

from reshard.errors import printable
from reshard.models import NotCarried

UNKNOWN = "reshard does not know this key"


class NotCarriedKeys:
    """Keys by path and reason, each with the files that hold it."""

    def __init__(self) -> None:
        """Start without keys."""
        self._files: dict[tuple[str, str], list[str]] = {}

    def add(self, path: str, reason: str, *, file: str = "") -> None:
        """Note one key of one file."""
        self._files.setdefault((printable(path), reason), []).append(printable(file))

    def add_all(self, paths: Iterable[str], reason: str, *, file: str = "") -> None:
        """Note several keys of one file."""
        for path in paths:
            self.add(path, reason, file=file)

    def found(self) -> tuple[NotCarried, ...]:
        """The noted keys, in the order in which they were met."""
        return tuple(
            NotCarried(path=path, reason=reason, file=files[0], files=len(files))
            for (path, reason), files in self._files.items()
        )
