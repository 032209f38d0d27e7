"""Random faults while several workers run one conversion: with a service, and without one on S3 and on a directory."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from house.requests import asked
from house.waiting import PATIENCE_S
from reshard.api.client import Client
from reshard.choices import JobState, TargetFormat
from reshard.engine import load_engine
from reshard.options import SourceSpec
from reshard_engine.integrity.manifest import MANIFEST_NAME
from servers.faulty import FaultyProxy, Wrong
from servers.process import ServerProcess, accepts, free_port
from servers.redis import redis_binary
from servers.s3 import S3Server
from servers.stack import Stack, client_of, end_tree, tree_of

WORKERS = 4
LEASE_S = 2.0
TARGETS = {
    "universal": ("--to", "universal"),
    "zero": ("--to", "zero", "--dp", "3"),
    "safetensors": ("--to", "safetensors"),
}
FAULTS = (Wrong.RESET_BEFORE, Wrong.RESET_AFTER, Wrong.UNAVAILABLE, Wrong.LOST, Wrong.SHORT_BODY, Wrong.RESET_BODY)
PART = {"directory": 256 << 10, "s3": 5 << 20}


@dataclass
class Tally:
    """What was done to workers and servers, and how conversions ended."""

    faults: Counter[str] = field(default_factory=Counter[str])
    ends: Counter[str] = field(default_factory=Counter[str])

    def __str__(self) -> str:
        return f"{dict(self.ends)}; faults: {dict(self.faults)}"


class Store:
    """The bucket behind a proxy that answers wrongly now and then."""

    def __init__(self, s3: S3Server, proxy: FaultyProxy, bucket: str, chance: random.Random) -> None:
        self.s3, self.proxy, self.bucket, self._chance = s3, proxy, bucket, chance

    def misbehave(self) -> str:
        """Answer some of the next requests wrongly, or all of them slowly."""
        if self._chance.random() < 0.3:
            until = time.monotonic() + 2
            self.proxy.break_next(FAULTS[0], lambda *_: time.monotonic() < until and time.sleep(0.02) is not None)
            return "slow"
        wrong = self._chance.choice(FAULTS)
        self.proxy.break_next(wrong, lambda *_: self._chance.random() < 0.05, times=self._chance.randint(1, 12))
        return wrong.name.lower()

    def behave(self) -> None:
        """Answer rightly."""
        self.proxy.break_next(FAULTS[0], lambda *_: False)

    def judge(self, name: str, expected: Mapping[str, bytes]) -> None:
        """The target is whole, and after a clean-up nothing is left beside it."""
        written = self.s3.read_all(self.bucket, f"{name}/target")
        assert MANIFEST_NAME in written, sorted(written)
        assert {n: d for n, d in written.items() if n != MANIFEST_NAME} == dict(expected), name
        subprocess.run(
            [sys.executable, "-m", "reshard.cli.main", "clean", f"s3://{self.bucket}/{name}/target", "--idle"],
            env={**os.environ, **self.s3.env()},
            check=True,
            capture_output=True,
        )
        client = self.s3.client()
        keys = [o["Key"] for o in client.list_objects_v2(Bucket=self.bucket, Prefix=f"{name}/").get("Contents", ())]
        assert [key for key in keys if ".reshard-" in key] == []
        assert client.list_multipart_uploads(Bucket=self.bucket, Prefix=f"{name}/").get("Uploads", []) == []
        for key in keys:
            client.delete_object(Bucket=self.bucket, Key=key)


def expectations(source: Path, directory: Path) -> dict[tuple[str, str], dict[str, bytes]]:
    """What one undisturbed process writes, by kind of place and target."""
    found: dict[tuple[str, str], dict[str, bytes]] = {}
    for place, part in PART.items():
        for target, flags in TARGETS.items():
            path = directory / f"{place}-{target}"
            options: dict[str, Any] = {"layout": {"dp": 3}} if "--dp" in flags else {}
            request = asked(
                source=SourceSpec(url=str(source)),
                target=str(path),
                to=TargetFormat(target),
                part_bytes=part,
                threads=1,
                **options,
            )
            load_engine().convert(request)
            found[place, target] = contents(path)
    return found


def contents(directory: Path) -> dict[str, bytes]:
    """Every file but the manifest, which holds times."""
    files = {p.relative_to(directory).as_posix(): p for p in directory.rglob("*") if p.is_file()}
    return {name: path.read_bytes() for name, path in sorted(files.items()) if name != MANIFEST_NAME}


# -- without a service ------------------------------------------------------------------------------------


def convert_in_turmoil(
    source: str,
    target: str,
    flags: tuple[str, ...],
    env: Mapping[str, str],
    chance: random.Random,
    tally: Tally,
    store: Store | None = None,
) -> None:
    """Start four workers, kill, stop and continue them, and let the store fail; one is spared.

    Raises:
        AssertionError: A worker that was not killed did not end well.
    """

    def start(number: int) -> subprocess.Popen[str]:
        place = ("--workers", str(WORKERS), "--worker", str(number))
        argv = [sys.executable, "-m", "reshard.cli.main", "convert", source, target, *flags, *place, "--json", "-q"]
        environment = {**os.environ, "RESHARD_LEASE_S": str(LEASE_S), "OMP_NUM_THREADS": "1", **env}
        return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    workers = [start(n) for n in range(WORKERS)]
    spared = chance.randrange(WORKERS)
    killed: set[int] = set()
    time.sleep(chance.uniform(0.6, 2.0))
    for _ in range(chance.randint(1, 5)):
        running = [n for n, w in enumerate(workers) if w.poll() is None and n not in killed]
        if not running:
            break
        number = chance.choice(running)
        drawn = chance.random()
        if drawn < 0.45 and number != spared:
            workers[number].kill()
            killed.add(number)
            tally.faults["killed"] += 1
            if chance.random() < 0.5:
                workers.append(start(number % WORKERS))
                tally.faults["started again"] += 1
        elif drawn < 0.7 or store is None:
            workers[number].send_signal(signal.SIGSTOP)
            pause = chance.choice((0.3, 2.5 * LEASE_S))
            threading.Timer(pause, workers[number].send_signal, (signal.SIGCONT,)).start()
            tally.faults["stopped past its lease" if pause > LEASE_S else "stopped"] += 1
        else:
            tally.faults[store.misbehave()] += 1
        time.sleep(chance.uniform(0.05, 0.8))
    _judge_ends(workers, killed, tally, store, lambda: start(0))


def _judge_ends(
    workers: Sequence[subprocess.Popen[str]],
    killed: Container[int],
    tally: Tally,
    store: Store | None,
    start_again: Callable[[], subprocess.Popen[str]],
) -> None:
    failures = list[str]()
    for number, worker in enumerate(workers):
        _, err = worker.communicate(timeout=150)
        if worker.returncode != 0 and number not in killed:
            failures.append(err)
    tally.ends["workers that ended well"] += sum(w.returncode == 0 for w in workers)
    if store is None:
        assert not failures, failures
        return
    store.behave()
    # While the store fails, workers may give up. If all did, the same command goes on later.
    tally.ends["workers that gave up while the store failed"] += len(failures)
    if not any(worker.returncode == 0 for worker in workers):
        tally.ends["conversions that went on later"] += 1
        again = start_again()
        _, err = again.communicate(timeout=150)
        assert again.returncode == 0, err


# -- with a service ---------------------------------------------------------------------------------------


@dataclass
class Service:
    """The API, four Celery workers, Redis, and PostgreSQL, all of which may be hit."""

    stack: Stack
    client: Client
    environment: dict[str, str]
    chance: random.Random
    redis: Redis
    postgres: psutil.Process
    workers: list[ServerProcess] = field(default_factory=list[ServerProcess])

    def start_worker(self) -> None:
        """Add a worker."""
        self.workers.append(self.stack.start_worker(self.environment))

    def hit(self, store: Store) -> str:
        """Do one bad thing."""
        worker = self.chance.choice(self.workers)
        below = [p for p in tree_of(worker.pid) if p.is_running()]
        match self.chance.choice(("engine", "worker", "stop", "redis", "postgres", "store", "store")):
            case "engine" if len(below) > 1:
                with _gone_is_fine():
                    self.chance.choice(below[1:]).kill()
                return "engine or pool process killed"
            case "worker":
                end_tree(worker)
                self.workers.remove(worker)
                self.start_worker()
                return "worker killed"
            case "stop" if below:
                for process in below:
                    with _gone_is_fine():
                        process.suspend()
                        threading.Timer(2.5 * LEASE_S, _resume, (process,)).start()
                return "worker stopped past its lease"
            case "redis":
                self.redis.restart_empty()
                return "redis restarted empty"
            case "postgres":
                family = [self.postgres, *self.postgres.children(recursive=True)]
                for process in family:
                    with _gone_is_fine():
                        process.suspend()
                time.sleep(1.0)
                for process in family:
                    _resume(process)
                return "postgres away for a second"
            case _:
                return store.misbehave()

    def run(self, source: str, target: str, to: str, store: Store, tally: Tally) -> None:
        """Submit a job, disturb it, and wait for its end."""
        options: dict[str, Any] = {"dp": 3} if to == "zero" else {}
        job = self.client.submit(
            source, target, to=to, part_bytes=PART["s3"], threads=1, max_attempts=20, idempotency_key=target, **options
        )
        for _ in range(self.chance.randint(1, 4)):
            time.sleep(self.chance.uniform(0.1, 1.2))
            tally.faults[self.hit(store)] += 1
        store.behave()
        ended = self.client.wait(job.id, timeout_s=PATIENCE_S)
        assert ended.state is JobState.SUCCEEDED, ended.error
        found = self.client.get(job.id)
        tally.ends[f"{len({w.worker for w in found.workers})} workers"] += 1
        tally.ends["more than one attempt"] += found.attempt > 1


class Redis:
    """A Redis that can be started again without its data."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._port, self._starts = directory, free_port(), 0
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self._process = self._start()

    def _start(self) -> ServerProcess:
        self._starts += 1
        directory = self._directory / str(self._starts)
        directory.mkdir(parents=True)
        argv = [redis_binary(), "--port", str(self._port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", ""]
        process = ServerProcess(argv, env=os.environ, log=self._directory / "redis.log")
        process.wait_until(lambda: accepts(self._port))
        return process

    def restart_empty(self) -> None:
        """Kill it, and start it with no data."""
        self._process.kill()
        self._process = self._start()

    def stop(self) -> None:
        """End it."""
        self._process.stop()


@contextmanager
def a_service(
    stack: Stack, directory: Path, environment: dict[str, str], postgres_directory: Path, chance: random.Random
) -> Generator[Service]:
    """A service with four workers, and servers that may be hit."""
    with ExitStack() as after:
        redis = Redis(directory / "redis")
        after.callback(redis.stop)
        stack.broker_url = redis.url
        stack.scripted = False
        stack.extra = {
            "RESHARD_SHARE_BYTES": "1",
            "RESHARD_MAX_WORKERS": str(WORKERS),
            "RESHARD_ADMISSION_S": "40",
            "RESHARD_RETRY_DELAY_S": "0.05",
        }
        url = after.enter_context(stack.api(environment))
        client = after.enter_context(client_of(url))
        postgres = psutil.Process(int((postgres_directory / "postmaster.pid").read_text().splitlines()[0]))
        service = Service(stack, client, environment, chance, redis, postgres)
        after.callback(lambda: [end_tree(worker) for worker in service.workers])
        for _ in range(WORKERS):
            service.start_worker()
        yield service


@contextmanager
def _gone_is_fine() -> Generator[None]:
    try:
        yield
    except psutil.NoSuchProcess:
        return


def _resume(process: psutil.Process) -> None:
    with _gone_is_fine():
        process.resume()
