"""One conversion on 1, 2, 4 and 8 workers behind a slow store, and the price of the protocol on a local directory.

    python bench/workers.py [--suite store|local|plan|all] [--megabytes 400] [--rounds 3] [--targets universal,zero]
                            [--verify full]

`store`: SeaweedFS on loopback, and before it one proxy for each worker process, which lets each call wait `--delay-ms`
and carries `--bandwidth` MB/s in each direction. Each worker has `--threads` threads, so that it waits for its network
and not for the processor: what is divided is waiting. `plain`, 0 workers, has no protocol. Each worker imports
the engine, says that it is ready, and begins on a sign, because on two cores eight interpreters start one after
another. `start_s` is that time, `job_s` runs from the sign to the end of the last worker, plans included; `run_s` is
the longest phase in which a worker of the job executed units, and `commit_s` is what the elected worker took after it:
with `--verify full`, that is mostly the checks, which all workers make.

`local`: one worker with the protocol beside a plain conversion of the same checkpoint into a local directory, in turn.

`plan`: what joining a job of a trillion parameters on 1,024 ranks costs each worker (`workers_plan.py`).

Exits 1 if one of `LIMITS` is missed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cases import environment, sized
from checkpoints import write_zero_checkpoint
from seaweed import seaweed
from slow_store import SlowStore, slow_stores

_BUCKET = "bench"
_WORKERS = (0, 1, 2, 4, 8)
_TARGETS: dict[str, dict[str, Any]] = {
    "universal": {"to": "universal"},
    "zero": {"to": "zero", "layout": {"dp": 3}},
    "safetensors": {"to": "safetensors"},
}
_SETTLE_S = 1.0
LIMITS = {
    "speed-up of the job's run at 8 workers": 6.5,
    "time of 1 worker on local files, as a multiple of plain": 1.05,
}


# -- one worker, in a process of its own -----------------------------------------------------------------------


def _worker(request: Mapping[str, Any], number: int, count: int) -> None:
    """Convert on a sign from stdin; `count` is 0 for a plain conversion."""
    from reshard.engine import load_engine
    from reshard.models.jobs import ConvertRequest
    from reshard.shared_work import SharedWork

    faulthandler.register(signal.SIGUSR1)  # says where a worker is that does not end
    engine, wanted = load_engine(), ConvertRequest.model_validate(request)
    _import_all(count)
    print("ready", flush=True)
    sys.stdin.readline()
    began, used = time.monotonic(), time.process_time()
    work = SharedWork(number=number, count=count) if count else None
    result = engine.convert(wanted, work=work)
    facts = {"wall_s": time.monotonic() - began, "cpu_s": time.process_time() - used}
    print(json.dumps({**facts, "seconds": dict(result.seconds), "done_by_others": result.already_done}))


def _import_all(count: int) -> None:
    """Import what a conversion imports when it begins."""
    import botocore.session  # noqa: F401

    if count:
        import reshard_engine.operations.shared_conversion
    import reshard_engine.operations.conversion  # noqa: F401


def _command(request: Mapping[str, Any], number: int, count: int) -> list[str]:
    return [sys.executable, __file__, "--worker", json.dumps({"request": request, "number": number, "count": count})]


def run_job(request: Mapping[str, Any], count: int, settings: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """One job: start its workers, let them begin together, wait for the last one."""
    spawned = time.monotonic()
    workers = [
        subprocess.Popen(
            _command(request, number, count),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment(), **setting},
        )
        for number, setting in enumerate(settings)
    ]
    for worker in workers:
        assert worker.stdout is not None
        if worker.stdout.readline().strip() != "ready":
            raise RuntimeError("a worker did not start")
    began = time.monotonic()
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
    said = [worker.communicate()[0] for worker in workers]
    ended = time.monotonic()
    if any(worker.returncode for worker in workers):
        raise RuntimeError(f"workers ended with {[w.returncode for w in workers]}")
    facts = [json.loads(text.splitlines()[-1]) for text in said]
    phases = [f["seconds"] for f in facts]
    committer = next(f["seconds"] for f in facts if not f["done_by_others"])
    return {
        "start_s": began - spawned,
        "job_s": ended - began,
        "run_s": max(p.get("run", 0.0) for p in phases),
        "commit_s": committer.get("verify", 0.0) + committer.get("commit", 0.0),
        "plan_s": max(p.get("plan", 0.0) for p in phases),
        "cpu_s": sum(f["cpu_s"] for f in facts),
    }


# -- behind a slow store ---------------------------------------------------------------------------------------


def _client(settings: Mapping[str, str]) -> Any:
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=settings["AWS_ENDPOINT_URL"],
        region_name="us-east-1",
        aws_access_key_id=settings["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=settings["AWS_SECRET_ACCESS_KEY"],
    )


def _upload(client: Any, directory: Path, prefix: str) -> int:
    total = 0
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        client.upload_file(str(path), _BUCKET, f"{prefix}/{path.relative_to(directory).as_posix()}")
        total += path.stat().st_size
    return total


def _clear(client: Any, prefix: str) -> tuple[int, int]:
    """Remove a target; returns the number and the bytes of its objects, and fails if anything lies beside it."""
    count = size = 0
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=_BUCKET, Prefix=prefix):
        entries = page.get("Contents", [])
        count, size = count + len(entries), size + sum(e["Size"] for e in entries)
        if entries:
            client.delete_objects(Bucket=_BUCKET, Delete={"Objects": [{"Key": e["Key"]} for e in entries]})
    if any(".reshard-" in e["Key"] for e in client.list_objects_v2(Bucket=_BUCKET).get("Contents", [])):
        raise RuntimeError("a job left texts behind")
    return count, size


def _one(settings: Mapping[str, str], target: str, count: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One job with `count` workers, 0 for a plain conversion."""
    client = _client(settings)
    request = {
        "source": {"url": f"s3://{_BUCKET}/run"},
        "target": f"s3://{_BUCKET}/out/{target}",
        "server_copy": "never",
        "threads": arguments.threads,
        "part_bytes": arguments.part_mib << 20,
        "verify": arguments.verify,
        **_TARGETS[target],
    }
    upstream = settings["AWS_ENDPOINT_URL"]
    link = {"delay_s": arguments.delay_ms / 1000, "bytes_per_s": arguments.bandwidth * 1e6}
    with slow_stores(upstream, max(1, count), **link) as stores:
        facts = run_job(request, count, [{**settings, "AWS_ENDPOINT_URL": s.endpoint} for s in stores])
        facts["calls"] = dict(sum((s.calls for s in stores), Counter[str]()))
        facts["traffic_bytes"] = _traffic(stores)
        if arguments.trace is not None:
            _write_trace(arguments.trace, stores)
    objects, facts["written_bytes"] = _clear(client, f"out/{target}")
    time.sleep(_SETTLE_S)
    print(f"{target} {count or 'plain'}: " + ", ".join(f"{k} {v:.1f}" for k, v in facts.items() if k.endswith("_s")))
    print(f"  {objects} objects, {json.dumps(facts['calls'], sort_keys=True)}", flush=True)
    return facts


