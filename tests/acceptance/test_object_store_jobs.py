"""The main job through the real service: API, Redis, PostgreSQL, a Celery worker; from each object store to itself.

The source is a ZeRO-3 checkpoint that real DeepSpeed wrote. The worker reaches the store through a proxy
that logs every request, and can slow the store down so that a test has time to interfere.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from house.conversions import convert
from house.waiting import PATIENCE_S, wait_until
from oracle.launcher import Worlds
from reshard.api.client import Client
from reshard.choices import JobState
from reshard.errors import JobError, ReshardError, SourceError
from reshard.models.jobs import ConvertResult, Job, JobEvent
from reshard_engine.execute.journal import UnitRecord
from reshard_engine.storage.locations import open_location
from reshard_engine.storage.protocol import ObjectStore
from servers.process import ServerProcess
from servers.proxy import LoggingProxy, logging_proxy
from servers.stack import Stack, client_of, end_tree, tree_of
from servers.stores import ObjectServer

PART_BYTES = 5 << 20
HERE = Path(__file__).parent
MANIFEST = "reshard.json"


@pytest.fixture(scope="module")
def source(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The save directory of the training run."""
    directory = tmp_path_factory.mktemp("wide")
    elems = worlds.run("acceptance.wide_model:train_and_save", world=2, save_dir=str(directory / "run"))[0]
    # Masters and two moments in fp32; ZeRO-3 stores no weights beside them.
    size = sum(path.stat().st_size for path in (directory / "run").rglob("*") if path.is_file())
    assert size > 100_000_000
    assert size >= 12 * elems
    return directory / "run"


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a local conversion writes, without a service and without an interruption."""
    target = tmp_path_factory.mktemp("expected") / "global_step1_universal"
    convert(source, target, part_bytes=PART_BYTES)
    files = {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}
    shutil.rmtree(target)
    return files


PATIENT = {"RESHARD_ADMISSION_S": "40"}
"""Of two cores that many tests share a probe has little: the look before a job is accepted may take longer here."""


@dataclass
class Site:
    """A running service and what is around it."""

    stack: Stack
    client: Client
    url: str
    store: ObjectServer
    bucket: str
    proxy: LoggingProxy
    empty: dict[str, Path]
    logs: Path
    workers: list[ServerProcess] = field(default_factory=list[ServerProcess])

    @property
    def place(self) -> str:
        """The URL of the bucket."""
        return f"{self.store.scheme}://{self.bucket}"

    def start_worker(self) -> ServerProcess:
        """A worker under the audit hook, in empty directories, with the store behind the proxy."""
        hook = self.logs / "hook"
        hook.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / "write_audit.py", hook / "sitecustomize.py")
        environment = {
            **self.store.env(self.proxy.endpoint),
            "PYTHONPATH": str(hook),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(self.empty["tmp"]),
            "HOME": str(self.empty["home"]),
        }
        process = self.stack.start_worker(environment, cwd=self.empty["cwd"])
        self.workers.append(process)
        return process

    def submit(self, name: str, **options: Any) -> Job:
        return self.client.submit(
            f"{self.place}/run",
            f"{self.place}/{name}/global_step1_universal",
            to="universal",
            part_bytes=PART_BYTES,
            threads=2,
            **options,
        )

    def written(self, name: str) -> dict[str, bytes]:
        return self.store.read_all(self.bucket, f"{name}/global_step1_universal")

    def worker_log(self) -> str:
        return "".join(process.log.read_text(errors="replace") for process in self.workers)


@pytest.fixture
def site(
    make_stack: Callable[[str], Stack], store: ObjectServer, store_bucket: str, source: Path, tmp_path: Path
) -> Generator[Site]:
    bucket = store_bucket
    store.upload(source, bucket, "run")
    stack = make_stack("celery")
    stack.scripted = False
    empty = {name: tmp_path / "empty" / name for name in ("cwd", "tmp", "home")}
    for directory in empty.values():
        directory.mkdir(parents=True)
    with (
        logging_proxy(store.endpoint) as proxy,
        stack.api({**store.env(), **PATIENT}) as url,
        client_of(url) as client,
    ):
        found = Site(stack, client, url, store, bucket, proxy, empty, tmp_path / "logs")
        try:
            yield found
        finally:
            for process in found.workers:
                end_tree(process)


def test_a_job_runs_and_nothing_touches_the_local_disk(site: Site, expected: dict[str, bytes]) -> None:
    worker = site.start_worker()
    job = site.submit("plain", idempotency_key="one key")
    assert site.submit("plain", idempotency_key="one key").id == job.id
    with (
        in_thread(lambda: site.client.wait(job.id, timeout_s=PATIENCE_S)) as waited,
        in_thread(lambda: list(sse_events(site.url, job.id))) as streamed,
    ):
        opened = set[str]()
        watched: list[JobEvent] = []
        for event in site.client.watch(job.id):
            opened |= open_for_writing(worker.pid)
            watched.append(event)
    assert streamed.value == watched
    assert waited.value.state is JobState.SUCCEEDED, waited.value.error
    assert watched[-1].state is JobState.SUCCEEDED
    assert [event.seq for event in watched] == list(range(1, len(watched) + 1))
    states = [event.state.value for event in watched if event.kind == "state"]
    assert states == ["QUEUED", "PLANNING", "RUNNING", "VERIFYING", "SUCCEEDED"]
    assert len(site.client.list().jobs) == 1

    result = site.client.result(job.id)
    assert isinstance(result, ConvertResult)
    assert result == waited.value.result
    progress = waited.value.progress
    assert progress is not None
    assert progress.units_done == progress.units_total >= 20
    assert progress.bytes_done == progress.bytes_total == result.write_bytes
    same_bytes(site.written("plain"), expected)
    pointer = site.store.read_all(site.bucket, "plain")["latest_universal"]
    assert pointer.decode().strip() == "global_step1_universal"
    uploaded = site.proxy.parts_uploaded(site.store)
    assert max(Counter(path for path, _, _ in uploaded).values()) >= 4
    assert len(set(uploaded)) == len(uploaded)
    assert site.store.unfinished(site.bucket) == []

    log = site.worker_log()
    active = [line for line in log.splitlines() if line.startswith("AUDIT-ACTIVE")]
    # The worker, its pool process, and the engine's process.
    assert any("celery" in line for line in active), active
    assert any("billiard" in line or "multiprocessing" in line for line in active), active
    assert any("reshard_worker.runner" in line for line in active), active
    writes = [line for line in log.splitlines() if line.startswith("AUDIT-WRITE")]
    # The worker's loops give signs of life, each in a small file for its probe (`reshard_worker.alive`).
    places = rf"{re.escape(str(site.empty['tmp']))}/reshard-\d+(/worker-\w+\.(loop|job) |')"
    others = [line for line in writes if not re.search(places, line)]
    # Celery's pool maps one page for a counter that it shares with its process, and unlinks its file at once.
    # It is the worker's main process that does it, before any job; nothing else may write anything.
    main = str(site.workers[0].pid)
    own_page = [line for line in others if line.split()[1] == main and f"{site.empty['tmp']}/" in line]
    assert others == own_page
    assert len(own_page) <= 4
    left = [path for directory in site.empty.values() for path in directory.rglob("*") if not path.is_dir()]
    assert {path.suffix for path in left} <= {".loop", ".job"}
    assert all(path.stat().st_size < 16 for path in left)
    # The kernel's view, which sees native code too: besides the log, no regular file (in /dev/shm or elsewhere)
    # was ever found open for writing.
    assert {path for path in opened if "/pymp-" not in path and not re.search(places, f"{path} ")} == {str(worker.log)}


def test_what_cannot_succeed_is_refused_at_submission(site: Site) -> None:
    urls = {
        f"{site.store.scheme}://no-such-bucket/run": "storage.no_bucket",
        f"{site.place}/nothing": "source.not_found",
        f"{site.place}/run/global_step2": "source.not_found",
        f"{site.place}//run": "request.invalid",
        "odd://x/y": "request.unknown_scheme",
    }
    for url, code in urls.items():
        began = time.monotonic()
        with pytest.raises(ReshardError) as caught:
            site.client.submit(url, f"{site.place}/out", to="universal")
        assert caught.value.code == code
        assert caught.value.fix
        assert time.monotonic() - began < 40
    site.store.put(site.bucket, "badlatest/latest", b"global_step9")
    with pytest.raises(SourceError, match=r"checkpoint\.bad_latest"):
        site.client.submit(f"{site.place}/badlatest", f"{site.place}/out", to="universal")
    assert site.client.list().jobs == ()
    found = site.client.inspect(f"{site.place}/run")
    assert (found.zero_stage, found.world["dp"]) == (3, 2)
    plan = site.client.plan(f"{site.place}/run", f"{site.place}/out", to="safetensors", dtype="bf16")
    assert plan.write_bytes > 2 * found.parameter_elems
    assert site.store.read_all(site.bucket, "out") == {}


def test_cancel_stops_a_running_job_and_leaves_nothing_readable(site: Site) -> None:
    site.start_worker()
    site.proxy.hold_parts(site.store, after=6)
    job = site.submit("cancelled")
    wait_for_units(site.client, job.id, 3)
    site.client.cancel(job.id)
    site.proxy.held = None
    ended = site.client.wait(job.id, timeout_s=PATIENCE_S)
    assert ended.state is JobState.CANCELLED
    with pytest.raises(JobError, match=r"job\.cancelled"):
        site.client.result(job.id)
    assert site.store.read_all(site.bucket, "cancelled") == {}
    assert site.store.unfinished(site.bucket) == []


def test_a_killed_worker_costs_no_finished_part(site: Site, expected: dict[str, bytes]) -> None:
    first = site.start_worker()
    site.proxy.hold_parts(site.store, after=12)
    job = site.submit("killed")
    wait_for_units(site.client, job.id, 8)  # five of them, at most, have no parts
    family = tree_of(first.pid)
    first.kill()
    # Its pool process and its engine process die with it.
    wait_until(
        lambda: not any(member.is_running() and member.status() != "zombie" for member in family), timeout_s=PATIENCE_S
    )
    assert site.client.get(job.id).done is False
    assert MANIFEST not in site.written("killed")
    sent = site.proxy.parts_uploaded(site.store)
    units, finished = journaled(site, "killed")
    assert units >= 8
    assert len(finished) >= 3
    engines = runner_pids(site.worker_log())
    site.proxy.held = None
    site.start_worker()
    ended = site.client.wait(job.id, timeout_s=PATIENCE_S)
    assert ended.state is JobState.SUCCEEDED, ended.error
    assert ended.attempt == 2
    assert ended.result is not None
    assert ended.result.resumed_bytes > 0
    same_bytes(site.written("killed"), expected)
    uploads = Counter(site.proxy.parts_uploaded(site.store))
    assert {part: uploads[part] for part in finished} == dict.fromkeys(finished, 1)
    assert finished <= set(sent)
    # Two processes wrote the one output.
    assert len(runner_pids(site.worker_log()) - engines) >= 1
    assert engines


@dataclass
class Later:
    """What a thread returned."""

    value: Any = None


@contextmanager
def in_thread(call: Callable[[], Any]) -> Generator[Later]:
    """Run something beside the block; its result is in `.value` after it."""
    found = Later()

    def run() -> None:
        found.value = call()

    thread = threading.Thread(target=run)
    thread.start()
    yield found
    thread.join(150)
    assert not thread.is_alive()


def open_for_writing(pid: int) -> set[str]:
    """Regular files that a process or its descendants hold open for writing, deleted ones included."""
    found: set[str] = set()
    for member in tree_of(pid):
        for descriptor in Path(f"/proc/{member.pid}/fd").glob("*"):
            try:
                path = str(descriptor.readlink())
                flags = Path(f"/proc/{member.pid}/fdinfo/{descriptor.name}").read_text().split("flags:")[1].split()[0]
                regular = stat.S_ISREG(descriptor.stat().st_mode)
            except FileNotFoundError:
                continue
            if regular and int(flags, 8) & (os.O_WRONLY | os.O_RDWR):
                found.add(path)
    return found


def sse_events(url: str, job_id: str) -> Iterator[JobEvent]:
    """The event stream as any HTTP client sees it, without our own client."""
    with httpx.stream("GET", f"{url}/v1/jobs/{job_id}/events", timeout=PATIENCE_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield JobEvent.model_validate_json(line.removeprefix("data: "))


def wait_for_units(client: Client, job_id: str, count: int) -> None:
    for event in client.watch(job_id, timeout_s=PATIENCE_S):
        assert not event.state.terminal, client.get(job_id).error
        if event.progress is not None and event.progress.units_done >= count:
            return


def same_bytes(written: dict[str, bytes], expected: dict[str, bytes]) -> None:
    """Equal files; the manifest alone holds times and the store's receipts."""
    assert set(written) == set(expected)
    different = [name for name, body in expected.items() if name != MANIFEST and written[name] != body]
    assert different == []


def journaled(site: Site, name: str) -> tuple[int, set[tuple[str, str, str]]]:
    """The number of units in the journal, and (path, upload id, part number) of their parts that the store holds."""
    store = open_location(site.place).store
    assert isinstance(store, ObjectStore)
    lines = [body for key, body in site.store.read_all(site.bucket, f"{name}/").items() if "/unit-" in f"/{key}"]
    records = [record for line in lines if (record := UnitRecord.from_line(line)) is not None]
    etags = {chunk.etag for record in records for chunk in record.chunks}
    held = {
        (upload, f"{part.number}")
        for path, upload in store.list_uploads(f"{site.bucket}/{name}/")
        for part in store.list_parts(path, upload) or ()
        if part.etag in etags
    }
    # A request may name an upload by the beginning of its id.
    return len(records), {
        part
        for part in site.proxy.parts_uploaded(site.store)
        if any(upload.startswith(part[1]) and number == part[2].lstrip("0") for upload, number in held)
    }


def runner_pids(log: str) -> set[str]:
    lines = [line for line in log.splitlines() if line.startswith("AUDIT-ACTIVE") and "reshard_worker.runner" in line]
    return {line.split()[1] for line in lines}
