"""Removes what jobs left beside their targets: after a discard, and for `reshard gc`."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable

from sqlalchemy.exc import DBAPIError

from reshard.errors import ExitCode, JobError, ReshardError, counted, from_problem
from reshard_jobs.database import Database
from reshard_jobs.logs import log_as
from reshard_jobs.queue.discards import DiscardClaim, Discards
from reshard_jobs.queue.reaper import Reaper, Retention
from reshard_worker.alive import JOB
from reshard_worker.child import Runners
from reshard_worker.protocol import Command, Failure, Result
from reshard_worker.settings import WorkerSettings, engine_command

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_IDLE_S = 3_600.0
"""Seconds after its last write for which a conversion of another program counts as running."""


def run_discard(
    command: Command, runners: Runners, *, limit_s: float, held: Callable[[], bool]
) -> tuple[bool, ReshardError | None]:
    """Run the engine of a discard; returns whether the claim is still held, and the problem, if there was one."""
    deadline = time.monotonic() + limit_s
    try:
        with runners.run(command) as child:
            while not child.ended and time.monotonic() < deadline:
                message = child.next_message(_TICK_S)
                if isinstance(message, Result):
                    return True, None
                if isinstance(message, Failure):
                    return True, from_problem(message.problem.model_dump())
                if not held():
                    return False, None
    except JobError as error:
        # No engine was started.
        return True, error
    return True, JobError(
        "job.lost", "the clean-up of the job did not end", fix="on a host that can write there: reshard clean DST"
    )


class EndedDiscards:
    """Removes what ended jobs left, one job at a time.

    Args:
        discards: The discards of the job database.
        settings: The worker's settings.
        runners: The engine processes.
    """

    def __init__(self, discards: Discards, settings: WorkerSettings, runners: Runners) -> None:
        self._discards = discards
        self._settings = settings
        self._runners = runners

    def run_next(self) -> tuple[str, ReshardError | None] | None:
        """Discard the files of one job; returns its id and the problem, if there was one. None if none is due."""
        claim = self._discards.claim_next()
        if claim is None:
            return None
        with log_as(job=claim.job_id, attempt=claim.attempt, tenant=claim.tenant):
            try:
                problem = self._run(claim)
            except (SystemExit, KeyboardInterrupt):
                self._discards.give_back(claim)
                raise
            if problem is None:
                logger.info("job %s: nothing of it is left beside its target", claim.job_id)
            else:
                logger.warning("job %s: its files could not be removed, and stay for now: %s", claim.job_id, problem)
        return claim.job_id, problem

    def _run(self, claim: DiscardClaim) -> ReshardError | None:
        try:
            command = engine_command(
                "discard",
                claim.request,
                self._settings,
                limits=claim.limits,
                plans=claim.plans,
                idle_s=0.0 if claim.asked else min(_IDLE_S, self._settings.jobs.keep_failed_s),
                keep_unfinished=claim.succeeded,
            )
        except ReshardError as error:
            self._discards.failed(claim)
            return error
        lease = _Lease(self._discards, claim, self._settings.jobs.heartbeat_s)
        held, problem = run_discard(command, self._runners, limit_s=self._settings.discard_limit_s, held=lease.is_held)
        if held and problem is None:
            self._discards.done(claim)
        elif held:
            self._discards.failed(claim)
        return problem


class _Lease:
    def __init__(self, discards: Discards, claim: DiscardClaim, heartbeat_s: float) -> None:
        self._discards = discards
        self._claim = claim
        self._heartbeat_s = heartbeat_s
        self._beat_at = self._asked_at = time.monotonic()

    def is_held(self) -> bool:
        """True if the claim holds. It is renewed when that is due."""
        JOB.give()
        now = time.monotonic()
        if now - self._asked_at < self._heartbeat_s:
            return True
        self._asked_at = now
        try:
            held = self._discards.heartbeat(self._claim)
        except DBAPIError as error:
            logger.warning("job %s: the database does not answer: %s", self._claim.job_id, error)
            return now - self._beat_at < self._discards.lease_s
        self._beat_at = now
        return held


# `reshard gc`: removes what ended jobs left beside their targets, and records that are old enough.


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
