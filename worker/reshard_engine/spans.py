"""Spans of work within the engine, for whoever runs it and wants to know when each began and ended.

The engine says when a piece of work begins and ends, and knows nothing of traces. Nothing listens unless `listen` was
called in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol


class EndSpan(Protocol):
    """Ends a span that has begun, with facts that are known by then."""

    def __call__(self, **facts: int) -> None:
        """End it."""
        ...


BeginSpan = Callable[[str, Mapping[str, str | int]], EndSpan]

_listeners: list[BeginSpan] = []


def listen(begin: BeginSpan) -> None:
    """Let a function know of each span that begins in this process; any thread may call it."""
    _listeners[:] = [begin]


def begin_span(name: str, **facts: str | int) -> EndSpan:
    """Say that a piece of work begins; returns what ends it. One that fails is never ended."""
    return _listeners[0](name, facts) if _listeners else _end_nothing


def _end_nothing(**facts: int) -> None:
    """Nobody listens."""
