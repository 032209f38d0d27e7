"""Runs a command as a process tree and says how long it took and how much memory it held."""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_SAMPLE_S = 0.02


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. Anonymous memory is what a process allocated; file-backed pages can be dropped and read again.

    The first two peaks are sampled; the kernel keeps the high-water mark of both together, so that no peak
    between two samples is missed.
    """

    wall_s: float
    peak_anonymous_bytes: int
    peak_file_backed_bytes: int
    high_water_bytes: int
    read_bytes: int
    written_bytes: int
    """What the tree passed through reads and writes, caches included."""
    output: str = field(repr=False)


class _Sampler(threading.Thread):
    """Sums RssAnon and RssFile over a process tree until it is told to stop."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._root = psutil.Process(pid)
        self._done = threading.Event()
        self.anonymous = 0
        self.file_backed = 0
        self.high_water = 0
        self._passed: dict[int, tuple[int, int]] = {}

    @property
    def read(self) -> int:
        """Bytes that all processes together read."""
        return sum(read for read, _ in self._passed.values())

    @property
    def written(self) -> int:
        """Bytes that all processes together wrote."""
        return sum(written for _, written in self._passed.values())

    def run(self) -> None:
        while not self._done.wait(_SAMPLE_S):
            anonymous = file_backed = high_water = 0
            try:
                tree = [self._root, *self._root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for process in tree:
                try:
                    status = Path(f"/proc/{process.pid}/status").read_text()
                except OSError:
                    continue  # it ended between the listing and the look
                fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
                anonymous += int(fields.get("RssAnon", "0 kB").split()[0]) << 10
                file_backed += int(fields.get("RssFile", "0 kB").split()[0]) << 10
                high_water += int(fields.get("VmHWM", "0 kB").split()[0]) << 10
                self._passed[process.pid] = _passed(process.pid) or self._passed.get(process.pid, (0, 0))
            self.anonymous = max(self.anonymous, anonymous)
            self.file_backed = max(self.file_backed, file_backed)
            self.high_water = max(self.high_water, high_water)

    def finish(self) -> None:
        self._done.set()
        self.join()


def _passed(pid: int) -> tuple[int, int] | None:
    try:
        fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    except OSError:
        return None
    return int(fields["rchar"]), int(fields["wchar"])


def measure(command: Sequence[str], *, env: dict[str, str]) -> Measured:
    """Run the command to its end.

    Raises:
        RuntimeError: With the end of its output, if it fails.
    """
    with tempfile.TemporaryFile() as log, tempfile.TemporaryFile() as answer:
        started = time.perf_counter()
        process = subprocess.Popen(list(command), stdout=answer, stderr=log, env=env)
        sampler = _Sampler(process.pid)
        sampler.start()
        code = process.wait()
        wall = time.perf_counter() - started
        sampler.finish()
        if code:
            log.seek(0)
            raise RuntimeError(
                f"{' '.join(command)} ended with {code}:\n{log.read()[-4000:].decode('utf-8', 'replace')}"
            )
        answer.seek(0)
        output = answer.read().decode("utf-8", "replace")
    peaks = sampler.anonymous, sampler.file_backed, sampler.high_water
    return Measured(wall, *peaks, sampler.read, sampler.written, output)
