"""The revisions of the job database: made, upgraded by one of many, refused with both numbers.

Upgrades are to the made-up next release of `servers.later_release`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, MetaData, text

from house.repository import ROOT
from house.waiting import PATIENCE_S, wait_until
from reshard.choices import JobState
from reshard.errors import JobError
from reshard.models.jobs import Job
from reshard_jobs import database as schema, upgrading
from reshard_jobs.database import HEAD, VERSION_TABLE, Database, engine_of, revisions, upgrade_sql
from reshard_jobs.queue.leases import Leases
from reshard_jobs.queue.reaper import Reaper, Retention
from reshard_jobs.queue.states import EventLog
from reshard_jobs.queue.store import JobFilter, JobStore
from reshard_jobs.tables import Base
from servers.fixtures import new_stack
from servers.frozen import HOST, thaw
from servers.later_release import ADDED, LATER, later_service
from servers.postgres import PostgresServer
from servers.scripted import release, scripted, units_done
from servers.stack import Stack, client_of, end_tree, runners_of

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
    """The names of what the tables have and this release does not know, and of what it knows and they have not."""
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
    # What this release has added since.
    before = added(engine)
    # Somebody else's.
    run(engine, "CREATE TABLE later_things (id INTEGER)")
    with pytest.raises(JobError, match=r"later_things.* already exists") as caught:
        Database(database_url, upgrade=True)
    assert caught.value.code == "service.schema_behind"
    assert fact(engine, f"SELECT version_num FROM {VERSION_TABLE}") == "0001"
    run(engine, "DROP TABLE later_things")
    assert added(engine) == before
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
        "schema_version": 1, "database": LATER, "program": LATER, "oldest_program": HEAD, "usable": True
    }  # fmt: skip
    assert cli("db", "history").count("\n") == int(LATER)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    from reshard.cli.main import run as run_cli

    def call(*arguments: str) -> str:
        assert run_cli(list(arguments)) == 0
        return capsys.readouterr().out

    return call


# Job databases of earlier releases, and upgrades while jobs run: no job is lost, and none begins anew.
#
# Upgrades are to the made-up next release of `servers.later_release`.


SCHEMAS = [1]
"""The revisions of which `tests/data/job_databases` has a database."""
FOREVER = {"RESHARD_KEEP_JOBS_S": "1e9", "RESHARD_KEEP_EVENTS_S": "1e9", "RESHARD_KEEP_FAILED_S": "1e9"}
"""The frozen jobs grow old."""


@pytest.fixture(scope="module")
def later_settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which Python finds the code of the next release."""
    return {"PYTHONPATH": str(later_service(tmp_path_factory.mktemp("later")))}


class Thawed:
    """A database of an earlier schema, with its places moved below a directory."""

    def __init__(self, schema: int, url: str, directory: Path, later_settings: Mapping[str, str]) -> None:
        self.url = url
        self.later = later_settings
        self.told = thaw(schema, url, directory)
        shutil.copytree(ROOT / "tests" / "data" / "zero2_tiny", directory / "source")

    def upgrade(self) -> None:
        environment = {**os.environ, **HOST, **self.later, "RESHARD_DATABASE_URL": self.url}
        command = [sys.executable, "-m", "reshard.cli.main", "db", "upgrade"]
        subprocess.run(command, check=True, env=environment, capture_output=True)


@pytest.fixture
def thawed(schema: int, database_url: str, tmp_path: Path, later_settings: dict[str, str]) -> Thawed:
    return Thawed(schema, database_url, tmp_path, later_settings)


