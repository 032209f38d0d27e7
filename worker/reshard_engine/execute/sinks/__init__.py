"""Sinks: local directories and object stores that a conversion writes to, with their journals and commits.

`sink_at` is the one place that asks on which kind of storage a target lies.
"""

from __future__ import annotations

from reshard_engine.execute.sinks.local import LocalSink
from reshard_engine.execute.sinks.object_store import ObjectSink
from reshard_engine.execute.sinks.protocol import Sink
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import ObjectStore
from reshard_engine.tensors.layout import KnownFiles


def sink_at(target: Location, *, known: KnownFiles) -> Sink | None:
    """The sink that writes a target; None for stores that are only read."""
    if target.store.scheme == "file":
        return LocalSink(target.path, known=known)
    return ObjectSink(target.store, target.path, known=known) if isinstance(target.store, ObjectStore) else None
