"""The number of directories that are listed to say what a place is that is not a checkpoint."""

from __future__ import annotations

import threading

import pytest

from house.expected import raised
from reshard.errors import SourceError
from reshard_engine.formats.sources import find_checkpoint
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing
from reshard_engine.testing.stores import MemoryStore


class CountingStore(MemoryStore):
    """A bucket that counts listings. With `meet`, listings below the bucket go on when two of them have come."""

    def __init__(self, *, meet: bool = False) -> None:
        super().__init__()
        self.listings: list[str] = []
        self._pair = threading.Barrier(2, timeout=20) if meet else None
        self._first = threading.Lock()

    def list_directory(self, path: str) -> Listing:
        self.listings.append(path)
        if self._pair is not None and path in {"bucket/d0", "bucket/d1"} and self.listings.count(path) == 1:
            self._pair.wait()
        return super().list_directory(path)


def filled(store: CountingStore, *, directories: int, inside: int = 1) -> Location:
    for number in range(directories):
        for below in range(inside):
            store.put(f"bucket/d{number}/e{below}/file.txt", b"x", metadata={}, if_absent=False)
    return Location(store, "bucket", "mem://bucket")


@pytest.mark.parametrize("tag", [None, "global_step5"])
def test_the_root_of_a_bucket_costs_at_most_200_listings(tag: str | None) -> None:
    store = CountingStore()
    error = raised(SourceError, find_checkpoint, filled(store, directories=300, inside=2), tag)
    assert len(store.listings) <= 200
    assert len(store.listings) == len(set(store.listings)), "no directory is listed twice"
    assert " directories below it were not looked into" in error.message
    assert "bucket/d299" in store.listings, "the newest are looked into"
    assert "bucket/d3" not in store.listings


def test_the_directories_of_a_bucket_are_listed_at_once() -> None:
    store = CountingStore(meet=True)
    assert "not looked into" not in raised(SourceError, find_checkpoint, filled(store, directories=2), None).message
