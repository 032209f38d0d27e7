"""Real worker processes of one conversion, on a shared directory and on a real S3 server: killed, late, missing."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from checkpoints import write_zero_checkpoint

from house.measured import say
from house.sources import zero_source
from house.tiers import rest_full
from reshard.engine import load_engine
from reshard_engine.integrity.manifest import MANIFEST_NAME
from servers.stores import ObjectServer

PARAMETERS = [(f"layer.{n}.weight", (256, 257)) for n in range(24)] + [("embed.weight", (4096, 256))]
TARGETS = {
    "universal": ("--to", "universal"),
    "zero": ("--to", "zero", "--dp", "3"),
    "safetensors": ("--to", "safetensors", "--dtype", "bf16"),
    "torch": ("--to", "torch"),
}


source = zero_source(PARAMETERS, stage=2)
"""A ZeRO-2 checkpoint of two ranks with 33 MB."""


def start(
    source: str, target: str, flags: tuple[str, ...], env: Mapping[str, str], *more: str
) -> subprocess.Popen[str]:
    """One worker."""
    command = [sys.executable, "-m", "reshard.cli.main", "convert", source, target, *flags, "--json", "--quiet", *more]
    environment = {**os.environ, "RESHARD_LEASE_S": "2", "OMP_NUM_THREADS": "1", **env}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def numbered(number: int, count: int) -> tuple[str, ...]:
    return "--workers", str(count), "--worker", str(number)


def result(process: subprocess.Popen[str]) -> dict[str, object]:
    """What a worker printed, which ended well."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, (process.returncode, err)
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_stays_beside_a_target_that_was_refused(source: Path, tmp_path: Path, count: int) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "notes.txt").write_text("not a checkpoint")
    workers = [start(str(source), str(target), TARGETS["universal"], {}, *numbered(n, count)) for n in range(count)]
    for worker in workers:
        out, _ = worker.communicate(timeout=120)
        assert worker.returncode == 5, out
        assert json.loads(out)["error"]["code"] == "request.target_exists"
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "notes.txt"]


def contents(directory: Path) -> dict[str, bytes]:
    """Every file but the manifest, which holds times."""
    files = {p.relative_to(directory).as_posix(): p for p in directory.rglob("*") if p.is_file()}
    return {name: path.read_bytes() for name, path in sorted(files.items()) if name != MANIFEST_NAME}


def plain(source: Path, directory: Path, flags: tuple[str, ...]) -> dict[str, bytes]:
    """What one process alone writes."""
    result(start(str(source), str(directory), flags, {}))
    return contents(directory)


def strays(directory: Path) -> list[str]:
    return [p.name for p in directory.iterdir() if ".reshard-" in p.name]


@pytest.mark.parametrize("target", rest_full(TARGETS, "zero", "safetensors"))
def test_workers_write_together_what_one_writes_alone(target: str, source: Path, tmp_path: Path) -> None:
    flags = (*TARGETS[target], "--part-size", "256KiB")
    expected = plain(source, tmp_path / "alone", flags)
    together = tmp_path / "together"
    found = [result(p) for p in [start(str(source), str(together), flags, {}, *numbered(n, 3)) for n in range(3)]]
    assert contents(together) == expected
    assert sorted(bool(r["already_done"]) for r in found) == [False, True, True]
    assert strays(tmp_path) == []
    assert load_engine().verify(str(together)).ok


def test_a_conversion_survives_all_its_workers_but_one(source: Path, tmp_path: Path) -> None:
    flags = (*TARGETS["zero"], "--part-size", "64KiB", "--threads", "1")
    expected = plain(source, tmp_path / "alone", flags)
    together, chance = tmp_path / "together", random.Random(7)
    killed = 0
    for turn in range(4):
        shutil.rmtree(together, ignore_errors=True)
        workers = [start(str(source), str(together), flags, {}, *numbered(n, 4)) for n in range(4)]
        time.sleep(0.6)
        for worker in workers[:2]:
            time.sleep(chance.uniform(0.05, 0.5))
            killed += worker.poll() is None
            worker.kill()
        time.sleep(chance.uniform(0.0, 0.3))
        workers[2].send_signal(signal.SIGSTOP)
        last = result(workers[3])
        workers[2].send_signal(signal.SIGCONT)
        assert result(workers[2])["target"] == last["target"], turn
        for worker in workers[:2]:
            worker.communicate()
        assert contents(together) == expected
        assert load_engine().verify(str(together)).ok
    say(f"workers of one conversion killed while they ran: {killed} of 8; stopped past their lease and continued: 4")


