"""Spans of what a worker does for a job, and those that its engine process tells of."""

from __future__ import annotations

import time

from reshard.models.jobs import ConvertResult, WorkShare
from reshard_jobs.queue.helpers import HelperClaim
from reshard_jobs.queue.leases import JobClaim
from reshard_jobs.tracing import Span, Value, begin_span
from reshard_worker.protocol import SpanBegan, SpanEnded


def attempt_span(claim: JobClaim, worker: str) -> Span:
    """Begin the span of an attempt, below the request that made the job, after that of its wait for this worker."""
    facts = _facts(claim, worker)
    name = "cleanup" if claim.cleanup else "attempt"
    now_ns = time.time_ns()
    if claim.traceparent is not None and claim.waited_s is not None:
        # The database's clock says how long, and this host's clock says until when: hosts' clocks differ.
        began_ns = now_ns - int(claim.waited_s * 1e9)
        begin_span("queue", facts, parent=claim.traceparent, begin_ns=began_ns).end(now_ns)
    return begin_span(name, facts, parent=claim.traceparent, kind="consumer", begin_ns=now_ns)


def help_span(place: HelperClaim, worker: str) -> Span:
    """Begin the span of the help for an attempt of another worker; it stands beside that attempt."""
    return begin_span("help", _facts(place, worker), parent=place.traceparent, kind="consumer")


def of_result(converted: ConvertResult) -> dict[str, Value]:
    """The facts of a conversion that has ended well."""
    return {"reshard.read_bytes": converted.read_bytes, "reshard.write_bytes": converted.write_bytes}


def of_share(share: WorkShare) -> dict[str, Value]:
    """The facts of a worker's part in a conversion."""
    return {"reshard.runs": share.runs, "reshard.units": share.units, "reshard.write_bytes": share.write_bytes}


def _facts(claim: JobClaim | HelperClaim, worker: str) -> dict[str, Value]:
    return {
        "reshard.job": claim.job_id,
        "reshard.attempt": claim.attempt,
        "reshard.tenant": claim.tenant,
        "reshard.target_format": str(claim.request.to),
        "reshard.worker": worker,
    }


# Spans that an engine process tells of, below the span of its attempt.


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
