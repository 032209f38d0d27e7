"""Makes `schemaN.sqlite.sql` and `schemaN.postgresql.sql`, job databases of the revision N, and their truth.

Run `python tests/data/job_databases/make_job_databases.py` before a change adds a revision: N is the newest one of the
checkout, whose code writes jobs in every state, with its own classes, into SQLite and into PostgreSQL. A line of
`schemaN.*.jsonl` is what that code then says about a job.
Everything is below `/frozen`, and the host is called `frozen`.
"""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LEASE_S = 60.0


class Writer:
    """Writes jobs with the code that is imported."""

    def __init__(self, url: str) -> None:
        from reshard_jobs.database import Database
        from reshard_jobs.queue.states import EventLog
        from reshard_jobs.queue.idempotency import IdempotencyKeys
        from reshard_jobs.queue.leases import Leases
        from reshard_jobs.queue.store import JobStore

        self.database = Database(url, host="frozen")
        self.store, self.log = JobStore(self.database), EventLog(self.database)
        self.leases: Any = Leases(self.database, lease_s=LEASE_S)
        self.keys = IdempotencyKeys(self.database)

    def create(self, case: str, **more: Any) -> str:
        from reshard.models.jobs import ConvertRequest
        from reshard.options import SourceSpec
        from reshard.choices import TargetFormat

        request = ConvertRequest(
            source=SourceSpec(url="/frozen/source"), target=f"/frozen/{case}", to=TargetFormat.UNIVERSAL
        )
        return self.store.create(request, labels={"case": case, "team": "x"}, **more).id

    def claimed(self, case: str, *, plan: bool = True, **more: Any) -> Any:
        claim = self.leases.claim(self.create(case, **more), worker="old-worker")
        assert claim is not None
        if plan:
            assert self.leases.record_plan(claim, f"plan-of-{case}")
        return claim

    def at(self, case: str, *phases: str, **more: Any) -> Any:
        from reshard.models.jobs import Progress

        claim = self.claimed(case, **more)
        for done, phase in enumerate(phases, start=1):
            progress = Progress(phase=phase, bytes_done=done, bytes_total=100, takes_workers=phase == "running")
            self.leases.heartbeat(claim, progress)
        return claim

    def write(self) -> None:
        from reshard.errors import SourceError, StorageError
        from reshard.models.jobs import ConvertResult
        from reshard.choices import JobKind, TargetFormat

        passing = StorageError("storage.unavailable", "the store did not answer", fix="look at the store")
        wrong = SourceError("checkpoint.incomplete", "rank 1 is missing", fix="copy it again")
        result = ConvertResult(
            target="/frozen/succeeded", to=TargetFormat.UNIVERSAL, files=(), read_bytes=1, write_bytes=2,
            seconds={}, plan_digest="d",
        )  # fmt: skip
        self.create("queued")
        hold: Any = self.keys.begin("a-key", "f" * 64)
        self.create("with-a-key", hold=hold)
        self.keys.begin("a-held-key", "e" * 64)
        assert self.leases.release(self.at("released", "running"))
        assert self.leases.retry(self.at("to-be-tried-again", "running"), passing, delay_s=0.01)
        self.claimed("planning", plan=False)
        self.at("running", "running")
        self.at("verifying", "running", "verifying")
        assert self.leases.succeed(self.at("succeeded", "running", "verifying"), result, plan_digest="d")
        for case in ("failed", "failed-and-unwanted"):
            assert self.leases.fail(self.at(case, "running"), wrong)
        assert self.leases.fail(self.claimed("failed-at-once", plan=False), wrong)
        assert self.leases.retry(self.at("exhausted", "running", max_attempts=1), passing, delay_s=0)
        self.store.cancel(self.create("cancelled-before"))
        claim = self.at("cancelled", "running")
        self.store.cancel(claim.job_id)
        assert self.leases.cancelled(claim)
        self.store.cancel(self.at("cancelling", "running").job_id)
        plan = self.store.get(self.create("a-plan")).request
        self.store.create(plan, kind=JobKind.PLAN, labels={"case": "planned"})
        self.write_helpers()
        self.write_nodes(passing)

    def write_helpers(self) -> None:
        from reshard.models.jobs import WorkShare
        from reshard_jobs.queue.helpers import Helpers

        helpers = Helpers(self.database, lease_s=LEASE_S, max_workers=4)
        self.at("shared", "running", priority=5, max_workers=3)
        left, _present = helpers.join_next(worker="helper-1"), helpers.join_next(worker="helper-2")
        assert left is not None
        assert left.job_id == self.store.list().jobs[0].id
        helpers.leave(left, WorkShare(runs=2, units=5, write_bytes=99))

    def write_nodes(self, problem: Any) -> None:
        from reshard_jobs.queue.nodes import Nodes

        nodes = Nodes(self.database, lease_s=LEASE_S)
        for name in ("old-worker", "another-worker"):
            nodes.seen(name)
        assert self.leases.hand_over(self.at("refused", "running"), problem)
        nodes.good("another-worker")
        claim = self.at("retried", "running")
        assert self.leases.fail(claim, problem)
        self.store.retry(claim.job_id)

    def told(self) -> list[dict[str, Any]]:
        """Each job as this code shows it, with its events."""
        found: list[dict[str, Any]] = []
        for job in reversed(self.store.list(page_size=200).jobs):
            facts = self.store.get(job.id).model_dump(mode="json", exclude={"links"}, exclude_none=True)
            facts["request"] = {name: facts["request"][name] for name in ("source", "target", "to")}
            events = [
                event.model_dump(mode="json", exclude={"job_id"}, exclude_none=True)
                for event in self.log.after(job.id, 0).events
            ]
            found.append({"job": facts, "events": events})
        return found


def dumped_sqlite(path: Path) -> str:
    connection = sqlite3.connect(path)
    try:
        return "\n".join(connection.iterdump()) + "\n"
    finally:
        connection.close()


def dumped_postgres(url: str) -> str:
    import pgserver

    binary = Path(pgserver.__file__).parent / "pginstall" / "bin" / "pg_dump"
    command = [str(binary), "--inserts", "--no-owner", "--no-privileges", "--no-comments", url]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # psql's own commands, and settings of newer servers.
    lines = [line for line in text.splitlines() if not re.match(r"\\|--|SET transaction_timeout|$", line)]
    return "\n".join(lines) + "\n"


def make(scratch: Path, server: Any) -> None:
    """Write the files of the newest revision."""
    from reshard_jobs.database import HEAD

    name = f"schema{int(HEAD)}"
    uri = server.get_uri()
    import psycopg

    with psycopg.connect(uri, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    postgres_url = uri.replace("/postgres?", f"/{name}?")
    sqlite = scratch / f"{name}.db"
    for url in (postgres_url, f"sqlite:///{sqlite}"):
        told = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "--write", url],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        kind = url.partition(":")[0]
        text = dumped_sqlite(sqlite) if kind == "sqlite" else dumped_postgres(url)
        (HERE / f"{name}.{kind}.sql").write_text(text)
        (HERE / f"{name}.{kind}.jsonl").write_text("".join(f"{json.dumps(job)}\n" for job in json.loads(told)))


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--write"]:
        writer = Writer(arguments[1])
        writer.write()
        json.dump(writer.told(), sys.stdout)
        return
    import pgserver

    with tempfile.TemporaryDirectory(prefix="rs") as scratch:
        server = pgserver.get_server(Path(scratch) / "pg", cleanup_mode="stop")
        try:
            make(Path(scratch), server)
        finally:
            server.cleanup()


if __name__ == "__main__":
    main(sys.argv[1:])
