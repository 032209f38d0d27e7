"""The one process that runs the engine: `python -m reshard_worker.runner`.

Reads a `Command` from stdin, writes `Message` lines to stdout, and knows nothing of SQL or the broker.
SIGTERM asks the engine to stop between units; the death of the supervisor kills it at once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from typing import BinaryIO

from reshard.errors import JobError, ReshardError, SourceError
from reshard.local import Engine, load_engine
from reshard.models import Problem, Progress
from reshard_worker.lifetime import die_with_parent
from reshard_worker.protocol import GO, Command, CommitRequest, Failure, ProgressMessage, Result
from reshard_worker.walls import limit_memory, open_reserve

logger = logging.getLogger(__name__)

_MIN_PROGRESS_S = 0.1


class Reporter:
    """Sends the engine's progress up, and holds its commit until the supervisor's fence agrees."""

    def __init__(self, commands: BinaryIO, messages: BinaryIO) -> None:
        self._commands = commands
        self._messages = messages
        self._phase = ""
        self._sent_at = 0.0

    def progress(self, progress: Progress) -> None:
        """Report progress: every change of phase, and otherwise ten times a second at most.

        Raises:
            JobError: `job.lost`: the engine may not commit, because another worker owns the job.
        """
        now = time.monotonic()
        entering = progress.phase != self._phase
        if entering or now - self._sent_at >= _MIN_PROGRESS_S:
            self._phase, self._sent_at = progress.phase, now
            self.send(ProgressMessage(progress=progress).line())
        if entering and progress.phase == "committing":
            self.send(CommitRequest().line())
            if self._commands.readline() != GO:
                raise JobError("job.lost", "the commit was not allowed: the lease is lost")

    def send(self, line: bytes) -> None:
        """Write one message."""
        self._messages.write(line)
        self._messages.flush()


def run(command: Command, engine: Engine, reporter: Reporter, stop: list[int]) -> Result:
    """Do what the command says. Signals received so far are in `stop`."""
    match command.op:
        case "convert":
            converted = engine.convert(command.request, on_progress=reporter.progress, should_stop=lambda: bool(stop))
            return Result(converted=converted)
        case "plan":
            return Result(planned=engine.plan(command.request))
        case "discard":
            engine.discard(command.request)
            return Result()


def main() -> int:
    """Run one command; the exit status is 0 whenever its outcome was delivered."""
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stop.append(number))
    # A Ctrl-C in the supervisor's terminal is the supervisor's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    # What a library prints must not end up among the messages.
    messages = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    reporter = Reporter(sys.stdin.buffer, messages)
    reporter.send(_outcome(sys.stdin.buffer.readline(), reporter, stop).line())
    return 0


def _outcome(line: bytes, reporter: Reporter, stop: list[int]) -> Result | Failure:
    """What became of a command; no exception leaves a runner."""
    try:
        command = Command.model_validate_json(line)
        limit_memory(command.memory_bytes)
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
        )
    except Exception:
        # To the worker's log with all that is known; to the job's record, which strangers read, without.
        logger.exception("unexpected error in the engine")
        fix = "look for a traceback in the worker's log and report it"
        problem = JobError("internal.error", "the engine met an unexpected error", fix=fix)
    return Failure(problem=Problem.model_validate(problem.to_problem()))


if __name__ == "__main__":
    sys.exit(main())
