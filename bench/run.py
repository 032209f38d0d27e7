"""Our CLI beside DeepSpeed's converters and a plain copy, on the same checkpoints, in one run.

    python bench/run.py [--suite main|small|wide|functions|dcp|ranks|megatron|scale|all] [--megabytes 4000] ...

Commands alternate; medians and ratios are printed, with peak memory of the process tree and the bytes that it read and
wrote. Outputs are compared with the peer's, tensor by tensor, before a ratio is. Exit status 1 if a stated ratio is
missed, or one is more than a quarter worse than `bench/baseline.json` says; `--accept` writes that file anew. A whole
run of `main` also draws docs/images/benchmark.svg; every other run draws benchmark.svg beside its tables.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cases import OURS, Case, environment, main_cases, small_cases, wide_cases
from dcp_cases import dcp_cases
from functions import function_cases
from measure import Measured, measure
from megatron_cases import megatron_cases
from plot import draw as draw_times
from rank_cases import rank_cases
from scale import memory_rows, plan_rows, thread_rows
from tables import draw, markdown

PLOT = Path(__file__).parents[1] / "docs" / "images" / "benchmark.svg"
SUITES = ("main", "small", "wide", "functions", "dcp", "ranks", "megatron", "scale")
BASELINE = Path(__file__).parent / "baseline.json"
MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
"""Where trees of many small files are made: ext4 passes over inodes that were removed in the last minutes, so that each
contender would pay for the files that the one before it removed (80,000 creations: 1.4 s, or 30 s)."""
WORSE = 1.25
"""A ratio may be so many times its baseline: machines are noisy."""


def _rounds(case: Case, rounds: int) -> dict[str, list[Measured]]:
    results: dict[str, list[Measured]] = {c.name: [] for c in case.contenders}
    for turn in range(rounds + 1):
        for contender in case.contenders:
            if turn > (contender.rounds or rounds):
                continue
            shutil.rmtree(contender.output, ignore_errors=True)
            contender.output.parent.mkdir(parents=True, exist_ok=True)
            os.sync()  # what others left to write is not this one's to wait for
            measured = measure(contender.command, env={**environment(), **contender.variables})
            if turn or contender.rounds == 1:  # the first round warms the page cache for everyone
                results[contender.name].append(measured)
    return results


def _row(case: Case, name: str, runs: list[Measured], ours: list[Measured]) -> dict[str, Any]:
    median = statistics.median(r.wall_s for r in runs)
    pairs = [theirs.wall_s / mine.wall_s for theirs, mine in zip(runs, ours, strict=False)]
    return {
        "case": case.name,
        "name": name,
        "wall_s": round(median, 3),
        "times_ours": round(statistics.median(pairs), 2),
        "peak_anonymous_mib": round(max(r.peak_anonymous_bytes for r in runs) / 2**20),
        "peak_file_backed_mib": round(max(r.peak_file_backed_bytes for r in runs) / 2**20),
        "read_mb": round(max(r.read_bytes for r in runs) / 1e6),
        "written_mb": round(max(r.written_bytes for r in runs) / 1e6),
        "walls_s": [round(r.wall_s, 3) for r in runs],
    }


def _missed(case: Case, rows: list[dict[str, Any]]) -> Iterator[str]:
    by_name = {row["name"]: row for row in rows}
    for limit in case.limits:
        found = by_name[limit.contender]["times_ours"]
        if found < limit.at_least:
            yield f"{case.name}: {limit.contender} takes {found} of our time, {limit.at_least:g} is promised"
    if by_name[OURS]["peak_anonymous_mib"] > case.anonymous_mib:
        yield f"{case.name}: {by_name[OURS]['peak_anonymous_mib']} MiB of memory, {case.anonymous_mib} are promised"


def _run_case(case: Case, rounds: int) -> tuple[list[dict[str, Any]], list[str]]:
    case.source()
    results = _rounds(case, rounds)
    if problems := case.check():
        raise SystemExit(f"{case.name}: outputs differ, no ratio is printed:\n" + "\n".join(problems[:10]))
    rows = [_row(case, name, runs, results[OURS]) for name, runs in results.items()]
    for contender in case.contenders:
        shutil.rmtree(contender.output, ignore_errors=True)
    return rows, list(_missed(case, rows))


def _worse(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Ratios that fell behind the stored ones. Seconds are never compared: machines differ."""
    known: dict[str, float] = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    for row in rows:
        key = f"{row['case']} | {row['name']}"
        if row["name"] != OURS and key in known and row["times_ours"] * WORSE < known[key]:
            yield f"{key}: {row['times_ours']} of our time, {known[key]} before"


