"""One job over several Celery workers: PostgreSQL, Redis, an object store behind a proxy that logs every request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from house.conversions import convert
from house.measured import say
from house.sources import zero_source
from house.waiting import PATIENCE_S, wait_until
from reshard.api.client import Client
from reshard.choices import JobState, TargetFormat
from reshard.models.jobs import Job
from reshard_engine.integrity.manifest import MANIFEST_NAME
from servers.process import ServerProcess
from servers.proxy import LoggingProxy, logging_proxy
from servers.stack import Stack, client_of, end_tree, runners_of, tree_of
from servers.stores import ObjectServer

PARAMETERS = [(f"layer.{n}.weight", (512, 513)) for n in range(24)] + [("embed.weight", (32768, 512))]
PART_BYTES = 5 << 20
OPTIONS = {"to": TargetFormat.SAFETENSORS, "part_bytes": PART_BYTES, "threads": 1}

pytestmark = pytest.mark.timeout(900)
"""Of a test with its teardown, which ends three workers and their stores on a busy machine."""


source = zero_source(PARAMETERS, stage=2)
"""A ZeRO-2 checkpoint of two ranks."""


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process writes alone."""
    target = tmp_path_factory.mktemp("expected") / "target"
    convert(source, target, **OPTIONS)
    return {p.name: p.read_bytes() for p in target.iterdir() if p.name != MANIFEST_NAME}


@dataclass
class Site:
    """A service with Celery workers."""

    stack: Stack
    client: Client
    store: ObjectServer
    proxy: LoggingProxy
    bucket: str
    workers: list[ServerProcess] = field(default_factory=list[ServerProcess])

    def start_worker(self) -> ServerProcess:
        self.workers.append(self.stack.start_worker(self.store.env(self.proxy.endpoint)))
        return self.workers[-1]

    def submit(self, name: str, **settings: int) -> Job:
        url = f"{self.store.scheme}://{self.bucket}/{name}"
        return self.client.submit(f"{self.store.scheme}://{self.bucket}/run", url, **OPTIONS, **settings)

    def wait_until(self, ready: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
        wait_until(ready, timeout_s=timeout_s, what=lambda: f"not in time: {what}")

    def at_work(self, job: Job) -> int:
        """The number of workers that are at the job now."""
        return sum(w.left_at is None for w in self.client.get(job.id).workers)

    def judge(self, name: str, expected: dict[str, bytes]) -> None:
        """The target is whole, and nothing is left beside it."""
        written = self.store.read_all(self.bucket, name)
        assert {n: d for n, d in written.items() if n != MANIFEST_NAME} == expected
        assert [key for key in self.store.read_all(self.bucket, "") if ".reshard-" in key] == []
        assert self.store.unfinished(self.bucket) == []


@pytest.fixture
def site(make_stack: Callable[[str], Stack], store: ObjectServer, source: Path) -> Generator[Site]:
    stack = make_stack("celery")
    stack.scripted = False
    stack.extra = {"RESHARD_SHARE_BYTES": "1", "RESHARD_MAX_WORKERS": "4", "RESHARD_ADMISSION_S": "40"}
    bucket = store.new_bucket()
    store.upload(source, bucket, "run")
    with logging_proxy(store.endpoint) as proxy, stack.api(store.env()) as url, client_of(url) as client:
        found = Site(stack, client, store, proxy, bucket)
        try:
            yield found
        finally:
            for process in found.workers:
                end_tree(process)


def test_a_job_runs_on_all_workers_and_survives_two_of_them(site: Site, expected: dict[str, bytes]) -> None:
    site.proxy.hold_parts(site.store)
    for _ in range(4):
        site.start_worker()
    job = site.submit("whole")
    site.wait_until(lambda: site.at_work(job) == 4, "four workers at one job")
    site.proxy.hold_parts(site.store, after=8)
    site.wait_until(lambda: len(site.proxy.parts_uploaded(site.store)) == 8 and site.proxy.waiting == 4, "a few units")
    owner = site.client.get(job.id).worker or ""
    before = Counter(site.proxy.parts_uploaded(site.store))
    victims = sorted(site.workers, key=lambda w: any(f"/{p.pid}" in owner for p in tree_of(w.pid)))[-2:]
    in_flight = sum(len(runners_of(w.pid)) for w in victims)
    for victim in victims:
        end_tree(victim)
    site.workers = [w for w in site.workers if w not in victims]
    site.proxy.held = None
    site.start_worker()
    ended = site.client.wait(job.id, timeout_s=PATIENCE_S)
    assert ended.state is JobState.SUCCEEDED, ended.error
    site.judge("whole", expected)
    found = site.client.get(job.id)
    assert found.attempt == 2, "the owner was among the killed workers"
    # A killed helper's place ends with its lease, which can be later than the end of the job.
    site.wait_until(lambda: site.at_work(job) == 0, "nobody is at work any more")
    shares = [w.share for w in found.workers if w.share is not None]
    assert sum(s.runs for s in shares) > 0
    again = {part: count for part, count in Counter(site.proxy.parts_uploaded(site.store)).items() if count > 1}
    assert sum(count - 1 for count in again.values()) <= in_flight, "more was sent twice than was in flight at the kill"
    events = list(site.client.watch(job.id))
    joined = [e.worker for e in events if e.kind == "worker" and e.worker is not None and e.worker.left_at is None]
    assert len(joined) >= 3
    say(
        f"one job, 4 workers, 2 killed (the owner among them), 1 added: {len(found.workers)} places in 2 attempts, "
        f"{len(before)} parts before the kill, {sum(c - 1 for c in again.values())} parts sent twice"
    )


def test_a_helper_leaves_for_a_job_that_waits(site: Site, expected: dict[str, bytes]) -> None:
    site.proxy.hold_parts(site.store)
    for _ in range(2):
        site.start_worker()
    large = site.submit("large")
    site.wait_until(lambda: site.at_work(large) == 2, "a helper")
    small = site.submit("small", max_workers=1)
    site.proxy.hold_parts(site.store, after=8)  # a helper ends its run before it leaves
    site.wait_until(lambda: site.client.get(small.id).state is not JobState.QUEUED, "the second job begins")
    assert not site.client.get(large.id).done, "it began only after the first had ended"
    site.proxy.held = None
    for job in (large, small):
        assert site.client.wait(job.id, timeout_s=PATIENCE_S).state is JobState.SUCCEEDED
    site.judge("large", expected)
    assert [w.role for w in site.client.get(small.id).workers] == ["owner"]


def test_a_cancel_stops_owner_and_helpers(site: Site) -> None:
    site.proxy.hold_parts(site.store)
    for _ in range(3):
        site.start_worker()
    job = site.submit("cancelled")
    site.wait_until(lambda: site.at_work(job) == 3, "two helpers")
    site.client.cancel(job.id)
    site.proxy.held = None
    assert site.client.wait(job.id, timeout_s=PATIENCE_S).state is JobState.CANCELLED
    site.wait_until(lambda: site.at_work(job) == 0, "all have left")
    site.judge("cancelled", {})
