"""Conversions within an object store against a plain concurrent copy of the same bytes with the same library.

    python bench/object_store.py [--megabytes 600] [--rounds 3] [--latency-ms 300] [--out bench/out] [--data DIR]

Starts SeaweedFS on loopback, uploads a ZeRO-2 checkpoint of four ranks, and takes turns, each contender in a process
of its own: `plain` gets every source object in ranges and puts the same bytes in parts (botocore in threads, no
checksum but what signing takes); `ours, every byte sent` converts to two ranks without server-side copies; `ours`
lets the store copy. Times are of whole processes; traffic is what passes in bodies of requests and answers.
The same checkpoint then becomes universal: by us within the store, and as people do it by hand, with a concurrent
download, `ds_to_universal` and a concurrent upload.

Then jobs on a store whose every call takes `--latency-ms`: one worker process converts four, then four do one each.

Client and server share the machine: read the ratios. Exits 1 if one of `LIMITS` is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cases import environment
from seaweed import seaweed

_BUCKET = "bench"
_PART_BYTES = 64 << 20
_CONCURRENCY = 8
_JOBS = 4
_SETTLE_S = 2.0
LIMITS = {
    "ours, every byte sent: time of plain": (0.0, 1.2),
    "by hand: time of ours to universal": (5.0, math.inf),
    "ours: time of ours, every byte sent": (0.0, 1.0),
    "ours: share of the bytes that passed the worker": (0.0, 0.1),
    "four workers: throughput of one": (3.6, 4.4),
}
"""From, to."""


# -- contenders: each runs in a process of its own ------------------------------------------------------------


class _Traffic:
    """Bytes in bodies, and how long each call of the store waits first."""

    def __init__(self, latency_s: float = 0.0) -> None:
        self.received = self.sent = self.calls = 0
        self._latency_s = latency_s
        self._lock = threading.Lock()

    def count(self, *, received: int = 0, sent: int = 0) -> None:
        with self._lock:
            self.received += received
            self.sent += sent
            self.calls += 1

    def watch(self, store: Any) -> None:
        """Count what the methods of a store class move."""
        sizes: dict[str, Callable[..., dict[str, int]]] = {
            "read_into": lambda *args, **_: {"received": len(args[2])},
            "put": lambda *args, **_: {"sent": len(args[1])},
            "put_part": lambda *args, **_: {"sent": len(args[3])},
        }
        names = ("copy_part", "stat", "metadata", "list_tree", "list_directory", "list_parts", "list_uploads")
        names += ("create_multipart", "complete_multipart", "abort_multipart", "delete")
        for name in (*sizes, *names):
            self._wrap(store, name, sizes.get(name, lambda *_, **__: {}))

    def _wrap(self, store: Any, name: str, size: Callable[..., dict[str, int]]) -> None:
        method = getattr(store, name)

        def watched(this: Any, *args: Any, **options: Any) -> Any:
            self.count(**size(*args, **options))
            if self._latency_s:
                time.sleep(self._latency_s)
            return method(this, *args, **options)

        setattr(store, name, watched)


def _convert(source: str, target: str, **options: Any) -> None:
    from reshard.engine import load_engine
    from reshard.models.jobs import ConvertRequest

    place = {"source": {"url": f"s3://{_BUCKET}/{source}"}, "target": f"s3://{_BUCKET}/{target}"}
    load_engine().convert(ConvertRequest.model_validate({**place, **options}))


def _ours(server_copy: str, target: str) -> _Traffic:
    from reshard_engine.storage.s3 import S3Store

    traffic = _Traffic()
    traffic.watch(S3Store)
    _convert("run", target, to="zero", layout={"dp": 2}, server_copy=server_copy)
    return traffic


def _botocore() -> Any:
    import botocore.session
    from botocore.config import Config

    config = Config(
        max_pool_connections=64,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return botocore.session.get_session().create_client(
        "s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"], config=config
    )


def _to_universal(target: str) -> _Traffic:
    from reshard_engine.storage.s3 import S3Store

    traffic = _Traffic()
    traffic.watch(S3Store)
    _convert("run", target, to="universal")
    return traffic


def _by_hand(target: str) -> _Traffic:
    """Everything is downloaded, converted by DeepSpeed's script and uploaded, eight transfers at a time."""
    client, traffic = _botocore(), _Traffic()
    listed = client.list_objects_v2(Bucket=_BUCKET, Prefix="run/")["Contents"]
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(_CONCURRENCY) as pool:
        here, there = Path(name) / "source", Path(name) / "universal"

        def get(part: tuple[str, int, int]) -> None:
            key, at, length = part
            answer = client.get_object(Bucket=_BUCKET, Key=key, Range=f"bytes={at}-{at + length - 1}")
            data = answer["Body"].read()
            descriptor = os.open(here / key, os.O_WRONLY | os.O_CREAT, 0o644)
            os.pwrite(descriptor, data, at)
            os.close(descriptor)
            traffic.count(received=len(data))

        def put(path: Path) -> None:
            data = path.read_bytes()
            client.put_object(Bucket=_BUCKET, Key=f"{target}/{path.relative_to(there).as_posix()}", Body=data)
            traffic.count(sent=len(data))

        for entry in listed:
            (here / entry["Key"]).parent.mkdir(parents=True, exist_ok=True)
        list(pool.map(get, _parts(listed)))
        script = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        tag = here / "run" / "global_step7"
        quiet = {"env": environment(), "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([*script, "--input_folder", str(tag), "--output_folder", str(there)], check=True, **quiet)
        list(pool.map(put, [p for p in there.rglob("*") if p.is_file()]))
    return traffic


def _parts(listed: Sequence[Any]) -> list[tuple[str, int, int]]:
    """(key, offset, length) of the ranges of objects."""
    return [(e["Key"], at, min(_PART_BYTES, e["Size"] - at)) for e in listed for at in range(0, e["Size"], _PART_BYTES)]


def _plain(target: str) -> _Traffic:
    """Ranged gets and part puts, as fast as botocore in threads does them."""
    client, traffic = _botocore(), _Traffic()
    listed = client.list_objects_v2(Bucket=_BUCKET, Prefix="run/")["Contents"]
    uploads = {
        entry["Key"]: client.create_multipart_upload(Bucket=_BUCKET, Key=f"{target}/{entry['Key']}")["UploadId"]
        for entry in listed
    }

    def move(part: tuple[str, int, int]) -> tuple[str, int, str]:
        key, at, length = part
        answer = client.get_object(Bucket=_BUCKET, Key=key, Range=f"bytes={at}-{at + length - 1}")
        data = answer["Body"].read()
        traffic.count(received=len(data))
        number = at // _PART_BYTES + 1
        place = {"Bucket": _BUCKET, "Key": f"{target}/{key}", "UploadId": uploads[key]}
        receipt = client.upload_part(**place, PartNumber=number, Body=data)
        traffic.count(sent=len(data))
        return key, number, receipt["ETag"]

    with ThreadPoolExecutor(_CONCURRENCY) as pool:
        receipts = list(pool.map(move, _parts(listed)))
    for key, upload in uploads.items():
        mine = [{"PartNumber": n, "ETag": etag} for k, n, etag in receipts if k == key]
        client.complete_multipart_upload(
            Bucket=_BUCKET, Key=f"{target}/{key}", UploadId=upload, MultipartUpload={"Parts": mine}
        )
    return traffic


def _worker(jobs: Sequence[str], latency_s: float) -> None:
    """Convert jobs one after another, once the word is given on stdin."""
    from reshard.engine import load_engine
    from reshard_engine.storage.s3 import S3Store

    load_engine()
    _Traffic(latency_s).watch(S3Store)
    print("ready", flush=True)
    sys.stdin.readline()
    for job in jobs:
        _convert("small", job, to="universal")


_CONTENDERS: dict[str, Callable[[str], _Traffic]] = {
    "plain": _plain,
    "ours, every byte sent": lambda target: _ours("never", target),
    "ours": lambda target: _ours("auto", target),
    "ours to universal": _to_universal,
    "by hand": _by_hand,
}


# -- the benchmark ---------------------------------------------------------------------------------------------


def _client() -> Any:
    import boto3

    return boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])


