"""The revision of a job database: which one it has, if this program may run on it, and the upgrade to the newest one.

Alembic runs the revisions (`migrations`). It is imported only when there is something to run: workers start often.
"""

from __future__ import annotations

import io
import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, String, column, inspect, select, table
from sqlalchemy.exc import DBAPIError, OperationalError

from reshard.errors import JobError, printable
from reshard_jobs.connections import for_reading, is_sqlite
from reshard_jobs.tables import MetaRow

if TYPE_CHECKING:
    from alembic.config import Config

logger = logging.getLogger(__name__)

HEAD = "0001"
"""The newest revision that this program knows, and the one that it needs."""
VERSION_TABLE = "reshard_revision"
"""Alembic's table. Its usual name is that of other programs which may share the database."""
MIGRATIONS = Path(__file__).with_name("migrations")
OLDEST_FACT = "oldest_program"
"""Name of the fact that says the oldest revision whose programs may run."""
LOCK_ID = 0x7265_7368
"""Advisory lock of PostgreSQL under which tables are created and changed; any constant will do."""
_LOCK_WAIT_S = 3
_LOCK_TRIES = 8
_LOCK_PAUSE_S = 2.0
_STAMP = select(column("version_num", String())).select_from(table(VERSION_TABLE))
# Its lines are for those who write revisions, and some are written when it is imported.
logging.getLogger("alembic").setLevel(logging.WARNING)
# Alembic keeps the environment of a running migration in a variable of its module.
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a database's tables."""

    revision: str | None
    """None: there are no tables."""
    oldest: str = ""
    """The oldest revision whose programs may run on them."""

    @property
    def current(self) -> bool:
        """True if the database has just the revision that this program needs."""
        return self.revision == HEAD

    @property
    def newer(self) -> bool:
        """True if a later release has upgraded the database."""
        return self.revision is not None and self.revision > HEAD

    @property
    def usable(self) -> bool:
        """True if this program may run on the database as it is."""
        return self.current or (self.newer and self.oldest <= HEAD)


def standing_of(connection: Connection) -> Standing:
    """Read the revision of a database.

    Raises:
        JobError: `service.schema_version`: no release has made these tables.
    """
    found = inspect(connection)
    stamped = found.has_table(VERSION_TABLE)
    if not stamped and not found.has_table(MetaRow.__tablename__):
        return Standing(None)
    oldest = connection.execute(select(MetaRow.value).where(MetaRow.name == OLDEST_FACT)).scalar_one_or_none()
    revision = connection.execute(_STAMP).scalar_one() if stamped else None
    if not (oldest and revision and oldest.isdecimal() and revision.isdecimal() and int(revision)):
        raise JobError(
            "service.schema_version",
            f"no release has made the tables of this job database (revision {printable(revision or 'unknown')})",
            fix="set RESHARD_DATABASE_URL to an empty database, or give `reshard serve` another directory: "
            "reshard serve --data-dir DIR; or restore this database from a backup",
        )
    return Standing(f"{int(revision):04}", f"{int(oldest):04}")


def prepare(engine: Engine, *, upgrade: bool = False) -> Standing:
    """Make the tables of a new database, or check those of an old one; returns what there was before.

    A SQLite file is upgraded by the first program that opens it: one host has one release. In PostgreSQL, only
    `upgrade` changes tables that exist, because workers of other hosts may be older.

    Raises:
        JobError: `service.schema_behind`: the database needs an upgrade, or its upgrade failed.
            `service.schema_version`: a later release has upgraded it, and programs of this one may not run on it.
            `service.unavailable`: its tables are in use for longer than an upgrade waits.
    """
    with for_reading(engine).begin() as connection:
        before = standing_of(connection)
    if before.usable:
        return before
    for tries_left in reversed(range(_LOCK_TRIES)):
        try:
            return _prepare(engine, upgrade=upgrade or is_sqlite(engine))
        except OperationalError as error:
            if not _waits_for_lock(error):
                raise
            if not tries_left:
                raise JobError(
                    "service.unavailable",
                    f"a table of the job database was locked by others in {_LOCK_TRIES} tries",
                    fix="end the transaction that holds it (pg_stat_activity, pg_locks), then: reshard db upgrade",
                ) from error
            logger.warning("a table of the job database is in use; the upgrade is tried again")
            time.sleep(_LOCK_PAUSE_S)
    raise AssertionError


def upgrade_sql(engine: Engine) -> str:
    """The statements that `reshard db upgrade` would run on this database, without running them."""
    with for_reading(engine).begin() as connection:
        before = standing_of(connection)
    refuse_newer(before)
    text = io.StringIO()
    config = _config(text)
    config.attributes["dialect"] = engine.dialect.name
    from alembic import command

    with _one_at_a_time:
        if before.revision != HEAD:
            config.attributes["upgrades"] = True
            command.upgrade(config, f"{before.revision or 'base'}:head", sql=True)
    return text.getvalue()


def revisions() -> list[tuple[str, str, str]]:
    """All revisions that this program knows, the oldest first: number, oldest program that may run on it, purpose."""
    from alembic.script import ScriptDirectory

    found = reversed(list(ScriptDirectory.from_config(_config()).walk_revisions()))
    return [(script.revision, script.module.oldest_program, " ".join(script.doc.split())) for script in found]


def refuse_newer(found: Standing) -> None:
    """Refuse a database that a later release has upgraded beyond programs of this one.

    Raises:
        JobError: `service.schema_version`.
    """
    if found.newer and not found.usable:
        raise JobError(
            "service.schema_version",
            f"the job database has revision {found.revision}, on which programs of revision {found.oldest} and later "
            f"may run, but this program has revision {HEAD}",
            fix="run the release that upgraded the database, or a later one; an upgrade is undone by a backup only",
        )


def _prepare(engine: Engine, *, upgrade: bool) -> Standing:
    with engine.begin() as connection:
        if not is_sqlite(engine):
            # One process makes the tables, and others wait for it here. SQLite has one writer at a time.
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({LOCK_ID})")
        before = standing_of(connection)
        refuse_newer(before)
        if before.usable:
            return before
        if before.revision is not None and not upgrade:
            raise JobError(
                "service.schema_behind",
                f"the job database has revision {before.revision}, but this program needs {HEAD}",
                fix="make a backup, then: reshard db upgrade; programs of the release before may go on meanwhile",
            )
        if not is_sqlite(engine):
            # Whoever waits for a table holds up all who come later, and so the workers.
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{_LOCK_WAIT_S}s'")
        try:
            _upgrade(connection, before)
        except DBAPIError as error:
            if error.connection_invalidated or _waits_for_lock(error):
                raise
            raise JobError(
                "service.schema_behind",
                f"the upgrade from revision {before.revision or 'none'} to {HEAD} failed, and nothing is changed: "
                f"{printable(str(error.orig).strip().partition(chr(10))[0])}",
                fix="remove what stands in the way, or connect as the owner of the tables; then: reshard db upgrade",
            ) from error
        return before


def _upgrade(connection: Connection, before: Standing) -> None:
    from alembic import command

    config = _config()
    config.attributes["connection"] = connection
    with _one_at_a_time:
        config.attributes["upgrades"] = True
        command.upgrade(config, "head")
    if before.revision is not None:
        logger.info("the job database was upgraded from revision %s to %s", before.revision, HEAD)


def _config(output: io.StringIO | None = None) -> Config:
    from alembic.config import Config

    config = Config(output_buffer=output) if output is not None else Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return config


def _waits_for_lock(error: DBAPIError) -> bool:
    return getattr(error.orig, "sqlstate", None) == "55P03"
