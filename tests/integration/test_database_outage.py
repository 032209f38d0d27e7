"""A PostgreSQL that is stopped for longer than a lease: no running job loses an attempt, and no lost worker is kept."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest

from house.waiting import PATIENCE_S, wait_until
from reshard.api.client import Client
from reshard.choices import JobState, TargetFormat
from reshard.errors import ReshardError
from reshard.models.jobs import ConvertRequest, Job
from reshard.options import SourceSpec
from reshard_jobs.database import Database
from reshard_jobs.queue.store import JobStore
from servers.fixtures import new_stack
from servers.postgres import PostgresServer, postgres_server
from servers.process import ServerProcess
from servers.scripted import release, scripted, units_done
from servers.stack import LEASE_S, Stack, client_of, end_tree, runners_of

OUTAGE_S = 2 * LEASE_S
"""So long that every lease has ended when the database is back."""


@pytest.fixture(scope="module")
def own_postgres(server_directory: Path) -> Generator[PostgresServer]:
    """A server that no other test uses, because these tests stop it."""
    with postgres_server(server_directory / "outage") as server:
        yield server


class Site:
    def __init__(self, stack: Stack, postgres: PostgresServer, client: Client, directory: Path) -> None:
        self.stack = stack
        self.postgres = postgres
        self.client = client
        self.directory = directory
        self.workers: list[ServerProcess] = []

    def submit(self, name: str, *, max_attempts: int = 1, **script: object) -> Job:
        target = str(self.directory / name)
        return self.client.submit(scripted(**script), target, to="universal", max_attempts=max_attempts)

    def ended(self, job: Job) -> Job:
        return self.client.wait(job.id, timeout_s=PATIENCE_S)

    def await_units(self, name: str, count: int) -> None:
        wait_until(lambda: len(units_done(self.directory / name)) >= count, timeout_s=PATIENCE_S)


@pytest.fixture
def site(own_postgres: PostgresServer, request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Site]:
    stack = new_stack("celery", tmp_path, request)
    stack.database_url = own_postgres.new_database()
    with stack.api() as url, client_of(url) as client:
        found = Site(stack, own_postgres, client, tmp_path)
        # The second worker is idle: it takes what it may.
        found.workers = [stack.start_worker() for _ in range(2)]
        yield found
        for process in found.workers:
            end_tree(process)


def test_a_running_job_goes_on_in_its_attempt(site: Site) -> None:
    job = site.submit("out", units=120, unit_s=0.1)
    site.await_units("out", 3)
    with site.postgres.away():
        time.sleep(OUTAGE_S)
        refused = httpx.get(f"{site.client.url}/readyz", timeout=PATIENCE_S)
        assert (refused.status_code, refused.json()["details"]["database"]) == (503, "away")
    ended = site.ended(job)
    assert ended.error is None
    assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 1)
    # What was finished stays finished, and one worker at a time wrote.
    assert [unit for unit, _ in units_done(site.directory / "out")] == list(range(120))
    assert len((site.directory / "out" / "commits").read_text().split()) == 1
    assert len({worker.worker for worker in ended.workers}) == 1
    # Both workers go on as before.
    jobs = [site.submit(f"later{number}", units=5, unit_s=0.1) for number in range(4)]
    assert {site.ended(later).state for later in jobs} == {JobState.SUCCEEDED}


def test_what_ends_while_the_database_is_away_is_recorded_when_it_is_back(site: Site) -> None:
    good = site.submit("good", units=4, unit_s=0.1, commit_s=1.5)
    bad = site.submit("bad", units=4, unit_s=0.5, at=2, fail="checkpoint.incomplete")
    site.await_units("good", 4)
    with site.postgres.away():
        time.sleep(OUTAGE_S)
    assert (site.ended(good).state, site.ended(good).attempt) == (JobState.SUCCEEDED, 1)
    assert (site.directory / "good" / "commits").read_text().count("\n") == 1
    problem = site.ended(bad).error
    assert problem is not None
    assert problem.code == "checkpoint.incomplete"
    assert site.ended(bad).attempt == 1


def test_a_worker_that_died_meanwhile_loses_its_job(site: Site) -> None:
    job = site.submit("out", max_attempts=2, units=30, held=3)
    site.await_units("out", 3)
    with site.postgres.away():
        (owner,) = [worker for worker in site.workers if runners_of(worker.pid)]
        end_tree(owner)
        time.sleep(OUTAGE_S)
        release(site.directory / "out")
    back_at = time.monotonic()
    ended = site.ended(job)
    assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 2)
    # The owner had one more lease to come back in.
    assert time.monotonic() - back_at > LEASE_S / 2


def test_a_worker_that_starts_while_the_database_is_away_reaps_when_it_is_back(site: Site) -> None:
    for worker in site.workers:
        end_tree(worker)
    with site.postgres.away():
        site.workers = [site.stack.start_worker()]
    # A job whose message was lost: only a reaper hears of it.
    database = Database(site.stack.database_url)
    source = SourceSpec(url=scripted())
    request = ConvertRequest(source=source, target=str(site.directory / "out"), to=TargetFormat.UNIVERSAL)
    job = JobStore(database).create(request)
    database.close()
    assert site.ended(job).state is JobState.SUCCEEDED


def test_a_cancel_reaches_a_job_whose_worker_waited_for_the_database(site: Site) -> None:
    job = site.submit("out", units=4000, unit_s=0.1)
    site.await_units("out", 3)
    with site.postgres.away():
        with pytest.raises(ReshardError), Client(site.client.url, "", retries=0) as hasty:
            hasty.cancel(job.id)
        time.sleep(OUTAGE_S)
    site.client.cancel(job.id)
    assert site.ended(job).state is JobState.CANCELLED
    assert not (site.directory / ".out.journal").exists()
