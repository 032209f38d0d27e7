"""Many small jobs through the real service, and one small job beside the command line.

    python bench/job_queue.py [--jobs 500] [--workers 2] [--rounds 9] [--out bench/out]

Starts PostgreSQL, Redis, the API and Celery workers on this machine. A ZeRO-2 checkpoint of two ranks with 300 KB
becomes universal, every time into a new directory.

1. An idle service gets one job at a time, in turns with `reshard convert` of the same source: seconds from the moment
   before the POST to the job's start, from its start to its end, and of the whole command. The API plans a job before
   it accepts it, which is a part of the first time.
2. All jobs are queued at once, as the API does after it has accepted them: jobs in a second, and the greatest number of
   messages that the broker held.
3. Behind them, one more job is posted: nothing is left in its way.

Exits 1 if one of `LIMITS` is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import redis as redis_client
from checkpoints import write_zero_checkpoint

from reshard.api.client import Client
from reshard.choices import JobState, TargetFormat
from reshard.models.jobs import ConvertRequest, Job
from reshard.options import SourceSpec
from reshard_jobs.database import Database
from reshard_jobs.queue.doorbell import DOORBELL_QUEUE
from reshard_jobs.queue.store import JobStore
from reshard_service.doorbell import CeleryDoorbell
from servers.postgres import postgres_server
from servers.redis import redis_server
from servers.stack import Stack, client_of

_PARAMETERS = [(f"layer.{n}.weight", (64, 40)) for n in range(8)]
_MESSAGES_PER_WORKER = 2
_SETTLE_S = 1.5
UNHURRIED = {"RESHARD_LEASE_S": "60", "RESHARD_HEARTBEAT_S": "10", "RESHARD_REAPER_S": "15"}
"""The product's own defaults, in place of those of the tests."""
LIMITS = {
    "messages in the broker, of workers": _MESSAGES_PER_WORKER,
    "seconds from the post of a job to its start, idle": 1.0,
    "start to end of a job, of the command line": 1.3,
    "seconds from the post of the last job to its start": 1.0,
}
"""At most."""


class _Gauge(threading.Thread):
    """Looks every few milliseconds how many messages the broker holds."""

    def __init__(self, broker_url: str) -> None:
        super().__init__(daemon=True)
        self._broker = redis_client.Redis.from_url(broker_url)
        self._done = threading.Event()
        self.most = 0

    def run(self) -> None:
        while not self._done.wait(0.005):
            self.most = max(self.most, int(self._broker.llen(DOORBELL_QUEUE)))

    def end(self) -> int:
        """Stop, and return the greatest number."""
        self._done.set()
        self.join()
        self._broker.close()
        return self.most


def _source(directory: Path) -> Path:
    write_zero_checkpoint(directory, _PARAMETERS, stage=2, ranks=2)
    return directory


def _posted(client: Client, source: Path, target: Path) -> tuple[float, float]:
    """Seconds from the post of a job to its start, and from there to its end."""
    began = time.time()
    job = client.wait(client.submit(str(source), str(target), to="universal").id, timeout_s=120)
    work_s = _work_s(job)
    assert job.started_at is not None
    return job.started_at.timestamp() - began, work_s


def _work_s(job: Job) -> float:
    if job.state is not JobState.SUCCEEDED or job.started_at is None or job.finished_at is None:
        raise SystemExit(f"job {job.id} is {job.state}: {job.error}")
    return (job.finished_at - job.started_at).total_seconds()


def _command_s(source: Path, target: Path) -> float:
    words = ["-m", "reshard.cli.main", "convert", str(source), str(target), "--to", "universal", "--quiet"]
    began = time.monotonic()
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return time.monotonic() - began


def one_by_one(client: Client, source: Path, directory: Path, rounds: int) -> dict[str, float]:
    """Jobs in an idle service in turns with the command line."""
    waits: list[float] = []
    works: list[float] = []
    commands: list[float] = []
    for turn in range(rounds + 1):
        commands.append(_command_s(source, directory / f"command{turn}"))
        time.sleep(_SETTLE_S)
        wait_s, work_s = _posted(client, source, directory / f"single{turn}")
        waits.append(wait_s)
        works.append(work_s)
        time.sleep(_SETTLE_S)
    # The first round warms caches, and the first job imports what only jobs need.
    waits, works, commands = waits[1:], works[1:], commands[1:]
    return {
        "idle_start_s": statistics.median(waits),
        "idle_start_most_s": max(waits),
        "job_s": statistics.median(works),
        "command_s": statistics.median(commands),
    }


def all_at_once(client: Client, source: Path, directory: Path, count: int, service: Stack) -> dict[str, float]:
    """Many jobs, and one behind them."""
    database = Database(service.database_url)
    store, doorbell, gauge = JobStore(database), CeleryDoorbell(service.broker_url), _Gauge(service.broker_url)
    gauge.start()
    began = time.monotonic()
    jobs: list[Job] = []
    for number in range(count):
        place = SourceSpec(url=str(source))
        request = ConvertRequest(source=place, target=f"{directory}/many{number}", to=TargetFormat.UNIVERSAL)
        jobs.append(store.create(request))
        doorbell.ring()
    queued_s = time.monotonic() - began
    for job in jobs:
        client.wait(job.id, timeout_s=1800)
    ended_s = time.monotonic() - began
    time.sleep(_SETTLE_S)
    last_s, _ = _posted(client, source, directory / "last")
    ended = [store.get(job.id) for job in jobs]
    database.close()
    return {
        "queue_s": queued_s,
        "jobs_a_second": count / ended_s,
        "messages": gauge.end(),
        "last_start_s": last_s,
        "job_in_the_crowd_s": statistics.median(map(_work_s, ended)),
        "busy_workers": len({job.worker for job in ended}),
    }


def measure(jobs: int, workers: int, rounds: int) -> dict[str, float]:
    """All numbers."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rs")))
        source = _source(directory / "source")
        database = stack.enter_context(postgres_server(directory / "pg")).new_database()
        broker = stack.enter_context(redis_server(directory / "redis"))
        service = Stack(directory / "logs", database, broker, scripted=False, extra=dict(UNHURRIED))
        url = stack.enter_context(service.api())
        for _ in range(workers):
            stack.enter_context(service.worker())
        with client_of(url) as client:
            found = one_by_one(client, source, directory, rounds)
            return found | all_at_once(client, source, directory, jobs, service)


def judged(found: dict[str, float], workers: int) -> dict[str, float]:
    """The numbers that have limits."""
    values = (found["messages"] / workers, found["idle_start_s"])
    values += (found["job_s"] / found["command_s"], found["last_start_s"])
    return dict(zip(LIMITS, values, strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out")
    chosen = parser.parse_args(arguments)
    found = measure(chosen.jobs, chosen.workers, chosen.rounds)
    for name, value in found.items():
        print(f"{name:24} {value:10.3f}")
    missed = False
    for name, value in judged(found, chosen.workers).items():
        missed |= value > LIMITS[name]
        print(f"{'MISSED' if value > LIMITS[name] else 'ok':6} {name}: {value:.2f} (at most {LIMITS[name]:g})")
    chosen.out.mkdir(parents=True, exist_ok=True)
    told = {"jobs": chosen.jobs, "workers": chosen.workers, "cores": os.cpu_count(), **found}
    (chosen.out / "job_queue.json").write_text(json.dumps(told, indent=2) + "\n")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
