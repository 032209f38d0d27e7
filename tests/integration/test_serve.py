"""`reshard serve` as a user starts it: one command, no services, nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from house.waiting import PATIENCE_S, wait_until
from reshard.choices import JobState
from reshard.errors import RequestError
from reshard_service.app import create_app
from reshard_service.serve import listening
from reshard_service.settings import ServiceSettings
from servers.process import ServerProcess, running
from servers.scripted import scripted, units_done
from servers.stack import Stack, client_of, end_tree, tree_of

MAIN = """
import sys, typer
from reshard.cli.remote import register
from reshard.errors import ReshardError
app = typer.Typer()
register(app)
try:
    app()
except ReshardError as error:
    sys.exit(f"{error.code}: {error.message}\\nfix: {error.fix}")
"""


def cli(*arguments: str) -> list[str]:
    return [sys.executable, "-c", MAIN, *arguments]


@contextmanager
def serving(directory: Path) -> Generator[tuple[ServerProcess, str]]:
    stack = Stack(directory / "logs", "", extra={"RESHARD_ADMISSION_S": "0.2"})
    env = {name: value for name, value in stack.env().items() if name != "RESHARD_DATABASE_URL"}
    log = directory / f"serve-{time.monotonic_ns()}.log"
    argv = cli("serve", "--port", "0", "--data-dir", str(directory / "data"))
    process = ServerProcess(argv, env=env, log=log)
    try:
        process.wait_until(lambda: "startup complete" in log.read_text())
        found = re.search(r"RESHARD_URL=(http://\S+)", log.read_text())
        assert found is not None
        yield process, found[1]
    finally:
        end_tree(process)


def gone(processes: list[psutil.Process], *, within_s: float) -> bool:
    return not psutil.wait_procs(processes, timeout=within_s)[1]


def test_jobs_run_and_the_end_is_clean(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, url), client_of(url) as client:
        # The real probe knows nothing of scripts; the job is put in beside the API.
        job_id = create_job(tmp_path, "out", units=4)
        assert client.wait(job_id, timeout_s=PATIENCE_S).state is JobState.SUCCEEDED
        long = create_job(tmp_path, "long", units=4000, unit_s=0.05)
        wait_until(lambda: len(units_done(tmp_path / "long")) >= 2, timeout_s=PATIENCE_S)
        family = tree_of(process.pid)
        # The API, its probe that waits, the executor, and the engine of the job.
        assert len(family) == 4
        assert process.stop(signal.SIGTERM) == 0
        assert gone(family, within_s=20)
    with serving(tmp_path) as (process, url), client_of(url) as client:
        job = client.get(long)
        assert job.state in {JobState.QUEUED, JobState.PLANNING, JobState.RUNNING}
        assert client.cancel(long).state is JobState.CANCELLING
        assert client.wait(long, timeout_s=PATIENCE_S).state is JobState.CANCELLED
        again = create_job(tmp_path, "killed", units=4000, unit_s=0.05)
        wait_until(lambda: len(units_done(tmp_path / "killed")) >= 2, timeout_s=PATIENCE_S)
        family = tree_of(process.pid)
        process.kill()
        assert gone(family[1:], within_s=30)
        assert again


def create_job(directory: Path, name: str, **script: object) -> str:
    """A job straight into the database of `reshard serve`."""
    from reshard.choices import TargetFormat
    from reshard.models.jobs import ConvertRequest
    from reshard.options import SourceSpec
    from reshard_jobs.database import Database
    from reshard_jobs.queue.store import JobStore

    database = Database(f"sqlite:///{directory}/data/jobs.db")
    source = SourceSpec(url=scripted(**script))
    request = ConvertRequest(source=source, target=str(directory / name), to=TargetFormat.UNIVERSAL)
    job = JobStore(database).create(request)
    database.close()
    return job.id


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_strangers_are_not_let_in_by_default(tmp_path: Path, host: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RESHARD_")}
    argv = cli("serve", "--port", "0", "--host", host, "--data-dir", str(tmp_path / "data"))
    ended = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode != 0
    assert "RESHARD_TOKEN and RESHARD_ROOTS is not set" in ended.stderr


@pytest.mark.parametrize(
    ("token", "why"),
    [
        ("x", "has 1 characters"),
        ("change-me", "has 9 characters"),
        ("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "has 1 different"),
        ("passwordpassword", "repeats a shorter text"),
        ("change-me-before-use", "is a placeholder"),
        ("$(openssl rand -hex 32)", "is a placeholder"),
    ],
)
def test_a_token_that_can_be_guessed_is_refused_where_strangers_knock(tmp_path: Path, token: str, why: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RESHARD_")}
    env |= {"RESHARD_TOKEN": token, "RESHARD_ROOTS": str(tmp_path)}
    argv = cli("serve", "--port", "0", "--host", "0.0.0.0", "--data-dir", str(tmp_path / "data"))
    ended = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode != 0
    assert f"RESHARD_TOKEN {why}" in ended.stderr
    fix = ended.stderr.partition("fix: ")[2].strip()
    made = subprocess.run(["sh", "-c", f"{fix} && printenv RESHARD_TOKEN"], capture_output=True, text=True, check=True)
    settings = ServiceSettings.from_env({**env, "RESHARD_TOKEN": made.stdout.strip()})
    settings.require_protection("others can reach it", otherwise="")


def test_loopback_takes_any_token_and_uvicorn_a_strong_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {**os.environ, "RESHARD_TOKEN": "x"}
    argv = cli("serve", "--port", "0", "--data-dir", str(tmp_path / "data"))
    with running(argv, env=env, log=tmp_path / "log") as process:
        process.wait_until(lambda: "startup complete" in (tmp_path / "log").read_text())
    monkeypatch.setenv("RESHARD_TOKEN", "x")
    monkeypatch.setenv("RESHARD_ROOTS", str(tmp_path))
    monkeypatch.delenv("RESHARD_ANONYMOUS", raising=False)
    with pytest.raises(RequestError, match="RESHARD_TOKEN has 1 characters"):
        create_app()


def test_a_worker_without_a_broker_says_so(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RESHARD_")}
    ended = subprocess.run(
        cli("worker"), env=env, capture_output=True, text=True, timeout=180, check=False, cwd=tmp_path
    )
    assert ended.returncode != 0
    assert "RESHARD_BROKER_URL is not set" in ended.stderr


def test_answers_do_not_wait_in_the_kernel() -> None:
    """asyncio switches Nagle's algorithm off for sockets with the number of their protocol: 48 ms became 7."""
    with closing(listening("127.0.0.1", 0)) as listener:
        assert listener.proto == socket.IPPROTO_TCP
