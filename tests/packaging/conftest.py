"""What the tests of this folder share: the wheel, and short folders for sockets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from house.repository import ROOT
from servers.fixtures import redis, server_directory

__all__ = ["redis", "server_directory", "wheel"]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this repository."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(directory), str(ROOT)], check=True, capture_output=True)
    (found,) = directory.glob("reshard-*.whl")
    return found
