"""Time to a loaded engine on fewer ranks: by a conversion, by DeepSpeed's universal checkpoint, and directly.

    python bench/direct.py [--megabytes 1000] [--stage 2] [--ranks 3] [--rounds 3] [--work DIR] [--store]

A run of DeepSpeed on four ranks goes on with fewer. Each round times, from the call to an engine that all ranks have
loaded: `ds_to_universal` and a universal load; our conversion and a plain load; our direct load; and, to compare, the
plain load of files that fit already. Then torch loads matrices that were saved by rows on four ranks, by rows on three
and by columns on two, through its own reader and through ours. Sums of what was loaded say that all ways give the same.
Files are in the page cache. Our modules are compiled before, as pip does when it installs them.

With `--store`, the source lies in an S3 server behind a proxy: each call waits 50 ms, and each connection has 200 MB/s;
with `--shared`, all connections together. The conversion writes a local directory. DeepSpeed's own ways need the
source on the disk first, and are left out.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import boto3

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]

from cases import convert_command, environment  # noqa: E402 - beside this file
from seaweed import seaweed  # noqa: E402
from slow_store import slow_stores  # noqa: E402

from oracle.launcher import Worlds  # noqa: E402

SAVED_RANKS = 4
BYTES_OF_A_LAYER = 14 << 20
"""bf16 weights, masters and two moments of 1,024 x 1,024 elements."""
MIB = 1 << 20


def _timed(command: Sequence[str]) -> float:
    begun = time.perf_counter()
    subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begun


class Bench:
    """The measurements of one size."""

    def __init__(self, worlds: Worlds, work: Path, layers: int, stage: int, ranks: int) -> None:
        self.worlds, self.work, self.layers, self.stage, self.ranks = worlds, work, layers, stage, ranks
        self.source = work / "source"
        self.place = str(self.source)
        """The source, as our own ways are told it."""
        self.run("save", SAVED_RANKS, layers=layers, stage=stage, folder=str(self.source))

    def run(self, function: str, world: int, **arguments: Any) -> list[Any]:
        """The results of a function of `direct_ranks` by rank."""
        return self.worlds.run(f"direct_ranks:{function}", world=world, timeout_s=900, **arguments)

    def load(self, way: str, folder: Path | str, before: float = 0.0) -> dict[str, Any]:
        """Load, after a conversion that took `before` seconds."""
        results = self.run("load", self.ranks, layers=self.layers, stage=self.stage, folder=str(folder), way=way)
        sums = {r["sum"] for r in results}
        assert len(sums) == 1
        return {
            "seconds": before + max(r["seconds"] for r in results),
            "read": sum(r["read"] for r in results),
            "peak": max(r["peak"] for r in results),
            "sum": sums.pop(),
        }

    def download(self, to: Path) -> dict[str, Any]:
        """Copy the files of the source from the store to the disk, several parts at once."""
        shutil.rmtree(to, ignore_errors=True)
        to.mkdir()
        begun, size = time.perf_counter(), 0
        client = _client(os.environ)
        for found in client.list_objects_v2(Bucket="bench", Prefix="run/step1")["Contents"]:
            client.download_file("bench", found["Key"], str(to / found["Key"].rpartition("/")[2]))
            size += found["Size"]
        return {"seconds": time.perf_counter() - begun, "read": size, "peak": 0}

    def once(self) -> dict[str, dict[str, Any]]:
        """Each way once."""
        universal, converted = self.work / "universal", self.work / "converted"
        for place in (universal, converted):
            shutil.rmtree(place, ignore_errors=True)
        found: dict[str, dict[str, Any]] = {}
        if self.place == str(self.source):
            script = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
            script += ["--input_folder", str(self.source / "step1"), "--output_folder", str(universal / "step1")]
            peer = _timed(script)
            (universal / "latest_universal").write_text("step1")
            found["ds_to_universal, universal load"] = self.load("universal", universal, peer)
        else:
            found["plain download of the source"] = self.download(self.work / "downloaded")
        options = ("--to", "zero", "--dp", str(self.ranks))
        ours = _timed(convert_command(self.place, converted / "step1", *options))
        found |= {
            "our conversion, plain load": self.load("plain", converted, ours),
            "direct": self.load("direct", self.place),
            "plain load of files that fit": self.load("plain", converted),
        }
        wanted = {round(one["sum"], 3) for one in found.values() if "sum" in one}
        assert len(wanted) == 1, f"the ways loaded different masters: {wanted}"
        return found


def _shown(rounds: list[dict[str, dict[str, Any]]], over: str) -> None:
    base = statistics.median(r[over]["seconds"] for r in rounds)
    for way in rounds[0]:
        seconds = statistics.median(r[way]["seconds"] for r in rounds)
        last = rounds[-1][way]
        print(
            f"  {way:34} {seconds:7.2f} s  {seconds / base:5.2f} of {over!r}  "
            f"read {last['read'] / MIB:7.0f} MiB  memory of a rank +{last['peak'] / MIB:5.0f} MiB",
            flush=True,
        )


def _distributed(worlds: Worlds, work: Path, layers: int, rounds: int) -> None:
    folder = str(work / "dcp")
    worlds.run("direct_ranks:save_distributed", world=SAVED_RANKS, timeout_s=900, layers=layers, folder=folder)
    for cut, dim, ranks in (("rows", 0, 3), ("columns", 1, 2)):
        found: list[dict[str, dict[str, Any]]] = []
        for _ in range(rounds):
            once: dict[str, dict[str, Any]] = {}
            for way in ("torch", "reshard"):
                arguments = {"layers": layers, "folder": folder, "way": way, "dim": dim}
                results = worlds.run("direct_ranks:load_distributed", world=ranks, timeout_s=900, **arguments)
                once[way] = {
                    "seconds": max(r["seconds"] for r in results),
                    "read": sum(r["read"] for r in results),
                    "peak": max(r["peak"] for r in results),
                    "sum": results[0]["sum"],
                }
            assert abs(once["torch"]["sum"] - once["reshard"]["sum"]) < 1e-6
            found.append(once)
        print(f"dcp.load, saved by rows on {SAVED_RANKS} ranks, loaded by {cut} on {ranks}:")
        _shown(found, "torch")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--store", action="store_true", help="the source is in a slow store")
    parser.add_argument("--shared", action="store_true", help="the connections to the store share its bandwidth")
    chosen = parser.parse_args()
    layers = max(1, chosen.megabytes * 1_000_000 // BYTES_OF_A_LAYER)
    for root in ("client", "worker"):
        compileall.compile_dir(ROOT / root, quiet=1)
    with tempfile.TemporaryDirectory(dir=chosen.work) as name, ExitStack() as stack:
        work = Path(name)
        upstream = stack.enter_context(seaweed(work)) if chosen.store else {}
        if upstream:
            place, limits = upstream["AWS_ENDPOINT_URL"], {"delay_s": 0.05, "bytes_per_s": 200e6}
            (slow,) = stack.enter_context(slow_stores(place, 1, **limits, shared=chosen.shared))
            os.environ.update(upstream | {"AWS_ENDPOINT_URL": slow.endpoint})
        worlds = stack.enter_context(Worlds(import_paths=(ROOT / "bench",), timeout_s=900))
        bench = Bench(worlds, work, layers, chosen.stage, chosen.ranks)
        if upstream:
            bench.place = _uploaded(bench.source, upstream)
        size = sum(p.stat().st_size for p in bench.source.rglob("*") if p.is_file())
        where = "in a store" if upstream else "on the disk"
        print(f"ZeRO-{chosen.stage}, {size / MIB:.0f} MiB {where}, {SAVED_RANKS} ranks -> {chosen.ranks}:")
        _shown([bench.once() for _ in range(chosen.rounds)], "our conversion, plain load")
        if not upstream:
            _distributed(worlds, work, layers * 3, chosen.rounds)


def _client(settings: Mapping[str, str]) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=settings["AWS_ENDPOINT_URL"],
        aws_access_key_id=settings["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=settings["AWS_SECRET_ACCESS_KEY"],
        region_name=settings["AWS_REGION"],
    )


def _uploaded(source: Path, settings: Mapping[str, str]) -> str:
    client = _client(settings)
    client.create_bucket(Bucket="bench")
    for path in (p for p in source.rglob("*") if p.is_file()):
        client.upload_file(str(path), "bench", f"run/{path.relative_to(source)}")
    return "s3://bench/run"


if __name__ == "__main__":
    main()
