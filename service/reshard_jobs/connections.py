"""Connections to the job database: the pool that an URL names, and how SQLite's connections behave."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import ConnectionPoolEntry

from reshard.errors import JobError

URL_FIX = "check RESHARD_DATABASE_URL: sqlite:////path/jobs.db or postgresql://user@host/database"

POSTGRES_TIMEOUTS = {
    "connect_timeout": "10",
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}
"""Parameters of libpq (PostgreSQL 12 and later) for a server whose host vanishes without closing its connections.

`tcp_user_timeout` is in milliseconds, the others in seconds. Without them a query would wait for the kernel's own
limits: a quarter of an hour for data that was sent, two hours for an idle connection. The URL may name others.
"""


def engine_of(url: str) -> Engine:
    """A pool of connections to a job database.

    Args:
        url: `sqlite:///path` or `postgresql://...`.

    Raises:
        JobError: `service.unavailable`: the URL is malformed.
    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise JobError(
            "service.unavailable",
            "the job database URL is malformed",
            fix=URL_FIX,
        ) from error
    if parsed.drivername in {"postgres", "postgresql"}:
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() == "sqlite":
        return _sqlite_engine(parsed)
    timeouts = {name: value for name, value in POSTGRES_TIMEOUTS.items() if name not in parsed.query}
    return create_engine(parsed, pool_pre_ping=True, connect_args=timeouts)


def is_sqlite(engine: Engine) -> bool:
    """True for a database in a file of one host."""
    return engine.dialect.name == "sqlite"


def for_reading(engine: Engine) -> Engine:
    """The pool with transactions that block no writer."""
    return engine.execution_options(sqlite_begin="BEGIN DEFERRED")


def file_of(engine: Engine) -> Path | None:
    """The file of a SQLite database; None for any other database, and for one in memory."""
    name = engine.url.database
    if not is_sqlite(engine) or not name or name == ":memory:" or name.startswith("file:"):
        return None
    return Path(name).absolute()


def make_private(path: Path) -> None:
    """Let nobody but the owner read a file that exists; a file of another owner stays as it is."""
    with suppress(OSError):
        mode = path.stat().st_mode
        if stat.S_ISREG(mode) and mode & 0o077:
            path.chmod(stat.S_IMODE(mode) & 0o700)


def _make_private_file(path: Path) -> None:
    """Make the file of a database before SQLite does, which would let others read it.

    The directory is made for this user alone, too. One that exists stays as it is: it may be shared, such as /tmp.
    """
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.parent.mkdir(mode=0o700)
    with suppress(OSError):
        # SQLite gives the mode of this file to those beside it. A file that exists is not opened: to close it would
        # drop all locks of this process on it (https://www.sqlite.org/howtocorrupt.html, 2.2).
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDONLY | os.O_CLOEXEC, 0o600))
    for ending in ("", "-wal", "-shm", "-journal"):
        make_private(path.with_name(path.name + ending))


def _sqlite_engine(url: URL) -> Engine:
    engine = create_engine(url, connect_args={"timeout": 20.0, "check_same_thread": False})
    if (path := file_of(engine)) is not None:
        _make_private_file(path)

    def on_connect(connection: object, _entry: ConnectionPoolEntry) -> None:
        # The driver must not begin transactions by itself: it would begin them DEFERRED, and a
        # deferred transaction that turns into a writer fails with "database is locked" at once.
        connection.isolation_level = None  # pyright: ignore[reportAttributeAccessIssue]
        cursor = connection.cursor()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=20000"):
            cursor.execute(f"PRAGMA {pragma}")  # pyright: ignore[reportUnknownMemberType]
        cursor.close()  # pyright: ignore[reportUnknownMemberType]

    def on_begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get("sqlite_begin", "BEGIN IMMEDIATE"))

    event.listen(engine, "connect", on_connect)
    event.listen(engine, "begin", on_begin)
    return engine
