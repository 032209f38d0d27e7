"""A runner process, as its supervisor sees it."""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from reshard_worker.protocol import GO, Command, Message, parse_message

logger = logging.getLogger(__name__)


class RunnerProcess:
    """One engine process in its own process group. Leaving the `with` block kills it.

    Args:
        argv: The runner's command line.
        command: What it is to do.
    """

    def __init__(self, argv: Sequence[str], command: Command) -> None:
        # stderr is the worker's own: tracebacks and logs go where the operator looks.
        self._process = subprocess.Popen(
            list(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._ended = False
        threading.Thread(target=self._read, name="runner-messages", daemon=True).start()
        self._write(command.line())

    def __enter__(self) -> Self:
        """The running process."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill what still runs."""
        self.kill()

    def next_message(self, timeout_s: float) -> Message | None:
        """The next message, or None when there was none in time or will be none (see `ended`)."""
        try:
            message = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if message is None:
            self._ended = True
        return message

    @property
    def ended(self) -> bool:
        """Whether the process has closed its side and every message was handed out."""
        return self._ended

    def allow_commit(self) -> None:
        """Let a runner that asked publish its output."""
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
                    logger.warning("runner %d sent a line that is no message", self._process.pid)
        self._messages.put(None)
