"""The records and uploads of workers that shared a conversion, for the next attempt at it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard_engine.distributed.epoch import Epoch, newest_epoch
from reshard_engine.distributed.ready import ReadyFacts
from reshard_engine.distributed.segments import read_segments, upload_id_in
from reshard_engine.execute.journal import UnitRecord
from reshard_engine.storage.texts import TextStore


class FormerWork:
    """Reads the records and uploads of all epochs of a conversion, when they are asked for."""

    def __init__(self, store: TextStore, *, threads: int = 8) -> None:
        """Read from the place where the workers of the conversion meet."""
        self._store = store
        self._threads = threads
        self._listed: Mapping[str, str] | None = None

    @property
    def _names(self) -> Mapping[str, str]:
        # `functools.cached_property` of Python 3.11 locks the whole class while it lists.
        if self._listed is None:
            self._listed = self._store.names()
        return self._listed

    def records(self) -> Sequence[UnitRecord]:
        """The records of the units that the workers finished. The newest epoch comes last."""
        names = [
            name
            for number in range(1, newest_epoch(self._names) + 1)
            for name in Epoch(self._store, number).view(self._names).segments_of_units()
        ]
        return read_segments(self._store, names, threads=self._threads)

    def uploads(self) -> Mapping[int, str]:
        """The ids of the uploads that the workers began, by file number."""
        found: dict[int, str] = {}
        for number in range(1, newest_epoch(self._names) + 1):
            epoch = Epoch(self._store, number)
            found |= ReadyFacts.from_text(self._store.read(epoch.name("ready"))).uploads
            for file, name in epoch.view(self._names).uploads.items():
                if (upload_id := upload_id_in(self._store.read(name))) is not None:
                    found[file] = upload_id
        return found
