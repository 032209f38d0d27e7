"""Claims and runs jobs. Both drivers, the embedded executor and Celery, use it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from enum import StrEnum

from sqlalchemy.exc import DBAPIError

from reshard.choices import JobKind
from reshard.errors import JobError, RequestError, ReshardError, SourceError, from_problem
from reshard.models.jobs import ConvertResult, Progress, WorkShare
from reshard_jobs.database import Database, is_away
from reshard_jobs.logs import log_as
from reshard_jobs.queue.discards import Discards
from reshard_jobs.queue.helpers import HelperClaim, Helpers
from reshard_jobs.queue.leases import JobClaim, Leases, LeaseStatus
from reshard_jobs.queue.nodes import Nodes
from reshard_jobs.statistics import ATTEMPTS, READ_BYTES, STORE_ERRORS, WRITE_BYTES, Totals
from reshard_jobs.tracing import current, start_tracing
from reshard_worker.alive import JOB
from reshard_worker.child import RunnerProcess, Runners, attempt_span, help_span, of_result, of_share
from reshard_worker.discarding import EndedDiscards, run_discard
from reshard_worker.host_faults import HOST, HostWatch, may_be_the_hosts, speaks_for_the_host
from reshard_worker.protocol import Command, CommitRequest, Failure, Message, PlanRequest, ProgressMessage, Result
from reshard_worker.settings import WorkerSettings, engine_command

# Keeps a claim alive: sends heartbeats, polls the cancel flag, and detects a lost lease.

logger = logging.getLogger(__name__)

_PAUSE_S = 0.5
"""Seconds between two tries while the database does not answer."""


class LeaseHeartbeat:
    """Keeps one claim alive.

    If the database does not answer, the claim counts as held until its lease must have expired by this process's own
    clock. That is a duration; clocks of two machines are never compared. From then on the claim is in doubt: nothing
    may be done in its name, until the database answers (`regain`).
    """

    def __init__(self, leases: Leases, claim: JobClaim, settings: WorkerSettings) -> None:
        self._leases = leases
        self._claim = claim
        self._settings = settings
        self._pulse = LeaseStatus(held=True, cancel_requested=False)
        self._beat_at = self._peek_at = self._progress_at = time.monotonic()
        self._phase = ""
        self._unsent: Progress | None = None
        self._in_doubt = False

    @property
    def pulse(self) -> LeaseStatus:
        """The last known state of the claim."""
        return self._pulse

    @property
    def in_doubt(self) -> bool:
        """True if the lease has expired by this process's clock, and the database has not said who owns the job."""
        return self._in_doubt

    def note(self, progress: Progress) -> None:
        """Keep progress for the next heartbeat."""
        self._unsent = progress

    def tick(self) -> LeaseStatus:
        """Do the work that is due: record progress, renew the lease, read the cancel flag."""
        JOB.give()
        now = time.monotonic()
        if self._unsent is not None:
            entering = self._unsent.phase != self._phase
            if entering or now - self._progress_at >= self._settings.progress_s:
                return self.beat()
        if now - self._beat_at >= self._settings.jobs.heartbeat_s:
            return self.beat()
        if now - self._peek_at >= self._settings.cancel_poll_s:
            self._peek_at = now
            return self._ask(lambda: self._leases.peek(self._claim), now)
        return self._pulse

    def beat(self) -> LeaseStatus:
        """Renew the lease now, and record progress that was not recorded yet."""
        JOB.give()
        now = time.monotonic()
        progress = self._unsent
        pulse = self._ask(lambda: self._leases.heartbeat(self._claim, progress), now, renews=True)
        if progress is not None and self._beat_at == now:
            self._unsent, self._phase, self._progress_at = None, progress.phase, now
        return pulse

    def regain(self) -> LeaseStatus:
        """Wait until the database answers, and renew the lease if the job still belongs to this claim."""
        while self.beat().held is False and self._in_doubt:
            time.sleep(_PAUSE_S)
        return self._pulse

    def persist(self, write: Callable[[], bool], *, waits: bool = True) -> bool:
        """Make a fenced write. Repeat it while the database is away: its answer then says if the lease was lost.

        Args:
            write: The write; False if the lease was lost.
            waits: False to give up when the lease must have expired.
        """
        while True:
            JOB.give()
            try:
                return write()
            except DBAPIError as error:
                expired = time.monotonic() - self._beat_at > self._leases.lease_s
                if expired and not (waits and is_away(error)):
                    logger.warning("job %s: its end could not be recorded: %s", self._claim.job_id, error)
                    return False
                time.sleep(_PAUSE_S)

    def _ask(self, question: Callable[[], LeaseStatus], now: float, *, renews: bool = False) -> LeaseStatus:
        try:
            self._pulse = question()
        except DBAPIError as error:
            logger.warning("job %s: the database does not answer: %s", self._claim.job_id, error)
            if now - self._beat_at > self._leases.lease_s:
                self._pulse = LeaseStatus(held=False, cancel_requested=False)
                self._in_doubt = is_away(error)
        else:
            self._in_doubt = False
            if renews:
                # Take the time before the call: the database counts the lease from a later moment.
                self._beat_at = now
        return self._pulse


