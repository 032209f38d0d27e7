"""Answers of the API under load: queued jobs, watchers, posters and slow clients at once, beside an idle service.

    python bench/load.py [--queued 1000] [--watchers 300] [--posters 16] [--slow 200] [--seconds 45] [--out bench/out]

Starts PostgreSQL, Redis and `reshard serve` on this machine, with the product's own limits. No worker runs: a thread
reports progress of 30 jobs twice a second, straight in the database, as workers do. Each watcher holds an event stream
of one of these jobs open. Each poster sends one job after another, of a real ZeRO-2 checkpoint of 300 KB, which the API
plans before it accepts it. Half of the slow clients send the head of a request a byte a second, the others a body.
One client asks for a job again and again: in an idle service, and under load.

Before the load, pages of 200 jobs are listed, and jobs are posted while every inspector waits for an object store that
never answers.

Prints p50 and p99 in milliseconds, the processor time of the API for a page of jobs, the most memory that the API's
processes had (proportional set size) in all, in the first minute and in the last one, the seconds after which slow
clients were cut, the statements in a second that the database ran, and the delay from the report of progress to its
arrival at a watcher. Exits 1 if one of `LIMITS` is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import httpx
import psutil
import psycopg
from checkpoints import write_zero_checkpoint
from job_queue import UNHURRIED

from reshard.api.wire import USER_AGENT
from reshard.choices import TargetFormat
from reshard.models.jobs import ConvertRequest, Progress
from reshard.options import SourceSpec
from reshard_jobs.database import Database
from reshard_jobs.queue.leases import JobClaim, Leases
from reshard_jobs.queue.store import JobStore
from servers.postgres import postgres_server
from servers.process import free_port, running
from servers.redis import redis_server
from servers.stack import Stack, tree_of

_REPORT_S = 0.5
_RUNNING = 30
_PARAMETERS = [(f"layer.{n}.weight", (64, 40)) for n in range(8)]
LIMITS = {
    "p99 of GET in ms": 250.0,
    "p99 of POST in ms": 1000.0,
    "memory of the API in MiB": 300.0,
    "slow clients that were never cut": 0.0,
    "posts refused": 0.0,
    "processor of the API for a page of 200 jobs in ms": 20.0,
    "p99 of POST in ms while all inspectors are busy": 300.0,
    "growth of the API's memory from the first minute to the last in MiB": 24.0,
}
"""At most, under load."""


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


class _Posters:
    """Clients that post jobs, each one after another."""

    def __init__(self, url: str, source: Path, targets: Path, count: int) -> None:
        self._url = url
        self._source = source
        self._targets = targets
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._post, args=(number,), daemon=True) for number in range(count)]
        self.answers_ms: list[float] = []
        self.refused = 0
        for thread in self._threads:
            thread.start()

    def _post(self, number: int) -> None:
        turn = 0
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._done.is_set():
                target = str(self._targets / f"{number}-{turn}")
                body = {"source": {"url": str(self._source)}, "target": target, "to": "universal"}
                began = time.perf_counter()
                answer = client.post("/v1/jobs", json=body)
                self.answers_ms.append((time.perf_counter() - began) * 1000)
                self.refused += answer.status_code != 202
                turn += 1

    def end(self) -> None:
        """Stop."""
        self._done.set()
        for thread in self._threads:
            thread.join()


class _SlowClients(threading.Thread):
    """Connections that send a byte a second: half of them the head of a request, the others a body."""

    def __init__(self, port: int, count: int) -> None:
        super().__init__(daemon=True)
        self._done = threading.Event()
        self.cut_after_s: dict[str, list[float]] = {"head": [], "body": []}
        self.open: dict[socket.socket, tuple[str, float]] = {}
        for number in range(count):
            kind = "body" if number % 2 else "head"
            text = "POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            text += "Content-Length: 1000\r\nContent-Type: application/json\r\n\r\n{" if kind == "body" else "X-Slow: "
            client = socket.create_connection(("127.0.0.1", port), timeout=30)
            client.sendall(text.encode())
            client.setblocking(False)
            self.open[client] = (kind, time.monotonic())

    def run(self) -> None:
        while self.open and not self._done.wait(1.0):
            for client, (kind, began) in list(self.open.items()):
                if _is_closed(client):
                    self.cut_after_s[kind].append(time.monotonic() - began)
                    del self.open[client]
                    client.close()

    def end(self) -> None:
        """Close those that are still open."""
        self._done.set()
        self.join()
        for client in self.open:
            client.close()


def _is_closed(client: socket.socket) -> bool:
    try:
        client.send(b"x")
        while client.recv(1 << 12):
            pass  # the answer that says why
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


class _Gauge(threading.Thread):
    """The most memory that the processes below one had, looked at once a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._done = threading.Event()
        self.most_mib = 0.0
        self.api_mib: list[float] = []
        """Memory of the API's own process, each second."""

    def run(self) -> None:
        while not self._done.wait(1.0):
            found: list[float] = []
            for process in tree_of(self._pid):
                with suppress(psutil.Error):
                    found.append(process.memory_full_info().pss / (1 << 20))
            self.api_mib += found[:1]
            self.most_mib = max(self.most_mib, sum(found))

    def end(self) -> None:
        """Stop."""
        self._done.set()
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


