"""A worker with wrong S3 credentials beside a right one: its fault is not a fault of the jobs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from checkpoints import gpt_parameters, write_zero_checkpoint

from reshard.api.client import Client
from reshard.choices import JobState
from servers.s3 import S3Server
from servers.stack import Stack, client_of

BUCKET = "bad-hosts"


@pytest.fixture(scope="module")
def checkpoint(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("source")
    write_zero_checkpoint(directory / "run", gpt_parameters(32, 1, 64), stage=3, ranks=2)
    s3.make_bucket(BUCKET)
    s3.upload(directory / "run", BUCKET, "run")
    return f"s3://{BUCKET}/run"


def wait_until(ready: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


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
            ended = [client.wait(job.id, timeout_s=90) for job in jobs]
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
            wait_until(lambda: states(client) == ["quarantined"], timeout_s=60)
            time.sleep(2)
            failed = client.list(states=(JobState.FAILED,)).jobs
            assert len(failed) == 3, "with nobody else to ask, three jobs are lost, and the others wait"
            assert "quarantine: 3 jobs in a row" in worker.log.read_text()
        with stack.worker():
            for job in failed:
                client.retry(job.id)
            ended = [client.wait(job.id, timeout_s=90) for job in jobs]
            assert [job.state for job in ended] == [JobState.SUCCEEDED] * len(jobs), [job.error for job in ended]