# The numbers that a worker adds to the job database for metrics: ends of attempts, errors of stores, bytes, memory.


class Tally:
    """The numbers of one worker. Nothing here can fail a job: numbers that cannot be written are lost.

    Args:
        database: The job database.
        nodes: The workers of the job database.
        worker: The name of this worker.
    """

    def __init__(self, database: Database, nodes: Nodes, worker: str) -> None:
        self._totals = Totals(database)
        self._nodes = nodes
        self._worker = worker
        self._store_errors: dict[str, int] = {}

    def problem(self, problem: ReshardError | None) -> None:
        """Take note of the error with which an engine ended."""
        if problem is not None and problem.code.startswith("storage."):
            self._store_errors[problem.code] = self._store_errors.get(problem.code, 0) + 1

    def ended(self, how: str, tenant: str = "", converted: ConvertResult | None = None) -> None:
        """Add an attempt that ended, and the errors that were noted since the last one."""
        counts = {(ATTEMPTS, how): 1} if how else {}
        counts |= {(STORE_ERRORS, code): count for code, count in self._store_errors.items()}
        if converted is not None:
            counts |= {(READ_BYTES, tenant): converted.read_bytes, (WRITE_BYTES, tenant): converted.write_bytes}
        self._store_errors = {}
        if counts:
            self._totals.add(counts)

    def engine(self, peak_bytes: int) -> None:
        """Record the most memory that the last engine took."""
        if not peak_bytes:
            return
        try:
            self._nodes.engine_ended(self._worker, peak_bytes)
        except DBAPIError as error:
            logger.warning("the memory of the engine could not be recorded: %s", error)


# Runs an engine that helps a job of another worker, until no work is left, or another job waits for a worker.

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


# Claims jobs, and runs each in an engine process.

_PASSING = frozenset({"storage.unavailable", "job.lost"})
"""Errors after which the same job may succeed. The next attempt keeps the work that this one finished."""
_MAX_RETRY_DELAY_S = 300.0
"""The longest pause between two attempts. The pause doubles with each attempt that failed by itself."""


class Outcome(StrEnum):
    """The outcomes of a claim."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    RETRIED = "retried"
    CANCELLED = "cancelled"
    FENCED = "fenced"
    """The lease was lost: nothing was recorded, and another worker owns the job."""
    HELPED = "helped"
    """The job belongs to another worker."""
    HANDED_OVER = "handed over"
    """The failure may be the fault of this worker's host: another worker tries the job."""
    DISCARDED = "discarded"
    """Files of a job that had ended were removed, or are tried again later."""


