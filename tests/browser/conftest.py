"""A real browser, and a service with a worker for it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

import servers
from servers.stack import Stack

TOKEN = "the token of the operator"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True)
class Site:
    """A service, and a directory whose checkpoints it may read and write."""

    url: str
    root: Path


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of the browser. In CI it must be there."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("there is no Chromium: make browser installs it")
        pytest.skip("there is no Chromium: make browser installs it (Debian's package chromium)")
    return found


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Generator[Site]:
    """A service whose worker converts slowly enough to be watched."""
    root = tmp_path_factory.mktemp("site")
    runner = shlex.join([sys.executable, "-P", str(Path(servers.__file__).with_name("paced_runner.py"))])
    extra = {
        "RESHARD_TOKEN": TOKEN,
        "RESHARD_ROOTS": str(root),
        "RESHARD_RUNNER_COMMAND": runner,
        "RESHARD_WARM_ENGINE": "0",
        "PACE_S": "0.12",
    }
    stack = Stack(root / "logs", f"sqlite:///{root}/jobs.db", scripted=False, extra=extra)
    with stack.api() as url, stack.worker():
        yield Site(url, root)