def holds(told: object, now: object) -> bool:
    """True if everything that was told is still so; more may be told now."""
    if isinstance(told, dict) and isinstance(now, dict):
        return all(holds(value, now.get(name)) for name, value in told.items())
    if isinstance(told, list) and isinstance(now, list):
        return len(told) == len(now) and all(map(holds, told, now))
    return told == now


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_job_reads_as_before(thawed: Thawed) -> None:
    thawed.upgrade()
    database = Database(thawed.url, host="frozen")
    store, log = JobStore(database), EventLog(database)
    listed = [job.id for job in reversed(store.list(page_size=200).jobs)]
    assert listed == [told["job"]["id"] for told in thawed.told]
    states = {job.state for job in store.list(page_size=200).jobs}
    assert states == set(JobState)
    for told in thawed.told:
        job = store.get(told["job"]["id"]).model_dump(mode="json")
        events = [event.model_dump(mode="json") for event in log.after(job["id"], 0).events]
        assert holds(told, {"job": job, "events": events}), (told, job, events)
    with database.read() as session:
        rows = session.execute(text("SELECT key, job_id FROM idempotency_keys")).all()
    (bound,) = (told["job"]["id"] for told in thawed.told if case_of(told["job"]) == "with-a-key")
    assert {tuple(row) for row in rows} == {("a-key", bound), ("a-held-key", None)}
    # Old enough, and their files are gone: the records go.
    reaper = Reaper(database, lease_s=60, retention=Retention(keep_jobs_s=1e-6, keep_events_s=1e-6, keep_keys_s=1e-6))
    reaper.sweep()
    left = {case_of(job.model_dump()) for job in store.list(page_size=200).jobs}
    assert left.isdisjoint({"succeeded", "failed-at-once", "cancelled", "cancelled-before"})
    assert left > {"queued", "running", "verifying", "cancelling"}
    database.close()


def case_of(job: Mapping[str, Any]) -> str:
    return job["labels"]["case"]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_job_goes_on(thawed: Thawed, tmp_path: Path) -> None:
    thawed.upgrade()
    stack = Stack(tmp_path / "logs", thawed.url, scripted=False, extra={**HOST, **FOREVER, **thawed.later})
    with stack.api() as url, client_of(url) as client:

        def job(case: str) -> Job:
            (found,) = client.list(labels={"case": case}).jobs
            return found

        for case in ("failed", "failed-at-once", "exhausted"):
            client.retry(job(case).id)
        client.cancel(job("a-plan").id)
        client.cancel(job("released").id)
        client.cancel(job("failed-and-unwanted").id)
        with stack.worker():
            for told in thawed.told:
                client.wait(told["job"]["id"], timeout_s=PATIENCE_S)
            wait_until(lambda: job("failed-and-unwanted").leftovers_until is None)
        found = {case_of(j.model_dump()): j for j in client.list(page_size=200).jobs}
    ended = {case: (j.state.value, j.attempt) for case, j in found.items()}
    # The reaper may end these before a worker removes their files: nobody has had them for three leases.
    assert (ended.pop("cancelling")[0], ended.pop("released")[0]) == ("CANCELLED", "CANCELLED")
    stay = {
        "a-plan": ("CANCELLED", 0), "cancelled": ("CANCELLED", 1),
        "cancelled-before": ("CANCELLED", 0), "failed-and-unwanted": ("FAILED", 1), "succeeded": ("SUCCEEDED", 1),
    }  # fmt: skip
    first = {"queued", "with-a-key", "planned"}
    assert ended == {case: stay.get(case, ("SUCCEEDED", 1 if case in first else 2)) for case in ended}
    for case, attempt in ended.items():
        wrote = attempt[0] == "SUCCEEDED" and case not in ("succeeded", "planned")
        assert (tmp_path / case / "reshard.json").exists() == wrote, case


@pytest.fixture(params=["embedded", "celery"])
def stacks(request: pytest.FixtureRequest, tmp_path: Path, later_settings: dict[str, str]) -> tuple[Stack, Stack]:
    """One service in two releases: this one, and the next one."""
    # A worker that is stopped gives its job back: no lease has to end, and none ends because the machine is busy.
    unhurried = {"RESHARD_LEASE_S": "60"}
    now = replace(new_stack(request.param, tmp_path, request), extra=unhurried)
    return now, replace(now, directory=tmp_path / "later-logs", extra={**later_settings, **unhurried})