def _upload(directory: Path, prefix: str) -> int:
    client, total = _client(), 0
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        client.upload_file(str(path), _BUCKET, f"{prefix}/{path.relative_to(directory).as_posix()}")
        total += path.stat().st_size
    return total


def _clear(prefix: str) -> None:
    client = _client()
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=_BUCKET, Prefix=prefix):
        for entry in page.get("Contents", []):
            client.delete_object(Bucket=_BUCKET, Key=entry["Key"])


def _same_bytes(first: str, other: str) -> bool:
    """Whether two targets hold the same files, but for the manifest."""
    client = _client()

    def files(prefix: str) -> dict[str, Any]:
        found = client.list_objects_v2(Bucket=_BUCKET, Prefix=f"{prefix}/").get("Contents", [])
        return {e["Key"].removeprefix(prefix): e for e in found if not e["Key"].endswith("reshard.json")}

    def pieces(entry: Any) -> Any:
        return client.get_object(Bucket=_BUCKET, Key=entry["Key"])["Body"].iter_chunks(8 << 20)

    ours, theirs = files(first), files(other)
    return ours.keys() == theirs.keys() and all(
        a == b for n in ours for a, b in zip(pieces(ours[n]), pieces(theirs[n]), strict=True)
    )


def _other_universal(ours: str, theirs: str) -> list[str]:
    from compare import same_universal  # brings torch, which contenders do not need

    client = _client()
    with tempfile.TemporaryDirectory() as name:
        for which, prefix in (("ours", ours), ("theirs", theirs)):
            for page in client.get_paginator("list_objects_v2").paginate(Bucket=_BUCKET, Prefix=f"{prefix}/zero/"):
                for entry in page["Contents"]:
                    path = Path(name) / which / entry["Key"].removeprefix(f"{prefix}/")
                    path.parent.mkdir(parents=True, exist_ok=True)
                    client.download_file(_BUCKET, entry["Key"], str(path))
        return same_universal(Path(name) / "ours", Path(name) / "theirs")


