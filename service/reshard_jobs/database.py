"""The job database: one connection pool, its transactions, its schema and the host it is bound to."""

from __future__ import annotations

import os
import platform
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, create_engine, event, func, insert, select, update
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    TimeoutError as PoolTimeout,
)
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry

from reshard.errors import JobError, ReshardError
from reshard_jobs.tables import SCHEMA, UPGRADES, Base, JobRow, MetaRow

_LOCK_ID = 0x7265_7368
"""Advisory lock under which PostgreSQL tables are created; any constant will do."""


def host_identity() -> str:
    """The identity of this host: `RESHARD_HOST_ID`, or the host's name and machine id."""
    if chosen := os.environ.get("RESHARD_HOST_ID"):
        return chosen
    try:
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except OSError:
        machine = ""
    return f"{platform.node()}/{machine}"


def is_away(error: Exception) -> bool:
    """True if a statement failed because the database is away or too busy: the same statement may succeed later."""
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    return lost or isinstance(error, OperationalError | InterfaceError | PoolTimeout)


class Database:
    """A pool of connections to the job database.

    Args:
        url: `sqlite:///path` (one host) or `postgresql://...` (any number of hosts).
        host: Identity of this host; a SQLite file is bound to the first host that opens it.

    Raises:
        JobError: `service.wrong_host`, `service.schema_version`, or `service.unavailable` (retry is safe).
    """

    def __init__(self, url: str, *, host: str | None = None) -> None:
        try:
            parsed = make_url(url)
        except ArgumentError as error:
            raise JobError("service.unavailable", "the job database URL is malformed", fix=_URL_FIX) from error
        if parsed.drivername in {"postgres", "postgresql"}:
            parsed = parsed.set(drivername="postgresql+psycopg")
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        self._engine = _sqlite_engine(parsed) if self.is_sqlite else create_engine(parsed, pool_pre_ping=True)
        try:
            self._prepare(host or host_identity())
        except OperationalError as error:
            self._engine.dispose()
            raise JobError("service.unavailable", "the job database cannot be opened", fix=_URL_FIX) from error
        except ReshardError:
            self._engine.dispose()
            raise

    @contextmanager
    def read(self) -> Generator[Session]:
        """Open a transaction that writes nothing and blocks no writer."""
        engine = self._engine.execution_options(sqlite_begin="BEGIN DEFERRED")
        with Session(engine, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def write(self) -> Generator[Session]:
        """Open a transaction that commits at the end of the block, or rolls back after an exception."""
        with Session(self._engine, expire_on_commit=False) as session, session.begin():
            yield session

    def lock_target_of(self, session: Session, job_id: str) -> None:
        """Keep others from claiming a job with the same target until the end of the transaction.

        Without this, PostgreSQL could run two claims at once, of which neither sees the other. SQLite has one writer
        at a time.
        """
        if not self.is_sqlite:
            target = select(JobRow.target).where(JobRow.id == job_id).scalar_subquery()
            session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(target, 0))))

    def close(self) -> None:
        """Close the pool's connections."""
        self._engine.dispose()

    def _prepare(self, host: str) -> None:
        with self._engine.begin() as connection:
            if not self.is_sqlite:
                # Two processes that create tables at once would collide in PostgreSQL's catalogue.
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK_ID})")
            Base.metadata.create_all(connection)
            version = _fact(connection, "schema_version", str(SCHEMA))
            while version in UPGRADES:
                for statement in UPGRADES[version]:
                    connection.exec_driver_sql(statement)
                version = str(int(version) + 1)
                values = {"value": version}
                connection.execute(update(MetaRow).where(MetaRow.name == "schema_version").values(**values))
            if version != str(SCHEMA):
                raise JobError(
                    "service.schema_version",
                    f"the job database has schema version {version}, but this program needs {SCHEMA}",
                    fix="run the same version of reshard everywhere, or start with a new database",
                )
            if self.is_sqlite and (bound := _fact(connection, "host", host)) != host:
                raise JobError(
                    "service.wrong_host",
                    f"the SQLite job database is bound to host {bound!r}, but this host is {host!r}",
                    fix="use RESHARD_DATABASE_URL=postgresql://... for several hosts; "
                    f"if this host replaces that one: export RESHARD_HOST_ID='{bound}'",
                )


_URL_FIX = "check RESHARD_DATABASE_URL: sqlite:////path/jobs.db or postgresql://user@host/database"


def _fact(connection: Connection, name: str, value: str) -> str:
    """The stored value of a fact. The value of the first writer is kept."""
    found = connection.execute(select(MetaRow.value).where(MetaRow.name == name)).scalar_one_or_none()
    if found is not None:
        return found
    try:
        with connection.begin_nested():
            connection.execute(insert(MetaRow).values(name=name, value=value))
    except IntegrityError:
        return connection.execute(select(MetaRow.value).where(MetaRow.name == name)).scalar_one()
    return value


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