def upgraded(stack: Stack, before: str = HEAD) -> None:
    command = [sys.executable, "-m", "reshard.cli.main", "db", "upgrade"]
    done = subprocess.run(command, env=stack.env(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"revision {LATER}: it had {before}" in done.stdout


def test_an_upgrade_in_the_middle_of_a_job(stacks: tuple[Stack, Stack], tmp_path: Path) -> None:
    old, new = stacks
    target = tmp_path / "out"
    with old.api() as url, client_of(url) as client, old.worker():
        job = client.submit(scripted(units=60, held=3), str(target), to="universal")
        wait_until(lambda: len(units_done(target)) >= 3)
        upgraded(new)
        release(target)
        # This release reads, writes and takes new jobs on the new tables.
        second = client.submit(scripted(units=3), str(tmp_path / "second"), to="universal")
        ended = client.wait(job.id, timeout_s=PATIENCE_S)
        assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 1)
        assert [unit for unit, _ in units_done(target)] == list(range(60))
        assert client.wait(second.id, timeout_s=PATIENCE_S).state is JobState.SUCCEEDED
    # A process of this release that starts now may run, too.
    with old.api() as url, client_of(url) as client:
        assert client.get(job.id).state is JobState.SUCCEEDED
    with new.api() as url, client_of(url) as client:
        assert [event.seq for event in client.watch(job.id)] == list(range(1, len(list(client.watch(job.id))) + 1))


def test_a_rolling_restart_loses_nothing(stacks: tuple[Stack, Stack], tmp_path: Path) -> None:
    old, new = stacks
    names = [f"out{number}" for number in range(5)]
    old_worker = old.start_worker()
    new_worker = None
    try:
        with old.api() as url, client_of(url) as client:
            jobs = [client.submit(scripted(units=20, held=3), str(tmp_path / name), to="universal") for name in names]
            wait_until(lambda: len(units_done(tmp_path / names[0])) >= 3)
            upgraded(new)
            new_worker = new.start_worker()
            wait_until(lambda: len(runners_of(new_worker.pid)) >= 1)
            # It gives its job back, and the new worker goes on with it.
            old_worker.stop()
            for name in names:
                release(tmp_path / name)
            wait_until(lambda: client.get(jobs[0].id).attempt == 2)
        with new.api() as url, client_of(url) as client:
            ended = [client.wait(job.id, timeout_s=PATIENCE_S) for job in jobs]
            assert [job.attempt for job in ended] == [2, 1, 1, 1, 1]
            assert {job.state for job in ended} == {JobState.SUCCEEDED}
        for name in names:
            assert sorted(unit for unit, _ in units_done(tmp_path / name)) == list(range(20)), name
    finally:
        end_tree(old_worker)
        if new_worker is not None:
            end_tree(new_worker)


def test_programs_do_not_start_on_an_older_database(
    make_stack: Callable[[str], Stack], later_settings: dict[str, str], tmp_path: Path
) -> None:
    stack = replace(make_stack("celery"), extra=later_settings)
    thaw(1, stack.database_url)
    app = ("-m", "uvicorn", "reshard_service.app:create_app", "--factory", "--port", "0")
    for argv in (("-c", "from reshard_worker.launch import worker; worker()"), ("-m", "reshard_worker.embedded"), app):
        done = subprocess.run(
            [sys.executable, *argv], env=stack.env(), cwd=tmp_path, capture_output=True, text=True, timeout=180
        )
        assert done.returncode != 0, argv
        said = done.stdout + done.stderr
        assert f"the job database has revision 0001, but this program needs {LATER}" in said, argv
    upgraded(stack, "0001")
    with stack.api() as url, client_of(url) as client:
        assert len(client.list(page_size=200).jobs) == 20


EXPANSION = (
    "ALTER TABLE jobs ADD COLUMN later_settings INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE jobs ADD COLUMN later_still TEXT",
    "CREATE INDEX jobs_by_later ON jobs (later_settings)",
    "CREATE TABLE later_things (job_id VARCHAR(40) PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE)",
    f"UPDATE {VERSION_TABLE} SET version_num = '9001'",
)


def test_this_release_runs_on_during_the_next_ones_upgrade(stack: Stack, tmp_path: Path) -> None:
    target = tmp_path / "out"
    with stack.api() as url, client_of(url) as client, stack.worker():
        job = client.submit(scripted(units=40, held=3), str(target), to="universal")
        wait_until(lambda: len(units_done(target)) >= 3)
        engine = engine_of(stack.database_url)
        with engine.begin() as connection:
            for statement in EXPANSION:
                connection.execute(text(statement))
        engine.dispose()
        release(target)
        ended = client.wait(job.id, timeout_s=PATIENCE_S)
        assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 1)
    with stack.api() as url, client_of(url) as client, stack.worker():
        job = client.submit(scripted(units=3), str(tmp_path / "second"), to="universal")
        assert client.wait(job.id, timeout_s=PATIENCE_S).state is JobState.SUCCEEDED