class Supervisor:
    """Claims jobs and runs each in one subprocess.

    Args:
        leases: Claims of the job database.
        settings: The worker's settings.
        name: The name of this worker in job records.
        on_claim: Called when other workers may find work: after a claim, and when a job begins to take helpers.
        helpers: Helpers of the job database; None if this worker works alone: it never helps, and gets no help.
        runners: The engine processes; by default a new one for each job.
        discards: Discards of the job database; None if this worker makes none.
        host: The watch over this worker's host; None for a worker that others do not know of.
        tally: What adds to the totals for metrics; None for a worker that counts nothing.
    """

    def __init__(  # noqa: PLR0913 - each collaborator beside the first three may be left out
        self,
        leases: Leases,
        settings: WorkerSettings,
        *,
        name: str,
        on_claim: Callable[[], object] | None = None,
        runners: Runners | None = None,
        helpers: Helpers | None = None,
        discards: Discards | None = None,
        host: HostWatch | None = None,
        tally: Tally | None = None,
    ) -> None:
        self._leases = leases
        self._helpers = helpers
        self._settings = settings
        self._name = name
        self._on_claim = on_claim
        self._runners = runners or Runners(settings.runner_command)
        self._host = host
        self._tally = tally
        self._ended = None
        if discards is not None:
            self._ended = EndedDiscards(discards, settings, self._runners)
        self._discarded = False
        start_tracing("reshard-worker")

    def run_next(self) -> Outcome | None:
        """Claim the next job and run it to its end, or help a running one; None if there is nothing to do.

        Files of ended jobs are removed first, because they may be what fills a store; but a job comes between two.
        """
        if self._host is not None and self._host.in_quarantine:
            return Outcome.DISCARDED if self._host.found_full and self._discard_next() else None
        if not self._discarded and self._discard_next():
            return Outcome.DISCARDED
        self._discarded = False
        claim = self._leases.claim_next(worker=self._name)
        if claim is not None:
            with (
                attempt_span(claim, self._name) as span,
                log_as(job=claim.job_id, attempt=claim.attempt, tenant=claim.tenant, **span.log_fields),
            ):
                return self._see_through(claim)
        if self._discard_next():
            return Outcome.DISCARDED
        place = self._helpers.join_next(worker=self._name) if self._helpers is not None else None
        if place is None:
            return None
        with (
            help_span(place, self._name) as span,
            log_as(job=place.job_id, attempt=place.attempt, tenant=place.tenant, **span.log_fields),
        ):
            return self._help(place)

    def work_waits(self) -> bool:
        """True if this worker would get a job if it asked now."""
        if self._host is not None and self._host.in_quarantine:
            return False
        return self._leases.work_waits(worker=self._name)

    def _discard_next(self) -> bool:
        found = None if self._ended is None else self._ended.run_next()
        if found is None:
            return False
        self._discarded = True
        job_id, problem = found
        self._count("", problem=problem)
        if problem is not None and self._host is not None and may_be_the_hosts(problem):
            self._host.refused(job_id, problem, record=True)
        return True

    def _help(self, claim: HelperClaim) -> Outcome:
        assert self._helpers is not None
        logger.info("job %s: this worker helps", claim.job_id)
        if self._on_claim is not None:
            self._on_claim()
        problem = HelperRun(self._leases, self._helpers, claim, self._settings, self._runners).run()
        self._count("", problem=problem)
        if problem is not None:
            current().fail(problem.code)
        if problem is not None and self._host is not None and may_be_the_hosts(problem):
            self._host.refused(claim.job_id, problem, record=True)
        logger.info("job %s: this worker has helped", claim.job_id)
        return Outcome.HELPED

    def _see_through(self, claim: JobClaim) -> Outcome:
        known_as = f" of {claim.given_id}" if claim.given_id else ""
        logger.info("job %s: attempt %d%s begins", claim.job_id, claim.attempt, known_as)
        watch = LeaseHeartbeat(self._leases, claim, self._settings)
        try:
            if self._on_claim is not None:
                self._on_claim()
            outcome = self._clean_up(claim, watch) if claim.cleanup else self._work(claim, watch)
        except (SystemExit, KeyboardInterrupt):
            # The runner has been killed by its `with` block. The journal keeps the work that it finished.
            watch.persist(lambda: self._leases.release(claim), waits=False)
            logger.info("job %s: given back, this worker stops", claim.job_id)
            self._count("given back")
            current().set({"reshard.outcome": "given back"})
            raise
        if outcome is not Outcome.SUCCEEDED:
            self._count(outcome)
        if outcome is Outcome.FENCED:
            current().fail("job.lost")
        current().set({"reshard.outcome": str(outcome)})
        logger.info("job %s: attempt %d %s", claim.job_id, claim.attempt, outcome)
        return outcome

    def _work(self, claim: JobClaim, watch: LeaseHeartbeat) -> Outcome:
        try:
            op = "plan" if claim.kind is JobKind.PLAN else "convert"
            workers = claim.max_workers or self._settings.max_workers if self._helpers is not None else 1
            abandoned = claim.abandoned
            command = engine_command(
                op, claim.request, self._settings, limits=claim.limits, workers=workers, abandoned=abandoned
            )
        except ReshardError as error:
            return self._failed(claim, watch, error)
        while True:
            try:
                end = self._run(command, claim, watch)
            except JobError as error:
                # No engine was started.
                return self._failed(claim, watch, error)
            if end is None and watch.in_doubt and watch.regain().held and not watch.pulse.cancel_requested:
                # Nobody else owned the job meanwhile. The journal keeps the work that the stopped engine finished.
                logger.info("job %s: attempt %d goes on, the database is back", claim.job_id, claim.attempt)
                continue
            if not watch.pulse.held and not watch.in_doubt:
                return Outcome.FENCED
            if isinstance(end, Result):
                return self._succeeded(claim, watch, end)
            if end is None or watch.beat().cancel_requested:
                return self._clean_up(claim, watch)
            return self._failed(claim, watch, end)

    def _run(self, command: Command, claim: JobClaim, watch: LeaseHeartbeat) -> Result | ReshardError | None:
        """Run an engine; None if it was stopped: the lease is lost or in doubt, or the job is to be cancelled."""
        with self._runners.run(command) as child:
            try:
                end = self._follow(child, claim, watch)
            except (SystemExit, KeyboardInterrupt):
                child.terminate()
                child.wait(self._settings.term_grace_s)
                raise
            except RequestError as error:
                # The plan was refused. The engine waits for the answer, and has written nothing.
                end = error
            stopped = not watch.pulse.held or watch.pulse.cancel_requested
            if end is None and watch.pulse.held and watch.pulse.cancel_requested:
                end = self._stop(child, watch)
            elif end is None and not watch.pulse.held and not child.ended:
                # An engine that learns that another one owns its conversion removes what it wrote too late.
                child.terminate()
                child.wait_for_end(self._settings.term_grace_s)
            # A runner that closed its output ends by itself. Killing it at once would lose its exit status.
            status = child.wait(self._settings.term_grace_s) if child.ended else None
            status = child.kill() if status is None and not child.answered else status
        if self._tally is not None:
            self._tally.engine(child.peak_memory_bytes)
        return end if end is not None or stopped else _died(status or 0, silent=not child.spoke)

    def _follow(self, child: RunnerProcess, claim: JobClaim, watch: LeaseHeartbeat) -> Result | ReshardError | None:
        """Follow a runner and return its outcome; None if it died, the lease is lost, or the job is to be cancelled."""
        planned_by = time.monotonic() + self._settings.planning_limit_s
        called = False
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
                if message.progress.takes_workers and not called and self._on_claim is not None:
                    called = True
                    watch.beat()
                    self._on_claim()
            if time.monotonic() > planned_by:
                return self._too_slow()
            if not self._may_go_on(message, claim, watch):
                return None
            if isinstance(message, PlanRequest | CommitRequest):
                # The fence was checked a moment ago: a worker that lost its lease stops before it writes or publishes.
                child.allow()
        return None

    def _may_go_on(self, message: Message | None, claim: JobClaim, watch: LeaseHeartbeat) -> bool:
        """True if the job is still this worker's and not to be cancelled; the lease is renewed for a request.

        A plan is recorded before its first byte is written: by its digest, others remove what this attempt leaves.

        Raises:
            RequestError: `request.quota_bytes`.
        """
        if isinstance(message, PlanRequest) and not watch.persist(
            lambda: self._leases.record_plan(claim, message.digest, message.write_bytes)
        ):
            watch.beat()
            return False
        pulse = watch.beat() if isinstance(message, PlanRequest | CommitRequest) else watch.tick()
        return pulse.held and not pulse.cancel_requested

    def _too_slow(self) -> SourceError:
        return SourceError(
            "source.too_slow",
            f"planning took longer than {self._settings.planning_limit_s:g} s",
            fix="run `reshard plan` on a machine near the checkpoint; "
            "the worker's operator sets RESHARD_PLANNING_LIMIT_S",
        )

    def _stop(self, child: RunnerProcess, watch: LeaseHeartbeat) -> Result | None:
        """Stop a runner. A result that arrives in the meantime is kept, because its output is complete."""
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

    def _clean_up(self, claim: JobClaim, watch: LeaseHeartbeat) -> Outcome:
        """Remove the files that a cancelled job left, then record its end."""
        problem: ReshardError | None = None
        if claim.kind is JobKind.CONVERT:
            self._await_helpers(claim, watch)
            problem = self._discard(claim, watch)
        if not watch.pulse.held or not watch.persist(lambda: self._leases.cancelled(claim, problem)):
            return Outcome.FENCED
        return Outcome.CANCELLED

    def _await_helpers(self, claim: JobClaim, watch: LeaseHeartbeat) -> None:
        """Wait until no helper writes any more. Each looks for a cancel, and its place ends with its lease."""
        deadline = time.monotonic() + self._leases.lease_s
        while self._helpers is not None and time.monotonic() < deadline and watch.tick().held:
            try:
                if not self._helpers.present(claim.job_id):
                    return
            except DBAPIError as error:
                logger.warning("job %s: the database does not answer: %s", claim.job_id, error)
            time.sleep(_TICK_S)

    def _discard(self, claim: JobClaim, watch: LeaseHeartbeat) -> ReshardError | None:
        """Remove what conversions of the job's recorded plans left; returns the problem, if there is one."""
        try:
            plans = self._leases.plans_of(claim.job_id)
            command = engine_command("discard", claim.request, self._settings, limits=claim.limits, plans=plans)
        except ReshardError as error:
            return error
        limit_s = self._settings.discard_limit_s
        return run_discard(command, self._runners, limit_s=limit_s, held=lambda: watch.tick().held)[1]

    def _succeeded(self, claim: JobClaim, watch: LeaseHeartbeat, end: Result) -> Outcome:
        watch.beat()
        outcome = end.planned if claim.kind is JobKind.PLAN else end.converted
        if outcome is None:
            return self._failed(claim, watch, JobError("internal.error", "the engine sent another job's outcome"))
        digest = end.planned.digest if end.planned else end.converted.plan_digest if end.converted else None
        if end.converted is not None:
            current().set(of_result(end.converted))
        share = end.converted.share if end.converted is not None else None
        done = watch.persist(lambda: self._leases.succeed(claim, outcome, plan_digest=digest, share=share))
        if self._host is not None:
            self._host.good()
        if done:
            self._count(Outcome.SUCCEEDED, claim.tenant, converted=end.converted)
        return Outcome.SUCCEEDED if done else Outcome.FENCED

    def _count(
        self,
        how: str,
        tenant: str = "",
        *,
        converted: ConvertResult | None = None,
        problem: ReshardError | None = None,
    ) -> None:
        if self._tally is not None:
            self._tally.problem(problem)
            self._tally.ended(how, tenant, converted)

    def _failed(self, claim: JobClaim, watch: LeaseHeartbeat, problem: ReshardError) -> Outcome:
        if self._tally is not None:
            self._tally.problem(problem)
        if problem.code == "job.cancelled":
            # The job was not cancelled: another process stopped the runner.
            problem = JobError("job.lost", "the engine process was stopped from outside")
        current().fail(problem.code)
        if problem.code in _PASSING:
            delay_s = min(self._settings.retry_delay_s * 2 ** (claim.own_attempts - 1), _MAX_RETRY_DELAY_S)
            done = watch.persist(lambda: self._leases.retry(claim, problem, delay_s=delay_s))
            return Outcome.RETRIED if done else Outcome.FENCED
        if may_be_the_hosts(problem):
            passed_on = watch.persist(lambda: self._leases.hand_over(claim, problem))
            if self._host is not None:
                self._host.refused(claim.job_id, problem)
            if passed_on:
                return Outcome.HANDED_OVER
        elif speaks_for_the_host(problem) and self._host is not None:
            self._host.good()
        if watch.persist(lambda: self._leases.fail(claim, problem)):
            return Outcome.FAILED
        # The lease was lost, or a cancel arrived after the last check.
        return self._clean_up(claim, watch) if watch.beat().cancel_requested else Outcome.FENCED


def _died(status: int, *, silent: bool) -> JobError:
    """The error for an engine process without a result. One that never said anything may be the host's fault."""
    if status < 0:
        return JobError("job.lost", f"the engine process was killed by signal {-status}", details={"signal": -status})
    text = f"the engine process ended with status {status} and no result"
    return JobError("internal.error", text, fix=_BUG, details={HOST: True} if silent else {})


_BUG = "look for a traceback in the worker's log and report it"
