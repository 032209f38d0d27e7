"""The one process that runs the engine: `python -m reshard_worker.runner`.

It reads a `Command` from stdin and writes `Message` lines to stdout. It uses neither SQL nor the broker. A supervisor
may ask it to stay (`warm_process`); then each command has a child process of it.
SIGTERM asks the engine to stop between units; the death of the supervisor kills it at once.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import BinaryIO, Literal

from reshard.engine import Engine, load_engine
from reshard.errors import JobError, RequestError, ReshardError, SourceError, exhaustion_of, printable
from reshard.extras import install_line
from reshard.models.jobs import Problem, Progress
from reshard_engine.spans import EndSpan, listen
from reshard_engine.storage.urls import confine
from reshard_engine.warm_process import die_with_parent, limit_memory, next_command, open_reserve
from reshard_jobs.logs import configure_logs, log_process_as
from reshard_worker.host_faults import HOST
from reshard_worker.protocol import (
    GO,
    STAYS_VARIABLE,
    Command,
    CommitRequest,
    Failure,
    Idle,
    PlanRequest,
    ProgressMessage,
    Result,
    SpanBegan,
    SpanEnded,
)

# Spans of an engine process, as it tells them to its supervisor, which sends them.
#
# The engine process needs no package of traces, no connection of its own and no time for a last flush; the spans that
# it began are known also if it is killed.

Send = Callable[[bytes], None]
_PHASES: Mapping[str, Literal["plan", "units", "verify", "commit"]] = {
    "planning": "plan",
    "running": "units",
    "verifying": "verify",
    "committing": "commit",
}


class RunnerSpans:
    """The spans of one command: one for each phase, and below them what the engine says itself."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._last = 0
        self._phase = 0
        self._open: dict[int, str] = {}

    def enter(self, phase: str, *, bytes_done: int) -> None:
        """Begin a phase of the conversion, which ends the one before; a phase without a span only does this."""
        with self._lock:
            written = {"bytes": bytes_done} if self._open.get(self._phase) == "units" else {}
            self._end_all("", {self._phase: written})
            self._phase = self._begin(name, 0, {}) if (name := _PHASES.get(phase)) is not None else 0

    def begin(self, name: str, facts: Mapping[str, str | int]) -> EndSpan:
        """Begin a span below the present phase."""
        with self._lock:
            number = self._begin(name, self._phase, facts)

        def end(**more: int) -> None:
            with self._lock:
                self._end(number, "", more)

        return end

    def end_all(self, code: str = "") -> None:
        """End what is open, with the code of an error if there is one."""
        with self._lock:
            self._end_all(code)

    def _begin(self, name: str, parent: int, facts: Mapping[str, str | int]) -> int:
        self._last += 1
        self._open[self._last] = name
        message = SpanBegan(number=self._last, parent=parent, name=name, at_ns=time.time_ns(), facts=dict(facts))
        self._send(message.line())
        return self._last

    def _end_all(self, code: str, facts: Mapping[int, Mapping[str, int]] = MappingProxyType({})) -> None:
        # Those that began last are within the others.
        for number in sorted(self._open, reverse=True):
            self._end(number, code, facts.get(number, {}))

    def _end(self, number: int, code: str, facts: Mapping[str, int]) -> None:
        if self._open.pop(number, None) is not None:
            self._send(SpanEnded(number=number, at_ns=time.time_ns(), code=code, facts=dict(facts)).line())


# Runs one command, and tells the supervisor how it goes.

logger = logging.getLogger(__name__)

_MIN_PROGRESS_S = 0.1


