"""A sign of life of a Celery worker: files that its loops touch, and the probe that looks at them.

`python -m reshard_worker.alive --name worker` is for Kubernetes and compose. It imports nothing but this module and the
standard library, and asks neither the broker nor the database: a worker that waits for one of them is alive.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "RESHARD_ALIVE"
"""The path before the endings of the files; set by `reshard worker` for its own processes."""
LIMIT_S = 120.0
"""Seconds without a sign after which a worker hangs. The longest call of a loop, to a database that does not answer, is
much shorter."""
_PAUSE_S = 1.0
LOOP_S = 5.0
"""Seconds between two signs of Celery's loop."""


class Sign:
    """One file. Its time says when its loop ran last, its text what the loop does."""

    def __init__(self, ending: str) -> None:
        self._ending = ending
        self._at = 0.0

    def give(self, text: str = "") -> None:
        """Show that the loop runs; at most once a second, unless the text is new."""
        now = time.monotonic()
        if not text and now - self._at < _PAUSE_S:
            return
        self._at = now
        self._write(text or "runs")

    def end(self) -> None:
        """Show that nothing runs."""
        self._at = 0.0
        if base := os.environ.get(VARIABLE):
            with suppress(OSError):
                Path(base + self._ending).unlink()

    def _write(self, text: str) -> None:
        # A full or read-only disk must not stop a job. The probe will complain.
        if base := os.environ.get(VARIABLE):
            with suppress(OSError):
                Path(base + self._ending).write_text(text)


LOOP = Sign(".loop")
"""The loop of Celery's main process, which takes messages. Its text is `away` while it waits for the broker, and `deaf`
while it takes no messages from a broker that is there; the time is then that of the change."""
JOB = Sign(".job")
"""The loop of the supervisor, while it has a job."""


def path_of(name: str) -> str:
    """The path before the endings of the files of a worker of this user and host."""
    return str(Path(tempfile.gettempdir()) / f"reshard-{os.getuid()}" / f"worker-{name}")


def prepare(name: str) -> str:
    """Make the directory of the files and remove those of an earlier worker of this name; returns the path."""
    base = Path(path_of(name))
    with suppress(OSError):
        base.parent.mkdir(mode=0o700, exist_ok=True)
    for sign in (".loop", ".job"):
        with suppress(OSError):
            base.with_name(base.name + sign).unlink()
    return str(base)


def problem_of(base: str, limit_s: float = LIMIT_S) -> str | None:
    """The reason why a worker does not count as alive; None if it does."""
    loop, job = _read(base + ".loop"), _read(base + ".job")
    if loop is None:
        return f"no worker has written {base}.loop"
    age_s, text = loop
    if text == "deaf" and age_s > limit_s:
        return f"it takes no messages from the broker, for {age_s:.0f} s now"
    if text != "away" and age_s > limit_s:
        return f"its loop has not run for {age_s:.0f} s"
    if job is not None and job[0] > limit_s:
        return f"the supervisor of its job has not run for {job[0]:.0f} s"
    return None


def hears() -> bool:
    """True unless the main process of this worker takes no messages, or its loop hangs."""
    loop = _read(os.environ.get(VARIABLE, "") + ".loop")
    return loop is None or loop[1] == "away" or (loop[1] != "deaf" and loop[0] <= LIMIT_S)


def _read(path: str) -> tuple[float, str] | None:
    """The age of a sign in seconds and its text; None if there is none."""
    with suppress(OSError):
        return time.time() - Path(path).stat().st_mtime, Path(path).read_text()
    return None


def main(arguments: list[str] | None = None) -> int:
    """Say if a worker of this host is alive; the exit status is 0 if it is."""
    parser = argparse.ArgumentParser(prog="python -m reshard_worker.alive", description=main.__doc__)
    parser.add_argument("--name", required=True, help="as in `reshard worker --name`")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds without a sign of life")
    asked = parser.parse_args(arguments)
    problem = problem_of(path_of(asked.name), asked.limit)
    sys.stdout.write(f"{problem or 'alive'}\n")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
