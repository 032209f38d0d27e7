"""The last look before a commit: source objects are still the pinned ones, output archives parse."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from reshard_engine.checkpoint import Checkpoint
from reshard_engine.storage.local import changed
from reshard_engine.storage.protocol import ObjectInfo, Store

_THREADS = 8


def prove_source_unchanged(checkpoint: Checkpoint) -> None:
    """Compare every source object with its pin once more.

    Raises:
        SourceError: `source.changed`.
    """
    objects: Iterable[tuple[Store, ObjectInfo]] = [(f.store, i) for f in checkpoint.files for i in f.objects]

    def check(entry: tuple[Store, ObjectInfo]) -> None:
        store, info = entry
        if store.stat(info.path) != info:
            raise changed(info)

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(check, objects))