class Reporter:
    """Sends the engine's progress to the supervisor, and delays the commit until the supervisor allows it."""

    def __init__(self, commands: BinaryIO, messages: BinaryIO) -> None:
        self._commands = commands
        self._messages = messages
        self._phase = ""
        self._sent_at = 0.0
        self._sending = threading.Lock()
        self._spans: RunnerSpans | None = None

    def trace(self) -> None:
        """Tell the supervisor of spans from now on."""
        self._spans = RunnerSpans(self.send)
        listen(self._spans.begin)

    def end_spans(self, code: str = "") -> None:
        """End the spans that are open, with the code of an error if there is one."""
        if self._spans is not None:
            self._spans.end_all(code)

    def progress(self, progress: Progress) -> None:
        """Report progress: every change of phase, and otherwise ten times a second at most.

        Raises:
            JobError: `job.lost`: the engine may not commit, because another worker owns the job.
        """
        now = time.monotonic()
        entering = progress.phase != self._phase
        if entering and self._spans is not None:
            self._spans.enter(progress.phase, bytes_done=progress.bytes_done)
        if entering or now - self._sent_at >= _MIN_PROGRESS_S:
            self._phase, self._sent_at = progress.phase, now
            self.send(ProgressMessage(progress=progress).line())
        if entering and progress.phase == "committing":
            self.send(CommitRequest().line())
            if self._commands.readline() != GO:
                raise JobError("job.lost", "the commit was not allowed: the lease is lost")

    def plan(self, digest: str, write_bytes: int) -> None:
        """Have the supervisor record the plan, and judge what it writes, before anything is written.

        Raises:
            JobError: `job.lost`: the engine may not begin, because another worker owns the job, or it is cancelled.
        """
        self.send(PlanRequest(digest=digest, write_bytes=write_bytes).line())
        if self._commands.readline() != GO:
            raise JobError("job.lost", "the engine was not allowed to begin: the lease is lost")

    def send(self, line: bytes) -> None:
        """Write one message. Any thread may call it."""
        with self._sending:
            self._messages.write(line)
            self._messages.flush()


def run(command: Command, engine: Engine, reporter: Reporter, stop: list[int]) -> Result:
    """Run a command. `stop` is set if a signal has arrived."""
    match command.op:
        case "convert":
            converted = engine.convert(
                command.request,
                work=command.work,
                on_progress=reporter.progress,
                should_stop=lambda: bool(stop),
                on_plan=reporter.plan,
                abandoned=command.abandoned,
            )
            return Result(converted=converted)
        case "help":
            assert command.work is not None
            helped = engine.help(
                command.request, command.work, on_progress=reporter.progress, should_stop=lambda: bool(stop)
            )
            return Result(helped=helped)
        case "plan":
            return Result(planned=engine.plan(command.request))
        case "discard":
            engine.discard(
                command.request, plans=command.plans, idle_s=command.idle_s, keep_unfinished=command.keep_unfinished
            )
            return Result()


def main() -> int:
    """Run one command; the exit status is 0 if the outcome was delivered."""
    configure_logs()
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stop.append(number))
    # The supervisor handles a Ctrl-C in its terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    # Output that a library prints must not mix with the messages.
    messages = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    commands = sys.stdin.buffer
    reporter = Reporter(commands, messages)
    stays = bool(os.environ.get(STAYS_VARIABLE))
    line = next_command(commands, lambda: reporter.send(Idle().line()), stop) if stays else commands.readline()
    outcome = _outcome(line, reporter, stop)
    # Work that was told to stop did not fail: a helper is, when the job ends or another one waits.
    code = outcome.problem.code if isinstance(outcome, Failure) else ""
    reporter.end_spans("" if code == "job.cancelled" else code)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    reporter.send(outcome.model_copy(update={"peak_memory_bytes": peak}).line())
    return 0


def _outcome(line: bytes, reporter: Reporter, stop: list[int]) -> Result | Failure:
    """Run a command and return its outcome; every exception becomes a `Failure`."""
    try:
        command = Command.model_validate_json(line)
        log_process_as(command.log)
        if command.traced:
            reporter.trace()
        limit_memory(command.memory_bytes)
        confine(command.roots, command.write_roots)
        return run(command, load_engine(), reporter, stop)
    except ReshardError as error:
        problem = error
    except MemoryError:
        open_reserve()
        logger.warning("the engine ran into its memory limit", exc_info=True)
        problem = SourceError(
            "checkpoint.too_large",
            "converting the checkpoint needs more memory than the engine process may take",
            fix="set a smaller --part-size or more of RESHARD_ENGINE_MEMORY: names, shapes and units need it, not data",
            details={HOST: True},
        )
    except ImportError as error:
        logger.exception("the engine of this worker is not complete")
        problem = RequestError(
            "request.engine_missing",
            f"the engine of this worker needs {printable(error.name or error.msg)!r}, which is not installed",
            fix=f"on the worker's host: {install_line('worker')}",
        )
    except Exception as error:
        # The worker's log gets the traceback. The job's record does not, because users of the API read it.
        logger.exception("unexpected error in the engine")
        fix = "look for a traceback in the worker's log and report it"
        bug = JobError("internal.error", "the engine met an unexpected error", fix=fix)
        problem = exhaustion_of(error) or bug
    return Failure(problem=Problem.model_validate(problem.to_problem()))


if __name__ == "__main__":
    sys.exit(main())
