"""Spans of what a worker does for a job: its wait in the queue, each attempt, and the help for one."""

from __future__ import annotations

import time

from reshard.models import ConvertResult, WorkShare
from reshard_jobs.helpers import HelperClaim
from reshard_jobs.leases import JobClaim
from reshard_jobs.tracing import Span, Value, begin_span


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
