"""The main job on one machine: `make demo`. Needs no root, no GPU and no running service.

Starts an S3 server (SeaweedFS) and `reshard serve` on free loopback ports, puts a small real DeepSpeed
ZeRO-3 checkpoint into a bucket, has it converted twice (universal, and bf16 safetensors) by jobs of the
service, lists and verifies both results, and stops everything. Exits 0 only if all of it worked.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Never

import boto3  # pyright: ignore[reportMissingTypeStubs]
import httpx

import reshard

REPOSITORY = Path(__file__).resolve().parents[2]
CHECKPOINT = REPOSITORY / "tests" / "data" / "zero3_tiny"
BUCKET = "demo"
SOURCE = f"s3://{BUCKET}/run1"
UNIVERSAL = f"s3://{BUCKET}/run1/global_step3_universal"
WEIGHTS = f"s3://{BUCKET}/weights"
START_S = 60.0


def main() -> int:
    """Run the demo; returns the exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    began = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="reshard-demo-"))
    try:
        with s3_server(directory) as endpoint:
            os.environ.update(s3_settings(endpoint))
            # `reshard serve` writes its token there, and the commands find it: the home directory stays as it is.
            os.environ["XDG_STATE_HOME"] = str(directory / "state")
            bucket = boto3.client("s3")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            upload(bucket)
            with reshard_service(directory) as url:
                os.environ["RESHARD_URL"] = url
                convert_by_client(url)
                convert_by_cli()
            show_results(bucket)
            verify_results()
    except KeyboardInterrupt:
        say("interrupted; everything is stopped")
        return 130
    except (reshard.ReshardError, RuntimeError) as error:
        say(f"\nthe demo failed: {error}")
        return 1
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    say(f"\ndone in {time.monotonic() - began:.0f} s: one ZeRO-3 checkpoint, two new forms, both verified")
    say("nothing is left running, nothing is left on disk")
    return 0


def upload(bucket: Any) -> None:
    """Put the checkpoint of `tests/data` into a new bucket."""
    step("a DeepSpeed ZeRO-3 checkpoint, written by two ranks, goes into a bucket")
    bucket.create_bucket(Bucket=BUCKET)
    for path in sorted(CHECKPOINT.rglob("*")):
        name = path.relative_to(CHECKPOINT).as_posix()
        if path.is_file() and (name == "latest" or name.startswith("global_step")):
            bucket.put_object(Bucket=BUCKET, Key=f"run1/{name}", Body=path.read_bytes())
    run("reshard", "inspect", SOURCE)


def convert_by_client(url: str) -> None:
    """One job through the Python client."""
    step("a job is POSTed with the Python client: universal, which DeepSpeed loads on any number of GPUs")
    say(f'  client.submit("{SOURCE}", "{UNIVERSAL}", to="universal")')
    with reshard.Client(url) as client:
        job = client.submit(SOURCE, UNIVERSAL, to="universal", labels={"from": "demo"})
        for event in client.watch(job.id):
            say(f"  {job.id[:12]} {event.state.value:<10} {share(event.progress)}")
        result = client.result(job.id)
    if not isinstance(result, reshard.ConvertResult):
        raise RuntimeError("the job has no conversion as its result")
    say(f"  read {result.read_bytes:,} bytes, wrote {result.write_bytes:,} bytes in {len(result.files)} files")


def convert_by_cli() -> None:
    """One job through the command line."""
    step("another job from the shell: consolidated weights, safetensors in bf16")
    run("reshard", "submit", SOURCE, WEIGHTS, "--to", "safetensors", "--dtype", "bf16", "--wait")
    run("reshard", "jobs", "list")


def show_results(bucket: Any) -> None:
    """List what is in the bucket now."""
    step("what is in the bucket now")
    for page in bucket.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
        for entry in page.get("Contents", []):
            say(f"  {entry['Size']:>9,}  s3://{BUCKET}/{entry['Key']}")


