"""Runner processes, as their supervisor sees them, and the spans of what they do for a job."""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context

from reshard.errors import JobError, exhaustion_of
from reshard.models.jobs import ConvertResult, WorkShare
from reshard_jobs.logs import log_context
from reshard_jobs.queue.helpers import HelperClaim
from reshard_jobs.queue.leases import JobClaim
from reshard_jobs.tracing import Span, Value, begin_span, current
from reshard_worker.protocol import (
    GO,
    STAYS_VARIABLE,
    Command,
    Failure,
    Idle,
    Message,
    Result,
    SpanBegan,
    SpanEnded,
    parse_message,
)

logger = logging.getLogger(__name__)

# Spans of what a worker does for a job, and those that its engine process tells of.


def attempt_span(claim: JobClaim, worker: str) -> Span:
    """Begin the span of an attempt, below the request that made the job, after that of its wait for this worker."""
    facts = _facts(claim, worker)
    name = "cleanup" if claim.cleanup else "attempt"
    now_ns = time.time_ns()
    if claim.traceparent is not None and claim.waited_s is not None:
        # The database's clock says how long, and this host's clock says until when: hosts' clocks differ.
        began_ns = now_ns - int(claim.waited_s * 1e9)
        begin_span("queue", facts, parent=claim.traceparent, begin_ns=began_ns).end(now_ns)
    return begin_span(name, facts, parent=claim.traceparent, kind="consumer", begin_ns=now_ns)


def help_span(place: HelperClaim, worker: str) -> Span:
    """Begin the span of the help for an attempt of another worker; it stands beside that attempt."""
    return begin_span("help", _facts(place, worker), parent=place.traceparent, kind="consumer")


def of_result(converted: ConvertResult) -> dict[str, Value]:
    """The facts of a conversion that has ended well."""
    return {"reshard.read_bytes": converted.read_bytes, "reshard.write_bytes": converted.write_bytes}


def of_share(share: WorkShare) -> dict[str, Value]:
    """The facts of a worker's part in a conversion."""
    return {"reshard.runs": share.runs, "reshard.units": share.units, "reshard.write_bytes": share.write_bytes}


def _facts(claim: JobClaim | HelperClaim, worker: str) -> dict[str, Value]:
    return {
        "reshard.job": claim.job_id,
        "reshard.attempt": claim.attempt,
        "reshard.tenant": claim.tenant,
        "reshard.target_format": str(claim.request.to),
        "reshard.worker": worker,
    }


# Spans that an engine process tells of, below the span of its attempt.


class EngineSpans:
    """The spans of one command.

    Args:
        parent: The span of the attempt, or of the help for one.
    """

    def __init__(self, parent: Span) -> None:
        self._parent = parent
        self._open: dict[int, Span] = {}

    def take(self, message: SpanBegan | SpanEnded) -> None:
        """Begin or end a span."""
        if isinstance(message, SpanBegan):
            parent = self._open.get(message.parent, self._parent)
            facts = {f"reshard.{name}": value for name, value in message.facts.items()}
            self._open[message.number] = parent.child(message.name, facts, begin_ns=message.at_ns)
            return
        span = self._open.pop(message.number, None)
        if span is None:
            return
        span.set({f"reshard.{name}": value for name, value in message.facts.items()})
        if message.code:
            span.fail(message.code)
        span.end(message.at_ns)

    def end(self) -> None:
        """End what an engine left open that was killed, or that died."""
        for number in sorted(self._open, reverse=True):
            span = self._open.pop(number)
            span.fail("job.lost")
            span.end()


# The processes.


_IDLE_S = 2.0
"""Seconds that the process of a command may take to end after its answer, before it is killed."""


