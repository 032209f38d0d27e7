"""Runs an engine that helps a job of another worker, until no work is left, or another job waits for a worker."""

from __future__ import annotations

import logging
import time

from sqlalchemy.exc import DBAPIError

from reshard.errors import ReshardError, from_problem
from reshard.models import WorkShare
from reshard_jobs.helpers import HelperClaim, Helpers
from reshard_jobs.leases import Leases
from reshard_jobs.tracing import current
from reshard_worker.alive import JOB
from reshard_worker.child import RunnerProcess, Runners
from reshard_worker.commands import engine_command
from reshard_worker.job_spans import of_share
from reshard_worker.protocol import Failure, Result
from reshard_worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_WAITING_S = 1.0
"""A helper leaves when a job waits for longer than this: an idle worker claims it sooner."""


class HelperRun:
    """One worker's help for one job."""

    def __init__(
        self, leases: Leases, helpers: Helpers, claim: HelperClaim, settings: WorkerSettings, runners: Runners
    ) -> None:
        self._leases = leases
        self._helpers = helpers
        self._claim = claim
        self._settings = settings
        self._runners = runners
        self._beat_at = self._peek_at = time.monotonic()
        self._waits_since: float | None = None
        self._may_go_on = True
        self._problem: ReshardError | None = None

    def run(self) -> ReshardError | None:
        """Help, then give up the place among the job's workers; returns the error with which the engine failed."""
        share: WorkShare | None = None
        failed = False
        try:
            share, failed = self._follow()
            if share is not None:
                current().set(of_share(share))
        except ReshardError as error:
            failed = True
            self._problem = error
            logger.warning("job %s: this worker cannot help: %s", self._claim.job_id, error)
        finally:
            try:
                self._helpers.leave(self._claim, share, failed=failed)
            except DBAPIError as error:
                logger.warning("job %s: the helper's end could not be recorded: %s", self._claim.job_id, error)
        return self._problem

    def _follow(self) -> tuple[WorkShare | None, bool]:
        """Follow the engine; returns its share, and if it failed.

        Raises:
            RequestError: A URL is outside this worker's own roots.
        """
        claim = self._claim
        command = engine_command("help", claim.request, self._settings, limits=claim.limits, workers=claim.max_workers)
        with self._runners.run(command) as child:
            try:
                while not child.ended and self._goes_on():
                    message = child.next_message(_TICK_S)
                    if isinstance(message, Result | Failure):
                        return self._outcome(message)
            except (SystemExit, KeyboardInterrupt):
                self._stop(child)
                raise
            if child.ended:
                logger.warning("job %s: the helping engine ended with no result", self._claim.job_id)
                return None, True
            return self._stop(child)

    def _stop(self, child: RunnerProcess) -> tuple[WorkShare | None, bool]:
        """Ask the engine to leave what it has finished to the other workers."""
        child.terminate()
        deadline = time.monotonic() + self._settings.term_grace_s
        while not child.ended and time.monotonic() < deadline:
            message = child.next_message(_TICK_S)
            if isinstance(message, Result | Failure):
                return self._outcome(message)
        return None, False

    def _outcome(self, message: Result | Failure) -> tuple[WorkShare | None, bool]:
        if isinstance(message, Result):
            return message.helped, False
        error = from_problem(message.problem.model_dump())
        if error.code == "job.cancelled":
            return None, False
        logger.warning("job %s: the helping engine failed: %s", self._claim.job_id, error)
        self._problem = error
        return None, True

    def _goes_on(self) -> bool:
        """True if the job still runs and no other job waits. If the database does not answer, the helper goes on."""
        JOB.give()
        now = time.monotonic()
        try:
            if now - self._beat_at >= self._settings.jobs.heartbeat_s:
                self._beat_at = now
                self._may_go_on = self._helpers.heartbeat(self._claim)
            elif now - self._peek_at >= self._settings.cancel_poll_s:
                self._peek_at = now
                self._may_go_on = self._helpers.peek(self._claim) and not self._other_job_waits(now)
        except DBAPIError as error:
            logger.warning("job %s: the database does not answer its helper: %s", self._claim.job_id, error)
        return self._may_go_on

    def _other_job_waits(self, now: float) -> bool:
        if not self._leases.work_waits():
            self._waits_since = None
            return False
        if self._waits_since is None:
            self._waits_since = now
        return now - self._waits_since >= _WAITING_S
