"""The revisions of the job database: made, upgraded by one of many, refused with both numbers.

Upgrades are to the made-up next release of `servers.later_release`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, MetaData, text

from reshard.errors import JobError
from reshard_jobs import database as schema, upgrading
from reshard_jobs.database import HEAD, VERSION_TABLE, Database, engine_of, revisions, upgrade_sql
from reshard_jobs.queue.leases import Leases
from reshard_jobs.queue.store import JobFilter, JobStore
from reshard_jobs.tables import Base
from servers.frozen import HOST, thaw
from servers.later_release import ADDED, LATER, later_service
from servers.postgres import PostgresServer

# SQLAlchemy cannot read an index over an expression back from SQLite, and says so; Alembic, too.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Skipped unsupported reflection of expression-based index"),
    pytest.mark.filterwarnings("ignore:autogenerate skipping metadata-specified expression-based index"),
]


@pytest.fixture
def engine(database_url: str) -> Generator[Engine]:
    found = engine_of(database_url)
    yield found
    found.dispose()


def run(engine: Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


def fact(engine: Engine, statement: str) -> object:
    with engine.begin() as connection:
        return connection.execute(text(statement)).scalar_one()


def differences(engine: Engine) -> list[Any]:
    with engine.begin() as connection:
        options = {"compare_server_default": True, "version_table": VERSION_TABLE}
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), Base.metadata))


def added(engine: Engine) -> list[str]:
    """The names of what the tables have and this release does not know."""
    return sorted(difference[-1].name for difference in differences(engine))


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in HOST.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The next release, whose upgrades this process runs; its `service` folder."""
    found = later_service(tmp_path / "later")
    monkeypatch.setattr(schema, "MIGRATIONS", found / "reshard_jobs" / "migrations")
    for module in (schema, upgrading):
        monkeypatch.setattr(module, "HEAD", LATER)
    return found


def test_the_revisions_make_the_tables_of_the_code(database_url: str, engine: Engine) -> None:
    Database(database_url).close()
    assert differences(engine) == []
    run(engine, "ALTER TABLE jobs ADD COLUMN forgotten INTEGER")
    assert differences(engine) != []


def test_the_head_of_the_code_is_the_head_of_the_revisions() -> None:
    script = ScriptDirectory.from_config(schema._config())
    assert script.get_heads() == [HEAD]
    numbers = [number for number, _, _ in revisions()]
    assert numbers == [f"{place:04}" for place in range(1, len(numbers) + 1)]
    assert all(oldest <= number for number, oldest, _ in revisions())


@pytest.mark.usefixtures("later")
def test_an_old_database_is_upgraded(database_url: str, engine: Engine) -> None:
    thaw(1, database_url)
    if database_url.startswith("postgresql"):
        with pytest.raises(JobError, match=rf"revision 0001, but this program needs {LATER}") as caught:
            Database(database_url)
        assert caught.value.code == "service.schema_behind"
        assert "reshard db upgrade" in caught.value.fix
        Database(database_url, upgrade=True).close()
    database = Database(database_url)
    (job,) = JobStore(database).list(JobFilter(labels={"case": "queued"})).jobs
    assert Leases(database, lease_s=60).claim(job.id, worker="w") is not None
    database.close()
    assert fact(engine, f"SELECT version_num FROM {VERSION_TABLE}") == LATER
    assert added(engine) == ADDED
    assert fact(engine, "SELECT count(*) FROM jobs WHERE later_still = target") == fact(
        engine, "SELECT count(*) FROM jobs"
    )


@pytest.mark.usefixtures("later")
def test_an_upgrade_that_fails_changes_nothing(database_url: str, engine: Engine) -> None:
    thaw(1, database_url)
    # Somebody else's.
    run(engine, "CREATE TABLE later_things (id INTEGER)")
    with pytest.raises(JobError, match=r"later_things.* already exists") as caught:
        Database(database_url, upgrade=True)
    assert caught.value.code == "service.schema_behind"
    assert fact(engine, f"SELECT version_num FROM {VERSION_TABLE}") == "0001"
    run(engine, "DROP TABLE later_things")
    assert differences(engine) == []
    Database(database_url, upgrade=True).close()
    assert added(engine) == ADDED


@pytest.mark.parametrize("before", [0, 1])
def test_of_many_processes_one_makes_the_tables(before: int, database_url: str, engine: Engine, later: Path) -> None:
    if before:
        thaw(before, database_url)
    code = "import sys\nfrom reshard_jobs.database import Database\nDatabase(sys.argv[1], upgrade=True).close()\n"
    environment = {**os.environ, "PYTHONPATH": str(later)}
    started = [subprocess.Popen([sys.executable, "-c", code, database_url], env=environment) for _ in range(6)]
    assert [process.wait(60) for process in started] == [0] * 6
    assert added(engine) == ADDED


