"""A real PostgreSQL."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.sql import SQL, Identifier


class PostgresServer:
    """One server; every test gets a database of its own."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._uri: str = server.get_uri()
        self._databases = 0
        self.directory = Path(server.pgdata)

    def new_database(self) -> str:
        """Create an empty database and return its URL."""
        self._databases += 1
        name = f"jobs{self._databases}"
        with psycopg.connect(self._uri, autocommit=True) as connection:
            connection.execute(SQL("CREATE DATABASE {}").format(Identifier(name)))
        return self._uri.replace("/postgres?", f"/{name}?")

    @contextmanager
    def away(self) -> Generator[None]:
        """The server is stopped for the length of the block: its connections end, and nobody gets a new one."""
        from pgserver._commands import pg_ctl

        pg_ctl(["-w", "-m", "fast", "stop"], pgdata=self._server.pgdata, user=self._server.system_user)
        try:
            yield
        finally:
            self._server.ensure_postgres_running()


@contextmanager
def postgres_server(directory: Path) -> Generator[PostgresServer]:
    """PostgreSQL with its data in `directory`, on a Unix socket."""
    if sys.version_info >= (3, 13):
        pytest.skip("pgserver 0.1.4 has no wheel for Python 3.13")
    import pgserver

    # The socket's path may not be longer than about 100 bytes: `directory` must be short.
    server = pgserver.get_server(directory, cleanup_mode="stop")  # pyright: ignore[reportUnknownMemberType, reportPrivateImportUsage]
    try:
        yield PostgresServer(server)
    finally:
        server.cleanup()  # pyright: ignore[reportUnknownMemberType]
