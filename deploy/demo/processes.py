"""The two servers of the demo, on free loopback ports, each stopped by its process id."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from playground import Playground
from screen import program, say, step

_START_S = 60.0
_STOP_S = 20.0
BUCKET = "demo"


@contextmanager
def s3_server(place: Playground) -> Generator[dict[str, str]]:
    """Run SeaweedFS; yields the settings by which any S3 client finds it."""
    step("An S3 server starts (SeaweedFS, on this machine only)")
    ports = dict(zip(("s3", "master", "volume", "filer"), free_ports(4), strict=True))
    data = place.servers / "s3"
    data.mkdir()
    command = [
        *(program("weed"), "mini", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *(f"-{name}.port={port}" for name, port in ports.items()),
        *("-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
    ]
    endpoint = f"http://127.0.0.1:{ports['s3']}"
    settings = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "demo",
        "AWS_SECRET_ACCESS_KEY": "demo-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    environment = {**os.environ, **settings, "GOMEMLIMIT": "512MiB"}
    log = place.logs / "s3.log"
    # Killed, not asked: it would wait for idle connections, and its data is thrown away.
    with server(command, environment, place.servers, log, signal.SIGKILL) as process:
        wait_until(lambda: answers(f"{endpoint}/healthz"), process, log)
        say(f"  {endpoint}")
        yield settings


@contextmanager
def reshard_service(place: Playground) -> Generator[str]:
    """Run `reshard serve` with its embedded executor; yields its URL."""
    step("The service starts: `reshard serve`, API and executor in one")
    log = place.logs / "serve.log"
    command = [program("reshard"), "serve", "--port", "0", "--data-dir", str(place.servers / "jobs")]
    environment = {**os.environ, "RESHARD_ROOTS": f"s3://{BUCKET}"}
    with server(command, environment, place.servers, log, signal.SIGTERM) as process:
        wait_until(lambda: announced(log) is not None and answers(f"{announced(log)}/readyz"), process, log)
        yield str(announced(log))


def announced(log: Path) -> str | None:
    """The URL that the service wrote into its log."""
    found = re.search(r"reshard serves on (http://\S+)", log.read_text(errors="replace"))
    return found[1] if found else None


@contextmanager
def server(
    command: Sequence[str], environment: Mapping[str, str], directory: Path, log: Path, stop_sign: signal.Signals
) -> Generator[subprocess.Popen[bytes]]:
    """Run a child process for the length of the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,
            start_new_session=True,  # Ctrl-C is the demo's: servers are stopped in order
        )
    try:
        yield process
    finally:
        stop(process, stop_sign)


def stop(process: subprocess.Popen[bytes] | subprocess.Popen[str], stop_sign: signal.Signals) -> None:
    """Stop a process that leads a group, and then whatever is left of the group."""
    if process.poll() is None:
        process.send_signal(stop_sign)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a server.

    Raises:
        RuntimeError: It ended, or takes too long; the message has the end of its log.
    """
    deadline = time.monotonic() + _START_S
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.args!r} did not start:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)


def answers(url: str) -> bool:
    """True if the URL answers 200."""
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def free_ports(count: int) -> list[int]:
    """Free loopback ports below the kernel's own range, each with a free port 10,000 above (gRPC)."""
    found: list[int] = []
    for port in range(18_000 + os.getpid() % 2_000, 32_000):
        if len(found) < count and is_free(port) and is_free(port + 10_000):
            found.append(port)
    if len(found) < count:
        raise RuntimeError("no free loopback ports")
    return found


def is_free(port: int) -> bool:
    """True if nothing listens on the loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
