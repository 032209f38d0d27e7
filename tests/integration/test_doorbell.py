"""A message in the broker means "there is work": few of them, no echoes, no worker idle beside work."""

from __future__ import annotations

import json
import os
import secrets
import signal
import statistics
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis as redis_client
from celery import Celery

from house.waiting import PATIENCE_S, wait_until
from reshard.choices import JobState, TargetFormat
from reshard.models.jobs import ConvertRequest, Job
from reshard.options import SourceSpec
from reshard_jobs.database import Database
from reshard_jobs.queue.doorbell import DOORBELL_QUEUE, DOORBELL_TASK
from reshard_jobs.queue.store import JobStore
from reshard_jobs.statistics import JobStatistics
from reshard_service.doorbell import CeleryDoorbell
from servers.postgres import PostgresServer
from servers.process import ServerProcess
from servers.scripted import release, scripted
from servers.stack import Stack, end_tree, runners_of, tree_of

UNHURRIED = {"RESHARD_LEASE_S": "60", "RESHARD_HEARTBEAT_S": "10", "RESHARD_REAPER_S": "600"}
"""Workers whose reaper does not sweep within a test: what happens here happens by the doorbell alone."""
RINGING = 4
"""Processes that ring at once: two workers, what submits, and one reaper."""


@dataclass
class Service:
    """Jobs straight in their database, and a real broker."""

    stack: Stack
    directory: Path

    def __post_init__(self) -> None:
        self._database = Database(self.stack.database_url)
        self.store = JobStore(self._database)
        self.statistics = JobStatistics(self._database)
        self.doorbell = CeleryDoorbell(self.stack.broker_url)
        self.broker = redis_client.Redis.from_url(self.stack.broker_url)
        self.broker.flushdb()
        self._sent_before = self._pushes()

    def close(self) -> None:
        self._database.close()
        self.broker.close()

    def submit(self, name: str, *, target: str = "", ring: bool = True, **script: object) -> Job:
        source = SourceSpec(url=scripted(**script))
        place = str(self.directory / (target or name))
        job = self.store.create(ConvertRequest(source=source, target=place, to=TargetFormat.UNIVERSAL))
        if ring:
            self.doorbell.ring()
        return job

    def ended(self, job: Job, *, timeout_s: float = 60.0) -> Job:
        deadline = time.monotonic() + timeout_s
        while not (found := self.store.get(job.id)).done:
            assert time.monotonic() < deadline, f"job {job.id} is {found.state}"
            time.sleep(0.05)
        return found

    def waiting(self) -> int:
        return int(self.broker.llen(DOORBELL_QUEUE))

    def sent(self) -> int:
        """Messages that were sent to any queue since this object was made."""
        return self._pushes() - self._sent_before

    def _pushes(self) -> int:
        return int(self.broker.info("commandstats").get("cmdstat_lpush", {}).get("calls", 0))


@pytest.fixture
def service(tmp_path: Path, postgres: PostgresServer, redis: str) -> Generator[Service]:
    stack = Stack(tmp_path / "logs", postgres.new_database(), redis)
    found = Service(stack, tmp_path)
    yield found
    found.close()


@pytest.fixture
def two_workers(service: Service) -> Generator[list[ServerProcess]]:
    started = [service.stack.start_worker(UNHURRIED) for _ in range(2)]
    yield started
    for process in started:
        end_tree(process)


def wait_s(job: Job) -> float:
    """How long the job waited for a worker."""
    assert job.started_at is not None
    return (job.started_at - job.created_at).total_seconds()


def flood(service: Service, count: int) -> dict[str, float]:
    """Submit many jobs at once, then one more behind them: messages and waits."""
    jobs = [service.submit(f"out{number}", units=1) for number in range(count)]
    most = 0
    while service.statistics.count_by_state()[JobState.SUCCEEDED] < count:
        most = max(most, service.waiting())
        time.sleep(0.05)
    ended = [service.store.get(job.id) for job in jobs]
    # Not the end of the last job alone: its worker rings, or not, right after it.
    time.sleep(0.5)
    found = {"sent": service.sent(), "most": most, "left": service.waiting()}
    waits = [wait_s(job) for job in ended]
    later = service.ended(service.submit("later", units=1))
    assert len({job.worker for job in ended}) == 2
    return {**found, "longest_s": max(waits), "median_s": statistics.median(waits), "later_s": wait_s(later)}


