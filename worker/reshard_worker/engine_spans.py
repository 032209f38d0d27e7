"""Spans that an engine process tells of, below the span of its attempt."""

from __future__ import annotations

from reshard_jobs.tracing import Span
from reshard_worker.protocol import SpanBegan, SpanEnded


class EngineSpans:
    """The spans of one command.

    Args:
        parent: The span of the attempt, or of the help for one.
    """

    def __init__(self, parent: Span) -> None:
        self._parent = parent
        self._open: dict[int, Span] = {}

    def take(self, message: SpanBegan | SpanEnded) -> None:
        """Begin or end a span."""
        if isinstance(message, SpanBegan):
            parent = self._open.get(message.parent, self._parent)
            facts = {f"reshard.{name}": value for name, value in message.facts.items()}
            self._open[message.number] = parent.child(message.name, facts, begin_ns=message.at_ns)
            return
        span = self._open.pop(message.number, None)
        if span is None:
            return
        span.set({f"reshard.{name}": value for name, value in message.facts.items()})
        if message.code:
            span.fail(message.code)
        span.end(message.at_ns)

    def end(self) -> None:
        """End what an engine left open that was killed, or that died."""
        for number in sorted(self._open, reverse=True):
            span = self._open.pop(number)
            span.fail("job.lost")
            span.end()
