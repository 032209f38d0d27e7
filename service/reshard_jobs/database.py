"""The job database: its connections and transactions, its revision, and the host that it is bound to."""

from __future__ import annotations

import io
import logging
import os
import platform
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import (
    Connection,
    Engine,
    Select,
    String,
    column,
    create_engine,
    event,
    func,
    insert,
    inspect,
    select,
    table,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError, TimeoutError as PoolTimeout
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry

from reshard.errors import JobError, ReshardError, printable
from reshard_jobs.tables import JobRow, MetaRow

if TYPE_CHECKING:
    from alembic.config import Config


# Connections to the job database: the pool that an URL names, and how SQLite's connections behave.

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


# The revision of a job database: which one it has, if this program may run on it, and the upgrade to the newest one.
#
# Alembic runs the revisions (`migrations`). It is imported only when there is something to run: workers start often.

logger = logging.getLogger(__name__)

HEAD = "0002"
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
# The lines of Alembic are for those who write revisions. It writes some of them when it is imported.
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
    with _one_at_a_time:
        if before.revision != HEAD:
            _run_revisions(config, f"{before.revision or 'base'}:head", sql=True)
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
    config = _config()
    config.attributes["connection"] = connection
    with _one_at_a_time:
        _run_revisions(config, "head")
    if before.revision is not None:
        logger.info("the job database was upgraded from revision %s to %s", before.revision, HEAD)


def _run_revisions(config: Config, which: str, *, sql: bool = False) -> None:
    from alembic import command

    config.attributes["upgrades"] = True
    command.upgrade(config, which, sql=sql)


def _config(output: io.StringIO | None = None) -> Config:
    from alembic.config import Config

    config = Config(output_buffer=output) if output is not None else Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return config


def _waits_for_lock(error: DBAPIError) -> bool:
    return getattr(error.orig, "sqlstate", None) == "55P03"


# The job database, as the programs of a service use it.

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


# A call that a thread repeats until it is stopped.


class PeriodicThread:
    """Makes a call at once and then every `interval_s`, until stopped.

    Args:
        call: The call; it raises nothing.
        interval_s: Seconds between the end of a call and the next one.
        name: The name of the thread.
    """

    def __init__(self, call: Callable[[], None], *, interval_s: float, name: str) -> None:
        self._call = call
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to call."""
        self._thread.start()

    def stop(self) -> None:
        """End after the call that runs now, for which this waits 5 s at most."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:
            self._call()
            if self._stop.wait(self._interval_s):
                return
