"""The two converters of `reshard.ensure`: the engine in this process, and a service."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from reshard.declared import given_options, options_of_ensure, options_of_source
from reshard.engine import load_client, load_engine
from reshard.errors import JobError, RequestError, ReshardError, printable
from reshard.filesystems import is_of_process
from reshard.models.jobs import ConvertRequest, Inspection, Progress
from reshard.models.resume import RunLaunch
from reshard.options import SourceSpec

if TYPE_CHECKING:
    from reshard.shared_work import SharedWork

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_MAX_SUBMISSIONS = 100


def pauses_s() -> Iterator[float]:
    """Seconds to wait between two looks at another process's work; the first waits are short."""
    pause = _FIRST_PAUSE_S
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE_S)


@contextmanager
def _fixes_for_ensure(source: SourceSpec, flags: Mapping[str, object]) -> Generator[None]:
    """Say the options in an error's fix that `ensure` lacks as the `reshard convert` that has them.

    Args:
        source: The source of the conversion.
        flags: Options of the conversion that failed, by name.
    """
    try:
        yield
    except ReshardError as error:
        if "reshard " in error.fix or (found := _foreign(error.fix)) is None:
            raise
        chosen = {name: value for name, value in source.given().items() if isinstance(value, str)}
        profile = None if is_of_process(source.profile) else source.profile
        named = {**flags, "tag": source.tag, "profile": profile, **chosen}
        given = [f"--{n.replace('_', '-')} {shlex.quote(str(v))}" for n, v in named.items() if v is not None]
        own = [] if found[0].startswith("--to ") else given
        command = " ".join(["reshard convert", shlex.quote(source.url), "DST", *own, found[0]])
        fix = f"{error.fix[: found.start()].removesuffix('add ')}{command}{error.fix[found.end() :]}"
        raise type(error)(error.code, error.message, fix=fix, details=error.details) from error


def _foreign(fix: str) -> re.Match[str] | None:
    """The first options in a fix that `ensure` does not take; None if it takes all."""
    for found in _FLAGS.finditer(fix):
        taken = all(word in OPTIONS for word in found[0].split() if word.startswith("--"))
        if not taken or (found[0].startswith("--to ") and found[0] not in ("--to zero", "--to dcp")):
            return found
    return None


_FLAGS = re.compile(r"--[a-z][a-z-]*(?: (?!--)[^\s;,()]+)?(?: --[a-z][a-z-]*(?: (?!--)[^\s;,()]+)?)*")
"""Options in a fix, each with its value, one after another."""
OPTIONS = {"--to", "--out", "--url", "--timeout", "--workers", "--json", "--quiet", "--help"} | {
    option.flag for option in options_of_ensure().values()
}
"""The options of `reshard ensure`."""


def _flags_of(request: ConvertRequest) -> dict[str, object]:
    """The options of the conversion as flags; rules, which came from a file, are left out."""
    source = options_of_source()
    given = {o.name: v for o, v in given_options(request) if o.name not in source and o.kind is not Path}
    return {"to": request.to, **given}


class Deadline:
    """The time limit of a wait; None means no limit."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._at = None if timeout_s is None else time.monotonic() + timeout_s

    def left_s(self) -> float | None:
        """Seconds left; None without a limit."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    def passed(self) -> bool:
        """True if the time is over."""
        return self.left_s() == 0.0

    def error(self, what: str) -> JobError:
        """The error for waiting too long."""
        return JobError(
            "job.wait_timeout",
            f"{what} has not finished after {self.timeout_s or 0:g} s",
            fix="call again (finished work is kept), or wait longer: --timeout",
        )


class Converter(Protocol):
    """Looks at sources and converts them."""

    def inspect(self, source: SourceSpec, launch: RunLaunch) -> Inspection:
        """Describe the checkpoint, and what the launch loads."""
        ...

    def convert(
        self, request: ConvertRequest, key: str, done: Callable[[], bool], work: SharedWork | None = None
    ) -> None:
        """Convert, and return when the target is committed.

        Args:
            request: The conversion.
            key: Is equal for requests that mean one conversion.
            done: Returns True if this process sees the result.
            work: The place of this process among those that convert together; None if it converts alone.
        """
        ...


