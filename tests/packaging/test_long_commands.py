"""The commands that take an hour and that CI does not run find their tests, with the settings that they name."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest

from house.repository import ROOT


@pytest.mark.parametrize("target", ["laws", "chaos", "nightly", "contract", "gpu"])
def test_a_long_command_finds_its_tests(target: str) -> None:
    shown = subprocess.run(
        ["make", "-n", target, "ARGS=--collect-only -q"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    line = next(text for text in shown.stdout.splitlines() if " -m pytest " in text)
    _, *words = shlex.split(line)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-2_000:]
    assert re.search(r"^tests/.*::test_|^\d+(/\d+)? tests collected", done.stdout, re.MULTILINE), done.stdout[-2_000:]
