"""One claim-and-run path under both drivers: the embedded executor on SQLite, Celery on PostgreSQL and Redis."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from house.waiting import PATIENCE_S, wait_until
from reshard.api.client import Client
from reshard.choices import JobState
from reshard.errors import JobError, ReshardError
from reshard.models.jobs import Job, JobEvent
from servers.fixtures import new_stack
from servers.process import ServerProcess
from servers.scripted import journal_of, release, scripted, units_done
from servers.stack import LEASE_S, Stack, client_of, end_tree, pause, resume, runners_of, tree_of


@dataclass
class Service:
    stack: Stack
    client: Client
    directory: Path
    started: list[ServerProcess] = field(default_factory=list[ServerProcess])

    def start_worker(self) -> ServerProcess:
        """A worker that the test ends as it likes; what is left of it is killed after the test."""
        self.started.append(self.stack.start_worker())
        return self.started[-1]

    def submit(self, name: str, **script: object) -> Job:
        return self.client.submit(scripted(**script), str(self.directory / name), to="universal")

    def target(self, name: str) -> Path:
        return self.directory / name

    def wait_for_units(self, name: str, count: int) -> None:
        wait_until(lambda: len(units_done(self.target(name))) >= count)


@pytest.fixture(scope="module", params=["embedded", "celery"])
def api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[Stack, Client]]:
    """An API of each driver, which has no worker: each test starts its own."""
    stack = new_stack(request.param, tmp_path_factory.mktemp("drivers"), request)
    with stack.api() as url, client_of(url) as client:
        yield stack, client


@pytest.fixture
def service(api: tuple[Stack, Client], tmp_path: Path) -> Generator[Service]:
    found = Service(*api, tmp_path)
    try:
        yield found
    finally:
        for process in found.started:
            end_tree(process)


@pytest.fixture
def worker(service: Service) -> Generator[ServerProcess]:
    with service.stack.worker() as process:
        yield process


def test_jobs_end_and_every_observer_agrees(service: Service, worker: ServerProcess) -> None:
    del worker
    job = service.submit("out", units=8, unit_s=0.1)
    assert job.state is JobState.QUEUED
    waited: list[Job] = []
    waiter = threading.Thread(target=lambda: waited.append(service.client.wait(job.id, timeout_s=PATIENCE_S)))
    waiter.start()
    events = list(service.client.watch(job.id))
    waiter.join(30)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    states = [event.state.value for event in events if event.kind == "state"]
    assert states == ["QUEUED", "PLANNING", "RUNNING", "VERIFYING", "SUCCEEDED"]
    assert waited[0].state is JobState.SUCCEEDED
    assert waited[0] == service.client.get(job.id)
    assert waited[0].attempt == 1
    assert list(service.client.watch(job.id, after_seq=2)) == events[2:]
    progress = [event.progress.bytes_done for event in events if event.progress]
    assert progress == sorted(progress)
    result = service.client.result(job.id)
    assert result == waited[0].result
    assert (service.target("out") / "output").stat().st_size == 8000

    # The same worker, now with what goes wrong in a job.
    refused = service.client.wait(service.submit("bad", fail="checkpoint.incomplete").id)
    assert refused.state is JobState.FAILED
    with pytest.raises(ReshardError) as caught:
        service.client.result(refused.id)
    assert caught.value.code == "checkpoint.incomplete"
    assert caught.value.fix == "change the script"

    bug = service.client.wait(service.submit("bug", bug=1).id)
    assert bug.error is not None
    assert bug.error.code == "internal.error"
    assert "secret" not in bug.model_dump_json()

    passing = service.client.wait(service.submit("passing", fail="storage.unavailable", times=1, at=2).id)
    assert passing.state is JobState.SUCCEEDED
    assert passing.attempt == 2
    assert [unit for unit, _ in units_done(service.target("passing"))] == [0, 1, 2, 3]

    crashed = service.client.wait(service.submit("crash", crash=11, at=1).id, timeout_s=PATIENCE_S)
    assert crashed.error is not None
    assert crashed.error.code == "job.attempts_exhausted"
    assert crashed.attempt == 3


def test_cancel_stops_a_running_job_and_removes_what_it_left(service: Service, worker: ServerProcess) -> None:
    # One engine that stops when asked, and one that does not listen.
    for name, script in (("polite", {}), ("deaf", {"deaf": 1})):
        # The engine of either job would work for 200 s.
        job = service.submit(name, units=4000, unit_s=0.05, **script)
        service.wait_for_units(name, 3)
        assert service.client.cancel(job.id).state is JobState.CANCELLING
        ended = service.client.wait(job.id, timeout_s=PATIENCE_S)
        assert ended.state is JobState.CANCELLED
        assert not service.target(name).exists()
        assert not journal_of(job.request).exists()
        assert runners_of(worker.pid) == []
        assert service.client.cancel(job.id).state is JobState.CANCELLED
        with pytest.raises(JobError, match=r"job\.cancelled"):
            service.client.result(job.id)
    # A job that nobody has begun.
    blocker = service.submit("blocker", units=4000, unit_s=0.05)
    service.wait_for_units("blocker", 1)
    queued = service.submit("queued")
    assert service.client.cancel(queued.id).state is JobState.CANCELLED
    service.client.cancel(blocker.id)
    assert service.client.wait(blocker.id, timeout_s=PATIENCE_S).state is JobState.CANCELLED
    assert units_done(service.target("queued")) == []


def test_a_killed_worker_costs_no_finished_unit(service: Service) -> None:
    job = service.submit("out", units=20, held=6)
    first = service.start_worker()
    service.wait_for_units("out", 6)
    victims = tree_of(first.pid)
    assert len(runners_of(first.pid)) == 1
    first.kill()
    wait_until(lambda: not any(alive(victim) for victim in victims), timeout_s=PATIENCE_S)
    killed_at = time.monotonic()
    release(service.target("out"))
    with service.stack.worker():
        ended = service.client.wait(job.id, timeout_s=PATIENCE_S)
    assert ended.state is JobState.SUCCEEDED
    assert ended.attempt == 2
    assert time.monotonic() - killed_at > LEASE_S / 2
    units = [unit for unit, _ in units_done(service.target("out"))]
    assert units == list(range(20))
    assert len({pid for _, pid in units_done(service.target("out"))}) == 2


def test_a_paused_worker_is_fenced(service: Service) -> None:
    job = service.submit("out", units=10, held=2)
    zombie = service.start_worker()
    service.wait_for_units("out", 2)
    stopped = tree_of(zombie.pid)
    pause(stopped, database_url=service.stack.database_url)
    release(service.target("out"))
    with service.stack.worker():
        ended = service.client.wait(job.id, timeout_s=PATIENCE_S)
        assert ended.state is JobState.SUCCEEDED
        assert ended.attempt == 2
        resume(stopped)
        wait_until(lambda: runners_of(zombie.pid) == [])
        time.sleep(0.5)
        assert service.client.get(job.id) == ended
    assert len((service.target("out") / "commits").read_text().split()) == 1


def test_a_paused_supervisor_cannot_commit(service: Service) -> None:
    # Only the supervisor sleeps; its engine works on, past the lease, up to the commit.
    job = service.submit("out", units=4, held=1, verify_s=0.3)
    zombie = service.start_worker()
    service.wait_for_units("out", 1)
    runner = runners_of(zombie.pid)[0]
    supervisor = runner.parent()
    assert supervisor is not None
    pause([supervisor], database_url=service.stack.database_url)
    release(service.target("out"))
    wait_until(lambda: len(units_done(service.target("out"))) == 4)
    time.sleep(1.0)
    assert alive(runner)
    assert not service.target("out").exists()
    with service.stack.worker():
        assert service.client.wait(job.id, timeout_s=PATIENCE_S).state is JobState.SUCCEEDED
    resume([supervisor])
    wait_until(lambda: not alive(runner))
    assert len((service.target("out") / "commits").read_text().split()) == 1


def test_a_stopped_worker_gives_its_job_back(service: Service) -> None:
    job = service.submit("out", units=20, held=3)
    first = service.start_worker()
    service.wait_for_units("out", 3)
    assert first.stop(signal.SIGTERM) == 0
    given_back = service.client.get(job.id)
    assert given_back.state is JobState.QUEUED
    assert given_back.worker is None
    release(service.target("out"))
    with service.stack.worker():
        ended = service.client.wait(job.id, timeout_s=PATIENCE_S)
    assert ended.state is JobState.SUCCEEDED
    assert [unit for unit, _ in units_done(service.target("out"))] == list(range(20))
    events: list[JobEvent] = list(service.client.watch(job.id))
    states = [event.state.value for event in events if event.kind == "state"]
    assert states[:4] == ["QUEUED", "PLANNING", "RUNNING", "QUEUED"]


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_failed_job_is_retried_and_watched_to_its_second_end(service: Service, worker: ServerProcess) -> None:
    del worker
    job = service.submit("again", units=4, fail="checkpoint.incomplete", times=1, at=2)
    failed = service.client.wait(job.id)
    assert failed.state is JobState.FAILED
    assert failed.leftovers_until is not None
    first = list(service.client.watch(job.id))
    assert first[-1].state is JobState.FAILED
    assert service.client.retry(job.id).retries == 1
    events = list(service.client.watch(job.id))
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert events[-1].state is JobState.SUCCEEDED
    assert service.client.get(job.id).leftovers_until is not None, "attempts were lost on the way"
    assert [unit for unit, _ in units_done(service.target("again"))] == [0, 1, 2, 3]
    with pytest.raises(JobError, match=r"job\.finished"):
        service.client.retry(job.id)


def test_cancel_of_a_failed_job_removes_its_files(service: Service, worker: ServerProcess) -> None:
    del worker
    job = service.client.wait(service.submit("over", fail="checkpoint.incomplete", at=2).id)
    assert journal_of(job.request).exists()
    assert service.client.cancel(job.id).state is JobState.FAILED
    wait_until(lambda: not journal_of(job.request).exists())
    wait_until(lambda: service.client.get(job.id).leftovers_until is None)
    live = service.client.workers()
    assert live
    assert not [w for w in live if w.state == "quarantined"]
