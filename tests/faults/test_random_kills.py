"""Random SIGKILLs of the real worker over the real service: API, Redis, PostgreSQL, Celery, SeaweedFS.

The engine process, the worker's pool process and its main process die at random moments, while two workers run
a queue of jobs from and to the object store. No job may be lost, no byte wrong, nothing left behind.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from house.conversions import convert
from house.measured import say
from house.seeds import run_seed
from house.sources import zero_source
from reshard.api.client import Client
from reshard.choices import JobState
from reshard.engine import load_engine
from servers.process import ServerProcess
from servers.proxy import logging_proxy
from servers.stack import Stack, client_of, end_tree, runners_of, tree_of
from servers.stores import ObjectServer

PART_BYTES = 5 << 20
WORKERS = 2
OPEN_JOBS = 4
PATIENCE = {"RESHARD_RETRY_DELAY_S": "0.01"}
"""Each lost attempt doubles the pause before the next one: a job that was hit ten times waits ten seconds."""
MAX_ATTEMPTS = 20
"""A job here may be hit again and again; one that gives up counts as lost."""
PARAMETERS = [("embed.weight", (1500, 1024)), ("norm.weight", (1024,)), ("head.weight", (64, 1024))]
TAG = "global_step7_universal"
PUT_PAUSE_S = 0.05
"""Each upload is held back this long, so that a job lasts long enough to be killed in any of its phases."""
SHOTS = {"engine": 0.6, "pool": 0.2, "worker": 0.2}
"""What is killed how often: a worker takes seconds to start again, an engine one."""


@dataclass
class Range:
    """A service with workers to shoot at."""

    stack: Stack
    client: Client
    store: ObjectServer
    bucket: str
    environment: dict[str, str]
    chance: random.Random
    workers: list[ServerProcess] = field(default_factory=list[ServerProcess])
    jobs: list[str] = field(default_factory=list[str])
    waiting: list[str] = field(default_factory=list[str])
    killed: Counter[str] = field(default_factory=Counter[str])

    def submit(self) -> None:
        """One more job, into a target of its own."""
        root = f"{self.store.scheme}://{self.bucket}"
        target = f"{root}/job-{len(self.jobs)}/{TAG}"
        job = self.client.submit(
            f"{root}/run",
            target,
            to="universal",
            part_bytes=PART_BYTES,
            threads=2,
            max_attempts=MAX_ATTEMPTS,
        )
        self.jobs.append(job.id)
        self.waiting.append(job.id)

    def keep_busy(self) -> None:
        """Replace dead workers, and keep more jobs open than workers can run."""
        for worker in [w for w in self.workers if w.popen.poll() is not None]:
            self.workers.remove(worker)
        while len(self.workers) < WORKERS:
            self.workers.append(self.stack.start_worker(self.environment))
        self.waiting = [job_id for job_id in self.waiting if not self.client.get(job_id).done]
        while len(self.waiting) < OPEN_JOBS:
            self.submit()

    def has_hit_a_job(self) -> bool:
        """True if a job lost an attempt: a kill may come a moment after the last one has ended."""
        return any(self.client.get(job_id).attempt > 1 for job_id in self.jobs)

    def shoot(self) -> bool:
        """Kill one process of the chosen kind, if there is one at this moment."""
        kind = self.chance.choices(list(SHOTS), list(SHOTS.values()))[0]
        worker = self.chance.choice(self.workers)
        engines = runners_of(worker.pid)
        pool = [p for p in tree_of(worker.pid)[1:] if p not in engines]
        aim = {"engine": engines, "pool": pool, "worker": tree_of(worker.pid)[:1]}[kind]
        if not aim or not engines:
            return False
        try:
            self.chance.choice(aim).kill()
        except psutil.NoSuchProcess:
            return False
        self.killed[kind] += 1
        return True


source = zero_source(PARAMETERS, stage=3)
"""A ZeRO-3 checkpoint of 20 MB; its largest atoms are two parts each."""


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an undisturbed local conversion writes."""
    target = tmp_path_factory.mktemp("expected") / TAG
    convert(source, target, part_bytes=PART_BYTES)
    files = {f"{TAG}/{p.relative_to(target)}": p.read_bytes() for p in target.rglob("*") if p.is_file()}
    return {**files, "latest_universal": TAG.encode()}


