"""The number of directories that are listed to say what a place is that is not a checkpoint."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from house.expected import raised
from reshard.errors import SourceError
from reshard_engine.formats.sources import find_checkpoint
from reshard_engine.storage.local import LocalStore
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


# Trees of a disk: what a reader opens by a path is listed under that path.


def below(root: Path) -> list[str]:
    return [info.path[len(str(root)) + 1 :] for info in LocalStore().list_tree(str(root))]


def test_a_tree_has_the_files_of_linked_directories_and_no_dead_links(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    for place in (root / "a", elsewhere / "deep"):
        place.mkdir(parents=True)
        (place / "file").write_text("x")
    (root / "linked").symlink_to(elsewhere)
    (root / "a" / "again").symlink_to(elsewhere / "deep")
    (root / "dead").symlink_to("nothing")
    (root / "dead_below_a_file").symlink_to("a/file/x")
    (root / "itself").symlink_to("itself")
    assert below(root) == ["a/again/file", "a/file", "linked/deep/file"]
    listing = LocalStore().list_directory(str(root))
    assert (listing.files, listing.directories) == ((), ("a", "linked"))


def test_a_tree_with_links_to_directories_above_ends(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in "ab":
        (root / name).mkdir(parents=True)
        (root / name / "file").write_text("x")
    (root / "a" / "up").symlink_to(root)
    (root / "a" / "b").symlink_to(root / "b")
    (root / "b" / "a").symlink_to(root / "a")
    assert below(root) == ["a/b/file", "a/file", "b/a/file", "b/file"]


def test_links_that_double_at_each_level_are_too_many(tmp_path: Path) -> None:
    for level in range(20):
        (tmp_path / f"level{level}").mkdir()
        for name in "ab":
            os.symlink(f"../level{level + 1}", tmp_path / f"level{level}" / name)
    (tmp_path / "level20").mkdir()
    error = raised(SourceError, lambda: LocalStore().list_tree(str(tmp_path / "level0")))
    assert error.code == "checkpoint.too_large"
