"""How memory grows with size, time with threads, and plans with ranks and parameters."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cases import RESHARD, environment, sized, widened
from checkpoints import write_zero_checkpoint
from measure import Measured, measure
from sparse import Parameters, dense, mixture, write_sparse_checkpoint

SIZES_MB = (100, 500, 1_000, 2_000, 4_000)
FLAT = 1.10
PLAN_S, PLAN_MIB = 60, 2_048
TWO_THREADS = 1.7
Found = tuple[list[dict[str, Any]], list[str]]


def _ours(*words: str) -> Measured:
    return measure([*RESHARD, *words, "-q"], env=environment())


def memory_rows(root: Path) -> Found:
    """Peak memory over checkpoints of growing size and equal numbers of tensors, whose names and shapes take some, too.

    Flat: the largest takes at most a tenth more than the median.
    """
    rows: list[dict[str, Any]] = []
    for megabytes in SIZES_MB:
        source = root / "grows"
        write_zero_checkpoint(source, widened(megabytes), stage=2, ranks=4)
        for to, options in (("universal", ()), ("safetensors", ("--dtype", "bf16")), ("zero", ("--dp", "3"))):
            target = root / "grown"
            found = _ours("convert", str(source), str(target), "--to", to, *options)
            shutil.rmtree(target)
            anonymous = round(found.peak_anonymous_bytes / 2**20)
            rows.append({"to": to, "gigabytes": megabytes / 1000, "peak_anonymous_mib": anonymous})
        shutil.rmtree(source)
    missed: list[str] = []
    for to in sorted({r["to"] for r in rows}):
        # Below the size of a few units there is less to hold: flat means that it does not go on growing.
        peaks = [r["peak_anonymous_mib"] for r in rows if r["to"] == to and r["gigabytes"] >= 0.5]
        if max(peaks) > FLAT * statistics.median(peaks):
            missed.append(f"memory of {to} grows with the checkpoint: {peaks} MiB")
    return rows, missed


def thread_rows(root: Path) -> Found:
    """One thread and two where the processor bounds: a cast from the page cache to a file in memory.

    Of sixteen units: with six, one thread would make four while the other makes two.
    """
    source = root / "threads"
    write_zero_checkpoint(source, sized(6_000), stage=2, ranks=4)
    walls: dict[int, list[float]] = {1: [], 2: []}
    for turn in range(4):
        for threads, found in walls.items():
            target = Path("/dev/shm") / f"reshard-bench-{root.name}"
            shutil.rmtree(target, ignore_errors=True)
            words = ("convert", str(source), str(target), "--to", "safetensors", "--dtype", "fp16")
            seconds = _seconds(measure([*RESHARD, *words, "--threads", str(threads), "--json"], env=environment()))
            if turn:
                found.append(seconds)
            shutil.rmtree(target)
    shutil.rmtree(source)
    medians = {threads: statistics.median(found) for threads, found in walls.items()}
    ratio = medians[1] / medians[2]
    row = {"one_thread_s": round(medians[1], 3), "two_threads_s": round(medians[2], 3), "ratio": round(ratio, 2)}
    return [row], [] if ratio >= TWO_THREADS else [f"two threads are {ratio:.2f} times one, {TWO_THREADS} is promised"]


def _seconds(found: Measured) -> float:
    """The time that the units took, without the start of the interpreter and the plan."""
    return float(json.loads(found.output.splitlines()[-1])["seconds"]["run"])


def _shapes() -> Iterator[tuple[str, Parameters, int, int, str]]:
    """(kind, parameters, stage, ranks, target)."""
    for ranks in (256, 1_024, 4_096):
        yield "dense, ZeRO-3 to universal", dense(10**12, 1_500), 3, ranks, "universal"
    for count in (6_250, 25_000, 100_000):
        yield "experts, ZeRO-2 to universal", mixture(10**12, count), 2, 4_096, "universal"


def plan_rows(root: Path) -> Found:
    """Plans for a trillion parameters, and smaller ones to see how time and memory grow."""
    rows: list[dict[str, Any]] = []
    for kind, parameters, stage, ranks, to in _shapes():
        source = root / "sparse"
        write_sparse_checkpoint(source, parameters, stage=stage, ranks=ranks)
        words = ("plan", str(source), str(root / "nowhere"), "--to", to, "--memory-limit", "8GiB", "--json")
        found = measure([*RESHARD, *words], env=environment())
        plan = json.loads(found.output)
        pieces = 3 * (len(parameters) * ranks if stage == 3 else len(parameters) + ranks)
        rows.append(
            {
                "kind": kind,
                "parameters": sum(_numel(shape) for _, shape in parameters),
                "tensors": len(parameters),
                "ranks": ranks,
                "pieces": pieces,
                "wall_s": round(found.wall_s, 2),
                "high_water_mib": round(found.high_water_bytes / 2**20),
                "units": plan["units"],
                "digest": plan["digest"],
                "answer_mb": round(len(found.output) / 1e6, 1),
            }
        )
        shutil.rmtree(source)
    missed = [
        f"the plan of {r['kind']} on {r['ranks']} ranks takes {r['wall_s']} s and {r['high_water_mib']} MiB"
        for r in rows
        if r["wall_s"] > PLAN_S or r["high_water_mib"] > PLAN_MIB
    ]
    return rows, missed


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total