@pytest.fixture
def place(
    make_stack: Callable[[str], Stack], store: ObjectServer, source: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> Generator[Range]:
    stack = make_stack("celery")
    stack.scripted = False
    stack.extra = {"RESHARD_LEASE_S": "2", "RESHARD_HEARTBEAT_S": "0.4", **PATIENCE}
    bucket = store.new_bucket()
    store.upload(source, bucket, "run")
    for name, value in store.env().items():
        monkeypatch.setenv(name, value)
    with ExitStack() as held:
        proxy = held.enter_context(logging_proxy(store.endpoint))
        proxy.pause_s = lambda method, _target: PUT_PAUSE_S if method in {"POST", "PUT"} else 0.0
        url = held.enter_context(stack.api(store.env()))
        client = held.enter_context(client_of(url))
        found = Range(stack, client, store, bucket, store.env(proxy.endpoint), random.Random(seed))
        try:
            yield found
        finally:
            for process in found.workers:
                end_tree(process)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """`RESHARD_SEED` repeats a run's choices; what they hit depends on the machine's pace."""
    return run_seed()


@pytest.mark.parametrize(
    ("kills", "pause_s"),
    [
        pytest.param(4, 0.5, marks=pytest.mark.timeout(900)),
        pytest.param(300, 1.0, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)]),
    ],
)
def test_random_kills(place: Range, expected: dict[str, bytes], kills: int, pause_s: float, seed: int) -> None:
    say(f"random kills: RESHARD_SEED={seed}")
    began = time.monotonic()
    while place.killed.total() < kills or not place.has_hit_a_job():
        place.keep_busy()
        time.sleep(place.chance.uniform(0.1, 2 * pause_s))
        if place.shoot() and place.killed.total() % 50 == 0:
            print(f"{place.killed.total()} kills, {len(place.jobs)} jobs, {time.monotonic() - began:.0f} s", flush=True)
    shot_s = time.monotonic() - began
    place.keep_busy()
    ended = [place.client.wait(job_id, timeout_s=400) for job_id in place.jobs]
    lost = [(job.id, job.state, job.error) for job in ended if job.state is not JobState.SUCCEEDED]
    wrong = [problem for number in range(len(ended)) if (problem := wrong_bytes(place, number, expected))]
    strays = [key for key in place.store.read_all(place.bucket, "") if ".reshard-" in key]
    uploads = place.store.unfinished(place.bucket)
    attempts = Counter(job.attempt for job in ended)
    say(f"random kills over the real service: {shot_s:.0f} s, all jobs ended after {time.monotonic() - began:.0f} s")
    say(f"{'killed':>8} {'jobs':>6} {'lost':>6} {'wrong bytes':>12} {'strays':>8} {'95 % bound':>11}")
    bound = f"{3 / kills:.4f}" if not (lost or wrong or strays or uploads) else "-"
    left = len(strays) + len(uploads)
    say(f"{kills:8} {len(ended):6} {len(lost):6} {len(wrong):12} {left:8} {bound:>11}")
    say(f"killed: {dict(place.killed)}; jobs by attempts: {dict(sorted(attempts.items()))}")
    assert not lost, lost
    assert not wrong, wrong
    assert (strays, uploads) == ([], [])
    assert max(attempts) > 1, "no kill hit a job"


def wrong_bytes(place: Range, number: int, expected: dict[str, bytes]) -> str | None:
    """How a job's output differs from the undisturbed one, or None; the manifest alone may."""
    found = place.store.read_all(place.bucket, f"job-{number}/")
    manifest = f"{TAG}/reshard.json"
    different = [path for path in expected if path != manifest and found.get(path) != expected[path]]
    if different or found.keys() != expected.keys():
        return f"job {number}: {different or sorted(found.keys() ^ expected.keys())}"
    report = load_engine().verify(f"{place.store.scheme}://{place.bucket}/job-{number}/{TAG}")
    return None if report.ok else f"job {number}: {report.problems}"
