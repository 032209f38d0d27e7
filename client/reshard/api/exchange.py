"""The exchanges of a client with a service, without I/O: retries, long polls, and streams that break off.

An exchange is a generator that yields steps and gets what came of each; its value is what the caller asked for.
`reshard.api.client` takes the steps with blocking calls, `reshard.api.async_client` with those of an event loop.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

import httpx
from pydantic import ValidationError

from reshard.api import wire
from reshard.api.wire import Answer, Call, ModelT
from reshard.choices import JobKind, JobState
from reshard.errors import JobError, ReshardError, from_problem
from reshard.models.jobs import ConvertRequest, ConvertResult, Job, JobEvent, JobEventPage, PlanSummary

# Server-sent events, read line by line.


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One dispatched event."""

    id: str
    kind: str
    data: str


class EventLines:
    """Makes the events of a stream of its lines, without comments (pings) and without an event that the end cuts off.

    Source: WHATWG HTML, 9.2.6 "Interpreting an event stream"; `retry` is not used.
    """

    def __init__(self) -> None:
        self._last_id, self._kind, self._data = "", "", list[str]()

    def feed(self, line: str) -> ServerEvent | None:
        """The event that this line completes, if it completes one."""
        if not line:
            found = ServerEvent(self._last_id, self._kind or "message", "\n".join(self._data)) if self._data else None
            self._kind, self._data = "", []
            return found
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._kind = value
        elif field == "id":
            self._last_id = value
        return None


