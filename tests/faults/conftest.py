"""Real servers, and the checkpoints that small conversions read."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from faults import memory_trials
from faults.small import write_sources
from reshard_engine.execute.sinks.object_store import ObjectSink
from reshard_engine.testing.stores import MemoryStore
from servers.fixtures import bucket, make_stack, postgres, redis, s3, server_directory, sqlite_url, store, store_bucket

__all__ = ["bucket", "make_stack", "postgres", "redis", "s3", "server_directory", "sqlite_url", "store", "store_bucket"]


@pytest.fixture(scope="session")
def small_root() -> Generator[Path]:
    """A directory with two checkpoints of each kind; in memory where that is possible: thousands of syncs."""
    shared = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="faults", dir=shared if os.access(shared, os.W_OK) else None))
    yield write_sources(root)
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def memory(small_root: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """A store with these checkpoints. Sleepers of these tests sleep for milliseconds: every look counts."""
    monkeypatch.setattr(ObjectSink, "deleted_at_once", 1)
    return memory_trials.loaded_store(small_root)