def test_a_new_database_is_made_without_a_word(sqlite_url: str) -> None:
    code = "import logging, sys\nfrom reshard_jobs.database import Database\nlogging.basicConfig(level=logging.INFO)\n"
    command = [sys.executable, "-c", f"{code}Database(sys.argv[1]).close()", sqlite_url]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout + done.stderr == ""


def test_a_later_release_says_who_may_run(database_url: str, engine: Engine) -> None:
    Database(database_url).close()
    run(engine, f"UPDATE {VERSION_TABLE} SET version_num = '9001'")
    # What the later revision added harms nobody.
    Database(database_url).close()
    run(engine, "UPDATE reshard_meta SET value = '9000' WHERE name = 'oldest_program'")
    for upgrade in (False, True):
        with pytest.raises(JobError, match=f"9001.*9000.*{HEAD}") as caught:
            Database(database_url, upgrade=upgrade)
        assert caught.value.code == "service.schema_version"


def test_tables_of_others_are_refused(database_url: str, engine: Engine) -> None:
    run(engine, "CREATE TABLE reshard_meta (name VARCHAR(64) PRIMARY KEY, value TEXT NOT NULL)")
    with pytest.raises(JobError) as caught:
        Database(database_url)
    assert caught.value.code == "service.schema_version"


@pytest.mark.parametrize("stamp", ["0008", None])
def test_tables_of_before_the_first_release_are_refused(stamp: str | None, database_url: str, engine: Engine) -> None:
    """They had eight revisions, and the number of the schema as a fact; before that no revision."""
    Database(database_url).close()
    run(engine, "UPDATE reshard_meta SET name = 'schema_version', value = '3' WHERE name = 'oldest_program'")
    run(engine, f"UPDATE {VERSION_TABLE} SET version_num = '{stamp}'" if stamp else f"DROP TABLE {VERSION_TABLE}")
    for upgrade in (False, True):
        with pytest.raises(JobError, match=stamp or "unknown") as caught:
            Database(database_url, upgrade=upgrade)
        assert caught.value.code == "service.schema_version"
        assert "set RESHARD_DATABASE_URL to an empty database" in caught.value.fix


def test_an_unknown_older_revision_is_refused(database_url: str, engine: Engine) -> None:
    Database(database_url).close()
    run(engine, f"UPDATE {VERSION_TABLE} SET version_num = '0000'")
    with pytest.raises(JobError, match="0000") as caught:
        Database(database_url, upgrade=True)
    assert caught.value.code == "service.schema_version"


def test_a_database_is_shared_with_another_program_of_alembic(database_url: str, engine: Engine) -> None:
    run(engine, "CREATE TABLE alembic_version (version_num VARCHAR(32))", "CREATE TABLE runs (id INTEGER)")
    run(engine, "INSERT INTO alembic_version VALUES ('theirs')")
    Database(database_url).close()
    assert fact(engine, "SELECT version_num FROM alembic_version") == "theirs"


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_the_printed_statements_do_the_same(postgres: PostgresServer, old: bool) -> None:
    url = postgres.new_database()
    engine = engine_of(url)
    if old:
        thaw(1, url)
    statements = upgrade_sql(engine)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(statements.replace("%", "%%"))
    assert added(engine) == ADDED
    Database(url).close()
    assert upgrade_sql(engine) == ""
    engine.dispose()


@pytest.mark.usefixtures("later")
def test_an_upgrade_does_not_stand_in_the_way_of_workers(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "_LOCK_TRIES", 2)
    monkeypatch.setattr(schema, "_LOCK_WAIT_S", 1)
    monkeypatch.setattr(schema, "_LOCK_PAUSE_S", 0.1)
    url = postgres.new_database()
    engine = engine_of(url)
    thaw(1, url)
    with engine.begin() as dump:
        dump.execute(text("SELECT * FROM jobs"))
        with pytest.raises(JobError, match="locked by others in 2 tries") as caught:
            Database(url, upgrade=True)
    assert caught.value.code == "service.unavailable"
    assert MetaData().tables == {}
    assert fact(engine, f"SELECT version_num FROM {VERSION_TABLE}") == "0001"
    assert not fact(engine, "SELECT count(*) FROM pg_class WHERE relname = 'later_things'")
    engine.dispose()


@pytest.mark.usefixtures("later")
def test_the_commands(database_url: str, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., str]) -> None:
    monkeypatch.setenv("RESHARD_DATABASE_URL", database_url)
    assert json.loads(cli("db", "current", "--json"))["database"] is None
    thaw(1, database_url)
    assert json.loads(cli("db", "current", "--json"))["usable"] is False
    assert "it had 0001" in cli("db", "upgrade")
    assert "has it already" in cli("db", "upgrade")
    assert json.loads(cli("db", "current", "--json")) == {
        "schema_version": 1, "database": LATER, "program": LATER, "oldest_program": "0001", "usable": True
    }  # fmt: skip
    assert cli("db", "history").count("\n") == int(LATER)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    from reshard.cli.main import run as run_cli

    def call(*arguments: str) -> str:
        assert run_cli(list(arguments)) == 0
        return capsys.readouterr().out

    return call
