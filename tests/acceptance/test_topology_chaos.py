"""The whole topology under faults, with helpers, and beside it a disk that fills: every byte is right, nothing stays.

PostgreSQL, Redis, SeaweedFS behind a proxy, the API and three Celery workers that help one another. Workers are killed,
stopped and paused for longer than a lease; Redis forgets everything; PostgreSQL is away; the store hangs.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import redis as redis_client

from house.conversions import convert
from house.measured import say
from house.seeds import run_seed
from house.sources import zero_source
from house.waiting import PATIENCE_S, wait_until
from reshard.api.client import Client
from reshard.choices import JobState, TargetFormat
from reshard.errors import ReshardError
from reshard.models.jobs import Job
from reshard_engine.integrity.manifest import MANIFEST_NAME
from servers.postgres import PostgresServer
from servers.process import ServerProcess
from servers.proxy import LoggingProxy, logging_proxy
from servers.s3 import S3Server
from servers.stack import LEASE_S, Stack, client_of, end_tree, tree_of

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

PARAMETERS = [(f"layer.{n}.weight", (256, 513)) for n in range(24)]
OPTIONS = {"to": TargetFormat.SAFETENSORS, "part_bytes": 5 << 20, "threads": 1}
JOBS, FULL = 24, 4
"""Conversions under faults; and those onto a disk that fills while they run."""
DISK_BYTES = 24 << 20
FREED_S = 60.0


@dataclass
class Site:
    """A service with three Celery workers, its stores, and what was done to them."""

    stack: Stack
    client: Client
    s3: S3Server
    proxy: LoggingProxy
    postgres: PostgresServer
    bucket: str
    targets: Path
    draw: random.Random
    workers: list[ServerProcess] = field(default_factory=list[ServerProcess])
    done: Counter[str] = field(default_factory=Counter[str])
    due: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])

    def start_worker(self) -> None:
        self.workers.append(self.stack.start_worker(self.s3.env(self.proxy.endpoint)))

    def strike(self) -> None:
        """The next fault: all of them come in an order that is drawn, and then again in another order."""
        if not self.due:
            self.due = [self.kill, self.kill, self.stop, self.pause, self.forget, self.no_database, self.hang]
            self.draw.shuffle(self.due)
        fault = self.due.pop()
        fault()
        self.done[fault.__name__] += 1

    def kill(self) -> None:
        end_tree(self.workers.pop(self.draw.randrange(len(self.workers))))
        self.start_worker()

    def stop(self) -> None:
        self.workers.pop(self.draw.randrange(len(self.workers))).stop()
        self.start_worker()

    def pause(self) -> None:
        processes = tree_of(self.draw.choice(self.workers).pid)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        time.sleep(2 * LEASE_S)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def forget(self) -> None:
        redis_client.Redis.from_url(self.stack.broker_url).flushdb()  # pyright: ignore[reportUnknownMemberType]

    def no_database(self) -> None:
        with self.postgres.away():
            time.sleep(1.5)

    def hang(self) -> None:
        self.proxy.pause_s = lambda _method, _target: 3.0
        time.sleep(3)
        self.proxy.pause_s = slowly

    def ended(self, job: Job, timeout_s: float = 400.0) -> Job:
        """A job at its end; the API may be without its database for a while."""
        deadline = time.monotonic() + timeout_s
        while True:
            with suppress(ReshardError):
                found = self.client.get(job.id)
                if found.done:
                    return found
            assert time.monotonic() < deadline, f"{job.id} has not ended"
            time.sleep(0.2)


def slowly(method: str, target: str) -> float:
    """Parts go up slowly, so that faults meet jobs at work."""
    return 0.3 if method == "PUT" and "partNumber" in target else 0.0


source = zero_source(PARAMETERS, stage=2)


@pytest.fixture
def site(
    make_stack: Callable[[str], Stack], s3: S3Server, postgres: PostgresServer, source: Path, tmp_path: Path
) -> Generator[Site]:
    seed = run_seed()
    stack = make_stack("celery")
    stack.scripted = False
    stack.extra = {"RESHARD_SHARE_BYTES": "1", "RESHARD_MAX_WORKERS": "3"}
    bucket = f"chaos-{tmp_path.name.replace('_', '-').lower()[:30]}-{os.getpid()}"
    s3.make_bucket(bucket)
    s3.upload(source, bucket, "run")
    (tmp_path / "targets").mkdir()
    with logging_proxy(s3.endpoint) as proxy, stack.api(s3.env()) as url, client_of(url) as client:
        proxy.pause_s = slowly
        found = Site(stack, client, s3, proxy, postgres, bucket, tmp_path / "targets", random.Random(seed))
        try:
            for _ in range(3):
                found.start_worker()
            yield found
        finally:
            for process in found.workers:
                end_tree(process)


def test_every_byte_is_right_and_nothing_stays(site: Site, source: Path, tmp_path: Path) -> None:
    expected = tmp_path / "expected"
    convert(source, expected, **OPTIONS)
    wanted = {p.name: p.read_bytes() for p in expected.iterdir() if p.name != MANIFEST_NAME}
    shutil.rmtree(expected)
    places = [f"s3://{site.bucket}/out{n}" if n % 2 else str(site.targets / f"out{n}") for n in range(JOBS)]
    jobs = [site.client.submit(f"s3://{site.bucket}/run", place, **OPTIONS, max_attempts=20) for place in places]
    began = time.monotonic()
    while not all_ended(site, jobs):
        assert time.monotonic() - began < 900, site.done
        site.strike()
        time.sleep(site.draw.uniform(0.2, 1.5))
    ended = [site.ended(job) for job in jobs]
    assert Counter(job.state for job in ended) == {JobState.SUCCEEDED: JOBS}, [job.error for job in ended if job.error]
    for number in range(JOBS):
        if number % 2:
            found = site.s3.read_all(site.bucket, f"out{number}/")
        else:
            found = {p.name: p.read_bytes() for p in (site.targets / f"out{number}").iterdir()}
        assert {name: data for name, data in found.items() if name != MANIFEST_NAME} == wanted, number
    wait_until(lambda: strays(site) == [], timeout_s=PATIENCE_S, what=lambda: f"strays: {strays(site)}")
    helped = sum(len(job.workers) > 1 for job in ended)
    say(
        f"topology chaos: {JOBS} conversions, {sum(site.done.values())} faults {dict(site.done)} in "
        f"{time.monotonic() - began:.0f} s, {sum(job.attempt for job in ended)} attempts, helpers in {helped}, 0 strays"
    )
    assert len(site.done) >= 4
    assert helped


@pytest.fixture
def disk(tmp_path: Path) -> Generator[Path]:
    """A small disk of its own."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(directory)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root, and the right to mount")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def test_a_disk_that_fills_is_freed_within_a_minute(site: Site, disk: Path) -> None:
    """Somebody else takes the room while the job and its helpers write; no worker can do it, and all of it is freed."""
    site.proxy.pause_s = lambda method, _target: 0.3 if method == "GET" else 0.0
    took: list[float] = []
    for number in range(FULL):
        job = site.client.submit(f"s3://{site.bucket}/run", str(disk / f"out{number}"), **OPTIONS)
        wait_until(lambda: used(disk) > 0, timeout_s=PATIENCE_S, what=lambda: "nothing was written")
        filler = disk / "filler"
        with suppress(OSError), filler.open("wb") as file:
            while file.write(bytes(1 << 16)):
                file.flush()
        ended = site.ended(job)
        failed_at = time.monotonic()
        assert ended.state is JobState.FAILED
        assert ended.error is not None
        assert ended.error.code in {"storage.no_space", "storage.no_room"}, ended.error
        filler.unlink()
        wait_until(lambda: os.listdir(disk) == [], timeout_s=FREED_S, what=lambda: f"still there: {os.listdir(disk)}")
        took.append(time.monotonic() - failed_at)
    say(f"a disk that fills: {FULL} jobs, files gone {max(took):.1f} s after the failure at the latest")


def used(disk: Path) -> int:
    """Bytes that files take on a disk."""
    found = os.statvfs(disk)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def all_ended(site: Site, jobs: list[Job]) -> bool:
    """Tell if all jobs have ended; no, while nobody can say."""
    with suppress(ReshardError):
        return all(site.client.get(job.id).done for job in jobs)
    return False


def strays(site: Site) -> list[str]:
    """List what is in the stores beside the targets and their pointers."""
    client = site.s3.client()
    keys = [entry["Key"] for entry in client.list_objects_v2(Bucket=site.bucket).get("Contents", ())]
    uploads = [entry["Key"] for entry in client.list_multipart_uploads(Bucket=site.bucket).get("Uploads", ())]
    names = {f"out{n}" for n in range(JOBS)} | {"latest", "run"}
    found = [key for key in keys if key.partition("/")[0] not in names or ".reshard" in key.partition("/")[2]]
    return [*found, *uploads, *(name for name in os.listdir(site.targets) if name not in names)]
