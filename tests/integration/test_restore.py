"""The job database is restored to an older moment: jobs that ended since end once more, and harm nothing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pgserver
import psycopg

from house.repository import ROOT
from house.waiting import PATIENCE_S
from reshard.api.client import Client
from reshard.choices import JobState
from reshard.models.jobs import Job, Progress
from reshard_jobs.database import Database
from reshard_jobs.queue.leases import Leases
from reshard_jobs.queue.store import JobStore
from servers.postgres import PostgresServer
from servers.stack import Stack, client_of

BIN = Path(pgserver.__file__).parent / "pginstall" / "bin"


def backup(url: str) -> str:
    return subprocess.run([str(BIN / "pg_dump"), url], check=True, capture_output=True, text=True).stdout


def restore(statements: str, url: str) -> None:
    command = [str(BIN / "psql"), "--quiet", "--set", "ON_ERROR_STOP=1", "--dbname", url]
    subprocess.run(command, check=True, input=statements, capture_output=True, text=True)


def files_of(target: Path) -> dict[str, tuple[int, int]]:
    """Each file with its inode and the time of its last change: a file that is written anew has others."""
    found = (path for path in target.rglob("*") if path.is_file())
    return {str(path.relative_to(target)): (path.stat().st_ino, path.stat().st_mtime_ns) for path in found}


def test_jobs_that_ended_after_the_backup_end_once_more(postgres: PostgresServer, tmp_path: Path) -> None:
    before, after = postgres.new_database(), postgres.new_database()
    source = tmp_path / "source"
    shutil.copytree(ROOT / "tests" / "data" / "zero2_tiny", source)

    def submitted(client: Client, name: str) -> Job:
        return client.submit(str(source), str(tmp_path / name), to="universal", job_id=name)

    stack = Stack(tmp_path / "logs", before, scripted=False)
    with stack.api() as url, client_of(url) as client:
        names = ["queued", "running", "cancelled", "another"]
        for name in names:
            submitted(client, name)
        # One has a worker at the moment of the backup.
        database = Database(before)
        try:
            leases = Leases(database, lease_s=1)
            claim = leases.claim(JobStore(database).key_of("running"), worker="lost")
            assert claim is not None
            assert leases.heartbeat(claim, Progress(phase="running", bytes_done=1, bytes_total=9)).held
        finally:
            database.close()
        kept = backup(before)
        client.cancel("cancelled")
        with stack.worker():
            submitted(client, "later")
            for name in ("queued", "running", "another", "later"):
                assert client.wait(name, timeout_s=PATIENCE_S).state is JobState.SUCCEEDED
    written = {name: files_of(tmp_path / name) for name in ("queued", "running", "later")}
    # Since then, someone has put something else where a job had written.
    shutil.rmtree(tmp_path / "another")
    (tmp_path / "another").mkdir()
    (tmp_path / "another" / "notes.txt").write_text("mine")

    restore(kept, after)
    stack = Stack(tmp_path / "logs-after", after, scripted=False)
    with stack.api() as url, client_of(url) as client:
        assert client.get("queued").state is JobState.QUEUED
        assert client.get("running").state is JobState.RUNNING
        # Who cancels before the workers start is spared the output.
        client.cancel("cancelled")
        with stack.worker():
            assert client.wait("queued", timeout_s=PATIENCE_S).state is JobState.SUCCEEDED
            ended = client.wait("running", timeout_s=PATIENCE_S)
            assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 2)
            refused = client.wait("another", timeout_s=PATIENCE_S)
            # The service does not know the job any more; its caller sends it again.
            submitted(client, "later")
            assert client.wait("later", timeout_s=PATIENCE_S).state is JobState.SUCCEEDED
    assert refused.state is JobState.FAILED
    assert refused.error is not None
    assert refused.error.code == "request.target_exists"
    assert (tmp_path / "another" / "notes.txt").read_text() == "mine"
    assert {name: files_of(tmp_path / name) for name in written} == written
    assert not (tmp_path / "cancelled").exists()
    with psycopg.connect(after) as connection:
        count = connection.execute("SELECT count(*) FROM jobs").fetchone()
    assert count == (5,)
