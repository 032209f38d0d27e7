"""Tests and measures casts on a GPU, on a machine without a network, in at most seven minutes.

    scripts/gpu_proof.sh OUT [--size small]

Each step is a process with its own time limit. A step that fails or exceeds its limit becomes a row of the table, and
the next step runs. After each row, OUT contains all results so far: `gpu_proof.json`, `gpu_proof.md` (the table) and
`gpu_proof.log`. Without a CUDA device, the device's program runs on the CPU with small sizes, to try this script.

Exit status: 0; 1 if bits differ or tests failed; 3 if another step failed, exceeded its limit or did not start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent
LIMITS_S = {"install": 50.0, "machine": 60.0, "tests": 80.0, "casts": 95.0, "conversion": 65.0, "job": 50.0}
"""Time limits of the steps. Time that a step does not use is added to the limit of the next one."""
TOTAL_S = sum(LIMITS_S.values())
GRACE_S = 5.0
"""Seconds that a step has to stop its servers after its limit."""
_POLL_S = 0.1
ROW, FACT = "@row ", "@fact "
"""Lines of a step that are results; all other lines are its log."""
PASSED, FAILED, LATE, STOPPED, SKIPPED = "passed", "failed", "exceeded its limit", "stopped", "not started"
_TAIL_LINES = 8
Row = dict[str, Any]

_COLUMNS = (
    *("measurement", "CPU", "device", "GB/s to the device", "GB/s back", "share of PCIe", "bits equal"),
    "remarks",
)


@dataclass(frozen=True)
class Step:
    """A process with a time limit."""

    name: str
    command: tuple[str, ...]
    limit_s: float


@dataclass
class Proof:
    """The results so far, which are written after each change."""

    out: Path
    facts: Row = field(default_factory=dict[str, Any])
    steps: list[Row] = field(default_factory=list[Row])
    rows: list[Row] = field(default_factory=list[Row])
    complete: bool = False
    stop: threading.Event = field(default_factory=threading.Event)
    """Set when a signal asks the proof to stop."""
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def take(self, step: str, line: str) -> bool:
        """Take a line of a step; True if it was a result."""
        for prefix in (ROW, FACT):
            if line.startswith(prefix):
                with contextlib.suppress(ValueError):
                    value: Row = json.loads(line[len(prefix) :])
                    if prefix == ROW:
                        self.rows.append({"step": step, **value})
                    else:
                        self.facts |= value
                    self.write()
                    return True
        return False

    def write(self) -> None:
        """Replace the files of results."""
        with self._writing:
            document = {"complete": self.complete, "facts": self.facts, "steps": self.steps, "rows": self.rows}
            _replace(self.out / "gpu_proof.json", json.dumps(document, indent=1) + "\n")
            _replace(self.out / "gpu_proof.md", table(self.facts, self.steps, self.rows))

    @property
    def status(self) -> int:
        """The exit status of the program."""
        if any(row.get("bits_equal") is False or row.get("failed_tests") for row in self.rows):
            return 1
        return 0 if self.complete and all(step["status"] == PASSED for step in self.steps) else 3


def _replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


# The table.


def table(facts: Mapping[str, Any], steps: Sequence[Row], rows: Sequence[Row]) -> str:
    """The machine, one Markdown table with a row for each measurement and each step without success, and the times."""
    cells = [_cells(row) for row in rows] + [_step_cells(step) for step in steps if step["status"] != PASSED]
    lines = [_headline(facts), "", "| " + " | ".join(_COLUMNS) + " |", "|---" + "|---:" * 5 + "|---" * 2 + "|"]
    lines += ["| " + " | ".join(text.replace("|", "/") for text in row) + " |" for row in cells]
    times = ", ".join(f"{step['name']} {step['seconds']:.0f} s" for step in steps)
    total = sum(step["seconds"] for step in steps)
    return "\n".join([*lines, "", f"Steps: {times}; {total:.0f} s of at most {TOTAL_S:.0f} s.", ""])


def _headline(facts: Mapping[str, Any]) -> str:
    here = ", ".join(str(facts[name]) for name in ("torch", "processor", "memory") if facts.get(name))
    if facts.get("device") == "cpu":
        unused = f" ({facts['gpu']} is there, but torch cannot use it)" if facts.get("gpu") else ""
        return (
            f"NO GPU: torch has no CUDA device{unused}. The device's program ran on the CPU, with small sizes; "
            f"the numbers say nothing about a GPU. {here}"
        )
    if facts.get("gpu"):
        parts = [f"GPU: {facts['gpu']}", f"driver {facts.get('driver', 'unknown')}", str(facts.get("link", ""))]
        return ", ".join([part for part in parts if part] + [here])
    return f"The machine is unknown, because the step `machine` has no result. {here}"


def _number(row: Row, name: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    return f"{value:.2f} {row.get('unit', '')}".strip() if isinstance(value, (int, float)) else str(value)


def _cells(row: Row) -> list[str]:
    share, equal = row.get("share_of_pcie"), row.get("bits_equal")
    rates = [f"{row[name]:.1f}" if row.get(name) is not None else "" for name in ("to_device", "from_device")]
    return [
        *(str(row.get("what", "")), _number(row, "cpu"), _number(row, "device"), *rates),
        "" if share is None else f"{share:.0%}",
        "TESTS FAILED" if row.get("failed_tests") else "" if equal is None else "yes" if equal else "NO: BITS DIFFER",
        str(row.get("note", "")),
    ]


def _step_cells(step: Row) -> list[str]:
    reason = step["status"] + (f" of {step['limit_s']:.0f} s" if step["status"] == LATE else "")
    if step["status"] == FAILED:
        reason += f" with exit status {step['exit_status']}"
    last = next((line for line in reversed(step["tail"]) if line.strip()), "")
    return [f"step `{step['name']}`: {reason}", "", "", "", "", "", "", last.strip()[:200]]


# The steps.


def run_step(step: Step, proof: Proof, env: Mapping[str, str]) -> Row:
    """Run a step within its limit; returns its outcome, which the proof gets, too."""
    outcome: Row = {"name": step.name, "status": SKIPPED, "seconds": 0.0, "limit_s": round(step.limit_s, 1)}
    outcome |= {"exit_status": None, "tail": []}
    if step.limit_s <= 0:
        return _ended(proof, outcome)
    began, tail = time.monotonic(), deque[str](maxlen=_TAIL_LINES)
    process = subprocess.Popen(
        step.command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=dict(env),
        start_new_session=True,
        encoding="utf-8",
        errors="replace",
    )
    reader = threading.Thread(target=_read, args=(process, step.name, proof, tail), daemon=True)
    reader.start()
    outcome |= _waited(process, proof.stop, until=began + step.limit_s)
    _end(process)
    reader.join(GRACE_S)
    for place in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        for left in place.glob(f"reshard-gpu-step-{os.getpid()}-*"):  # of a step that was killed: gigabytes of memory
            shutil.rmtree(left, ignore_errors=True)
    return _ended(proof, outcome | {"seconds": round(time.monotonic() - began, 1), "tail": list(tail)})


def _waited(process: subprocess.Popen[str], stop: threading.Event, *, until: float) -> Row:
    """Wait for the end of a process, for the time `until` or for a signal; returns what happened first."""
    while True:
        try:
            status = process.wait(_POLL_S)
            return {"status": FAILED if status else PASSED, "exit_status": status}
        except subprocess.TimeoutExpired:
            if stop.is_set():
                return {"status": STOPPED}
            if time.monotonic() > until:
                return {"status": LATE}


def _ended(proof: Proof, outcome: Row) -> Row:
    proof.steps.append(outcome)
    proof.write()
    print(f"{outcome['name']:12} {outcome['seconds']:6.1f} s  {outcome['status']}", file=sys.stderr, flush=True)
    return outcome


def _read(process: subprocess.Popen[str], name: str, proof: Proof, tail: deque[str]) -> None:
    assert process.stdout is not None
    with process.stdout, (proof.out / "gpu_proof.log").open("a", encoding="utf-8") as log:
        for line in process.stdout:
            log.write(f"{name}: {line}")
            log.flush()
            if not proof.take(name, line):
                tail.append(line.rstrip("\n"))


def _end(process: subprocess.Popen[str]) -> None:
    """End a step and all processes below it. It has some seconds to stop its servers itself."""
    below = set(descendants(process.pid))
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        below |= set(descendants(process.pid))
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in below:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    """The processes below a process, in whatever session."""
    parents = _parents()
    below, fresh = list[int](), [pid]
    while fresh:
        fresh = [child for child, parent in parents.items() if parent in fresh]
        below += fresh
    return below


def _parents() -> dict[int, int]:
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    return parents


def commands(site: Path, wheels: Path, size: str) -> Iterator[tuple[str, Callable[[Row], tuple[str, ...]]]]:
    """The names of the steps in their order, and what makes their commands of the facts of the steps before."""
    install = (sys.executable, str(HERE / "gpu_install.py"), str(wheels), str(site))
    yield "install", lambda _: install
    for name in list(LIMITS_S)[1:]:
        yield name, lambda facts, name=name: _step_command(name, device_of(facts), size)


def _step_command(name: str, device: str, size: str) -> tuple[str, ...]:
    size = size if size != "auto" else "full" if device == "cuda" else "small"
    words = (name, "--device", device, "--size", size, "--until-s", f"{LIMITS_S[name] * 0.7:.0f}")
    return (sys.executable, str(HERE / "gpu_steps.py"), *words)


def device_of(facts: Mapping[str, Any]) -> str:
    """torch's name of the device: that of the step `machine`, or what the driver's file says."""
    return str(facts.get("device") or ("cuda" if os.path.exists("/dev/nvidiactl") else "cpu"))


def environment(site: Path) -> dict[str, str]:
    """The environment of the steps: installed packages first, no settings of a service."""
    # Compiled modules are kept: else each of the many processes would compile all that it imports.
    dropped = ("RESHARD_", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    roots = [str(ROOT / name) for name in ("client", "worker", "service")]
    places = [str(site), *roots, *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(places), "PYTHONUNBUFFERED": "1", "PYTHON_COLORS": "0"}


def prove(proof: Proof, wanted: Iterable[tuple[str, Callable[[Row], tuple[str, ...]]]], env: Mapping[str, str]) -> int:
    """Run all steps and print the table; returns the exit status."""

    def ask_to_stop(_number: int, _frame: FrameType | None) -> None:
        proof.stop.set()

    for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(sign, ask_to_stop)
    until = time.monotonic()
    for name, made in wanted:
        until += LIMITS_S[name]
        run_step(Step(name, made(proof.facts), until - time.monotonic()), proof, env)
        if proof.stop.is_set():
            print(f"stopped by a signal; {proof.out} has the results so far", file=sys.stderr, flush=True)
            break
    else:
        proof.complete = True
    proof.write()
    print(table(proof.facts, proof.steps, proof.rows), flush=True)
    return proof.status


def main() -> int:
    """Install, run, print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory for the results")
    parser.add_argument("--size", choices=("auto", "small", "full"), default="auto", help="auto: small without a GPU")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".whl", help="what `make gpu-wheels` downloaded")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for name in ("gpu_proof.json", "gpu_proof.md", "gpu_proof.log"):
        (out / name).unlink(missing_ok=True)
    site = Path(tempfile.mkdtemp(prefix="reshard-gpu-"))
    try:
        return prove(Proof(out), commands(site, arguments.wheels.resolve(), arguments.size), environment(site))
    finally:
        shutil.rmtree(site, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
