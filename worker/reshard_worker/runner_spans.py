"""Spans of an engine process, as it tells them to its supervisor, which sends them.

The engine process needs no package of traces, no connection of its own and no time for a last flush; the spans that it
began are known also if it is killed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

from reshard_engine.spans import EndSpan
from reshard_worker.protocol import SpanBegan, SpanEnded

Send = Callable[[bytes], None]
_PHASES: Mapping[str, Literal["plan", "units", "verify", "commit"]] = {
    "planning": "plan",
    "running": "units",
    "verifying": "verify",
    "committing": "commit",
}


class RunnerSpans:
    """The spans of one command: one for each phase, and below them what the engine says itself."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._last = 0
        self._phase = 0
        self._open: dict[int, str] = {}

    def enter(self, phase: str, *, bytes_done: int) -> None:
        """Begin a phase of the conversion, which ends the one before; a phase without a span only does this."""
        with self._lock:
            written = {"bytes": bytes_done} if self._open.get(self._phase) == "units" else {}
            self._end_all("", {self._phase: written})
            self._phase = self._begin(name, 0, {}) if (name := _PHASES.get(phase)) is not None else 0

    def begin(self, name: str, facts: Mapping[str, str | int]) -> EndSpan:
        """Begin a span below the present phase."""
        with self._lock:
            number = self._begin(name, self._phase, facts)

        def end(**more: int) -> None:
            with self._lock:
                self._end(number, "", more)

        return end

    def end_all(self, code: str = "") -> None:
        """End what is open, with the code of an error if there is one."""
        with self._lock:
            self._end_all(code)

    def _begin(self, name: str, parent: int, facts: Mapping[str, str | int]) -> int:
        self._last += 1
        self._open[self._last] = name
        message = SpanBegan(number=self._last, parent=parent, name=name, at_ns=time.time_ns(), facts=dict(facts))
        self._send(message.line())
        return self._last

    def _end_all(self, code: str, facts: Mapping[int, Mapping[str, int]] = MappingProxyType({})) -> None:
        # Those that began last are within the others.
        for number in sorted(self._open, reverse=True):
            self._end(number, code, facts.get(number, {}))

    def _end(self, number: int, code: str, facts: Mapping[str, int]) -> None:
        if self._open.pop(number, None) is not None:
            self._send(SpanEnded(number=number, at_ns=time.time_ns(), code=code, facts=dict(facts)).line())
