"""The probe of a worker: it tells one that works, or waits for its broker, from one that hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from celery import Celery
from checkpoints import gpt_parameters, write_zero_checkpoint

from house.waiting import PATIENCE_S, wait_until
from reshard.api.client import Client
from reshard.choices import JobState
from reshard_jobs.queue.doorbell import DOORBELL_QUEUE
from reshard_worker.alive import LOOP_S
from servers.redis import redis_server
from servers.s3 import S3Server
from servers.scripted import scripted
from servers.stack import Stack, client_of, pause, resume

LIMIT_S = 8.0


def probe(tmp: Path, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
    (name,) = [path.stem.removeprefix("worker-") for path in tmp.glob("reshard-*/*.loop")]
    argv = [sys.executable, "-m", "reshard_worker.alive", "--name", name, "--limit", str(limit_s)]
    return subprocess.run(argv, env={**os.environ, "TMPDIR": str(tmp)}, capture_output=True, text=True, timeout=180)


@pytest.mark.timeout(240)
def test_a_worker_that_hangs_is_told_from_one_that_works(
    make_stack: Callable[[str], Stack], tmp_path: Path, server_directory: Path
) -> None:
    stack = make_stack("celery")
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    stack.extra = {"TMPDIR": str(tmp), "RESHARD_LEASE_S": "60"}
    with redis_server(server_directory / "alive") as broker:
        stack.broker_url = broker
        with stack.api() as url, client_of(url) as client, stack.worker() as worker:
            assert probe(tmp).returncode == 0
            job = client.submit(scripted(units=4000, unit_s=0.1), str(tmp_path / "out"), to="universal")
            wait_until(lambda: client.get(job.id).state is JobState.RUNNING)
            time.sleep(LIMIT_S + 1)
            assert probe(tmp).returncode == 0, "it works"
            (pool,) = [
                child
                for child in psutil.Process(worker.pid).children()
                if any("spawn_main" in word or "billiard.spawn" in word for word in child.cmdline())
            ]
            pause([pool], database_url=stack.database_url)
            wait_until(lambda: probe(tmp).returncode == 1)
            assert "supervisor of its job" in probe(tmp).stdout
            resume([pool])
            wait_until(lambda: probe(tmp).returncode == 0)
            main = psutil.Process(worker.pid)
            main.send_signal(signal.SIGSTOP)
            wait_until(lambda: probe(tmp).returncode == 1)
            assert "its loop has not run" in probe(tmp).stdout
            main.send_signal(signal.SIGCONT)
            wait_until(lambda: probe(tmp).returncode == 0)
            client.cancel(job.id)
            assert client.wait(job.id, timeout_s=PATIENCE_S).state is JobState.CANCELLED


@pytest.mark.timeout(120)
def test_a_worker_without_its_broker_is_alive(
    make_stack: Callable[[str], Stack], tmp_path: Path, server_directory: Path
) -> None:
    stack = make_stack("celery")
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    stack.extra = {"TMPDIR": str(tmp)}
    server = redis_server(server_directory / "away")
    stack.broker_url = server.__enter__()
    with stack.worker():
        assert probe(tmp).returncode == 0
        server.__exit__(None, None, None)
        time.sleep(6)
        for _ in range(5):
            assert probe(tmp, limit_s=4.0).returncode == 0
            time.sleep(1)


CONTROLLED = """
import sys
if "-m" in sys.orig_argv and "celery" in sys.orig_argv:
    from celery.worker.consumer.control import Control
    Control.include_if = lambda self, consumer: True