def verify_results() -> None:
    """Read both results again and compare them with their manifests."""
    step("both results are read again and compared with their manifests")
    for target in (UNIVERSAL, WEIGHTS):
        run("reshard", "verify", target)


# -- the two servers ----------------------------------------------------------------------------------


@contextmanager
def s3_server(directory: Path) -> Generator[str]:
    """SeaweedFS on free loopback ports; yields its endpoint."""
    step("an S3 server starts (SeaweedFS, on this machine only)")
    ports = dict(zip(("s3", "master", "volume", "filer"), free_ports(4), strict=True))
    data = directory / "s3"
    data.mkdir()
    command = [
        *(program("weed"), "mini", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *(f"-{name}.port={port}" for name, port in ports.items()),
        *("-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
    ]
    endpoint = f"http://127.0.0.1:{ports['s3']}"
    environment = {**os.environ, **s3_settings(endpoint), "GOMEMLIMIT": "512MiB"}
    # Killed, not asked: it would wait for idle connections, and its data is thrown away.
    with server(command, environment, directory / "s3.log", signal.SIGKILL) as process:
        wait_until(lambda: answers(f"{endpoint}/healthz"), process, directory / "s3.log")
        say(f"  {endpoint}")
        yield endpoint


@contextmanager
def reshard_service(directory: Path) -> Generator[str]:
    """`reshard serve` with its embedded executor; yields its URL."""
    step("`reshard serve` starts: the API and an executor, no other service")
    log = directory / "serve.log"
    command = [program("reshard"), "serve", "--port", "0", "--data-dir", str(directory / "jobs")]
    environment = {**os.environ, "RESHARD_ROOTS": f"s3://{BUCKET}"}
    with server(command, environment, log, signal.SIGTERM) as process:
        wait_until(lambda: announced(log) is not None and answers(f"{announced(log)}/readyz"), process, log)
        url = str(announced(log))
        say(f"  RESHARD_URL={url}")
        yield url


def announced(log: Path) -> str | None:
    """The URL that the service wrote into its log."""
    found = re.search(r"reshard serves on (http://\S+)", log.read_text(errors="replace"))
    return found[1] if found else None


def s3_settings(endpoint: str) -> dict[str, str]:
    """What any S3 client needs to know; the names are those of AWS."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "demo",
        "AWS_SECRET_ACCESS_KEY": "demo-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextmanager
def server(
    command: Sequence[str], environment: Mapping[str, str], log: Path, stop_sign: signal.Signals
) -> Generator[subprocess.Popen[bytes]]:
    """A child process for the length of the block, stopped by its process id."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            start_new_session=True,  # Ctrl-C is ours: servers are stopped in order
        )
    try:
        yield process
    finally:
        process.send_signal(stop_sign)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a server; fail with its log if it ends or takes too long."""
    deadline = time.monotonic() + START_S
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.args!r} did not start:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)


def answers(url: str) -> bool:
    """Whether the URL answers 200."""
    try:
        return httpx.get(url, timeout=2.0).status_code == 200
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
    """Whether nothing listens on the loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


# -- on the screen ------------------------------------------------------------------------------------


def run(name: str, *arguments: str) -> None:
    """Run one of our commands and show it with its output."""
    say(f"  $ {name} {' '.join(arguments)}")
    command = [program(name), *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            say(f"  {line.rstrip()}")
    if process.returncode:
        raise RuntimeError(f"`{name} {arguments[0]}` ended with status {process.returncode}")


def program(name: str) -> str:
    """A program of this Python's environment, or of PATH."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} is not installed: run `make setup`")
    return found


def share(progress: reshard.Progress | None) -> str:
    """How far a job is."""
    if progress is None or not progress.bytes_total:
        return ""
    percent = 100 * progress.bytes_done / progress.bytes_total
    return f"{percent:3.0f} %  {progress.units_done}/{progress.units_total} units"


def step(text: str) -> None:
    """Head a part of the demo."""
    say(f"\n== {text}")


def say(text: str) -> None:
    """One line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _interrupt(_number: int, _frame: object) -> Never:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
