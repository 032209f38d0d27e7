"""Journal segments: texts with the records of several items of one run, one record a line; and the texts of uploads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from reshard.errors import StorageError
from reshard_engine.execute.journal import UnitRecord
from reshard_engine.storage.texts import TextStore

_THREADS = 8


class SegmentGoneError(StorageError):
    """The error for a segment that was listed and then removed."""

    def __init__(self) -> None:
        """The caller looks again: it learns that its epoch has ended."""
        super().__init__("storage.unavailable", "the journal of this conversion was removed while it was read")


class Record(Protocol):
    """The record of a unit or of a check."""

    def to_line(self) -> bytes:
        """The record as one line without its line end, protected by a checksum."""
        ...


def to_segment(records: Iterable[Record]) -> bytes:
    """The text of a segment. It is not empty even if there are no records."""
    return b"\n".join([*(r.to_line() for r in records), b""]) or b"\n"


def from_segment(text: bytes | None) -> Iterator[UnitRecord]:
    """The records in a segment. A line that holds none, because it was cut off or damaged, is left out."""
    for line in (text or b"").split(b"\n"):
        if line and (record := UnitRecord.from_line(line)) is not None:
            yield record


def read_segments(store: TextStore, names: Sequence[str], *, threads: int = _THREADS) -> list[UnitRecord]:
    """The records of units in several segments that a listing named.

    Raises:
        SegmentGoneError: One does not exist any more: the conversion ended meanwhile.
    """
    return [record for text in read_texts(store, names, threads=threads) for record in from_segment(text)]


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
