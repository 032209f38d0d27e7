"""A real PostgreSQL."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pgserver
import psycopg
from psycopg.sql import SQL, Identifier


class PostgresServer:
    """One server; every test gets a database of its own."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._databases = 0

    def new_database(self) -> str:
        """Create an empty database and return its URL."""
        self._databases += 1
        name = f"jobs{self._databases}"
        with psycopg.connect(self._uri, autocommit=True) as connection:
            connection.execute(SQL("CREATE DATABASE {}").format(Identifier(name)))
        return self._uri.replace("/postgres?", f"/{name}?")


@contextmanager
def postgres_server(directory: Path) -> Generator[PostgresServer]:
    """PostgreSQL with its data in `directory`, on a Unix socket."""
    # The socket's path may not be longer than about 100 bytes: `directory` must be short.
    server = pgserver.get_server(directory, cleanup_mode="stop")  # pyright: ignore[reportUnknownMemberType, reportPrivateImportUsage]
    try:
        yield PostgresServer(server.get_uri())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    finally:
        server.cleanup()  # pyright: ignore[reportUnknownMemberType]