def _accept(rows: list[dict[str, Any]]) -> None:
    known: dict[str, float] = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    known |= {f"{r['case']} | {r['name']}": r["times_ours"] for r in rows if r["name"] != OURS}
    BASELINE.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def _facts(rounds: int) -> dict[str, Any]:
    packages = {"Reshard": "reshard", "DeepSpeed": "deepspeed", "PyTorch": "torch"}
    return {
        "machine": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "cores": len(os.sched_getaffinity(0)),
        "rounds": rounds,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "load": round(os.getloadavg()[0], 2),
        "versions": {name: version(package) for name, package in packages.items()},
    }


def _write(arguments: argparse.Namespace, facts: dict[str, Any], rows: list[dict[str, Any]], missed: list[str]) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "bench.json").write_text(json.dumps(facts | {"rows": rows, "missed": missed}, indent=1) + "\n")
    (arguments.out / "bench.md").write_text(markdown(rows))
    draw(facts, arguments.out)
    draw_times(facts, rows, arguments.out / PLOT.name)
    if arguments.suite == "main" and not arguments.only:
        draw_times(facts, rows, PLOT)
        PLOT.with_suffix(".json").write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


def main() -> int:
    """Run the suites; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=(*SUITES, "all"), default="main")
    parser.add_argument("--megabytes", type=int, default=4_000, help="masters and moments of the checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out")
    parser.add_argument("--data", type=Path, help="where checkpoints are made; a temporary directory by default")
    parser.add_argument("--accept", action="store_true", help="store these ratios as the baseline")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    missed: list[str] = []
    facts = _facts(arguments.rounds)
    with (
        tempfile.TemporaryDirectory(prefix="reshard-bench-", dir=arguments.data) as directory,
        tempfile.TemporaryDirectory(prefix="reshard-bench-", dir=arguments.data or MEMORY) as small,
    ):
        root = Path(directory)
        suites = {
            "main": main_cases(root, arguments.megabytes),
            "small": small_cases(Path(small)),
            "functions": function_cases(root, min(arguments.megabytes, 4_000)),
            "dcp": dcp_cases(root, arguments.megabytes),
            "ranks": rank_cases(root, arguments.megabytes),
            "megatron": megatron_cases(root, min(arguments.megabytes, 1_000)),
            "wide": wide_cases(root, min(arguments.megabytes, 1_000)),
        }
        for suite, cases in suites.items():
            if arguments.suite not in (suite, "all"):
                continue
            for case in cases:
                if arguments.only in case.name:
                    more, also = _run_case(case, arguments.rounds)
                    rows += more
                    missed += also
                    print(markdown(more), flush=True)
            shutil.rmtree(root / "source", ignore_errors=True)
        if arguments.suite in ("scale", "all"):
            for name, measured in (("memory", memory_rows), ("threads", thread_rows), ("plans", plan_rows)):
                if arguments.only in name:
                    facts[name], also = measured(root)
                    missed += also
                    print(json.dumps(facts[name], indent=1), flush=True)
    missed += _worse(rows)
    _write(arguments, facts, rows, missed)
    if arguments.accept:
        _accept(rows)
    for line in missed:
        print(line, file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