def _child(*arguments: str) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), *arguments]


def _measured(name: str, target: str) -> dict[str, float]:
    """One contender in a process of its own."""
    started = time.perf_counter()
    done = subprocess.run(_child("--contender", name, "--target", target), capture_output=True, text=True, check=False)
    wall = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-4000:]}")
    return {"wall_s": wall, **json.loads(done.stdout.splitlines()[-1])}


def _rounds(rounds: int) -> dict[str, list[dict[str, float]]]:
    results: dict[str, list[dict[str, float]]] = {name: [] for name in _CONTENDERS}
    for turn in range(rounds + 1):
        names = list(_CONTENDERS)
        # Each goes first in turn, and waits for what the server does after the one before.
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            target = f"out/{turn}/{names.index(name)}/tag"
            time.sleep(_SETTLE_S)
            found = _measured(name, target)
            print(f"{turn} {name}: {found}", file=sys.stderr, flush=True)
            if turn:
                results[name].append(found)
                _clear(f"out/{turn}/")
        if not turn:
            if not _same_bytes("out/0/1/tag", "out/0/2/tag"):
                raise SystemExit("with and without server-side copies the outputs differ: no ratio is printed")
            if problems := _other_universal("out/0/3/tag", "out/0/4/tag"):
                raise SystemExit(f"outputs differ from DeepSpeed's, no ratio is printed: {problems[:8]}")
            _clear("out/0/")
    return results


def _workers(latency_ms: float, rounds: int) -> dict[str, float]:
    """Seconds in which one worker process converts four jobs, and four one each."""
    found: dict[str, list[float]] = {"one": [], "four": []}
    for turn in range(rounds):
        jobs = [f"jobs/{turn}/{n}/tag" for n in range(2 * _JOBS)]
        found["one"].append(_started_together([jobs[:_JOBS]], latency_ms))
        found["four"].append(_started_together([[job] for job in jobs[_JOBS:]], latency_ms))
        _clear("jobs/")
    return {name: statistics.median(times) for name, times in found.items()}


