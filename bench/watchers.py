"""Answers of the API while many clients watch jobs.

    python bench/watchers.py [--watchers 300] [--jobs 30] [--seconds 10] [--out FILE]

Starts PostgreSQL and the API on this machine, and makes jobs that nobody runs. Each watcher holds an event stream of
one job open. Meanwhile each job reports progress twice a second, straight in the database, as a worker does.
One client asks for a job again and again: without watchers, with them, and without them again.

Prints p50 and p99 in milliseconds, the ratio of both p99, the statements in a second that the database ran, and the
delay from the report of progress to its arrival at a watcher.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import httpx
import psycopg

from reshard.models import ConvertRequest, Progress, SourceSpec, TargetFormat
from reshard_jobs.database import Database
from reshard_jobs.leases import JobClaim, Leases
from reshard_jobs.store import JobStore
from servers.postgres import postgres_server
from servers.stack import Stack

_REPORT_S = 0.5


class _Worker(threading.Thread):
    """Reports progress of all jobs, evenly over each period."""

    def __init__(self, leases: Leases, claims: list[JobClaim]) -> None:
        super().__init__(daemon=True)
        self._leases = leases
        self._claims = claims
        self._done = threading.Event()

    def run(self) -> None:
        turn = 0
        while not self._done.wait(_REPORT_S / len(self._claims)):
            claim = self._claims[turn % len(self._claims)]
            # The number of bytes carries the time at which it was reported, for the delay.
            self._leases.heartbeat(claim, Progress(phase="running", bytes_done=time.time_ns(), bytes_total=1))
            turn += 1

    def end(self) -> None:
        """Stop."""
        self._done.set()
        self.join()


class _Watchers(threading.Thread):
    """Event streams, in a thread of their own so that they do not delay the client that is measured."""

    def __init__(self, url: str, job_ids: list[str], count: int) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._jobs = [job_ids[number % len(job_ids)] for number in range(count)]
        self._loop = asyncio.new_event_loop()
        self.connected = 0
        self.delays_s: list[float] = []

    def run(self) -> None:
        self._loop.run_until_complete(self._all())

    async def _all(self) -> None:
        self._ends = asyncio.Event()
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=60, limits=limits) as client:
            tasks = [asyncio.create_task(self._watch(client, job_id)) for job_id in self._jobs]
            await self._ends.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, client: httpx.AsyncClient, job_id: str) -> None:
        headers = {"Accept": "text/event-stream"}
        async with client.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as stream:
            self.connected += 1
            came = time.time()
            async for line in stream.aiter_lines():
                if line.startswith("data:") and (progress := json.loads(line[5:])["progress"]):
                    reported = progress["bytes_done"] / 1e9
                    if reported > came:
                        self.delays_s.append(time.time() - reported)

    def end(self) -> None:
        """Close all streams."""
        self._loop.call_soon_threadsafe(self._ends.set)
        self.join()


def _ask(url: str, job_id: str, seconds: float) -> list[float]:
    found: list[float] = []
    end = time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=60) as client:
        while time.monotonic() < end:
            began = time.perf_counter()
            client.get(f"/v1/jobs/{job_id}").raise_for_status()
            found.append((time.perf_counter() - began) * 1000)
            time.sleep(0.02)
    return found


def _statements(database_url: str) -> int:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("SELECT pg_stat_clear_snapshot()")
        row = connection.execute(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
    assert row is not None
    return int(row[0])


def _quantiles(answers_ms: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(answers_ms, n=100)
    return {"asked": len(answers_ms), "p50_ms": round(cuts[49], 2), "p99_ms": round(cuts[98], 2)}


def measure(directory: Path, *, watchers: int, jobs: int, seconds: float) -> dict[str, object]:
    """Run the whole measurement."""
    with postgres_server(directory / "pg") as postgres:
        stack = Stack(directory / "logs", postgres.new_database())
        database = Database(stack.database_url)
        store, leases = JobStore(database), Leases(database, lease_s=3600)
        claims: list[JobClaim] = []
        for number in range(jobs):
            source = SourceSpec(url="/in")
            job = store.create(ConvertRequest(source=source, target=f"/out{number}", to=TargetFormat.UNIVERSAL))
            claim = leases.claim(job.id, worker="bench")
            assert claim is not None
            claims.append(claim)
        asked = store.create(ConvertRequest(source=SourceSpec(url="/in"), target="/asked", to=TargetFormat.UNIVERSAL))
        worker = _Worker(leases, claims)
        worker.start()
        with stack.api() as url:
            _ask(url, asked.id, 1.0)
            before = _ask(url, asked.id, seconds / 2)
            streams = _Watchers(url, [claim.job_id for claim in claims], watchers)
            streams.start()
            deadline = time.monotonic() + 60
            while streams.connected < watchers and time.monotonic() < deadline:
                time.sleep(0.1)
            time.sleep(1.0)
            statements = _statements(stack.database_url)
            began = time.monotonic()
            during = _ask(url, asked.id, seconds)
            rate = (_statements(stack.database_url) - statements) / (time.monotonic() - began)
            connected = streams.connected
            streams.end()
            time.sleep(1.0)
            after = _ask(url, asked.id, seconds / 2)
        worker.end()
        database.close()
    quiet, busy = _quantiles(before + after), _quantiles(during)
    delays = statistics.quantiles(streams.delays_s, n=100) if len(streams.delays_s) > 1 else [0.0] * 99
    return {
        "watchers": connected,
        "jobs": jobs,
        "without watchers": quiet,
        "with watchers": busy,
        "p99, of that without watchers": round(busy["p99_ms"] / quiet["p99_ms"], 2),
        "transactions of the database in a second": round(rate, 1),
        "events that arrived": len(streams.delays_s),
        "delay of an event, p50 and p99 in seconds": [round(delays[49], 3), round(delays[98], 3)],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--watchers", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="rw") as directory:
        found = measure(Path(directory), watchers=arguments.watchers, jobs=arguments.jobs, seconds=arguments.seconds)
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