def _write_trace(path: Path, stores: Sequence[SlowStore]) -> None:
    """Every call of a job: when, which worker, what."""
    calls = sorted((at, number, kind, target) for number, s in enumerate(stores) for at, kind, target in s.log)
    lines = [f"{at - calls[0][0]:9.3f} {number} {kind:12} {target}" for at, number, kind, target in calls]
    path.write_text("\n".join(lines) + "\n")


def _traffic(stores: Sequence[SlowStore]) -> int:
    return sum(s.sent_bytes + s.received_bytes for s in stores)


def store_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All targets on all numbers of workers, in turn."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    targets = arguments.targets.split(",")
    with tempfile.TemporaryDirectory(prefix="reshard-bench-", dir=arguments.data) as name:
        directory = Path(name)
        with seaweed(directory) as settings:
            client = _client(settings)
            client.create_bucket(Bucket=_BUCKET)
            write_zero_checkpoint(directory / "run", sized(arguments.megabytes), stage=2, ranks=4)
            print(f"source: {_upload(client, directory / 'run', 'run') / 1e6:.0f} MB", flush=True)
            for _ in range(arguments.rounds):
                for target in targets:
                    for count in arguments.workers:
                        found.setdefault((target, count), []).append(_one(settings, target, count, arguments))
    return [_row(target, count, found) for target, count in found]


def _row(target: str, count: int, found: Mapping[tuple[str, int], list[dict[str, Any]]]) -> dict[str, Any]:
    def middle(workers: int, what: str) -> float:
        return statistics.median(f[what] for f in found[target, workers])

    first = min(n for t, n in found if t == target and n)
    times = ("start_s", "plan_s", "run_s", "commit_s", "job_s", "cpu_s")
    return {
        "target": target,
        "workers": count,
        "rounds": len(found[target, count]),
        **{what: round(middle(count, what), 2) for what in times},
        "speedup_run": round(middle(first, "run_s") / middle(count, "run_s"), 2),
        "speedup_commit": round(middle(first, "commit_s") / middle(count, "commit_s"), 2),
        "speedup_job": round(middle(first, "job_s") / middle(count, "job_s"), 2),
        "calls": found[target, count][-1]["calls"],
        "traffic_mb": round(middle(count, "traffic_bytes") / 1e6),
    }