class RunnerProcess:
    """One engine process in its own process group.

    Args:
        argv: The runner's command line.
        stays: True to ask the runner to wait for another command after each.
    """

    def __init__(self, argv: Sequence[str], *, stays: bool = False) -> None:
        environment = {name: value for name, value in os.environ.items() if name != STAYS_VARIABLE}
        environment = {**environment, STAYS_VARIABLE: "1"} if stays else environment
        self._process = _started(argv, environment)
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._ended = False
        self._context = copy_context()
        self._last: Message | None = Idle()
        self._spans: EngineSpans | None = None
        self.spoke = False
        """True if the runner has sent a message about its command."""
        self.peak_memory_bytes = 0
        """The most memory that the process of the last command took; 0 if it is not known."""
        try:
            threading.Thread(target=self._read, name="runner-messages", daemon=True).start()
        except RuntimeError as error:
            self.kill()
            raise _refused(error) from error

    def give(self, command: Command) -> None:
        """Let a new or idle runner do this work."""
        self._last = None
        self.spoke = False
        self.peak_memory_bytes = 0
        self._context = copy_context()
        self._spans = EngineSpans(current()) if command.traced else None
        self._write(command.line())

    def next_message(self, timeout_s: float) -> Message | None:
        """The next message; None if none arrived in time, or if no more will arrive (see `ended`)."""
        try:
            message = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if message is None:
            self._ended = True
        self._last = message
        if isinstance(message, SpanBegan | SpanEnded) and self._spans is not None:
            self._spans.take(message)
        if isinstance(message, Result | Failure):
            self.peak_memory_bytes = message.peak_memory_bytes
        self.spoke = self.spoke or message is not None
        return message

    @property
    def answered(self) -> bool:
        """True if the last message that was returned was the answer to the command."""
        return isinstance(self._last, Result | Failure)

    def waits(self, timeout_s: float) -> bool:
        """True if the runner waits for a command now, or within `timeout_s` after an answer."""
        deadline = time.monotonic() + timeout_s
        while not isinstance(self._last, Idle) and not self._ended and (left := deadline - time.monotonic()) > 0:
            self.next_message(left)
        return isinstance(self._last, Idle) and self._process.poll() is None

    def wait_for_end(self, timeout_s: float) -> None:
        """Return when the runner has answered or ended, or after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self._ended and not self.answered and (left := deadline - time.monotonic()) > 0:
            self.next_message(left)

    @property
    def ended(self) -> bool:
        """True if the process has closed its output and every message was returned."""
        return self._ended

    def end_spans(self) -> None:
        """Nothing more is heard of the command: end what its spans left open."""
        if self._spans is not None:
            self._spans.end()
            self._spans = None

    def allow(self) -> None:
        """Let a runner go on that sent `PlanRequest` (it begins to write) or `CommitRequest` (it publishes)."""
        self._write(GO)

    def terminate(self) -> None:
        """Ask the engine to stop between units."""
        self._signal(signal.SIGTERM)

    def kill(self) -> int:
        """Kill the process group, wait for its leader, and return its exit status (negative: a signal)."""
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)
        status = self._process.wait()
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                logger.debug("runner %d left a command unread", self._process.pid)
        return status

    def wait(self, timeout_s: float) -> int | None:
        """The exit status, or None if it still runs after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            logger.debug("runner %d has ended already", self._process.pid)

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            logger.warning("runner %d closed its input", self._process.pid)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                try:
                    self._messages.put(parse_message(line))
                except ValueError:
                    self._context.run(logger.warning, "runner %d sent a line that is not a message", self._process.pid)
        self._messages.put(None)


def _started(argv: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A new runner. It inherits the worker's stderr, so that tracebacks and logs reach the operator.

    Raises:
        JobError: `job.host_exhausted`.
    """
    try:
        return subprocess.Popen(
            list(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=environment
        )
    except OSError as error:
        raise _refused(error) from error


def _refused(error: OSError | RuntimeError) -> Exception:
    """The typed error for what the host refuses; other errors, such as a missing program, stay bugs of the service."""
    return exhaustion_of(error) or error


class Runners:
    """The runner processes of one supervisor, one command at a time.

    Args:
        argv: The runner's command line.
        warm: True to keep a runner that answered for the next command, if it stays.
    """

    def __init__(self, argv: Sequence[str], *, warm: bool = False) -> None:
        self._argv = tuple(argv)
        self._warm = warm
        self._kept: RunnerProcess | None = None

    def prepare(self) -> None:
        """Start the runner of the next command ahead, if runners are kept."""
        if self._warm and self._kept is None:
            try:
                self._kept = RunnerProcess(self._argv, stays=True)
            except JobError as error:
                # The next command starts its own, or fails with this error.
                logger.warning("no engine process could be started ahead: %s", error)

    @contextmanager
    def run(self, command: Command) -> Generator[RunnerProcess]:
        """Give a command to a runner. What does not answer within the block is killed at its end.

        Raises:
            JobError: `job.host_exhausted`: no runner can be started.
        """
        child = self._waiting() or RunnerProcess(self._argv, stays=self._warm)
        try:
            child.give(command.model_copy(update={"log": log_context(), "traced": current().recording}))
            yield child
        except BaseException:
            child.kill()
            raise
        finally:
            child.end_spans()
        if self._warm and child.answered:
            self._kept = child
            return
        child.kill()
        self.prepare()

    def close(self) -> None:
        """Kill the runner that waits."""
        if self._kept is not None:
            self._kept.kill()
            self._kept = None

    def _waiting(self) -> RunnerProcess | None:
        child, self._kept = self._kept, None
        if child is None or child.waits(_IDLE_S):
            return child
        child.kill()
        return None
