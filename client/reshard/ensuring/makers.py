"""Who converts for `reshard.ensure`: the engine of this process, or a service."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from reshard.errors import JobError, RequestError, printable
from reshard.local import load_engine
from reshard.models import ConvertRequest, Inspection, Progress, SourceSpec

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_MAX_SUBMISSIONS = 100


def pauses_s() -> Iterator[float]:
    """Seconds between looks at what another process does: short ones first."""
    pause = _FIRST_PAUSE_S
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE_S)


class Deadline:
    """When waiting ends; None is never."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._at = None if timeout_s is None else time.monotonic() + timeout_s

    def left_s(self) -> float | None:
        """Seconds left; None without a limit."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    def passed(self) -> bool:
        """Whether the time is over."""
        return self.left_s() == 0.0

    def error(self, what: str) -> JobError:
        """The error for waiting too long."""
        return JobError(
            "job.wait_timeout",
            f"{what} is not finished after {self.timeout_s or 0:g} s",
            fix="call again: what is done is kept; or wait longer: --timeout",
        )


class Maker(Protocol):
    """Looks at sources and converts them."""

    def inspect(self, source: SourceSpec) -> Inspection:
        """What the checkpoint is."""
        ...

    def convert(self, request: ConvertRequest, key: str, done: Callable[[], bool]) -> None:
        """Convert, wherever, and return when the target is committed.

        Args:
            request: The conversion.
            key: Equal for requests that mean one conversion.
            done: Whether the result is there, as this process sees it.
        """
        ...


class Here:
    """The engine of this process."""

    def __init__(self, deadline: Deadline, on_progress: Callable[[Progress], None] | None) -> None:
        """The engine is loaded when it is needed: most processes only wait."""
        self._deadline, self._on_progress = deadline, on_progress

    def inspect(self, source: SourceSpec) -> Inspection:
        """From metadata only."""
        return load_engine().inspect(source)

    def convert(self, request: ConvertRequest, key: str, done: Callable[[], bool]) -> None:
        """Waits for whoever has the target: its lock ends with its process."""
        engine, pauses = load_engine(), pauses_s()
        while True:
            try:
                engine.convert(request, on_progress=self._on_progress, should_stop=self._deadline.passed)
                return
            except RequestError as error:
                if error.code != "request.target_busy":
                    raise
            except JobError as error:
                if error.code != "job.cancelled":
                    raise
            if self._deadline.passed():
                raise self._deadline.error(f"the conversion into {printable(request.target)}")
            time.sleep(next(pauses))


class Service:
    """A service: one job, however many processes ask for it."""

    def __init__(self, url: str, deadline: Deadline) -> None:
        """The client is imported here: it brings httpx."""
        from reshard.client import Client

        self._client, self._deadline = Client(url), deadline

    def inspect(self, source: SourceSpec) -> Inspection:
        """As the service sees it."""
        return self._client.inspect(source.url, tag=source.tag)

    def convert(self, request: ConvertRequest, key: str, done: Callable[[], bool]) -> None:
        """Submits until a job answers that had not ended: an ended one may have failed, or its result be gone."""
        for attempt in range(_MAX_SUBMISSIONS):
            name = f"ensure-{key[:40]}-{attempt}"
            job = self._client.submit_request(request, labels={"made-by": "ensure"}, idempotency_key=name)
            ended = job.state.terminal
            if not ended:
                job = self._client.wait(job.id, timeout_s=self._deadline.left_s())
            if ended and (job.error is not None or not done()):
                continue
            self._client.result(job.id)  # raises what the job ended with
            return
        raise JobError("job.attempts_exhausted", f"{_MAX_SUBMISSIONS} jobs for this conversion have ended without it")