"""
"""A worker whose consumption a test can stop, as a fault of Celery or of its transport would."""


@pytest.mark.timeout(120)
def test_a_worker_that_takes_no_messages_is_not_alive(
    make_stack: Callable[[str], Stack], tmp_path: Path, server_directory: Path
) -> None:
    stack = make_stack("celery")
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    (tmp_path / "sitecustomize.py").write_text(CONTROLLED)
    stack.extra = {"TMPDIR": str(tmp), "PYTHONPATH": str(tmp_path)}
    with redis_server(server_directory / "deaf") as broker, Celery(broker=broker) as operator:
        stack.broker_url = broker
        with stack.api() as url, client_of(url) as client, stack.worker():
            assert probe(tmp).returncode == 0
            wait_until(lambda: len(client.workers()) == 1)
            operator.control.cancel_consumer(DOORBELL_QUEUE, reply=True, timeout=5.0)
            wait_until(lambda: probe(tmp).returncode == 1)
            assert "takes no messages" in probe(tmp).stdout
            wait_until(lambda: not client.workers())
            operator.control.add_consumer(DOORBELL_QUEUE, reply=True, timeout=5.0)
            wait_until(lambda: probe(tmp).returncode == 0)
            wait_until(lambda: len(client.workers()) == 1)
            # A worker that waits for the end of its job takes none either, and is alive.
            job = client.submit(scripted(units=4000, unit_s=0.05), str(tmp_path / "out"), to="universal")
            wait_until(lambda: client.get(job.id).state is JobState.RUNNING)
            time.sleep(2 * LOOP_S)
            assert probe(tmp).returncode == 0
            assert len(client.workers()) == 1
            client.cancel(job.id)
            assert client.wait(job.id, timeout_s=PATIENCE_S).state is JobState.CANCELLED


def test_no_worker_is_no_live_worker(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "reshard_worker.alive", "--name", "nobody"]
    done = subprocess.run(argv, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no worker has written" in done.stdout


def test_the_probe_is_cheap() -> None:
    argv = [sys.executable, "-X", "importtime", "-m", "reshard_worker.alive", "--name", "nobody"]
    said = subprocess.run(argv, capture_output=True, text=True).stderr
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in said.splitlines()}
    assert not loaded & {"torch", "celery", "pydantic", "sqlalchemy", "numpy", "typer", "reshard_jobs"}, loaded


# A worker with wrong S3 credentials beside a right one: its fault is not a fault of the jobs.


BUCKET = "bad-hosts"


@pytest.fixture(scope="module")
def checkpoint(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("source")
    write_zero_checkpoint(directory / "run", gpt_parameters(32, 1, 64), stage=3, ranks=2)
    s3.make_bucket(BUCKET)
    s3.upload(directory / "run", BUCKET, "run")
    return f"s3://{BUCKET}/run"


def states(client: Client) -> list[str]:
    return sorted(worker.state for worker in client.workers())


@pytest.mark.timeout(240)
def test_jobs_end_on_the_worker_with_the_right_credentials(
    make_stack: Callable[[str], Stack], s3: S3Server, checkpoint: str, tmp_path: Path
) -> None:
    stack = make_stack("celery")
    stack.scripted = False
    stack.extra = {**s3.env(), "RESHARD_LEASE_S": "10", "RESHARD_QUARANTINE_S": "3600"}
    bad = {"AWS_SECRET_ACCESS_KEY": "wrong"}
    targets = f"s3://{BUCKET}/{tmp_path.name}"
    with stack.api() as url, client_of(url) as client, stack.worker(bad) as worker:
        # The bad worker alone has fetched nothing yet: it has the queue to itself while the good one starts.
        wait_until(lambda: states(client) == ["idle"])
        with stack.worker():
            wait_until(lambda: states(client) == ["idle", "idle"])
            jobs = [client.submit(checkpoint, f"{targets}/out{n}", to="universal", max_attempts=1) for n in range(10)]
            ended = [client.wait(job.id, timeout_s=PATIENCE_S) for job in jobs]
            assert [job.state for job in ended] == [JobState.SUCCEEDED] * len(jobs), [job.error for job in ended]
            if "quarantine: 3 jobs in a row" not in worker.log.read_text():
                # The good worker was so fast that the bad one met fewer than three jobs.
                assert sum(job.attempt - 1 for job in ended) < 3
            else:
                assert states(client) == ["idle", "quarantined"]
                metrics = httpx.get(f"{url}/metrics").text
                assert 'reshard_workers{state="quarantined"} 1.0' in metrics


@pytest.mark.timeout(240)
def test_a_bad_worker_alone_does_not_drain_the_queue(
    make_stack: Callable[[str], Stack], s3: S3Server, checkpoint: str, tmp_path: Path
) -> None:
    stack = make_stack("celery")
    stack.scripted = False
    stack.extra = {**s3.env(), "RESHARD_LEASE_S": "10", "RESHARD_QUARANTINE_S": "60"}
    targets = f"s3://{BUCKET}/{tmp_path.name}"
    with stack.api() as url, client_of(url) as client:
        with stack.worker({"AWS_SECRET_ACCESS_KEY": "wrong"}) as worker:
            wait_until(lambda: states(client) == ["idle"])
            jobs = [client.submit(checkpoint, f"{targets}/out{n}", to="universal") for n in range(8)]
            wait_until(lambda: states(client) == ["quarantined"], timeout_s=PATIENCE_S)
            time.sleep(2)
            failed = client.list(states=(JobState.FAILED,)).jobs
            assert len(failed) == 3, "with nobody else to ask, three jobs are lost, and the others wait"
            assert "quarantine: 3 jobs in a row" in worker.log.read_text()
        with stack.worker():
            for job in failed:
                client.retry(job.id)
            ended = [client.wait(job.id, timeout_s=PATIENCE_S) for job in jobs]
            assert [job.state for job in ended] == [JobState.SUCCEEDED] * len(jobs), [job.error for job in ended]
