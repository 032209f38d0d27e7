"""Texts with what workers did: records in segments of the journal, uploads, and what a coordinator found out.

A segment holds the records of several items of one run, one record a line. The next attempt reads all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from reshard.errors import StorageError
from reshard_engine.distributed.session import Session, newest_session
from reshard_engine.execute.journal import UnitRecord, records_in
from reshard_engine.storage.texts import TextStore

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


def read_segments(store: TextStore, names: Sequence[str], *, threads: int = _THREADS) -> list[UnitRecord]:
    """The records of units in several segments that a listing named.

    Raises:
        SegmentGoneError: One does not exist any more: the conversion ended meanwhile.
    """
    return [record for text in read_texts(store, names, threads=threads) for record in records_in(text)]


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


def upload_text(upload_id: str) -> bytes:
    """The text that names the upload of a file."""
    return json.dumps({"id": upload_id}).encode()


def upload_id_in(text: bytes | None) -> str | None:
    """The id in the text that names an upload; None if there is none."""
    try:
        return str(json.loads(text or b"")["id"])
    except (ValueError, TypeError, KeyError):
        return None


@dataclass(frozen=True, slots=True)
class ReadyFacts:
    """The facts that the coordinator found out, and that the others need not find out again."""

    uploads: Mapping[int, str] = field(default_factory=dict[int, str])
    """The ids of uploads that earlier attempts began and that still hold, by file number."""
    warnings: tuple[str, ...] = ()
    """Disagreements between the replicas of the source."""

    def to_text(self) -> bytes:
        """The facts as JSON text."""
        return json.dumps({"uploads": dict(self.uploads), "warnings": self.warnings}).encode()

    @staticmethod
    def from_text(text: bytes | None) -> ReadyFacts:
        """The facts in a text; empty if there is none."""
        try:
            facts = json.loads(text or b"{}")
            uploads = {int(file): str(upload) for file, upload in facts.get("uploads", {}).items()}
            return ReadyFacts(uploads, tuple(map(str, facts.get("warnings", ()))))
        except (ValueError, TypeError, AttributeError):
            return ReadyFacts()


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
        return read_segments(self._store, names, threads=self._threads)

    def uploads(self) -> Mapping[int, str]:
        """The ids of the uploads that the workers began, by file number."""
        found: dict[int, str] = {}
        for number in range(1, newest_session(self._names) + 1):
            session = Session(self._store, number)
            found |= ReadyFacts.from_text(self._store.read(session.name("ready"))).uploads
            for file, name in session.view(self._names).uploads.items():
                if (upload_id := upload_id_in(self._store.read(name))) is not None:
                    found[file] = upload_id
        return found
