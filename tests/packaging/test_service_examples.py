"""The examples of docs/service.md run as they stand, against a real service; only their URLs are replaced."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Generator
from pathlib import Path

import pytest

from house.repository import ROOT, code_blocks
from servers.process import served

TOKEN = "token-of-the-examples-in-docs"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """The URL of a service."""
    with served(tmp_path_factory.mktemp("examples"), TOKEN) as url:
        yield url


def example(language: str, mark: str) -> str:
    """The one block of the page that holds `mark`."""
    (found,) = [code for code in code_blocks(ROOT / "docs" / "service.md", language) if mark in code]
    return found


def run(command: list[str], url: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "RESHARD_URL": url, "RESHARD_TOKEN": TOKEN, "PATH": path}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=180)


def localised(code: str, directory: Path, url: str) -> str:
    shutil.copytree(ROOT / "tests" / "data" / "zero3_tiny", directory / "run1")
    return code.replace("s3://checkpoints", str(directory)).replace("http://127.0.0.1:8000", url)


def test_the_python_example(service: str, tmp_path: Path) -> None:
    code = example("python", "reshard.Client")
    done = run([sys.executable, "-c", localised(code, tmp_path, service)], service, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "zero/optimizer_state.pt" in done.stdout
    assert (tmp_path / "run1" / "latest_universal").read_text() == "global_step3_universal"


def test_the_command_of_a_scheduler(service: str, tmp_path: Path) -> None:
    code = localised(example("sh", "--idempotency-key"), tmp_path, service)
    for _again in range(2):
        done = run(["bash", "-euo", "pipefail", "-c", code], service, tmp_path)
        assert (done.returncode, done.stdout) == (0, f"{tmp_path}/run1/global_step3_universal\n"), done.stderr


def test_curl_waits_for_the_result(service: str, tmp_path: Path) -> None:
    code = localised(example("sh", "Idempotency-Key"), tmp_path, service).replace("run1-global_step3", "by-curl")
    done = run(["bash", "-c", code], service, tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["target"] == f"{tmp_path}/run1/global_step3_universal"
    assert (tmp_path / "run1" / "global_step3_universal" / "reshard.json").exists()


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("Bearer $RESHARD_TOKEN", "Bearer wrong", "request.unauthorized"),
        ('"tag": "global_step3"', '"tag": "global_step9"', "source.not_found"),
    ],
)
def test_curl_prints_the_error_of_the_service_and_ends(
    service: str, tmp_path: Path, old: str, new: str, code: str
) -> None:
    """The block before printed `KeyError: 'id'`, and then asked for a job without a name for ever."""
    text = localised(example("sh", "Idempotency-Key"), tmp_path, service)
    assert old in text
    done = run(["bash", "-c", text.replace(old, new).replace("run1-global_step3", code)], service, tmp_path)
    assert done.returncode == 1
    assert f'"code":"{code}"' in done.stderr
    assert done.stdout == ""


def test_curl_fails_with_a_job_that_fails(service: str, tmp_path: Path) -> None:
    text = localised(example("sh", "Idempotency-Key"), tmp_path, service)
    optimizer = next((tmp_path / "run1" / "global_step3").glob("*_optim_states.pt"))
    with zipfile.ZipFile(optimizer) as archive:
        largest = max(archive.infolist(), key=lambda record: record.file_size)
        tensor = archive.read(largest)
    data = optimizer.read_bytes()
    assert data.count(tensor) == 1
    # One byte of a tensor: planning does not read it.
    optimizer.write_bytes(data.replace(tensor, bytes([tensor[0] ^ 1]) + tensor[1:]))
    done = run(["bash", "-c", text.replace("run1-global_step3", "spoilt")], service, tmp_path)
    assert done.returncode == 1
    assert '"code":"' in done.stderr
    assert done.stdout == ""
