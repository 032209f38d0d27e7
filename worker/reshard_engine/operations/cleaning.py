"""`reshard clean`: what conversions that nobody goes on with left of a target, shown or removed."""

from __future__ import annotations

from reshard.errors import RequestError, printable
from reshard.models import CleanReport
from reshard_engine.execute.sinks.control_objects import ControlObjects
from reshard_engine.execute.sinks.local import LocalSink, writing
from reshard_engine.execute.sinks.local_leftovers import leftovers_of
from reshard_engine.execute.sinks.object_leftovers import Leftovers
from reshard_engine.formats.registry import known_files
from reshard_engine.operations.conversion import sink_for
from reshard_engine.operations.into_directory import INNER
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import ObjectStore

IDLE_S = 3_600.0
"""How long an unfinished conversion in an object store is taken for one at work after its last record."""


def clean_target(target: Location, *, dry_run: bool, idle_s: float = IDLE_S) -> CleanReport:
    """Remove what unfinished conversions into a target left, but nothing that is in use.

    A finished target stays. Locally a process at work holds a lock, which ends with it. In an object store nothing
    says who lives: what has written within `idle_s` is taken for alive.

    Raises:
        RequestError: `request.unknown_scheme` for storage that is only read.
    """
    sinks, store = [sink_for(target)], target.store
    if isinstance(sinks[0], LocalSink):
        # Where a conversion goes into a directory that holds other things, its target lies in that.
        inner = target.child(INNER)
        with writing(target.path):
            found = [*leftovers_of(target.path), *leftovers_of(inner.path)]
        sinks.append(sink_for(inner))
    elif isinstance(store, ObjectStore):
        found = Leftovers(store, target.path, ControlObjects(store, target.path), known_files()).found(idle_s=idle_s)
    else:
        raise RequestError(
            "request.unknown_scheme",
            f"nothing can be written to {printable(target.url)}, so nothing is left there",
            fix="name a local path or s3://",
        )
    # Locally each is looked at again under its lock; in a store all are of conversions that share one claim.
    local = isinstance(sinks[0], LocalSink)
    removes = not dry_run and (local or not any(f.in_use for f in found))
    for sink in sinks if removes and found else ():
        if sink is not None:
            sink.discard_all()
            if not local:
                sink.discard_all()  # journals beside that of the claim, which is gone now
    return CleanReport(target=target.url, removed=removes, leftovers=tuple(found))