class LocalConverter:
    """Converts with the engine in this process."""

    def __init__(self, deadline: Deadline, on_progress: Callable[[Progress], None] | None) -> None:
        """Prepare without the engine, which is loaded at its first use: most processes only wait."""
        self._deadline, self._on_progress = deadline, on_progress

    def inspect(self, source: SourceSpec, launch: RunLaunch) -> Inspection:
        """Describe the checkpoint from its metadata, and what the launch loads."""
        with _fixes_for_ensure(source, {}):
            return load_engine().inspect(source, launch=launch)

    def convert(
        self, request: ConvertRequest, key: str, done: Callable[[], bool], work: SharedWork | None = None
    ) -> None:
        """Convert; wait first for another process that holds the lock of the target. The lock ends with its process."""
        engine, pauses = load_engine(), pauses_s()
        call = engine.convert if work is None else partial(engine.convert, work=work)
        while True:
            try:
                with _fixes_for_ensure(request.source, _flags_of(request)):
                    call(request, on_progress=self._on_progress, should_stop=self._deadline.passed)
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

    def put_text(self, url: str, text: str) -> None:
        """Write a small text into an object store."""
        load_engine().put_text(url, text)

    def help(self, request: ConvertRequest, work: SharedWork, ended: Callable[[], bool]) -> None:
        """Convert together with others until the conversion ends, or until `ended()` is true.

        Raises:
            ReshardError: The conversion has failed or was stopped, which those who wait for it are told.
        """
        with _fixes_for_ensure(request.source, _flags_of(request)):
            load_engine().convert(request, work=work, should_stop=lambda: self._deadline.passed() or ended())


class DirectLoader(LocalConverter):
    """Converts nothing: its targets are directories of stubs, whose contents this process loads from the source."""

    def __init__(self, *, compare: bool) -> None:
        """Begin without targets. `compare`: compare what must agree in each source first, as conversions do."""
        super().__init__(Deadline(None), None)
        self._compare = compare
        self._stubs: list[Any] = []

    def convert(
        self, request: ConvertRequest, key: str, done: Callable[[], bool], work: SharedWork | None = None
    ) -> None:
        """Lay the target out, and make its stubs. The other arguments have nothing to say."""
        with _fixes_for_ensure(request.source, _flags_of(request)):
            self._stubs.append(load_engine().loading().stubs(request, compare=self._compare))

    def home(self) -> AbstractContextManager[str]:
        """A temporary directory for the targets."""
        return load_engine().loading().stub_home()

    @contextmanager
    def serving(self) -> Generator[None]:
        """Serve the targets as long as the block lasts."""
        with load_engine().loading().serving(self._stubs):
            yield


class ServiceConverter:
    """Converts with a service: all processes that ask for one conversion share one job."""

    def __init__(self, url: str, deadline: Deadline) -> None:
        """Connect to the service. The client is imported here because it needs httpx."""
        self._client, self._deadline, self._url = load_client()(url), deadline, url

    def inspect(self, source: SourceSpec, launch: RunLaunch) -> Inspection:
        """Describe the checkpoint as the service sees it, and what the launch loads."""
        with self._away_or_here(), _fixes_for_ensure(source, {}):
            return self._client.inspect(source, launch=launch)

    def convert(
        self, request: ConvertRequest, key: str, done: Callable[[], bool], work: SharedWork | None = None
    ) -> None:
        """Submit until the answer is a job that has not ended: an ended one may have failed or lost its result."""
        with self._away_or_here(), _fixes_for_ensure(request.source, _flags_of(request)):
            self._convert(request, key, done)

    @contextmanager
    def _away_or_here(self) -> Generator[None]:
        """Add to the error of a service that is away how to do without it."""
        try:
            yield
        except JobError as error:
            if error.code != "service.unavailable":
                raise
            here = "unset RESHARD_URL" if os.environ.get("RESHARD_URL") == self._url else "leave --url out"
            raise JobError(error.code, error.message, fix=f"{error.fix}; or convert here: {here}") from error

    def _convert(self, request: ConvertRequest, key: str, done: Callable[[], bool]) -> None:
        for attempt in range(_MAX_SUBMISSIONS):
            name = f"ensure-{key[:40]}-{attempt}"
            job = self._client.submit_request(request, labels={"made-by": "ensure"}, idempotency_key=name)
            ended = job.state.terminal
            if not ended:
                job = self._client.wait(job.id, timeout_s=self._deadline.left_s())
            if ended and (job.error is not None or not done()):
                continue
            self._client.result(job.id)  # raises the error that ended the job
            return
        raise JobError(
            "job.attempts_exhausted",
            f"{_MAX_SUBMISSIONS} jobs for this conversion have ended, and its result is missing",
            fix="reshard jobs list --state FAILED",
        )
