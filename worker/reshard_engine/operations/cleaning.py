"""`reshard clean`: lists or removes the files of unfinished conversions."""

from __future__ import annotations

from reshard.errors import RequestError, printable
from reshard.models import CleanReport
from reshard_engine.execute.sinks.control_objects import ControlObjects
from reshard_engine.execute.sinks.local import LocalSink
from reshard_engine.execute.sinks.local_files import writing
from reshard_engine.execute.sinks.local_leftovers import leftovers_of, targets_below
from reshard_engine.execute.sinks.object_leftovers import Leftovers
from reshard_engine.formats.registry import known_files
from reshard_engine.operations.conversion import sink_for
from reshard_engine.operations.into_directory import INNER
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import ObjectStore

IDLE_S = 3_600.0
"""Seconds after its last write for which an unfinished conversion in an object store counts as running."""


def clean_target(target: Location, *, dry_run: bool, idle_s: float = IDLE_S) -> CleanReport:
    """Remove files that unfinished conversions into a target left, except those in use.

    A finished target stays. On local storage a running conversion holds a lock, which ends with its process. An object
    store has no such lock: a conversion that has written within `idle_s` counts as running.

    Raises:
        RequestError: `request.unknown_scheme` for storage that is only read.
    """
    sinks, store = [sink_for(target)], target.store
    below: list[str] = []
    if isinstance(sinks[0], LocalSink):
        # The target of a conversion into an existing directory lies inside that directory.
        inner = target.child(INNER)
        with writing(target.path):
            found = [*leftovers_of(target.path), *leftovers_of(inner.path)]
            below = [path for path in targets_below(target.path) if path != inner.path]
        sinks.append(sink_for(inner))
    elif isinstance(store, ObjectStore):
        found = Leftovers(store, target.path, ControlObjects(store, target.path), known_files()).found(idle_s=idle_s)
    else:
        raise RequestError(
            "request.unknown_scheme",
            f"nothing can be written to {printable(target.url)}, so no conversion left files there",
            fix="name a local path or s3://",
        )
    # On local storage each leftover is checked again under its lock. In a store all of them share one claim.
    local = isinstance(sinks[0], LocalSink)
    removes = not dry_run and (local or not any(f.in_use for f in found))
    for sink in sinks if removes and found else ():
        if sink is not None:
            sink.discard_all()
            if not local:
                sink.discard_all()  # other journals beside that of the claim, which has been removed
    return CleanReport(target=target.url, removed=removes, leftovers=tuple(found), below=tuple(below))
