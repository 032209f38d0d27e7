"""Fixtures: the servers that all folders of a process of tests share, and a stack for each test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from house.shared import started_once
from house.tiers import STORES
from servers.azure import azure_server
from servers.gcs import gcs_server
from servers.postgres import PostgresServer, postgres_server
from servers.redis import redis_server
from servers.s3 import S3Server, s3_server
from servers.stack import Stack
from servers.stores import ObjectServer

_Server = TypeVar("_Server")
_POSTGRES = pytest.StashKey[PostgresServer]()
_REDIS = pytest.StashKey[str]()
_STORES: Mapping[str, tuple[pytest.StashKey[ObjectServer], Callable[[Path], AbstractContextManager[ObjectServer]]]] = {
    "s3": (pytest.StashKey(), s3_server),
    "az": (pytest.StashKey(), azure_server),
    "gs": (pytest.StashKey(), gcs_server),
}
"""The servers by which tests of any object store run; one that cannot run here calls `pytest.skip`."""


@pytest.fixture(scope="session")
def server_directory() -> Generator[Path]:
    """A directory with a short name: Unix sockets allow no long ones."""
    directory = Path(tempfile.mkdtemp(prefix="rs"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _in_its_directory(server: Callable[[Path], AbstractContextManager[_Server]]) -> Generator[_Server]:
    """A server with its data in a directory of its own."""
    directory = Path(tempfile.mkdtemp(prefix="rs"))
    try:
        with server(directory / "data") as found:
            yield found
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres(request: pytest.FixtureRequest) -> PostgresServer:
    """PostgreSQL."""
    return started_once(request.config, _POSTGRES, lambda: _in_its_directory(postgres_server))


@pytest.fixture(scope="session")
def redis(request: pytest.FixtureRequest) -> str:
    """Redis; its URL."""
    return started_once(request.config, _REDIS, lambda: _in_its_directory(redis_server))


@pytest.fixture(scope="session")
def s3(request: pytest.FixtureRequest) -> S3Server:
    """SeaweedFS."""
    found = started(request, "s3")
    assert isinstance(found, S3Server)
    return found


def started(request: pytest.FixtureRequest, kind: str) -> ObjectServer:
    """The server of a kind, one for each process of tests."""
    key, server = _STORES[kind]
    return started_once(request.config, key, lambda: _in_its_directory(server))


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> ObjectServer:
    """Each kind of object store; a server that cannot run here is skipped with the reason."""
    return started(request, request.param)


@pytest.fixture
def store_bucket(store: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket of its own in each kind of object store, and an environment that finds its server."""
    for name, value in store.env().items():
        monkeypatch.setenv(name, value)
    return store.new_bucket()


@pytest.fixture
def bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket of its own, and an environment that finds its server."""
    for name, value in s3.env().items():
        monkeypatch.setenv(name, value)
    return s3.new_bucket()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """A new SQLite job database."""
    return f"sqlite:///{tmp_path / 'jobs.db'}"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, sqlite_url: str) -> str:
    """A new job database of each kind."""
    if request.param == "sqlite":
        return sqlite_url
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database()


def new_stack(driver: str, directory: Path, request: pytest.FixtureRequest) -> Stack:
    """A stack of a driver with its files in a directory: `embedded` on SQLite, `celery` on PostgreSQL and Redis."""
    if driver == "embedded":
        return Stack(directory / "logs", f"sqlite:///{directory / 'jobs.db'}")
    server: PostgresServer = request.getfixturevalue("postgres")
    broker: str = request.getfixturevalue("redis")
    # A queue of its own: other tests' doorbells must not ring here.
    return Stack(directory / "logs", server.new_database(), f"{broker[:-2]}/{_next_database()}")


@pytest.fixture
def make_stack(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Stack]:
    """Builds a stack of a driver for one test."""
    return lambda driver: new_stack(driver, tmp_path, request)


@pytest.fixture(params=["embedded", "celery"])
def stack(request: pytest.FixtureRequest, make_stack: Callable[[str], Stack]) -> Stack:
    """A stack of each driver."""
    return make_stack(request.param)


_used: list[int] = []


def _next_database() -> int:
    """Redis has 16 databases; a test run that needs more reuses the oldest."""
    _used.append(len(_used) % 15 + 1)
    return _used[-1]