def test_many_jobs_leave_few_messages_and_no_worker_idle(service: Service, two_workers: list[ServerProcess]) -> None:
    found = flood(service, 12)
    assert found["most"] <= RINGING
    assert found["left"] <= RINGING
    # At a job's submission, its claim and its end, and each only where none waits.
    assert found["sent"] <= 3 * 12
    assert found["later_s"] < 60, "only a reaper heard of it"

    # A job that waits for another one's target is heard of at that one's end.
    first = service.submit("shared", units=4, held=1)
    second = service.submit("shared2", target="shared", units=1)
    release(service.directory / "shared")
    assert service.ended(first).state is JobState.SUCCEEDED
    assert service.ended(second).state is JobState.SUCCEEDED

    # A worker that is told to stop rings for the job that it gives back.
    given_back = service.submit("long", units=4000, unit_s=0.05)
    owner = _owner_of_a_runner(two_workers)
    assert owner.stop(signal.SIGTERM) == 0
    wait_until(lambda: service.store.get(given_back.id).attempt >= 2, what=lambda: "nobody heard of it")


def test_a_lost_message_is_rung_again_and_a_message_too_many_costs_no_process(service: Service) -> None:
    with service.stack.worker({**UNHURRIED, "RESHARD_REAPER_S": "1"}) as worker:
        assert service.ended(service.submit("unheard", ring=False)).state is JobState.SUCCEEDED
        # Celery counts messages: fifty with nothing to do once cost a start of the pool process.
        before = _pool_processes(worker)
        assert len(before) == 1
        with Celery(broker=service.stack.broker_url) as sender:
            for _ in range(120):
                sender.send_task(DOORBELL_TASK, queue=DOORBELL_QUEUE, ignore_result=True)
        # Any message is good for any job: this one does not wait for the end of those before its own.
        between = service.ended(service.submit("between", units=1))
        assert between.state is JobState.SUCCEEDED
        assert wait_s(between) < 60
        wait_until(lambda: not service.waiting(), timeout_s=PATIENCE_S)
        assert service.ended(service.submit("after", units=1)).state is JobState.SUCCEEDED
        assert _pool_processes(worker) == before
        # A service with nothing to do says nothing.
        sent = service.sent()
        time.sleep(2.5)
        assert service.sent() == sent


def _message(**changes: Any) -> str:
    """A message as Celery writes it, with changes."""
    properties = {
        "correlation_id": "c",
        "delivery_mode": 2,
        "delivery_info": {"exchange": "", "routing_key": DOORBELL_QUEUE},
        "priority": 0,
        "body_encoding": "base64",
        "delivery_tag": secrets.token_hex(8),
    }
    whole = {
        "body": "W1tdLCB7fSwge31d",
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"lang": "py", "task": DOORBELL_TASK, "id": "i", "root_id": "i", "retries": 0},
        "properties": properties,
    }
    changed = {**whole, **{name: value for name, value in changes.items() if name in whole}}
    changed["properties"] = changes.get("properties", {**properties, **changes})
    return json.dumps(changed)


FOREIGN = (
    *(b"\xff\xfe\x00", b"", b"hello", b"[" * 100_000, b"5", b"null", b"[]", b"{}", b'"work"', b'{"properties": 1}'),
    *(_message(properties=value) for value in (None, [], {"delivery_tag": "t"})),
    *(_message(headers=value) for value in (None, 5, [], {}, {"task": []}, {"task": DOORBELL_TASK}, {"task": "other"})),
    *(_message(body=value) for value in (5, "%%%", "e30=", "W10=", [], None)),
    *(_message(delivery_tag=value) for value in (None, [], {"a": 1}, 5)),
    *(_message(delivery_info=value) for value in (None, [], {})),
    *(_message(body_encoding=value) for value in ("rot13", 5)),
    *(_message(**{"content-type": value}) for value in ("application/x-python-serialize", 5, None)),
    _message(**{"content-encoding": "nonsense"}),
)
"""What another program, an operator or damage may leave in the queue."""