def _started_together(shares: Sequence[Sequence[str]], latency_ms: float) -> float:
    workers = [
        subprocess.Popen(
            _child("--worker", *share, "--latency-ms", str(latency_ms)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for share in shares
    ]
    for worker in workers:
        assert worker.stdout is not None
        worker.stdout.readline()
    started = time.perf_counter()
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    codes = [worker.wait() for worker in workers]
    if any(codes):
        raise SystemExit(f"workers ended with {codes}")
    return time.perf_counter() - started


def _report(results: dict[str, list[dict[str, float]]], workers: dict[str, float]) -> dict[str, Any]:
    middle = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in results.items()
    }
    wall = {name: run["wall_s"] for name, run in middle.items()}
    passed = {name: run["received_bytes"] + run["sent_bytes"] for name, run in middle.items()}
    plain, sent, ours, universal, by_hand = _CONTENDERS
    ratios = {
        "ours, every byte sent: time of plain": wall[sent] / wall[plain],
        "ours: time of plain": wall[ours] / wall[plain],
        "ours: time of ours, every byte sent": wall[ours] / wall[sent],
        "by hand: time of ours to universal": wall[by_hand] / wall[universal],
        "ours: share of the bytes that passed the worker": passed[ours] / passed[plain],
    }
    if workers:
        ratios["four workers: throughput of one"] = workers["one"] / workers["four"]
    return {"medians": middle, "workers_s": workers, "ratios": ratios, "runs": results}


def _missed(ratios: dict[str, float]) -> list[str]:
    return [
        f"{name}: {ratios[name]:.3f}, wanted {low} to {high}"
        for name, (low, high) in LIMITS.items()
        if name in ratios and not low <= ratios[name] <= high
    ]


def _write(directory: Path, megabytes: int) -> None:
    """ZeRO-2 checkpoints of four ranks: a large one of wide layers, and a small one."""
    from checkpoints import gpt_parameters, write_zero_checkpoint  # brings torch, which contenders do not need

    hidden = 2048
    wanted = megabytes * 1_000_000 / 12
    layers = max(1, round((wanted - (8_000 + 1024) * hidden) / (12 * hidden * hidden)))
    write_zero_checkpoint(directory / "run", gpt_parameters(hidden, layers, 8_000), stage=2, ranks=4)
    write_zero_checkpoint(directory / "small", gpt_parameters(128, 2, 500), stage=2, ranks=4)


def main() -> int:
    """Run everything; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1_200, help="master and moments of the checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency-ms", type=float, default=300.0)
    parser.add_argument("--no-workers", action="store_true", help="leave out the case of four workers")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out")
    parser.add_argument("--data", type=Path, help="where the server's data go, such as /dev/shm")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--target", help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        traffic = _CONTENDERS[arguments.contender](arguments.target)
        used = time.process_time()
        facts = {"received_bytes": traffic.received, "sent_bytes": traffic.sent, "calls": traffic.calls, "cpu_s": used}
        print(json.dumps(facts))
        return 0
    if arguments.worker:
        _worker(arguments.worker, arguments.latency_ms / 1000)
        return 0
    with tempfile.TemporaryDirectory(prefix="reshard-bench-", dir=arguments.data) as name:
        directory = Path(name)
        with seaweed(directory) as settings:
            os.environ.update(settings)
            _client().create_bucket(Bucket=_BUCKET)
            _write(directory, arguments.megabytes)
            size = _upload(directory / "run", "run")
            _upload(directory / "small", "small")
            results = _rounds(arguments.rounds)
            workers = {} if arguments.no_workers else _workers(arguments.latency_ms, -(-arguments.rounds // 3))
    report = {"source_bytes": size, "part_bytes": _PART_BYTES, **_report(results, workers)}
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1)
    (arguments.out / "object_store.json").write_text(text + "\n")
    print(text)
    missed = _missed(report["ratios"])
    for line in missed:
        print(line, file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
