"""One server process of a test."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from house.waiting import PATIENCE_S

STOP_S = 120.0


class ServerProcess:
    """A child in its own process group, with its output in a file."""

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], log: Path, cwd: Path | None = None) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self.popen = subprocess.Popen(
                list(argv),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the process that was started."""
        return self.popen.pid

    def wait_until(self, ready: Callable[[], bool], *, timeout_s: float = PATIENCE_S) -> None:
        """Return when `ready()` holds; fail with the server's output if it ends or takes too long."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            status = self.popen.poll()
            if status is not None or time.monotonic() > deadline:
                tail = self.log.read_text(errors="replace")[-4000:]
                raise AssertionError(f"{self.popen.args!r} is not ready (status {status}):\n{tail}")
            time.sleep(0.05)

    def stop(self, sign: signal.Signals = signal.SIGTERM) -> int:
        """Stop the process and return its status; what does not stop is killed."""
        if self.popen.poll() is None:
            self.popen.send_signal(sign)
        try:
            return self.popen.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.popen.wait(STOP_S)

    def kill(self) -> None:
        """SIGKILL to this one process, as an out-of-memory killer would; its group is left to itself."""
        os.kill(self.pid, signal.SIGKILL)
        self.popen.wait(STOP_S)


@contextmanager
def running(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    log: Path,
    cwd: Path | None = None,
    stop_sign: signal.Signals = signal.SIGTERM,
) -> Generator[ServerProcess]:
    """A server process for the length of the block."""
    process = ServerProcess(argv, env=env, log=log, cwd=cwd)
    try:
        yield process
    finally:
        process.stop(stop_sign)


@contextmanager
def served(directory: Path, token: str) -> Generator[str]:
    """`reshard serve` as a user starts it, with its files in a directory; yields its URL."""
    log = directory / "serve.log"
    env = {name: value for name, value in os.environ.items() if not name.startswith("RESHARD_")}
    argv = [sys.executable, "-m", "reshard.cli.main", "serve", "--port", "0", "--data-dir", str(directory / "data")]

    def url() -> str:
        found = re.search(r"reshard serves on (http://\S+)", log.read_text())
        return found[1] if found else ""

    with running(argv, env={**env, "RESHARD_TOKEN": token}, log=log) as process:
        process.wait_until(lambda: bool(url()) and "startup complete" in log.read_text())
        yield url()


_BELOW, _TWINS, _PROCESSES = 10_000, 20_000, 8
"""Ports are out of the range that the kernel hands out itself (32,768 and above on Linux): a connection of anybody may
take one of those between its choice and the start of the server. Each process of tests has its own eighth of them."""
_EACH = 10_000 // _PROCESSES
_next = itertools.count(random.SystemRandom().randrange(_EACH))


def free_port(*, twin_offset: int = 0) -> int:
    """A free loopback port; with `twin_offset`, one whose neighbour at that distance is free too.

    No port is ever another one's twin at 10,000: once in hundreds of runs SeaweedFS refused to start for that.
    """
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % _PROCESSES
    first = (_TWINS if twin_offset else _BELOW) + process * _EACH
    for number in itertools.islice(_next, _EACH):
        port = first + number % _EACH
        if all(_is_free(candidate) for candidate in {port, port + twin_offset}):
            return port
    raise AssertionError(f"no port is free from {first} on")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def accepts(port: int) -> bool:
    """Whether something listens on the loopback port."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return True
    except OSError:
        return False
