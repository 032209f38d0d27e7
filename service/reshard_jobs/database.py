"""The job database: one connection pool, its transactions and the host that it is bound to."""

from __future__ import annotations

import os
import platform
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy import Select, func, insert, inspect, select
from sqlalchemy.exc import (
    DBAPIError,
    InterfaceError,
    OperationalError,
    TimeoutError as PoolTimeout,
)
from sqlalchemy.orm import Session

from reshard.errors import JobError, ReshardError
from reshard_jobs.connections import URL_FIX, engine_of, file_of, for_reading, is_sqlite
from reshard_jobs.schema import prepare
from reshard_jobs.tables import JobRow, MetaRow

_TENANT_SEED = 1
"""Seed of the hashes of tenants' locks; those of targets have 0."""


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
        upgrade: True to upgrade PostgreSQL's tables, too, if they are of an earlier release.

    Attributes:
        found: The state of the tables before.
        file: The file of a SQLite database; None for any other.

    Raises:
        JobError: `service.wrong_host`, `service.schema_behind`, `service.schema_version`, or `service.unavailable`
            (retry is safe).
    """

    def __init__(self, url: str, *, host: str | None = None, upgrade: bool = False) -> None:
        self._engine = engine_of(url)
        self.is_sqlite = is_sqlite(self._engine)
        self.file = file_of(self._engine)
        try:
            if self.is_sqlite:
                # Before an upgrade: another host's programs may be of another release.
                self._bind(host or host_identity(), only_look=True)
            self.found = prepare(self._engine, upgrade=upgrade)
            if self.is_sqlite:
                self._bind(host or host_identity())
        except OperationalError as error:
            self._engine.dispose()
            raise JobError("service.unavailable", "the job database cannot be opened", fix=URL_FIX) from error
        except ReshardError:
            self._engine.dispose()
            raise

    @contextmanager
    def read(self) -> Generator[Session]:
        """Open a transaction that writes nothing and blocks no writer."""
        with Session(for_reading(self._engine), expire_on_commit=False) as session, session.begin():
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

    def lock_tenant(self, session: Session, tenant: Select[str]) -> None:
        """Keep others from claims for a tenant, which a query may find, until the end of the transaction."""
        if not self.is_sqlite:
            name = tenant.scalar_subquery()
            session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(name, _TENANT_SEED))))

    def scrub(self) -> None:
        """Leave nothing in a SQLite file of what was overwritten or removed before: it is written anew.

        Raises:
            sqlite3.Error: Another process works with the database.
        """
        with closing(self._engine.raw_connection()) as connection, closing(connection.cursor()) as cursor:
            cursor.execute("VACUUM")
            # A checkpoint that has to wait says so in its row (https://www.sqlite.org/pragma.html#pragma_wal_checkpoint).
            busy, *_ = cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if busy:
                raise sqlite3.OperationalError("another process reads the database's log")

    def close(self) -> None:
        """Close the pool's connections."""
        self._engine.dispose()

    def _bind(self, host: str, *, only_look: bool = False) -> None:
        with (for_reading(self._engine) if only_look else self._engine).begin() as connection:
            if only_look and not inspect(connection).has_table(MetaRow.__tablename__):
                return
            bound = connection.execute(select(MetaRow.value).where(MetaRow.name == "host")).scalar_one_or_none()
            if bound is None and not only_look:
                connection.execute(insert(MetaRow).values(name="host", value=host))
        if bound not in (None, host):
            raise JobError(
                "service.wrong_host",
                f"the SQLite job database is bound to host {bound!r}, but this host is {host!r}",
                fix="use RESHARD_DATABASE_URL=postgresql://... for several hosts; "
                f"if this host replaces that one: export RESHARD_HOST_ID='{bound}'",
            )
