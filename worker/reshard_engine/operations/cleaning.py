"""`reshard clean`: lists or removes the files of unfinished conversions."""

from __future__ import annotations

from reshard.errors import RequestError, printable
from reshard.models import CleanReport
from reshard_engine.operations.conversion import sink_for
from reshard_engine.storage.locations import Location

IDLE_S = 3_600.0
"""Seconds after its last write for which an unfinished conversion in an object store counts as running."""


def clean_target(target: Location, *, dry_run: bool, idle_s: float = IDLE_S) -> CleanReport:
    """Remove files that unfinished conversions into a target left, except those in use.

    A finished target stays. On local storage a running conversion holds a lock, which ends with its process. An object
    store has no such lock: a conversion that has written within `idle_s` counts as running.

    Raises:
        RequestError: `request.unknown_scheme` for storage that is only read.
    """
    sink = sink_for(target)
    if sink is None:
        raise RequestError(
            "request.unknown_scheme",
            f"nothing can be written to {printable(target.url)}, so no conversion left files there",
            fix="name a local path or s3://",
        )
    found, below = sink.leftovers(idle_s=idle_s), sink.targets_below()
    removed = not dry_run and sink.clean(found)
    return CleanReport(target=target.url, removed=removed, leftovers=tuple(found), below=tuple(below))
