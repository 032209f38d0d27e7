"""The one claim-and-run path: both drivers, embedded and Celery, end up here."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Literal

from reshard.errors import JobError, ReshardError, SourceError, from_problem
from reshard.models import ConvertRequest, JobKind, VerifyLevel
from reshard_jobs.leases import Claim, Leases
from reshard_worker.child import RunnerProcess
from reshard_worker.protocol import Command, CommitRequest, Failure, ProgressMessage, Result
from reshard_worker.settings import WorkerSettings
from reshard_worker.walls import engine_memory_bytes
from reshard_worker.watch import LeaseWatch

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_PASSING = frozenset({"storage.unavailable", "job.lost"})
"""Failures after which the same job may succeed: the next attempt keeps what this one finished."""
_MAX_RETRY_DELAY_S = 300.0


class Outcome(StrEnum):
    """What became of a claim."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    RETRIED = "retried"
    CANCELLED = "cancelled"
    FENCED = "fenced"
    """The lease was lost: nothing was written, another worker owns the job."""


class Supervisor:
    """Claims jobs and runs each in one subprocess.

    Args:
        leases: Claims of the job database.
        settings: How to run.
        name: How this worker is shown.
        on_claim: Called when a job was claimed, before its work begins.
    """

    def __init__(
        self, leases: Leases, settings: WorkerSettings, *, name: str, on_claim: Callable[[], None] | None = None
    ) -> None:
        self._leases = leases
        self._settings = settings
        self._name = name
        self._on_claim = on_claim

    def run_next(self) -> Outcome | None:
        """Claim the oldest job and see it to its end; None if there is none."""
        claim = self._leases.claim_next(worker=self._name)
        return None if claim is None else self._see_through(claim)

    def _see_through(self, claim: Claim) -> Outcome:
        logger.info("job %s: attempt %d begins", claim.job_id, claim.attempt)
        watch = LeaseWatch(self._leases, claim, self._settings)
        try:
            if self._on_claim is not None:
                self._on_claim()
            outcome = self._clean_up(claim, watch) if claim.cleanup else self._work(claim, watch)
        except (SystemExit, KeyboardInterrupt):
            # The runner is gone by now (its `with` block); what it finished stays finished.
            watch.persist(lambda: self._leases.release(claim))
            logger.info("job %s: given back, this worker stops", claim.job_id)
            raise
        logger.info("job %s: attempt %d %s", claim.job_id, claim.attempt, outcome)
        return outcome

    def _work(self, claim: Claim, watch: LeaseWatch) -> Outcome:
        try:
            command = self._command("plan" if claim.kind is JobKind.PLAN else "convert", claim.request)
        except ReshardError as error:
            return self._failed(claim, watch, error)
        with RunnerProcess(self._settings.runner_command, command) as child:
            try:
                end = self._follow(child, watch)
            except (SystemExit, KeyboardInterrupt):
                child.terminate()
                child.wait(self._settings.term_grace_s)
                raise
            if end is None and watch.pulse.held and watch.pulse.cancel_requested:
                end = self._stop(child, watch)
            # A runner that closed its output ends by itself; killed at once, its own status would be lost.
            status = child.wait(self._settings.term_grace_s) if child.ended else None
            status = child.kill() if status is None else status
        if not watch.pulse.held:
            return Outcome.FENCED
        if isinstance(end, Result):
            return self._succeeded(claim, watch, end)
        if watch.beat().cancel_requested:
            return self._clean_up(claim, watch)
        return self._failed(claim, watch, end or _died(status))

    def _command(self, op: Literal["convert", "plan", "discard"], request: ConvertRequest) -> Command:
        """What the engine is to do, with the very places that were judged.

        Raises:
            RequestError: A worker obeys its own operator's roots, whatever the API said before.
        """
        judged = self._settings.jobs.roots.allowed_request(request)
        if self._settings.verify is VerifyLevel.FULL:
            judged = judged.model_copy(update={"verify": VerifyLevel.FULL})
        memory_bytes = engine_memory_bytes(judged, self._settings.engine_memory_bytes)
        return Command(op=op, request=judged, memory_bytes=memory_bytes)

    def _follow(self, child: RunnerProcess, watch: LeaseWatch) -> Result | ReshardError | None:
        """The runner's outcome; None if it died, the lease is lost, or the job is to be cancelled."""
        planned_by = time.monotonic() + self._settings.planning_limit_s
        while not child.ended:
            message = child.next_message(_TICK_S)
            if isinstance(message, Result):
                return message
            if isinstance(message, Failure):
                return from_problem(message.problem.model_dump())
            if isinstance(message, ProgressMessage):
                watch.note(message.progress)
                if message.progress.phase != "planning":
                    planned_by = math.inf
            if time.monotonic() > planned_by:
                return self._too_slow()
            pulse = watch.beat() if isinstance(message, CommitRequest) else watch.tick()
            if not pulse.held or pulse.cancel_requested:
                return None
            if isinstance(message, CommitRequest):
                # The fence was asked a moment ago: a zombie stops here, before anything is readable.
                child.allow_commit()
        return None

    def _too_slow(self) -> SourceError:
        return SourceError(
            "source.too_slow",
            f"the plan was not made within {self._settings.planning_limit_s:g} s",
            fix="look at the storage with `reshard plan` near the checkpoint; "
            "the worker's operator sets RESHARD_PLANNING_LIMIT_S",
        )

    def _stop(self, child: RunnerProcess, watch: LeaseWatch) -> Result | None:
        """Stop a runner. A result that crosses the request is kept: its output is whole and readable."""
        child.terminate()
        deadline = time.monotonic() + self._settings.term_grace_s
        while not child.ended and time.monotonic() < deadline:
            message = child.next_message(_TICK_S)
            watch.tick()
            if isinstance(message, Result):
                return message
            if isinstance(message, Failure):
                return None
        return None

    def _clean_up(self, claim: Claim, watch: LeaseWatch) -> Outcome:
        """Remove what a cancelled job left, then record its end."""
        problem: ReshardError | None = None
        if claim.kind is JobKind.CONVERT:
            problem = self._discard(claim, watch)
        if not watch.pulse.held or not watch.persist(lambda: self._leases.cancelled(claim, problem)):
            return Outcome.FENCED
        return Outcome.CANCELLED

    def _discard(self, claim: Claim, watch: LeaseWatch) -> ReshardError | None:
        try:
            command = self._command("discard", claim.request)
        except ReshardError as error:
            return error
        deadline = time.monotonic() + self._settings.discard_limit_s
        with RunnerProcess(self._settings.runner_command, command) as child:
            while not child.ended and time.monotonic() < deadline:
                message = child.next_message(_TICK_S)
                if isinstance(message, Result):
                    return None
                if isinstance(message, Failure):
                    return from_problem(message.problem.model_dump())
                if not watch.tick().held:
                    return None
        return JobError(
            "job.lost", "the clean-up of the cancelled job did not end", fix="reshard clean DST of that job"
        )

    def _succeeded(self, claim: Claim, watch: LeaseWatch, end: Result) -> Outcome:
        watch.beat()
        outcome = end.planned if claim.kind is JobKind.PLAN else end.converted
        if outcome is None:
            return self._failed(claim, watch, JobError("internal.error", "the engine sent another job's outcome"))
        digest = end.planned.digest if end.planned else end.converted.plan_digest if end.converted else None
        done = watch.persist(lambda: self._leases.succeed(claim, outcome, plan_digest=digest))
        return Outcome.SUCCEEDED if done else Outcome.FENCED

    def _failed(self, claim: Claim, watch: LeaseWatch, problem: ReshardError) -> Outcome:
        if problem.code == "job.cancelled":
            # Nobody cancelled: someone else stopped the runner.
            problem = JobError("job.lost", "the engine process was stopped from outside")
        if problem.code in _PASSING:
            delay_s = min(self._settings.retry_delay_s * 2 ** (claim.attempt - 1), _MAX_RETRY_DELAY_S)
            done = watch.persist(lambda: self._leases.retry(claim, problem, delay_s=delay_s))
            return Outcome.RETRIED if done else Outcome.FENCED
        if watch.persist(lambda: self._leases.fail(claim, problem)):
            return Outcome.FAILED
        # Not ours any more, or a cancel arrived between the last look and the write.
        return self._clean_up(claim, watch) if watch.beat().cancel_requested else Outcome.FENCED


def _died(status: int) -> JobError:
    if status < 0:
        return JobError("job.lost", f"the engine process was killed by signal {-status}", details={"signal": -status})
    return JobError("internal.error", f"the engine process ended with status {status} and no result", fix=_BUG)


_BUG = "look for a traceback in the worker's log and report it"
