"""The examples of the README run as they stand, against a real service; only their URLs are replaced."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from house.repository import ROOT, code_blocks
from servers.process import running

TOKEN = "readme"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """`reshard serve`, as a user starts it."""
    directory = tmp_path_factory.mktemp("readme")
    log = directory / "serve.log"
    env = {name: value for name, value in os.environ.items() if not name.startswith("RESHARD_")}
    argv = [sys.executable, "-m", "reshard.cli.main", "serve", "--port", "0", "--data-dir", str(directory / "data")]

    def url() -> str:
        found = re.search(r"reshard serves on (http://\S+)", log.read_text())
        return found[1] if found else ""

    with running(argv, env={**env, "RESHARD_TOKEN": TOKEN}, log=log) as process:
        process.wait_until(lambda: bool(url()) and "startup complete" in log.read_text())
        yield url()


def example(language: str, mark: str) -> str:
    """The one block of the README that holds `mark`."""
    (found,) = [code for code in code_blocks(ROOT / "README.md", language) if mark in code]
    return found


def run(command: list[str], url: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "RESHARD_URL": url, "RESHARD_TOKEN": TOKEN, "PATH": path}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=60)


def localised(code: str, directory: Path, url: str) -> str:
    shutil.copytree(ROOT / "tests" / "data" / "zero3_tiny", directory / "run1")
    return code.replace("s3://checkpoints", str(directory)).replace("http://127.0.0.1:8000", url)


def test_the_python_example(service: str, tmp_path: Path) -> None:
    code = example("python", "reshard.Client")
    done = run([sys.executable, "-c", localised(code, tmp_path, service)], service, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "zero/optimizer_state.pt" in done.stdout
    assert (tmp_path / "run1" / "latest_universal").read_text() == "global_step3_universal"


def test_the_scheduler_example(service: str, tmp_path: Path) -> None:
    code = example("sh", "Idempotency-Key")
    done = run(["bash", "-euo", "pipefail", "-c", localised(code, tmp_path, service)], service, tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^state\s+SUCCEEDED$", done.stdout, re.MULTILINE)
    assert (tmp_path / "run1" / "global_step3_universal" / "reshard.json").exists()
