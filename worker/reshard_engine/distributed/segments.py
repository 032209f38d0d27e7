"""Texts with what workers did: records in segments of the journal, uploads, and what a coordinator found out.

A segment holds the records of several items of one run, one record a line. The next attempt reads all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from reshard.errors import StorageError
from reshard_engine.distributed.session import Session, newest_session
from reshard_engine.execute.journal import UnitRecord, records_in
from reshard_engine.storage.texts import JsonText, TextStore

_THREADS = 8


class SegmentGoneError(StorageError):
    """The error for a segment that was listed and then removed."""

    def __init__(self) -> None:
        """The caller looks again: it learns that its session has ended."""
        super().__init__("storage.unavailable", "the journal of this conversion was removed while it was read")


class Record(Protocol):
    """The record of a unit or of a check."""

    def to_line(self) -> bytes:
        """The record as one line without its line end, protected by a checksum."""
        ...


def to_segment(records: Iterable[Record]) -> bytes:
    """The text of a segment. It is not empty even if there are no records."""
    return b"\n".join([*(r.to_line() for r in records), b""]) or b"\n"


def read_texts(store: TextStore, names: Sequence[str], *, threads: int = _THREADS) -> list[bytes]:
    """The texts of several segments that a listing named.

    Raises:
        SegmentGoneError: One does not exist any more: the conversion ended meanwhile.
    """
    if threads == 1:
        texts = [store.read(name) for name in names]
    else:
        with ThreadPoolExecutor(threads) as pool:
            texts = list(pool.map(store.read, names))
    found = [text for text in texts if text is not None]
    if len(found) < len(texts):
        raise SegmentGoneError
    return found


@dataclass(frozen=True, slots=True)
class ReadyFacts(JsonText):
    """The facts that the coordinator found out, and that the others need not find out again."""

    uploads: Mapping[int, str] = field(default_factory=dict[int, str])
    """The ids of uploads that earlier attempts began and that still hold, by file number."""
    warnings: tuple[str, ...] = ()
    """Disagreements between the replicas of the source."""


class FormerWork:
    """Reads the records and uploads of all sessions of a conversion, when they are asked for."""

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
        """The records of the units that the workers finished. The newest session comes last."""
        names = [
            name
            for number in range(1, newest_session(self._names) + 1)
            for name in Session(self._store, number).view(self._names).segments_of_units()
        ]
        return [record for text in read_texts(self._store, names, threads=self._threads) for record in records_in(text)]

    def uploads(self) -> Mapping[int, str]:
        """The ids of the uploads that the workers began, by file number."""
        found: dict[int, str] = {}
        for number in range(1, newest_session(self._names) + 1):
            session = Session(self._store, number)
            ready = ReadyFacts.from_text(self._store.read(session.name("ready")))
            found |= {} if ready is None else ready.uploads
            found |= session.uploads(session.view(self._names))
        return found
