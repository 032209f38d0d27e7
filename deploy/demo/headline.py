"""The headline: a run of two ranks goes on as one of three, with the same losses. DeepSpeed trains for real."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from playground import Playground
from processes import stop
from screen import say, shown, table

RANKS, OTHER_RANKS = 2, 3
DIFFERENCE = 1e-6
"""Losses are the same if they differ by less than this share: fp32 sums of another number of ranks round otherwise."""
SCRIPT = Path(__file__).with_name("train.py")
_LOSS = re.compile(r"step (\d+) loss ([\d.]+)")
_TIMEOUT_S = 120.0

Losses = Mapping[int, float]


def has_deepspeed() -> bool:
    """True if this environment can train."""
    return importlib.util.find_spec("deepspeed") is not None


def train(place: Playground) -> Losses:
    """Train without interruption and save a checkpoint on the way; returns the losses of all steps."""
    losses, status, said = _launch(place, RANKS, "--save", place.source)
    if status:
        raise RuntimeError(f"the training failed: {said}")
    return losses


def refusal(place: Playground) -> str:
    """Return what DeepSpeed says about the checkpoint on the other number of ranks.

    Raises:
        RuntimeError: It took the checkpoint.
    """
    losses, status, said = _launch(place, OTHER_RANKS, "--load", place.source)
    if not status or losses:
        raise RuntimeError(f"DeepSpeed resumed {shown(place.source)} on {OTHER_RANKS} ranks, which it should refuse")
    return said


def resume(place: Playground) -> Losses:
    """Go on from the result on the other number of ranks; returns the losses of those steps."""
    losses, status, said = _launch(place, OTHER_RANKS, "--load", place.result)
    if status or not losses:
        raise RuntimeError(f"DeepSpeed did not resume from {shown(place.result)}: {said}")
    return losses


def compare(before: Losses, after: Losses) -> None:
    """Print the losses of the same steps side by side.

    Raises:
        RuntimeError: They are not the same.
    """
    rows = [(n, before[n], after[n], abs(after[n] - before[n]) / before[n]) for n in sorted(after)]
    header = ("step", f"{RANKS} ranks, uninterrupted", f"{OTHER_RANKS} ranks, resumed", "difference")
    table(header, [(str(n), f"{a:.8f}", f"{b:.8f}", f"{share:.0e}") for n, a, b, share in rows])
    worst = max(share for *_, share in rows)
    if not worst < DIFFERENCE:  # NaN is not a loss, either
        raise RuntimeError(f"the losses differ by {worst:.1e} of their value; less than {DIFFERENCE:g} was expected")


def _launch(place: Playground, ranks: int, what: str, checkpoint: Path) -> tuple[Losses, int, str]:
    """Run the training script and show its losses; returns them, its exit status, and its error."""
    command = [sys.executable, str(SCRIPT), "--ranks", str(ranks), what, str(checkpoint)]
    say(f"  $ python {shown(SCRIPT)} --ranks {ranks} {what} {shown(checkpoint)}")
    losses: dict[int, float] = {}
    log = place.logs / f"train-{what.strip('-')}-{ranks}-{checkpoint.name}.log"
    with log.open("w+", errors="replace") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        late = threading.Timer(_TIMEOUT_S, process.kill)
        late.start()
        try:
            for line in process.stdout or ():
                if found := _LOSS.match(line):
                    losses[int(found[1])] = float(found[2])
                    say(f"  {line.rstrip()}")
            status = process.wait()
        finally:
            late.cancel()
            stop(process, signal.SIGTERM)
            if process.stdout is not None:
                process.stdout.close()
        errors.seek(0)
        lines = [line for line in errors.read().splitlines() if line.strip()]
    return losses, status, lines[-1] if lines else f"status {status} without a word"
