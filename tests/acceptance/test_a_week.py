"""A week of jobs in minutes: whatever they come to, the service and its storage end as they began.

Jobs succeed, fail, are retried, cancelled, killed, repeated and refused, on S3 and on a disk; the times for which the
service keeps things are seconds. At the end the rows of the database, the keys of the broker, the uploads, objects and
files of the storage and the memory of the processes are what they were after the first few jobs.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import psycopg
import pytest
import redis as redis_client
from checkpoints import write_zero_checkpoint

from house.measured import say
from house.waiting import PATIENCE_S
from reshard.api.client import Client
from reshard.choices import JobState
from reshard.errors import ReshardError
from reshard.models.jobs import Job
from servers.process import ServerProcess
from servers.s3 import S3Server
from servers.stack import Stack, client_of, end_tree, tree_of

PARAMETERS = [(f"layer.{n}.weight", (32, 24)) for n in range(3)]
RUNNER = Path(__file__).parent.parent / "servers" / "weekly_runner.py"
BUCKET = "week"
KEPT = {
    "RESHARD_KEEP_FAILED_S": "4",
    "RESHARD_KEEP_JOBS_S": "10",
    "RESHARD_KEEP_EVENTS_S": "5",
    "RESHARD_KEEP_KEYS_S": "5",
    "RESHARD_KEEP_AUDIT_S": "5",
}
KINDS = ("plain", "local", "fails", "heals", "dies", "cancelled", "own-id", "repeated", "missing", "again")
POINTERS = {"latest", "latest_universal"}
"""Files beside targets that name the newest one, and stay when users remove that."""
PENDING = 24
"""Jobs that are under way at a time."""
MOST_GROWTH = 1.25
SLACK_MIB = 24.0
"""Memory of a process may grow by a quarter and so much: the allocator keeps what concurrent jobs needed."""


@dataclass
class Held:
    """What the service holds when no job is under way."""

    rows: dict[str, int]
    keys: int
    """Keys of the broker that hold messages."""
    uploads: int
    objects: set[str]
    files: set[str]
    memory_mib: dict[str, float]


@dataclass
class Site:
    """A service with two Celery workers, and its storage."""

    stack: Stack
    client: Client
    s3: S3Server
    source: Path
    targets: Path
    healed: Path
    api_pid: int
    workers: list[ServerProcess] = field(default_factory=list[ServerProcess])
    ended: Counter[str] = field(default_factory=Counter[str])

    def held(self) -> Held:
        """Look at everything."""
        with psycopg.connect(self.stack.database_url.replace("+psycopg", ""), autocommit=True) as connection:
            # Totals have a row for each kind of event that has ever happened.
            query = "SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'totals'"
            tables = connection.execute(query).fetchall()
            rows = {
                table: int((connection.execute(f'SELECT count(*) FROM "{table}"').fetchone() or (0,))[0])  # type: ignore[arg-type] # pyright: ignore[reportArgumentType, reportCallIssue]
                for (table,) in tables
            }
        with redis_client.Redis.from_url(self.stack.broker_url) as broker:
            lists = sum(1 for _ in broker.scan_iter(_type="list"))
        client = self.s3.client()
        listed = [
            o
            for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
            for o in page.get("Contents", ())
        ]
        uploads = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        objects = {o["Key"] for o in listed if o["Key"].removeprefix("out/") not in POINTERS}
        files = {str(p.relative_to(self.targets)) for p in self.targets.rglob("*")}
        memory = {"api": _memory_mib(self.api_pid)}
        memory |= {f"worker {n}": _memory_mib(w.pid) for n, w in enumerate(self.workers)}
        return Held(rows, lists, len(uploads), objects, files - POINTERS, memory)

    def live(self, number: int) -> None:
        """One job of some kind, from its beginning to its end."""
        kind = KINDS[number % len(KINDS)]
        chance = random.Random(number)
        name = f"job{number}" + ("-fails" if kind in ("fails", "heals") else "-dies" if kind == "dies" else "")
        target = str(self.targets / name) if kind == "local" else f"s3://{BUCKET}/out/{name}"
        source = f"s3://{BUCKET}/run" if kind != "missing" else f"s3://{BUCKET}/nothing"
        to = chance.choice(["universal", "safetensors", "zero"])
        layout = {"dp": 2} if to == "zero" else {}
        submit = lambda **more: self.client.submit(source, target, to=to, layout=layout, **more)  # noqa: E731
        if kind == "missing":
            self.ended[f"missing: {self._refused(submit)}"] += 1
            return
        job = submit(**self._naming(kind, number))
        if kind in ("own-id", "repeated"):
            assert submit(**self._naming(kind, number)).id == job.id
        if kind == "cancelled":
            time.sleep(chance.uniform(0, 0.3))
            self._cancel(job)
        ended = self.client.wait(job.id, timeout_s=PATIENCE_S)
        if kind == "heals":
            assert ended.state is JobState.FAILED
            (self.healed / name).touch()
            self.client.retry(job.id)
            ended = self.client.wait(job.id, timeout_s=PATIENCE_S)
        wanted = {"fails": {JobState.FAILED}, "cancelled": {JobState.CANCELLED, JobState.SUCCEEDED}}
        assert ended.state in wanted.get(kind, {JobState.SUCCEEDED}), f"{kind}: {ended.state}, {ended.error}"
        if kind == "again":
            assert self.client.wait(submit().id, timeout_s=PATIENCE_S).state is JobState.SUCCEEDED
        self.ended[f"{kind}: {ended.state.value}"] += 1
        if ended.state is JobState.SUCCEEDED:
            self._take_away(target)

    def _refused(self, submit: Callable[[], Job]) -> str:
        """Submit a job whose source is missing. If the API has no time to look, a worker finds out."""
        try:
            ended = self.client.wait(submit().id, timeout_s=PATIENCE_S)
        except ReshardError as error:
            return error.code
        assert ended.state is JobState.FAILED
        return ended.state.value

    def _naming(self, kind: str, number: int) -> dict[str, str]:
        own = {"own-id": {"job_id": f"step-{number}"}, "repeated": {"idempotency_key": f"key-{number}"}}
        return own.get(kind, {})

    def _cancel(self, job: Job) -> None:
        try:
            self.client.cancel(job.id)
        except ReshardError as error:
            assert error.code == "job.finished"  # noqa: PT017 - a job that had ended cannot be cancelled

    def _take_away(self, target: str) -> None:
        """Users remove what they have used."""
        if not target.startswith("s3://"):
            shutil.rmtree(target)
            return
        prefix = target.removeprefix(f"s3://{BUCKET}/") + "/"
        client = self.s3.client()
        keys = [{"Key": o["Key"]} for o in client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ())]
        client.delete_objects(Bucket=BUCKET, Delete={"Objects": keys})

    def run(self, numbers: range) -> None:
        """Live jobs, some at a time, and wait until the service has forgotten them."""
        with ThreadPoolExecutor(PENDING) as pool:
            for future in [pool.submit(self.live, number) for number in numbers]:
                future.result()

    def settled(self, until: Callable[[Held], bool], *, timeout_s: float = 90.0) -> Held:
        """Look until the service has forgotten the jobs, or for so long."""
        deadline = time.monotonic() + timeout_s
        while not until(held := self.held()) and time.monotonic() < deadline:
            time.sleep(1.0)
        return held


def _memory_mib(pid: int) -> float:
    """Proportional set size of a process and those below it."""
    found = 0.0
    for process in tree_of(pid):
        try:
            found += process.memory_full_info().pss / (1 << 20)
        except psutil.Error:
            continue  # it has ended
    return found


@pytest.fixture
def site(make_stack: Callable[[str], Stack], s3: S3Server, tmp_path: Path) -> Generator[Site]:
    source = tmp_path / "run"
    write_zero_checkpoint(source, PARAMETERS, stage=2, ranks=2)
    healed, targets = tmp_path / "healed", tmp_path / "targets"
    healed.mkdir()
    targets.mkdir()
    stack = make_stack("celery")
    stack.scripted = False
    stack.extra = {
        **KEPT,
        "RESHARD_RUNNER_COMMAND": f"{sys.executable} -P {RUNNER}",
        "RESHARD_ADMISSION_S": "40",
        "HEALED": str(healed),
    }
    s3.make_bucket(BUCKET)
    s3.upload(source, BUCKET, "run")
    with stack.api(s3.env()) as url, client_of(url) as client:
        api = next(c.pid for c in psutil.net_connections("tcp") if c.laddr.port == int(url.rsplit(":", 1)[1]) and c.pid)
        found = Site(stack, client, s3, source, targets, healed, api)
        try:
            found.workers += [stack.start_worker(s3.env()) for _ in range(2)]
            yield found
        finally:
            for process in found.workers:
                end_tree(process)


def _week(site: Site, jobs: int) -> None:
    site.run(range(len(KINDS)))
    first = site.settled(lambda held: not held.rows["jobs"])
    assert first.rows["jobs"] == 0, first.rows
    began = time.monotonic()
    site.run(range(1000, 1000 + jobs))
    took_s = time.monotonic() - began
    last = site.settled(lambda held: held.rows == first.rows and held.objects == first.objects)
    say(f"{jobs} jobs in {took_s:.0f} s: {dict(sorted(site.ended.items()))}")
    say(f"rows {last.rows}, lists in the broker {last.keys}, uploads {last.uploads}, objects {len(last.objects)}")
    memory = {name: f"{first.memory_mib[name]:.0f} -> {mib:.0f} MiB" for name, mib in last.memory_mib.items()}
    say(f"memory {memory}")
    assert last.rows == first.rows
    assert (last.keys, last.uploads, last.objects, last.files) == (0, 0, first.objects, set())
    assert first.objects == {k for k in first.objects if k.startswith("run/")}, "the first jobs left something"
    for name, mib in last.memory_mib.items():
        assert mib < MOST_GROWTH * first.memory_mib[name] + SLACK_MIB, f"{name} grew"


@pytest.mark.timeout(300)
def test_a_day_of_jobs_leaves_nothing(site: Site) -> None:
    _week(site, 2 * len(KINDS))


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_a_week_of_jobs_leaves_nothing(site: Site) -> None:
    _week(site, int(os.environ.get("RESHARD_WEEK_JOBS", "5000")))
