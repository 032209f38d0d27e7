"""Worker processes on a real S3 server read the source's metadata once, and go on when the one that reads is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from checkpoints import write_zero_checkpoint

from house.measured import say
from reshard_engine.integrity.manifest import MANIFEST_NAME
from servers.proxy import LoggingProxy, logging_proxy
from servers.s3 import S3Server

PARAMETERS = [(f"layer.{n}.weight", (64, 65)) for n in range(24)]
RANKS = 8
WORKERS = 4


@dataclass(frozen=True)
class Alone:
    """Files that one process wrote, and the number of its reads of the source."""

    files: dict[str, bytes]
    reads: int


@pytest.fixture(scope="module")
def alone(s3: S3Server, bucket: str) -> Alone:
    with logging_proxy(s3.endpoint) as proxy:
        result(start(s3, proxy, bucket, "alone"))
        return Alone(target_files(s3, bucket, "alone"), gets(proxy, f"/{bucket}/run/"))


@pytest.fixture(scope="module")
def bucket(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A bucket with a ZeRO-2 checkpoint of eight ranks."""
    name = f"metadata-{os.getpid()}"
    directory = tmp_path_factory.mktemp("source") / "run"
    write_zero_checkpoint(directory, PARAMETERS, stage=2, ranks=RANKS)
    s3.make_bucket(name)
    s3.upload(directory, name, "run")
    return name


def start(s3: S3Server, proxy: LoggingProxy, bucket: str, target: str, *more: str) -> subprocess.Popen[str]:
    source, out = f"s3://{bucket}/run", f"s3://{bucket}/{target}"
    argv = [sys.executable, "-m", "reshard.cli.main", "convert", source, out, "--to", "universal"]
    flags = ["--server-copy", "never", "--json", "--quiet", *more]
    environment = {**os.environ, "RESHARD_LEASE_S": "10", "OMP_NUM_THREADS": "1", **s3.env(proxy.endpoint)}
    return subprocess.Popen([*argv, *flags], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def numbered(number: int) -> tuple[str, ...]:
    return "--workers", str(WORKERS), "--worker", str(number)


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, (process.returncode, err)
    return json.loads(out.splitlines()[-1])


def gets(proxy: LoggingProxy, path: str) -> int:
    """Reads of objects below a path that were answered."""
    found = [r for r in proxy.requests if r.method == "GET" and r.path.startswith(path) and r.status in (200, 206)]
    return sum("list-type" not in r.query for r in found)


def target_files(s3: S3Server, bucket: str, target: str) -> dict[str, bytes]:
    return {n: d for n, d in s3.read_all(bucket, target).items() if n != MANIFEST_NAME}


def left_beside(s3: S3Server, bucket: str) -> list[str]:
    keys = [o["Key"] for o in s3.client().list_objects_v2(Bucket=bucket).get("Contents", ())]
    return [key for key in keys if ".reshard-" in key]


def test_four_workers_read_the_metadata_once(s3: S3Server, bucket: str, alone: Alone) -> None:
    with logging_proxy(s3.endpoint) as proxy:
        # The reads are slow, so that all workers have begun before the first reader has read.
        proxy.pause_s = lambda method, target: 0.2 if method == "GET" and f"/{bucket}/run/" in target else 0.0
        workers = [start(s3, proxy, bucket, "together", *numbered(n)) for n in range(WORKERS)]
        seconds = [result(worker)["seconds"] for worker in workers]
        by_four, of_packs = (gets(proxy, f"/{bucket}/{path}") for path in ("run/", ".together.reshard-packs/pa"))
    assert target_files(s3, bucket, "together") == alone.files
    joined = sum("pack" in s for s in seconds)
    say(
        f"reads of the source: {alone.reads} by one process, {by_four} by {WORKERS} workers, and {of_packs} of the pack"
    )
    assert joined == WORKERS - 1
    assert by_four == alone.reads
    assert of_packs == 2 * joined, "the number of parts, and the part"
    assert left_beside(s3, bucket) == []


def test_the_others_go_on_when_the_first_reader_is_killed(s3: S3Server, bucket: str, alone: Alone) -> None:
    with logging_proxy(s3.endpoint) as proxy:
        proxy.pause_s = lambda method, target: 0.5 if method == "GET" and f"/{bucket}/run/" in target else 0.0
        workers = [start(s3, proxy, bucket, "killed", *numbered(n)) for n in range(WORKERS - 1)]
        reader = _first_reader(s3, bucket, "killed")
        wait_for(lambda: gets(proxy, f"/{bucket}/run/") >= 1)
        os.kill(reader, signal.SIGKILL)
        ended = {worker.pid: worker for worker in workers}
        ended.pop(reader).communicate()
        found = [result(worker) for worker in ended.values()]
    assert target_files(s3, bucket, "killed") == alone.files
    assert sum("publish" in r["seconds"] for r in found) == 1, "one of the others took the reading over"
    assert left_beside(s3, bucket) == []


def test_clean_removes_the_pack_of_killed_workers(s3: S3Server, bucket: str) -> None:
    with logging_proxy(s3.endpoint) as proxy:
        # Data is read slowly: the pack is published, and nothing is committed.
        proxy.pause_s = lambda _, target: 5.0 if "/epoch-" in target else 0.0
        worker = start(s3, proxy, bucket, "left", *numbered(0))
        wait_for(lambda: any("/packs/" in key for key in left_beside(s3, bucket)))
        worker.kill()
        worker.communicate()
    subprocess.run(
        [sys.executable, "-m", "reshard.cli.main", "clean", f"s3://{bucket}/left", "--idle"],
        env={**os.environ, **s3.env()},
        check=True,
        capture_output=True,
    )
    assert left_beside(s3, bucket) == []


def _first_reader(s3: S3Server, bucket: str, target: str) -> int:
    """The process id of the worker that claimed the reading."""
    head = f".{target}.reshard-packs/claim-"
    wait_for(lambda: any(key.startswith(head) for key in left_beside(s3, bucket)))
    claim = next(key for key in left_beside(s3, bucket) if key.startswith(head))
    text = s3.client().get_object(Bucket=bucket, Key=claim)["Body"].read()
    return int(json.loads(text)["worker"].split("-")[1])


def wait_for(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.05)
