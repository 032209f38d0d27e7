"""Job databases of earlier releases, and upgrades while jobs run: no job is lost, and none begins anew.

Upgrades are to the made-up next release of `servers.later_release`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from house.repository import ROOT
from reshard.choices import JobState
from reshard.models.jobs import Job
from reshard_jobs.database import VERSION_TABLE, Database, engine_of
from reshard_jobs.queue.reaper import Reaper, Retention
from reshard_jobs.queue.states import EventLog
from reshard_jobs.queue.store import JobStore
from servers.fixtures import new_stack
from servers.frozen import HOST, thaw
from servers.later_release import LATER, later_service
from servers.scripted import scripted, units_done
from servers.stack import Stack, client_of, end_tree, runners_of

SCHEMAS = [1]
"""The revisions of which `tests/data/job_databases` has a database."""
FOREVER = {"RESHARD_KEEP_JOBS_S": "1e9", "RESHARD_KEEP_EVENTS_S": "1e9", "RESHARD_KEEP_FAILED_S": "1e9"}
"""The frozen jobs grow old."""


def wait_until(ready: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which Python finds the code of the next release."""
    return {"PYTHONPATH": str(later_service(tmp_path_factory.mktemp("later")))}


class Thawed:
    """A database of an earlier schema, with its places moved below a directory."""

    def __init__(self, schema: int, url: str, directory: Path, later: Mapping[str, str]) -> None:
        self.url = url
        self.later = later
        self.told = thaw(schema, url, directory)
        shutil.copytree(ROOT / "tests" / "data" / "zero2_tiny", directory / "source")

    def upgrade(self) -> None:
        environment = {**os.environ, **HOST, **self.later, "RESHARD_DATABASE_URL": self.url}
        command = [sys.executable, "-m", "reshard.cli.main", "db", "upgrade"]
        subprocess.run(command, check=True, env=environment, capture_output=True)


@pytest.fixture
def thawed(schema: int, database_url: str, tmp_path: Path, later: dict[str, str]) -> Thawed:
    return Thawed(schema, database_url, tmp_path, later)


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
                client.wait(told["job"]["id"], timeout_s=90)
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
def stacks(request: pytest.FixtureRequest, tmp_path: Path, later: dict[str, str]) -> tuple[Stack, Stack]:
    """One service in two releases: this one, and the next one."""
    now = new_stack(request.param, tmp_path, request)
    return now, replace(now, directory=tmp_path / "later-logs", extra=later)


def upgraded(stack: Stack) -> None:
    command = [sys.executable, "-m", "reshard.cli.main", "db", "upgrade"]
    done = subprocess.run(command, env=stack.env(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"revision {LATER}: it had 0001" in done.stdout


def test_an_upgrade_in_the_middle_of_a_job(stacks: tuple[Stack, Stack], tmp_path: Path) -> None:
    old, new = stacks
    target = tmp_path / "out"
    with old.api() as url, client_of(url) as client, old.worker():
        job = client.submit(scripted(units=60, unit_s=0.1), str(target), to="universal")
        wait_until(lambda: len(units_done(target)) >= 3)
        upgraded(new)
        # This release reads, writes and takes new jobs on the new tables.
        second = client.submit(scripted(units=3), str(tmp_path / "second"), to="universal")
        ended = client.wait(job.id, timeout_s=60)
        assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 1)
        assert [unit for unit, _ in units_done(target)] == list(range(60))
        assert client.wait(second.id, timeout_s=60).state is JobState.SUCCEEDED
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
            jobs = [
                client.submit(scripted(units=20, unit_s=0.1), str(tmp_path / name), to="universal") for name in names
            ]
            wait_until(lambda: len(units_done(tmp_path / names[0])) >= 3)
            upgraded(new)
            new_worker = new.start_worker()
            wait_until(lambda: len(runners_of(new_worker.pid)) >= 1)
            # It gives its job back, and the new worker goes on with it.
            old_worker.stop()
            wait_until(lambda: client.get(jobs[0].id).attempt == 2 or client.get(jobs[0].id).done)
        with new.api() as url, client_of(url) as client:
            ended = [client.wait(job.id, timeout_s=90) for job in jobs]
            retried = [job.id for job in ended if job.attempt > 1]
            assert {job.state for job in ended} == {JobState.SUCCEEDED}
            assert len(retried) <= 1
        for name in names:
            assert sorted(unit for unit, _ in units_done(tmp_path / name)) == list(range(20)), name
    finally:
        end_tree(old_worker)
        if new_worker is not None:
            end_tree(new_worker)


def test_programs_do_not_start_on_an_older_database(
    make_stack: Callable[[str], Stack], later: dict[str, str], tmp_path: Path
) -> None:
    stack = replace(make_stack("celery"), extra=later)
    thaw(1, stack.database_url)
    app = ("-m", "uvicorn", "reshard_service.app:create_app", "--factory", "--port", "0")
    for argv in (("-c", "from reshard_worker.launch import worker; worker()"), ("-m", "reshard_worker.embedded"), app):
        done = subprocess.run(
            [sys.executable, *argv], env=stack.env(), cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode != 0, argv
        said = done.stdout + done.stderr
        assert f"the job database has revision 0001, but this program needs {LATER}" in said, argv
    upgraded(stack)
    with stack.api() as url, client_of(url) as client:
        assert len(client.list(page_size=200).jobs) == 20


EXPANSION = (
    "ALTER TABLE jobs ADD COLUMN later INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE jobs ADD COLUMN later_still TEXT",
    "CREATE INDEX jobs_by_later ON jobs (later)",
    "CREATE TABLE later_things (job_id VARCHAR(40) PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE)",
    f"UPDATE {VERSION_TABLE} SET version_num = '9001'",
)


def test_this_release_runs_on_during_the_next_ones_upgrade(stack: Stack, tmp_path: Path) -> None:
    target = tmp_path / "out"
    with stack.api() as url, client_of(url) as client, stack.worker():
        job = client.submit(scripted(units=40, unit_s=0.1), str(target), to="universal")
        wait_until(lambda: len(units_done(target)) >= 3)
        engine = engine_of(stack.database_url)
        with engine.begin() as connection:
            for statement in EXPANSION:
                connection.execute(text(statement))
        engine.dispose()
        ended = client.wait(job.id, timeout_s=60)
        assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 1)
    with stack.api() as url, client_of(url) as client, stack.worker():
        job = client.submit(scripted(units=3), str(tmp_path / "second"), to="universal")
        assert client.wait(job.id, timeout_s=60).state is JobState.SUCCEEDED
