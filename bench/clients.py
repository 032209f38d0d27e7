"""Contenders of a benchmark that take turns, each in a process of its own, and tables of their medians."""

from __future__ import annotations

import json
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

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