# -- on local files --------------------------------------------------------------------------------------------


def local_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One worker with the protocol and a plain conversion, in turn."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="reshard-bench-", dir=arguments.data) as name:
        directory = Path(name)
        write_zero_checkpoint(directory / "run", sized(arguments.local_megabytes), stage=2, ranks=4)
        for target in arguments.targets.split(","):
            source, into = {"url": str(directory / "run")}, str(directory / "out")
            request = {"source": source, "target": into, **_TARGETS[target]}
            found: dict[int, list[float]] = {0: [], 1: []}
            for turn in range(arguments.local_rounds + 1):
                for count in (0, 1) if turn % 2 else (1, 0):
                    facts = run_job(request, count, [{}])
                    if turn:
                        found[count].append(facts["job_s"])
                    shutil.rmtree(into)
                    os.sync()
            rows.append(_local_row(target, found))
            print(rows[-1], flush=True)
    return rows


def _local_row(target: str, found: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    ratios = [one / plain for plain, one in zip(found[0], found[1], strict=True)]
    return {
        "target": target,
        "rounds": len(ratios),
        "plain_s": round(statistics.median(found[0]), 3),
        "one_worker_s": round(statistics.median(found[1]), 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(r, 2) for r in sorted(ratios)],
    }


# -- the benchmark ---------------------------------------------------------------------------------------------


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of the store as Markdown."""
    times = ("start_s", "plan_s", "run_s", "commit_s", "job_s", "cpu_s", "speedup_run", "speedup_commit", "speedup_job")
    times = (*times, "traffic_mb")
    lines = ["| target | workers | " + " | ".join(times) + " | calls |", "|---" * (len(times) + 3) + "|"]
    for row in rows:
        calls = ", ".join(f"{kind} {count}" for kind, count in sorted(row["calls"].items()))
        values = " | ".join(str(row[what]) for what in times)
        lines.append(f"| {row['target']} | {row['workers'] or 'plain'} | {values} | {calls} |")
    return "\n".join(lines)


def _missed(report: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    at_eight, local = LIMITS.values()
    found += [
        f"{row['target']}: {row['speedup_run']} times as fast on 8 workers, {at_eight} are promised"
        for row in report.get("store", ())
        if row["workers"] == 8 and row["speedup_run"] < at_eight
    ]
    found += [
        f"{row['target']}: one worker takes {row['ratio']} times as long, {local} is promised"
        for row in report.get("local", ())
        if row["ratio"] > local
    ]
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=("store", "local", "plan", "all"), default="all")
    parser.add_argument("--targets", default=",".join(_TARGETS))
    parser.add_argument(
        "--workers", type=lambda text: tuple(map(int, text.split(","))), default=_WORKERS, help="0: plain"
    )
    parser.add_argument("--megabytes", type=int, default=400, help="master and moments of the store's checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--verify", choices=("default", "full"), default="default")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--part-mib", type=int, default=5)
    parser.add_argument("--delay-ms", type=float, default=30.0)
    parser.add_argument("--bandwidth", type=float, default=50.0, help="MB/s of each worker in each direction")
    parser.add_argument("--local-megabytes", type=int, default=1_000)
    parser.add_argument("--local-rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out")
    parser.add_argument("--data", type=Path, help="where data go, such as /dev/shm")
    parser.add_argument("--trace", type=Path, help="where the calls of the last job are listed")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Run what was asked for; returns the exit status."""
    arguments = _arguments()
    if arguments.worker is not None:
        _worker(**arguments.worker)
        return 0
    report: dict[str, Any] = {}
    if arguments.suite in {"store", "all"}:
        report["store"] = store_rows(arguments)
        print(table(report["store"]))
    if arguments.suite in {"local", "all"}:
        report["local"] = local_rows(arguments)
    if arguments.suite in {"plan", "all"}:
        from workers_plan import plan_facts

        report["plan"] = plan_facts()
        print(json.dumps(report["plan"], indent=1))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "workers.json").write_text(json.dumps(report, indent=1) + "\n")
    missed = _missed(report)
    for line in missed:
        print(line, file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
