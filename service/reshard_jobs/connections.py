"""Connections to the job database: the pool that an URL names, and how SQLite's connections behave."""

from __future__ import annotations

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


def _sqlite_engine(url: URL) -> Engine:
    if url.database and url.database != ":memory:":
        Path(url.database).absolute().parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, connect_args={"timeout": 20.0, "check_same_thread": False})

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
