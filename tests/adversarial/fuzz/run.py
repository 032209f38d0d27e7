"""Coverage-guided fuzzing: `python tests/adversarial/fuzz/run.py [--seconds 600] [--jobs 2] [TARGET ...]`.

Each target runs in processes of its own under atheris (libFuzzer), which instruments the engine. A find is an
exception that is not a `ReshardError`, two seconds of processor time, or a gigabyte of memory; the input that made it
is left in `--finds`, and the exit status is 1. Replay: `run.py --replay FILE TARGET`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path.insert(0, str(TESTS))

MAX_CPU_S = 2.0
MAX_RSS_MB = 1_024
ROUND_S = 90.0
"""Seconds of one process: atheris never frees the arrays that comparisons of numpy make in code that it instruments."""
_PLANTED = "RESHARD_TEST_PLANTED_FIND"
_STATUS = re.compile(r"^#\d+\t\w+\s+cov: (\d+) ft: (\d+)", re.MULTILINE)
_EXECUTIONS = re.compile(r"stat::number_of_executed_units:\s+(\d+)")
_PEAK = re.compile(r"stat::peak_rss_mb:\s+(\d+)")
SHARES = {
    "pickle": 4, "zip": 3, "checkpoint": 4, "dcp_metadata": 3, "dcp": 3, "fsdp_ranks": 3, "torch_checkpointing": 3,
    "full_state_dict": 3, "megatron": 3, "safetensors": 2, "index": 1, "latest": 1, "manifest": 1, "journal": 1,
}  # fmt: skip
"""How much of the time each target gets."""


@dataclass(frozen=True)
class Report:
    """What became of one target."""

    target: str
    executions: int
    edges: int
    features: int
    peak_rss_mb: int
    seconds: float
    finds: tuple[str, ...]
    log: str


def child(target: str, arguments: list[str]) -> None:
    """Fuzz in this process; does not return."""
    import atheris

    with atheris.instrument_imports(include=["reshard", "reshard_engine"]):
        from adversarial.fuzz.targets import TARGETS
    from reshard.errors import ReshardError

    work = TARGETS[target][0]

    def one(data: bytes) -> None:
        started = time.process_time()
        with suppress(ReshardError):
            work(data)
        if _PLANTED in os.environ and len(data) > 4:
            raise KeyError("planted")
        if time.process_time() - started > MAX_CPU_S:
            raise AssertionError(f"more than {MAX_CPU_S} s of processor time")

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def fuzz(target: str, seconds: float, finds: Path, *, planted: bool = False, runs: int = 0) -> Report:
    """Fuzz a target in processes of its own, one after another, which go on from the same inputs.

    With `runs` it is one process and so many runs, however long they take.
    """
    from adversarial.fuzz.targets import TARGETS, words

    with tempfile.TemporaryDirectory() as corpus, tempfile.NamedTemporaryFile("w", suffix=".dict") as known:
        seeds = TARGETS[target][1]()
        for number, seed in enumerate(seeds):
            Path(corpus, f"seed-{number}").write_bytes(seed)
        known.writelines('"' + "".join(f"\\x{b:02x}" for b in word) + '"\n' for word in words(seeds))
        known.flush()
        prefix = finds / f"{target}-"
        started = time.monotonic()
        rounds: list[str] = []
        made: tuple[str, ...] = ()
        while not made and (left := seconds - (time.monotonic() - started)) > 0:
            command = [
                # A shell between: the kernel counts the memory of who starts a program to that program's peak.
                *("sh", "-c", '"$@"; exit $?', "sh"),
                *(sys.executable, __file__, "--child", target, corpus),
                f"-runs={runs}" if runs else f"-max_total_time={max(1, round(min(left, ROUND_S)))}",
                *("-max_len=16384", "-timeout=60"),
                *(f"-rss_limit_mb={MAX_RSS_MB}", "-print_final_stats=1", f"-artifact_prefix={prefix}"),
                f"-dict={known.name}",
            ]
            environment = {**os.environ, _PLANTED: "1"} if planted else None
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
            rounds.append(done.stdout + done.stderr)
            made = tuple(sorted(str(p) for p in finds.glob(f"{target}-*")))
            if done.returncode and not made:
                made = (f"ended with status {done.returncode}",)
            if runs:
                break
    status = _STATUS.findall(rounds[-1])
    edges, features = (int(v) for v in status[-1]) if status else (0, 0)
    return Report(
        target, sum(_number(_EXECUTIONS, text) for text in rounds), edges, features,
        max(_number(_PEAK, text) for text in rounds), round(time.monotonic() - started, 1), made,
        rounds[-1][-4_000:] if made else "",
    )  # fmt: skip


def _number(pattern: re.Pattern[str], text: str) -> int:
    found = pattern.findall(text)
    return int(found[-1]) if found else 0


def fuzz_all(targets: list[str], seconds: float, jobs: int, finds: Path, *, planted: bool = False) -> list[Report]:
    """Fuzz targets, `jobs` at a time, in about so many seconds altogether; `planted` plants a bug in each."""
    finds.mkdir(parents=True, exist_ok=True)
    share = seconds * jobs / sum(SHARES[t] for t in targets)
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda t: fuzz(t, share * SHARES[t], finds, planted=planted), targets))


def replay(target: str, file: Path) -> None:
    """Run one input without atheris, so that the traceback is Python's own."""
    from adversarial.fuzz.targets import TARGETS

    TARGETS[target][0](file.read_bytes())


def main() -> int:
    """Parse the arguments and fuzz."""
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--finds", type=Path, default=Path(tempfile.gettempdir(), "reshard-fuzz"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--replay", type=Path)
    chosen = parser.parse_args()
    if chosen.replay:
        replay(chosen.targets[0], chosen.replay)
        return 0
    # The longest first, so that two jobs end together.
    targets = sorted(chosen.targets or SHARES, key=lambda t: -SHARES[t])
    reports = fuzz_all(targets, chosen.seconds, chosen.jobs, chosen.finds)
    if chosen.json:
        print(json.dumps([asdict(r) for r in reports]))
    else:
        print(f"{'target':19} {'executions':>11} {'edges':>7} {'features':>9} {'peak MB':>8} {'seconds':>8}  finds")
        for r in reports:
            print(
                f"{r.target:19} {r.executions:11,} {r.edges:7,} {r.features:9,} {r.peak_rss_mb:8,} {r.seconds:8.1f}  "
                + (", ".join(r.finds) or "none")
            )
            print(r.log, file=sys.stderr, end="")
    return 1 if any(r.finds for r in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
