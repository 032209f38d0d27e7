"""Our own processes, as users start them: the API, a Celery worker, an embedded executor."""

from __future__ import annotations

import os
import shlex
import signal
import sqlite3
import sys
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from house.waiting import PATIENCE_S
from reshard.api.client import Client
from servers.process import ServerProcess, free_port, running

LEASE_S = 2.5
"""Short enough that tests need not wait, long enough for a busy two-core machine."""


@dataclass
class Stack:
    """Settings that the processes of one service share, and where their logs go."""

    directory: Path
    database_url: str
    broker_url: str = ""
    scripted: bool = True
    """Whether the scripted engine stands in for the real one."""
    extra: dict[str, str] = field(default_factory=dict[str, str])

    def env(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment of a process: this one's without its own RESHARD_ settings."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RESHARD_")}
        return {
            **inherited,
            "RESHARD_DATABASE_URL": self.database_url,
            "RESHARD_BROKER_URL": self.broker_url,
            "RESHARD_LEASE_S": str(LEASE_S),
            "RESHARD_HEARTBEAT_S": "0.5",
            "RESHARD_REAPER_S": "0.5",
            "RESHARD_RETRY_DELAY_S": "0.2",
            "RESHARD_SHUTDOWN_GRACE_S": "0.5",
            "RESHARD_ANONYMOUS": "true",
            **(scripted_runner() if self.scripted else {}),
            **self.extra,
            **(more or {}),
        }

    @contextmanager
    def api(self, more: Mapping[str, str] | None = None) -> Generator[str]:
        """The API in a uvicorn of its own; yields its URL."""
        with self.api_process(more) as (url, _):
            yield url

    @contextmanager
    def api_process(self, more: Mapping[str, str] | None = None) -> Generator[tuple[str, ServerProcess]]:
        """The API and its process."""
        port = free_port()
        factory = "servers.scripted:create_app" if self.scripted else "reshard_service.app:create_app"
        argv = [
            *(sys.executable, "-m", "uvicorn", factory, "--factory", "--app-dir", str(Path(__file__).parent.parent)),
            *("--host", "127.0.0.1", "--port", str(port), "--timeout-graceful-shutdown", "2", "--no-proxy-headers"),
        ]
        url = f"http://127.0.0.1:{port}"
        with running(argv, env=self.env(more), log=self.directory / "api.log") as process:
            process.wait_until(lambda: _answers(url))
            yield url, process

    def start_worker(
        self, more: Mapping[str, str] | None = None, *, cwd: Path | None = None, log_level: str = "INFO"
    ) -> ServerProcess:
        """A worker of the stack's driver: Celery with a broker, the embedded executor without."""
        if not self.broker_url:
            argv = [sys.executable, "-m", "reshard_worker.embedded"]
            return ServerProcess(argv, env=self.env(more), log=self.directory / "embedded.log", cwd=cwd)
        argv = [sys.executable, "-c", f"from reshard_worker.launch import worker; worker(log_level={log_level!r})"]
        log = self.directory / f"celery-{time.monotonic_ns()}.log"
        process = ServerProcess(argv, env=self.env(more), log=log, cwd=cwd)
        process.wait_until(lambda: " ready." in log.read_text(errors="replace"))
        return process

    @contextmanager
    def worker(
        self, more: Mapping[str, str] | None = None, *, cwd: Path | None = None, log_level: str = "INFO"
    ) -> Generator[ServerProcess]:
        """A worker for the length of the block."""
        process = self.start_worker(more, cwd=cwd, log_level=log_level)
        try:
            yield process
        finally:
            end_tree(process)


def end_tree(process: ServerProcess) -> None:
    """Kill a process and whatever of it is left: a test that wants a graceful end asks for it itself."""
    left = tree_of(process.pid)
    if process.popen.poll() is None:
        process.kill()
    for child in left[1:]:
        if child.is_running():
            child.kill()


def tree_of(pid: int) -> list[psutil.Process]:
    """A process and its descendants, or nothing if it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def runners_of(pid: int) -> list[psutil.Process]:
    """Runner processes below a worker."""
    found: list[psutil.Process] = []
    for process in tree_of(pid)[1:]:
        try:
            command = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if any(part.endswith(("scripted.py", "reshard_worker.runner")) for part in command):
            found.append(process)
    return found


def pause(processes: Iterable[psutil.Process], *, database_url: str) -> None:
    """SIGSTOP, but not inside a transaction: a sleeper that holds SQLite's one write lock, or the row of its job in
    PostgreSQL, stops everybody.
    """
    for _ in range(100):
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        if _is_writable(database_url):
            return
        resume(processes)
        time.sleep(0.05)
    raise AssertionError("the processes were in a transaction at each of 100 looks")


def _is_writable(database_url: str) -> bool:
    scheme, _, path = database_url.partition(":///")
    if not scheme.startswith("sqlite"):
        return _no_row_is_locked(database_url)
    connection = sqlite3.connect(path, timeout=0.3, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.OperationalError:
        return False
    finally:
        connection.close()
    return True


def _no_row_is_locked(database_url: str) -> bool:
    import psycopg  # a machine with a GPU runs the stack on SQLite, and has no driver of PostgreSQL

    with psycopg.connect(database_url, autocommit=True) as connection:
        try:
            connection.execute("SELECT id FROM jobs FOR UPDATE NOWAIT")
        except psycopg.errors.LockNotAvailable:
            return False
    return True


def resume(processes: Iterable[psutil.Process]) -> None:
    """SIGCONT."""
    for process in processes:
        if process.is_running():
            process.send_signal(signal.SIGCONT)


def scripted_runner() -> dict[str, str]:
    """The setting that puts the scripted engine into the engine process."""
    script = Path(__file__).with_name("scripted.py")
    # One process for each job: the tests that use it look for the engine process of a job, and find no other one.
    command = shlex.join([sys.executable, "-P", str(script)])
    return {"RESHARD_RUNNER_COMMAND": command, "RESHARD_WARM_ENGINE": "0"}


def client_of(url: str, token: str = "") -> Client:
    """A client of a service under test."""
    return Client(url, token, timeout_s=PATIENCE_S)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", timeout=1.0).status_code == 200
    except httpx.TransportError:
        return False