def test_one_process_goes_on_where_killed_workers_stopped(source: Path, tmp_path: Path) -> None:
    flags = (*TARGETS["universal"], "--part-size", "64KiB", "--threads", "1")
    expected = plain(source, tmp_path / "alone", flags)
    resumed = 0
    for turn in range(5):
        together = tmp_path / f"together-{turn}"
        lease = {"RESHARD_LEASE_S": "1"}
        workers = [start(str(source), str(together), flags, lease, *numbered(n, 2)) for n in range(2)]
        until = time.monotonic() + 60
        while time.monotonic() < until and not list(tmp_path.glob(f".{together.name}.reshard-*.workers/*/segment-*")):
            time.sleep(0.01)
        for worker in workers:
            worker.kill()
            worker.communicate()
        after = result(start(str(source), str(together), flags, {}))
        assert contents(together) == expected
        assert strays(tmp_path) == []
        resumed = int(str(after["resumed_bytes"]))
        if resumed:
            break  # else they were done before they were killed
    assert resumed > 0


def test_a_late_worker_finds_the_conversion_done(source: Path, tmp_path: Path) -> None:
    together = tmp_path / "together"
    first = result(start(str(source), str(together), TARGETS["safetensors"], {}, *numbered(1, 3)))
    late = result(start(str(source), str(together), TARGETS["safetensors"], {}, *numbered(0, 3)))
    assert (first["already_done"], late["already_done"]) == (False, True)


def test_the_launcher_numbers_the_workers(source: Path, tmp_path: Path) -> None:
    slurm: Callable[[int], dict[str, str]] = lambda n: {"SLURM_PROCID": str(n), "SLURM_NTASKS": "2"}  # noqa: E731
    together = tmp_path / "together"
    workers = [start(str(source), str(together), TARGETS["universal"], slurm(n), "--workers", "auto") for n in range(2)]
    assert {result(w)["target"] for w in workers} == {str(together)}


def test_every_worker_tells_why_the_conversion_cannot_succeed(tmp_path: Path) -> None:
    source = tmp_path / "run"
    write_zero_checkpoint(source, PARAMETERS, stage=2, ranks=2)
    largest = max(source.rglob("*optim_states.pt"), key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    flags = (*TARGETS["universal"], "--verify", "full", "--part-size", "256KiB")
    together = tmp_path / "together"
    workers = [start(str(source), str(together), flags, {}, *numbered(n, 3)) for n in range(3)]
    for worker in workers:
        _, err = worker.communicate(timeout=120)
        assert worker.returncode == 3, err
        assert "zip.crc" in err
    assert not together.exists()


@pytest.mark.parametrize("target", rest_full(TARGETS, "universal", "zero"))
def test_workers_share_a_target_in_an_object_store(
    target: str, source: Path, tmp_path: Path, store: ObjectServer
) -> None:
    bucket = store.new_bucket()
    store.upload(source, bucket, "run")
    flags = (*TARGETS[target], "--part-size", "5MiB")
    expected = plain(source, tmp_path / target, flags)
    url = f"{store.scheme}://{bucket}/{target}"
    workers = [start(f"{store.scheme}://{bucket}/run", url, flags, store.env(), *numbered(n, 3)) for n in range(3)]
    if target == "zero":
        time.sleep(2.0)
        workers[0].kill()
        workers[0].communicate()
        workers = workers[1:]
    for worker in workers:
        result(worker)
    written = store.read_all(bucket, target)
    assert {n: d for n, d in written.items() if n != MANIFEST_NAME} == expected
    left = [name for name in store.read_all(bucket, "") if ".reshard-" in name]
    assert [k for k in left if "beats" not in k] == [], "left behind"
    assert store.unfinished(bucket) == []