def test_a_worker_outlives_what_is_no_message(service: Service) -> None:
    with service.stack.worker(UNHURRIED) as worker:
        for entry in FOREIGN:
            service.broker.lpush(DOORBELL_QUEUE, entry)
            deadline = time.monotonic() + PATIENCE_S
            while service.waiting():
                assert worker.popen.poll() is None, f"{entry[:80]!r} ended the worker"
                assert time.monotonic() < deadline, f"{entry[:80]!r} stopped the worker"
                time.sleep(0.02)
        assert service.ended(service.submit("after", units=1)).state is JobState.SUCCEEDED
        assert worker.popen.poll() is None
    assert "is not a message" in worker.log.read_text()
    assert service.broker.hlen("unacked") == 0


def test_nobody_controls_a_worker_through_the_broker(service: Service) -> None:
    with service.stack.worker(UNHURRIED) as worker:
        with Celery(broker=service.stack.broker_url) as sender:
            sender.control.cancel_consumer(DOORBELL_QUEUE)
            sender.control.pool_shrink(1)
            sender.control.broadcast("shutdown")
            assert sender.control.ping(timeout=1.0) == []
        for number in range(2):
            assert service.ended(service.submit(f"out{number}", units=1)).state is JobState.SUCCEEDED
        assert worker.popen.poll() is None


DELAYING = (
    {"eta": "2100-01-01T00:00:00+00:00"},
    {"expires": "2000-01-01T00:00:00+00:00"},
    {"expires": "2100-01-01T00:00:00+00:00", "eta": "2099-01-01T00:00:00+00:00", "retries": 5},
    {"timelimit": [0.01, 0.01]},
)
"""Headers with which Celery puts a message off, drops it, or ends the process that works for it."""


@pytest.mark.parametrize("headers", DELAYING, ids=[" ".join(headers) for headers in DELAYING])
def test_a_forged_message_rings_like_any_other(service: Service, headers: dict[str, Any]) -> None:
    """It waits while a job is submitted, so nobody rings for that job once more."""
    with service.stack.worker(UNHURRIED) as worker:
        first = service.submit("first", units=40, held=1)
        while service.store.get(first.id).state is not JobState.RUNNING:
            assert worker.popen.poll() is None
            time.sleep(0.02)
        before = _pool_processes(worker)
        named = {"lang": "py", "task": DOORBELL_TASK, "id": "i", "root_id": "i", "retries": 0}
        service.broker.delete(DOORBELL_QUEUE)
        service.broker.lpush(DOORBELL_QUEUE, _message(headers={**named, **headers}))
        second = service.submit("second", units=4, unit_s=0.05)
        release(service.directory / "first")
        assert service.ended(first).state is JobState.SUCCEEDED
        assert service.ended(second).state is JobState.SUCCEEDED
        assert service.store.get(second.id).attempt == 1
        assert _pool_processes(worker) == before
        assert service.broker.hlen("unacked") == 0


SLOW_START = """
import sys, time
if any("billiard" in word for word in sys.orig_argv):
    time.sleep(6)
"""


def test_a_host_on_which_imports_take_long(service: Service, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(SLOW_START)
    with service.stack.worker({**UNHURRIED, "PYTHONPATH": str(slow)}) as worker:
        assert service.ended(service.submit("first")).state is JobState.SUCCEEDED
        # Celery times the pool processes that follow the first: after a recycling, or because one was killed.
        (process,) = _pool_processes(worker)
        os.kill(process, signal.SIGKILL)
        began = time.monotonic()
        assert service.ended(service.submit("second")).state is JobState.SUCCEEDED
        assert time.monotonic() - began > 5, "the pool process was not slow"
        assert process not in _pool_processes(worker)
        assert "Timed out waiting for UP message" not in worker.log.read_text()


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_208_jobs_over_two_workers(service: Service, two_workers: list[ServerProcess]) -> None:
    del two_workers
    found = flood(service, 208)
    print(found)
    assert found["left"] <= RINGING
    assert found["most"] <= RINGING
    assert found["later_s"] < 60, "only a reaper heard of it"


def _owner_of_a_runner(workers: list[ServerProcess]) -> ServerProcess:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for worker in workers:
            if runners_of(worker.pid):
                return worker
        time.sleep(0.05)
    raise AssertionError("no worker runs a job")


def _pool_processes(worker: ServerProcess) -> list[int]:
    found: list[int] = []
    for process in tree_of(worker.pid)[1:]:
        try:
            if any("billiard.spawn" in word for word in process.cmdline()):
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found
