"""What `make` shows while pip installs: phases with their seconds, and a line that moves where there is a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from house.repository import ROOT

PIP = """#!/bin/sh
test "$3" = install || exit 9
site=$(dirname "$0")/../lib/python3.11/site-packages
i=0; while [ $i -lt 60 ]; do i=$((i + 1)); echo "Collecting name$i"; done
echo "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (190.5 MB)"
echo "  Downloading small-1.0-py3-none-any.whl (20.5 kB)"
echo "  Using cached https://index.test/x/deepspeed-0.19.8.tar.gz (1.9 GB)"
echo "Installing collected packages: a, b, c, d"
mkdir -p "$site/a-1.dist-info" "$site/b-1.dist-info"
sleep 1.3
echo "ERROR: the end is near"
exit STATUS
"""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment whose pip fails unless its status is changed."""
    (tmp_path / "bin").mkdir()
    old = tmp_path / "lib" / "python3.11" / "site-packages" / "old-1.dist-info"
    old.mkdir(parents=True)
    os.utime(old, (1, 1))  # it was there before, and is not counted
    with_status(tmp_path, 1)
    return tmp_path


def with_status(environment: Path, status: int) -> list[str]:
    program = environment / "bin" / "python"
    program.write_text(PIP.replace("STATUS", str(status)))
    program.chmod(0o755)
    return [sys.executable, str(ROOT / "scripts" / "install.py"), str(environment), ".[dev]"]


def test_without_a_terminal_each_phase_is_a_line(environment: Path) -> None:
    done = subprocess.run(with_status(environment, 0), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0
    assert "\r" not in done.stdout
    assert [re.sub(r"^ +\d+ s  ", "", line) for line in done.stdout.splitlines()] == [
        "50 packages found",
        "fetching torch-2.13.0 (190.5 MB)",
        "fetching deepspeed-0.19.8 (1.9 GB)",
        "unpacking 4 packages",
        "installed",
    ]
    assert all(re.match(r" +\d+ s  ", line) for line in done.stdout.splitlines())


def test_what_pip_said_last_is_shown_when_it_fails(environment: Path) -> None:
    done = subprocess.run(with_status(environment, 3), capture_output=True, text=True, timeout=180)
    assert done.returncode == 3
    assert done.stdout.endswith("ERROR: the end is near\n")
    assert f"the end of {environment / 'install.log'}" in done.stdout
    assert (environment / "install.log").read_text().count("Collecting") == 60


def test_a_terminal_sees_how_many_packages_are_unpacked(environment: Path) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(with_status(environment, 0), stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        text = b""
        try:
            while part := os.read(ours, 4096):
                text += part
        except OSError:  # the terminal has no other side any more
            pass
        assert process.wait(30) == 0
    os.close(ours)
    shown = text.decode()
    assert "\r\033[K    1 s  unpacking [############............] 2 of 4" in shown
    assert re.search(r"\r\033\[K +\d s  installed\r\n$", shown)
