"""`reshard gc`: removes what ended jobs left beside their targets, and records that are old enough."""

from __future__ import annotations

import json
import logging
import sys

from reshard.errors import ExitCode, ReshardError, counted
from reshard_jobs.database import Database
from reshard_jobs.discards import Discards
from reshard_jobs.reaper import Reaper
from reshard_jobs.retention import Retention
from reshard_worker.child import Runners
from reshard_worker.discarding import EndedDiscards
from reshard_worker.settings import WorkerSettings


def gc(*, now: bool = False, dry_run: bool = False, as_json: bool = False) -> None:
    """Make every discard that is due, and forget old jobs.

    Args:
        now: True to make discards that are not due yet, too.
        dry_run: True to list the jobs only.
        as_json: True for one JSON object.

    Raises:
        ReshardError: A setting is wrong, or the job database does not answer.
        SystemExit: Files of a job could not be removed.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    settings = WorkerSettings.from_env()
    jobs = settings.jobs
    database = Database(jobs.database_url)
    runners = Runners(settings.runner_command, warm=settings.warm_engine)
    discards = Discards(database, lease_s=jobs.lease_s)
    try:
        if dry_run:
            _report(dict.fromkeys(discards.pending(due=not now)), 0, done="would be", as_json=as_json)
            return
        if now:
            discards.bring_forward()
        reaper = Reaper(database, lease_s=jobs.lease_s, retention=Retention.of(jobs))
        found: dict[str, ReshardError | None] = {}
        ended = EndedDiscards(discards, settings, runners)
        while (outcome := ended.run_next()) is not None:
            found[outcome[0]] = outcome[1]
        forgotten = 0
        while count := reaper.sweep().forgotten:
            forgotten += count
        _report(found, forgotten, done="are", as_json=as_json)
    finally:
        runners.close()
        database.close()
    if any(found.values()):
        raise SystemExit(int(ExitCode.FAILED))


def _report(jobs: dict[str, ReshardError | None], forgotten: int, *, done: str, as_json: bool) -> None:
    if as_json:
        listed = [{"id": job_id, "problem": e.to_problem() if e else None} for job_id, e in jobs.items()]
        sys.stdout.write(json.dumps({"schema_version": 1, "jobs": listed, "forgotten": forgotten}) + "\n")
        return
    for job_id, problem in jobs.items():
        sys.stdout.write(
            f"{job_id}: " + (f"its files stay: {problem}" if problem else f"its files {done} removed") + "\n"
        )
    sys.stdout.write(
        f"{counted(len(jobs), 'job')} had files to remove, {counted(forgotten, 'old job')} {done} forgotten\n"
    )