_LONG_POLL_S = 25.0
_SILENCE_S = 45.0
"""Seconds of silence after which a stream counts as dead; the service sends a ping every 15 s."""
_POLL_S = 1.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pause:
    """A step: let this time pass."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Listen:
    """A step: open a stream. It gives an `Answer`, whose body is empty unless it is an error."""

    call: Call
    silence_s: float
    """Seconds without a byte after which the stream counts as dead."""


@dataclass(frozen=True, slots=True)
class NextLine:
    """A step: the next line of the stream that was opened last; None at its end."""


Step: TypeAlias = Call | Pause | Listen | NextLine | JobEvent
"""Something that the side with I/O is to do. An event goes to the caller. A `Call` gives an `Answer`."""
Flow: TypeAlias = Generator[Step, Any, T]
"""An exchange whose value is a `T`. A step that does not reach the service throws its `httpx.TransportError` in."""


class Run(Protocol):
    """Takes the steps of an exchange, and returns its value."""

    def __call__(self, flow: Flow[T], /) -> T:
        """The value of an exchange without events."""
        ...


class Talk(Generic[T]):
    """One exchange on its way.

    Attributes:
        step: The next step; None after the end.
        value: The exchange's value, after its end.
    """

    value: T

    def __init__(self, flow: Flow[T]) -> None:
        self._flow = flow
        self.step: Step | None = None
        self.take(None)

    def take(self, result: object) -> None:
        """Go on with what came of the step."""
        self._go(lambda: self._flow.send(result))

    def fail(self, error: httpx.TransportError) -> None:
        """Go on after a step that did not reach the service."""
        self._go(lambda: self._flow.throw(error))

    def _go(self, advance: Callable[[], Step]) -> None:
        try:
            self.step = advance()
        except StopIteration as end:
            self.step, self.value = None, end.value


@dataclass(frozen=True, slots=True)
class Exchange:
    """The exchanges with one service."""

    url: str
    retries: int
    """Repetitions of a request after transient failures, at most."""

    def send(self, call: Call) -> Flow[Answer]:
        """The answer to a call, which is repeated after transient failures."""
        retries = 0 if call.once else self.retries
        for tries in range(retries + 1):
            answer = None
            try:
                answer = yield call
                if not wire.passing(answer) or tries == retries:
                    return answer
            except httpx.TransportError as error:
                if tries == retries:
                    raise self._away(error) from error
            yield Pause(wire.pause_s(tries, random.random(), answer))  # noqa: S311 - jitter
        raise AssertionError("the last try returns or raises")

    def ask(self, call: Call, model: type[ModelT]) -> Flow[ModelT]:
        """The answer to a call as a wire model."""
        return wire.parse((yield from self.send(call)), model)

    def pick(self, call: Call, model: type[ModelT], of: Callable[[ModelT], T]) -> Flow[T]:
        """A part of the answer to a call."""
        return of((yield from self.ask(call, model)))

    def tell(self, call: Call) -> Flow[None]:
        """Send a call whose answer says nothing but that it was heard."""
        answer = yield from self.send(call)
        if answer.status >= 400:
            raise wire.error_of(answer)

    def plan(self, request: ConvertRequest) -> Flow[PlanSummary]:
        """The plan of a conversion, of the planning job if the service makes one."""
        answer = yield from self.send(Call("POST", "/v1/plans", body=request.sent().model_dump(mode="json")))
        if answer.status != 202:
            return wire.parse(answer, PlanSummary)
        job = yield from self.wait(wire.parse(answer, Job).id, None)
        outcome = yield from self.result(job.id)
        if not isinstance(outcome, PlanSummary):
            raise JobError(
                "service.protocol",
                "a planning job has no plan",
                fix="install the release that the service runs",
            )
        return outcome

    def result(self, job_id: str) -> Flow[ConvertResult | PlanSummary]:
        """The result of a job that SUCCEEDED, or its error."""
        job = yield from self.ask(wire.job_call(job_id), Job)
        if job.error is not None:
            raise from_problem(job.error.model_dump())
        model = PlanSummary if job.kind is JobKind.PLAN else ConvertResult
        try:
            return (yield from self.ask(wire.result_call(job.id), model))
        except ReshardError as error:
            # It failed between the two calls.
            if error.code == "job.failed" and isinstance(own := error.details.get("error"), dict):
                raise from_problem(cast("dict[str, Any]", own)) from None
            raise

    def wait(self, job_id: str, timeout_s: float | None) -> Flow[Job]:
        """The job after its end."""
        deadline = _Deadline(job_id, timeout_s)
        while True:
            job = yield from self.ask(wire.job_call(job_id, wait_s=deadline.limit(_LONG_POLL_S)), Job)
            if job.done:
                return job
            deadline.check()

    def events(self, job_id: str, after_seq: int) -> Flow[None]:
        """The events that a job has until now."""
        while True:
            page = yield from self.ask(wire.events_call(job_id, after_seq), JobEventPage)
            yield from page.events
            if page.done or not page.events:
                return
            after_seq = page.events[-1].seq

    def watch(self, job_id: str, after_seq: int, timeout_s: float | None) -> Flow[None]:
        """The events of a job until its end, each exactly once, across broken connections and restarts."""
        seen, deadline = _Seen(job_id, after_seq), _Deadline(job_id, timeout_s)
        streaming = True
        while True:
            before, seen.failed = seen.after_seq, False
            try:
                if streaming and not (yield from self._stream(seen, deadline)):
                    # A proxy on the way does not pass streams through, so the client polls from now on.
                    streaming = False
                    continue
                if not streaming:
                    yield from self._poll(seen, deadline)
                # A job that FAILED may have been sent back to the queue. Then the log goes on.
                if seen.ended or (seen.failed and (not streaming or (yield from self._ended_before(seen)))):
                    return
            except httpx.TransportError as error:
                deadline.check()
                if seen.failures >= self.retries:
                    raise self._away(error) from error
            if seen.after_seq == before:
                seen.failures += 1
                if (yield from self._ended_before(seen)):
                    return
            yield Pause(wire.pause_s(seen.failures, random.random(), None))  # noqa: S311 - jitter

    def _ended_before(self, seen: _Seen) -> Flow[bool]:
        page = yield from self.ask(wire.events_call(seen.job_id, seen.after_seq), JobEventPage)
        return page.done and not page.events

    def _stream(self, seen: _Seen, deadline: _Deadline) -> Flow[bool]:
        """The events of one stream; False if the answer is not a stream."""
        answer: Answer = yield Listen(wire.stream_call(seen.job_id, seen.after_seq), deadline.limit(_SILENCE_S))
        if answer.status >= 400:
            if wire.passing(answer):
                raise httpx.ReadError(f"HTTP {answer.status}")
            raise wire.error_of(answer)
        if answer.status == 204:
            return True
        if not answer.is_stream:
            return False
        lines = EventLines()
        while not seen.ended and (line := (yield NextLine())) is not None:
            # Pings are lines, too.
            deadline.check()
            if (found := lines.feed(line)) is not None:
                yield seen.noted(_job_event(found.data))
        return True

    def _poll(self, seen: _Seen, deadline: _Deadline) -> Flow[None]:
        while True:
            page = yield from self.ask(wire.events_call(seen.job_id, seen.after_seq), JobEventPage)
            for event in page.events:
                yield seen.noted(event)
            if page.done or seen.ended:
                return
            deadline.check()
            yield Pause(deadline.limit(_POLL_S))

    def _away(self, error: httpx.TransportError) -> ReshardError:
        return JobError(
            "service.unavailable",
            f"{self.url} does not answer ({type(error).__name__})",
            fix=f"check RESHARD_URL: curl {self.url}/healthz",
        )


class Calls:
    """Base of a part of a client, which has a method for each call.

    Args:
        run: Takes the steps of an exchange.
        exchange: The exchanges with the service.
    """

    def __init__(self, run: Run, exchange: Exchange) -> None:
        self._run, self._exchange = run, exchange

    def _ask(self, call: Call, model: type[ModelT]) -> ModelT:
        """The answer to a call as a wire model."""
        return self._run(self._exchange.ask(call, model))

    def _pick(self, call: Call, model: type[ModelT], of: Callable[[ModelT], T]) -> T:
        """A part of the answer to a call."""
        return self._run(self._exchange.pick(call, model, of))


@dataclass(slots=True)
class _Seen:
    """The events of a job that were passed on."""

    job_id: str
    after_seq: int
    failures: int = 0
    """Attempts in a row that brought no event."""
    failed: bool = False
    ended: bool = False

    def noted(self, event: JobEvent) -> JobEvent:
        """The event, which counts as passed on from now on."""
        self.after_seq, self.failures = event.seq, 0
        self.failed = event.kind == "state" and event.state is JobState.FAILED
        self.ended = event.kind == "state" and event.state.terminal and not self.failed
        return event


class _Deadline:
    """The time limit of a wait for a job; None waits for ever."""

    def __init__(self, job_id: str, timeout_s: float | None) -> None:
        self._job_id = job_id
        self._timeout_s = timeout_s
        self._at = None if timeout_s is None else time.monotonic() + timeout_s

    def limit(self, wait_s: float) -> float:
        """`wait_s`, shortened so that the wait ends shortly after the deadline at the latest."""
        return wait_s if self._at is None else max(0.05, min(wait_s, self._at - time.monotonic()))

    def check(self) -> None:
        """Raise `job.wait_timeout` after the deadline."""
        if self._at is not None and time.monotonic() >= self._at:
            raise JobError(
                "job.wait_timeout",
                f"job {self._job_id} has not ended after {self._timeout_s:g} s",
                fix=f"it goes on; re-attach: reshard jobs watch {self._job_id}",
                details={"job_id": self._job_id},
            )


def _job_event(data: str) -> JobEvent:
    try:
        return JobEvent.model_validate_json(data)
    except ValidationError as error:
        raise JobError(
            "service.protocol",
            "the service sent an event of another kind",
            fix="install the release that the service runs",
        ) from error
