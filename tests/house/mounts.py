"""Mounts of `reshard mount`, each by a process of its own, as users run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from house.repository import ROOT

ENDS_S = 60.0


@dataclass
class Mounted:
    """A running mount."""

    process: subprocess.Popen[str]
    place: Path
    facts: dict[str, Any]
    log: Path

    @property
    def target(self) -> Path:
        """The directory with the target's files."""
        return Path(self.facts["target"])

    @property
    def said(self) -> str:
        """The text that the process has written to stderr."""
        return self.log.read_text()

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; returns the exit code."""
        self.process.send_signal(number)
        return self.process.wait(ENDS_S)


def start(source: Path, place: Path, *words: str) -> Mounted:
    """Mount a target; the test is skipped where there is no FUSE."""
    log = place.with_name(f"{place.name}.log")
    command = [sys.executable, "-m", "reshard.cli.main", "mount", str(source), str(place), *words, "--json"]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT)
    assert process.stdout is not None
    with process.stdout as told:
        line = told.readline()
    facts: dict[str, Any] = json.loads(line) if line else {}
    if "path" in facts:
        return Mounted(process, place, facts, log)
    process.wait(ENDS_S)
    error: dict[str, str] = facts.get("error", {})
    if error.get("code") == "storage.no_fuse":
        pytest.skip(error["detail"])
    raise AssertionError(f"{line}{log.read_text()}")


@contextmanager
def mounted(source: Path, place: Path, *words: str) -> Generator[Mounted]:
    """Mount a target, and unmount it after the block."""
    found = start(source, place, *words)
    try:
        yield found
    finally:
        if found.process.poll() is None:
            found.end()
        if is_mounted(place):
            subprocess.run(["umount", "-l", str(place)], check=False)


def is_mounted(place: Path) -> bool:
    """True if the kernel lists a mount there, alive or dead."""
    return any(line.split(" ")[4] == str(place) for line in Path("/proc/self/mountinfo").read_text().splitlines())


def files_below(tree: Path) -> dict[str, bytes]:
    """The files of a tree by relative path, without manifests."""
    found = [Path(folder) / name for folder, _, names in os.walk(tree) for name in names]
    return {str(path.relative_to(tree)): path.read_bytes() for path in found if path.name != "reshard.json"}
