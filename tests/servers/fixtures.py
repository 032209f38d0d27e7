"""Fixtures: the servers that a whole test run shares, and a stack for each test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from servers.postgres import PostgresServer, postgres_server
from servers.redis import redis_server
from servers.s3 import S3Server, s3_server
from servers.stack import Stack


@pytest.fixture(scope="session")
def server_directory() -> Generator[Path]:
    """A directory with a short name: Unix sockets allow no long ones."""
    directory = Path(tempfile.mkdtemp(prefix="rs"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres(server_directory: Path) -> Generator[PostgresServer]:
    """PostgreSQL."""
    with postgres_server(server_directory / "pg") as server:
        yield server


@pytest.fixture(scope="session")
def redis(server_directory: Path) -> Generator[str]:
    """Redis; its URL."""
    with redis_server(server_directory / "redis") as url:
        yield url


@pytest.fixture(scope="session")
def s3(server_directory: Path) -> Generator[S3Server]:
    """SeaweedFS."""
    with s3_server(server_directory / "s3") as server:
        yield server


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
