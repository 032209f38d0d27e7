"""Contenders of a benchmark that take turns, each in a process of its own, and tables of their medians."""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from servers.stores import ObjectServer

Medians = dict[str, dict[str, float]]


def run_contender(run: Callable[[], object]) -> None:
    """Run one contender in this process; prints its numbers. What it imported before is not counted."""
    # The peak that the kernel counts may be that of the process which started this one.
    Path("/proc/self/clear_refs").write_text("5")
    before, memory = resource.getrusage(resource.RUSAGE_SELF), _peak_mib()
    started = time.perf_counter()
    run()
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"wall_s": wall, "cpu_s": cpu, "grown_mib": _peak_mib() - memory}))


def _peak_mib() -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def measure(script: str, names: Sequence[str], options: Sequence[str], rounds: int) -> Medians:
    """The medians of each contender: `script --contender NAME OPTIONS` runs one. Each goes first in turn.

    One round more is run, and not counted.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            command = [sys.executable, "-W", "ignore", script, "--contender", name, *options]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
            if turn:
                found[name].append(json.loads(done.stdout.splitlines()[-1]))
    return {n: {key: statistics.median(r[key] for r in runs) for key in runs[0]} for n, runs in found.items()}


def print_table(title: str, medians: Medians, size_bytes: int) -> None:
    """Print a Markdown table; the names of contenders are what follows their first colon."""
    print(f"\n| {title} | wall s | MiB/s | client CPU s | memory grown MiB |\n|---|---:|---:|---:|---:|")
    for name, m in medians.items():
        rate = size_bytes / m["wall_s"] / (1 << 20)
        print(
            f"| {name.partition(':')[2]} | {m['wall_s']:.2f} | {rate:.0f} | {m['cpu_s']:.2f} | {m['grown_mib']:.0f} |"
        )


# What the benchmarks of stores share.


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """The options of a benchmark of a store's clients, and those of the process of a contender."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-clients", action="store_true")
    parser.add_argument("--no-conversions", action="store_true")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    return parser


def put_checkpoint(server: ObjectServer, bucket: str, place: Path, size_bytes: int, *, width: int) -> int:
    """Put a ZeRO-2 checkpoint of four ranks under `run` into a bucket; returns its bytes.

    Args:
        server: The store.
        bucket: The bucket.
        place: A directory that does not exist yet, for the files.
        size_bytes: About the bytes of the checkpoint's states.
        width: Width of the model; its depth follows.
    """
    from checkpoints import gpt_parameters, write_zero_checkpoint  # brings torch

    layers = max(1, round(size_bytes / 12 / (12 * width * width)))
    write_zero_checkpoint(place, gpt_parameters(width, layers, 1_000), stage=2, ranks=4)
    server.upload(place, bucket, "run")
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