class _Silence:
    """An object store that takes connections and never answers."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._taken: list[socket.socket] = []
        self._thread = threading.Thread(target=self._take, daemon=True)
        self._thread.start()

    def _take(self) -> None:
        with suppress(OSError):
            while True:
                self._taken.append(self._socket.accept()[0])

    @property
    def waiting(self) -> int:
        """Connections that wait for an answer."""
        return len(self._taken)

    def close(self) -> None:
        """End all waits."""
        self._socket.close()
        for taken in self._taken:
            taken.close()


def _list_ms(url: str, pid: int, pages: int = 50) -> float:
    """Processor time of the API's process for a page of 200 jobs."""
    process = psutil.Process(pid)
    # As our clients say: others get what release 0.1 understands.
    with httpx.Client(base_url=url, timeout=60, headers={"User-Agent": USER_AGENT}) as client:
        assert len(client.get("/v1/jobs?page_size=200").json()["jobs"]) == 200
        before = process.cpu_times()
        for _ in range(pages):
            client.get("/v1/jobs?page_size=200").raise_for_status()
        after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) * 1000 / pages


def _post_while_inspectors_wait(url: str, silence: _Silence, source: Path, targets: Path) -> list[float]:
    """Milliseconds of posts, one after another and at most 60, while all inspections that there can be wait."""
    inspectors = max(2, os.cpu_count() or 2)

    def inspect(number: int) -> None:
        with suppress(httpx.HTTPError):
            httpx.post(f"{url}/v1/inspections", json={"url": f"s3://silent/run{number}"}, timeout=60)

    threads = [threading.Thread(target=inspect, args=(number,), daemon=True) for number in range(inspectors)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    while silence.waiting < inspectors and time.monotonic() < deadline:
        time.sleep(0.05)
    assert silence.waiting >= inspectors, "the inspectors are not busy"
    found: list[float] = []
    with httpx.Client(base_url=url, timeout=60) as client:
        while len(found) < 60 and all(thread.is_alive() for thread in threads):
            body = {"source": {"url": str(source)}, "target": str(targets / str(len(found))), "to": "universal"}
            began = time.perf_counter()
            client.post("/v1/jobs", json=body).raise_for_status()
            found.append((time.perf_counter() - began) * 1000)
    silence.close()
    for thread in threads:
        thread.join()
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


@contextmanager
def _served(stack: Stack) -> Generator[tuple[str, int, int]]:
    """`reshard serve`; yields its URL, its port and its process id."""
    port = free_port()
    argv = [sys.executable, "-m", "reshard.cli.main", "serve", "--port", str(port)]
    argv += ["--data-dir", str(stack.directory / "data"), "--log-level", "warning"]
    url = f"http://127.0.0.1:{port}"
    with running(argv, env=stack.env(), log=stack.directory / "api.log") as process:
        process.wait_until(lambda: _answers(url))
        yield url, port, process.pid


def _answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/readyz").status_code == 200
    return False


def _running_jobs(store: JobStore, leases: Leases) -> list[JobClaim]:
    claims: list[JobClaim] = []
    for number in range(_RUNNING):
        job = store.create(_request(f"/running{number}"))
        claim = leases.claim(job.id, worker="bench")
        assert claim is not None
        claims.append(claim)
    return claims


def _request(target: str) -> ConvertRequest:
    return ConvertRequest(source=SourceSpec(url="/in"), target=target, to=TargetFormat.UNIVERSAL)


def measure(directory: Path, *, queued: int, watchers: int, posters: int, slow: int, seconds: float) -> dict[str, Any]:
    """Run the whole measurement."""
    write_zero_checkpoint(directory / "source", _PARAMETERS, stage=2, ranks=2)
    with ExitStack() as servers:
        postgres = servers.enter_context(postgres_server(directory / "pg"))
        broker = servers.enter_context(redis_server(directory / "redis"))
        silence = _Silence()
        there = {"AWS_ENDPOINT_URL": silence.url, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
        extra = {**UNHURRIED, **there, "AWS_DEFAULT_REGION": "us-east-1"}
        stack = Stack(directory / "logs", postgres.new_database(), broker, scripted=False, extra=extra)
        stack.directory.mkdir(exist_ok=True)
        database = servers.enter_context(closing(Database(stack.database_url)))
        store, leases = JobStore(database), Leases(database, lease_s=3600)
        claims = _running_jobs(store, leases)
        asked = store.create(_request("/asked"))
        worker = _Worker(leases, claims)
        worker.start()
        url, port, pid = servers.enter_context(_served(stack))
        _ask(url, asked.id, 1.0)
        idle = _ask(url, asked.id, seconds / 4)
        idle_posts = _Posters(url, directory / "source", directory / "idle", 1)
        time.sleep(seconds / 8)
        idle_posts.end()
        for number in range(queued):
            store.create(_request(f"/queued{number}"))
        list_ms = _list_ms(url, pid) if queued >= 200 else 0.0
        busy = _post_while_inspectors_wait(url, silence, directory / "source", directory / "busy")
        gauge, streams = _Gauge(pid), _Watchers(url, [claim.job_id for claim in claims], watchers)
        gauge.start()
        streams.start()
        deadline = time.monotonic() + 60
        while streams.connected < watchers and time.monotonic() < deadline:
            time.sleep(0.1)
        slow_clients = _SlowClients(port, slow)
        slow_clients.start()
        posts = _Posters(url, directory / "source", directory / "posted", posters)
        time.sleep(1.0)
        statements, began = _statements(stack.database_url), time.monotonic()
        loaded = _ask(url, asked.id, seconds)
        rate = (_statements(stack.database_url) - statements) / (time.monotonic() - began)
        connected = streams.connected
        posts.end()
        for helper in (slow_clients, streams, gauge, worker):
            helper.end()
    delays = statistics.quantiles(streams.delays_s, n=100) if len(streams.delays_s) > 1 else [0.0] * 99
    cut = {
        kind: {"cut": len(s), "after_s": round(max(s, default=0), 1)} for kind, s in slow_clients.cut_after_s.items()
    }
    return {
        "queued": queued,
        "watchers": connected,
        "posters": posters,
        "GET, idle": _quantiles(idle),
        "GET, loaded": _quantiles(loaded),
        "POST, one poster in an idle service": _quantiles(idle_posts.answers_ms),
        "POST, loaded": _quantiles(posts.answers_ms),
        "POST, all inspectors busy": _quantiles(busy),
        "processor of the API for a page of 200 jobs, ms": round(list_ms, 1),
        "posts refused": posts.refused + idle_posts.refused,
        "memory of the API, MiB": round(max(gauge.api_mib), 1),
        "memory of the API in the first and the last minute, MiB": [
            round(max(gauge.api_mib[:60]), 1),
            round(max(gauge.api_mib[-60:]), 1),
        ],
        "memory of the API and its probes, MiB": round(gauge.most_mib, 1),
        "slow clients": cut,
        "slow clients that were never cut": len(slow_clients.open),
        "transactions of the database in a second": round(rate, 1),
        "events that arrived": len(streams.delays_s),
        "delay of an event, p50 and p99 in seconds": [round(delays[49], 3), round(delays[98], 3)],
    }


def judged(found: dict[str, Any]) -> dict[str, float]:
    """The numbers that have limits."""
    values = (found["GET, loaded"]["p99_ms"], found["POST, loaded"]["p99_ms"])
    values += (found["memory of the API, MiB"], found["slow clients that were never cut"], found["posts refused"])
    first, last = found["memory of the API in the first and the last minute, MiB"]
    values += (found["processor of the API for a page of 200 jobs, ms"], found["POST, all inspectors busy"]["p99_ms"])
    values += (last - first,)
    return dict(zip(LIMITS, values, strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queued", type=int, default=1000)
    parser.add_argument("--watchers", type=int, default=300)
    parser.add_argument("--posters", type=int, default=16)
    parser.add_argument("--slow", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out")
    chosen = vars(parser.parse_args(argv))
    out = chosen.pop("out")
    with tempfile.TemporaryDirectory(prefix="rl") as directory:
        found = measure(Path(directory), **chosen)
    text = json.dumps(found, indent=1)
    print(text)
    missed = False
    for name, value in judged(found).items():
        missed |= value > LIMITS[name]
        print(f"{'MISSED' if value > LIMITS[name] else 'ok':6} {name}: {value:g} (at most {LIMITS[name]:g})")
    out.mkdir(parents=True, exist_ok=True)
    (out / "load.json").write_text(text + "\n", encoding="utf-8")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
