"""The client of a reshard service."""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Generator, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, Unpack, cast

import httpx
from pydantic import BaseModel, ValidationError

from reshard import _wire
from reshard._sse import ServerEvent, parse_events
from reshard._wire import Answer, Call, ConvertOptions, ModelT
from reshard.admin import AdminClient
from reshard.errors import JobError, RequestError, ReshardError, from_problem
from reshard.models import (
    ConvertRequest,
    ConvertResult,
    Inspection,
    Job,
    JobEvent,
    JobEventPage,
    JobKind,
    JobList,
    JobState,
    PlanSummary,
    SourceSpec,
    TargetFormat,
    WorkerNode,
    WorkerNodeList,
)
from reshard.service_token import ServiceAuth
from reshard.webhooks import Webhooks

_LONG_POLL_S = 25.0
_SILENCE_S = 45.0
"""Seconds of silence after which a stream counts as dead; the service sends a ping every 15 s."""
_POLL_S = 1.0


class Client:
    """A client of one service. It holds one connection pool and is safe to share between threads.

    Args:
        url: The service, default `RESHARD_URL`.
        token: Its token, default `RESHARD_TOKEN`. Without both, the client finds the token of a `reshard serve` that
            the same user started on this machine.
        timeout_s: Seconds that one request may take; long polls and streams are not counted.
        retries: How often a request is repeated after a transient failure. Every call is safe to repeat.

    Raises:
        RequestError: `request.invalid`: no URL is known.
    """

    def __init__(
        self, url: str | None = None, token: str | None = None, *, timeout_s: float = 30.0, retries: int = 5
    ) -> None:
        base = url or os.environ.get("RESHARD_URL", "")
        if not base.startswith(("http://", "https://")):
            raise RequestError(
                "request.invalid",
                f"the service's URL is {base!r}" if base else "no service is configured",
                fix="export RESHARD_URL=http://host:8000 (start one with `reshard serve`)",
            )
        key = token if token is not None else os.environ.get("RESHARD_TOKEN") or None
        self.url = base.rstrip("/")
        self._timeout_s = timeout_s
        self._retries = retries
        self._http = httpx.Client(base_url=self.url, auth=ServiceAuth(self.url, key), timeout=timeout_s)

    def __enter__(self) -> Self:
        """Return the client itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client's connections."""
        self.close()

    def close(self) -> None:
        """Close the connection pool. The client cannot be used after that; `with Client() as client:` does it."""
        self._http.close()

    @property
    def admin(self) -> AdminClient:
        """The calls of administrators: tokens, tenants, the audit log.

        Returns:
            An object with a method for each call. The calls need a token with the scope `admin`.
        """
        return AdminClient(self._send)

    def inspect(self, url: str | SourceSpec, *, tag: str | None = None, profile: str | None = None) -> Inspection:
        """Describe a checkpoint that the service can read, from its metadata.

        Args:
            url: The checkpoint, as the service sees it: an absolute path or a URL; or a `SourceSpec`.
            tag: Checkpoint tag; by default what `latest` names.
            profile: Name of a storage profile of the service.

        Returns:
            The description.

        Raises:
            SourceError: The checkpoint is missing, damaged, hostile or of an unsupported kind.
            RequestError: `request.root_forbidden`, `request.unauthorized` and the like: the service refuses.
            JobError: `job.wait_timeout`: reading takes longer than the service allows; `service.unavailable`.
        """
        spec = url if isinstance(url, SourceSpec) else SourceSpec(url=url, tag=tag, profile=profile)
        body = _dump(spec)
        return self._ask(Call("POST", "/v1/inspections", body=body), Inspection)

    def plan(
        self, source: str | SourceSpec, target: str, *, to: TargetFormat | str, **options: Unpack[ConvertOptions]
    ) -> PlanSummary:
        """Plan a conversion without running it. Waits for the planning job if the service makes one.

        Args:
            source: The checkpoint, as the service sees it, or a `SourceSpec` with its tag and profile.
            target: The target, as the service sees it.
            to: The format to write.
            **options: Options of the conversion, by their names in requests; see `ConvertRequest`.

        Returns:
            The plan.

        Raises:
            ReshardError: What is wrong with the request or with the source; `service.unavailable`.
        """
        return self.plan_request(_wire.convert_request(source, target, to, options))

    def plan_request(self, request: ConvertRequest) -> PlanSummary:
        """`plan` for a request that is a wire model already.

        Args:
            request: The conversion.

        Returns:
            The plan.

        Raises:
            ReshardError: As `plan`.
        """
        answer = self._send(Call("POST", "/v1/plans", body=_dump(request)))
        if answer.status != 202:
            return _wire.parse(answer, PlanSummary)
        job = self.wait(_wire.parse(answer, Job).id)
        outcome = self.result(job.id)
        if not isinstance(outcome, PlanSummary):
            raise JobError("service.protocol", "a planning job has no plan")
        return outcome

    def submit(  # noqa: PLR0913 - the fields of a submission
        self,
        source: str | SourceSpec,
        target: str,
        *,
        to: TargetFormat | str,
        labels: Mapping[str, str] | None = None,
        max_attempts: int = 3,
        max_workers: int = 0,
        priority: int = 0,
        idempotency_key: str | None = None,
        job_id: str | None = None,
        **options: Unpack[ConvertOptions],
    ) -> Job:
        """Submit a conversion. A second call with the same idempotency key, or the same job id, returns the same job.

        Args:
            source: The checkpoint, as the service sees it, or a `SourceSpec` with its tag and profile.
            target: The target, as the service sees it.
            to: The format to write.
            labels: Names and values by which `list` finds the job.
            max_attempts: Attempts before the job fails because its workers were lost.
            max_workers: Most workers that run the job at once: 0 is the service's default, 1 forbids helpers.
            priority: Jobs with a higher one begin first.
            idempotency_key: A text of your own that names this submission; by default a new one.
            job_id: An id of your own, such as that of a scheduler's step: 1 to 40 letters, digits, `.`, `_` and `-`.
            **options: Options of the conversion, by their names in requests; see `ConvertRequest`.

        Returns:
            The job, which may have ended already if it was submitted before.

        Raises:
            ReshardError: The service refuses the request. A problem that takes longer to find fails the job instead.
        """
        request = _wire.convert_request(source, target, to, options)
        return self.submit_request(
            request,
            labels=labels,
            max_attempts=max_attempts,
            max_workers=max_workers,
            priority=priority,
            idempotency_key=idempotency_key,
            job_id=job_id,
        )

    def submit_request(
        self,
        request: ConvertRequest,
        *,
        labels: Mapping[str, str] | None = None,
        max_attempts: int = 3,
        max_workers: int = 0,
        priority: int = 0,
        idempotency_key: str | None = None,
        job_id: str | None = None,
    ) -> Job:
        """`submit` for a request that is a wire model already.

        Args:
            request: The conversion.
            labels: As for `submit`, and so are all other arguments.
            max_attempts: Attempts before the job fails because its workers were lost.
            max_workers: Most workers that run the job at once.
            priority: Jobs with a higher one begin first.
            idempotency_key: A text of your own that names this submission.
            job_id: An id of your own.

        Returns:
            The job.

        Raises:
            ReshardError: The service refuses the request.
        """
        key = idempotency_key or str(uuid.uuid4())
        settings = {
            "labels": dict(labels or {}),
            "max_attempts": max_attempts,
            "max_workers": max_workers,
            "priority": priority,
        }
        return self._ask(_wire.submit_call(request, settings, key, job_id), Job)

    def get(self, job_id: str) -> Job:
        """The job as it is now.

        Args:
            job_id: The job's id.

        Returns:
            The job. A notebook shows it with its progress, error or result.

        Raises:
            RequestError: `request.not_found`.
            JobError: `service.unavailable`.
        """
        return self._ask(_wire.job_call(job_id), Job)

    def list(
        self,
        *,
        states: tuple[JobState, ...] = (),
        labels: Mapping[str, str] | None = None,
        page_size: int = 50,
        page_token: str = "",
    ) -> JobList:
        """One page of jobs, newest first; `next_page_token` leads to the next.

        Args:
            states: Only jobs in one of these states.
            labels: Only jobs with all of these labels.
            page_size: Most jobs of a page, 200 at most.
            page_token: The `next_page_token` of the page before.

        Returns:
            The page.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        return self._ask(_wire.list_call(states, labels or {}, page_size, page_token), JobList)

    def wait(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        """Wait for the end of a job and return it; it may have failed or been cancelled (`result` raises then).

        Args:
            job_id: The job's id.
            timeout_s: Seconds to wait; None waits for ever.

        Returns:
            The job after its end.

        Raises:
            JobError: `job.wait_timeout`; the job goes on. `service.unavailable`.
            RequestError: `request.not_found`.
        """
        deadline = _Deadline(job_id, timeout_s)
        while True:
            job = self._ask(_wire.job_call(job_id, wait_s=deadline.limit(_LONG_POLL_S)), Job)
            if job.done:
                return job
            deadline.check()

    def watch(self, job_id: str, *, after_seq: int = 0, timeout_s: float | None = None) -> Generator[JobEvent]:
        """Yield the events of a job until its end, each exactly once, across broken connections and restarts.

        Args:
            job_id: The job's id.
            after_seq: The `seq` of the last event that is known already; 0 yields all.
            timeout_s: Seconds until the end of the job; None waits for ever.

        Yields:
            The events, in their order.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last;
                `job.wait_timeout` when the job did not end in time (it goes on).
        """
        deadline = _Deadline(job_id, timeout_s)
        failures = 0
        streaming = True
        while True:
            seen, failed = after_seq, False
            try:
                source = (self._stream if streaming else self._poll)(job_id, after_seq, deadline)
                for event in source:
                    after_seq, failures = event.seq, 0
                    yield event
                    failed = event.kind == "state" and event.state is JobState.FAILED
                    if event.kind == "state" and event.state.terminal and not failed:
                        return
                # A job that FAILED may have been sent back to the queue. Then the log goes on.
                if failed and (not streaming or self._ended_before(job_id, after_seq)):
                    return
            except _NotAStreamError:
                # A proxy on the way does not pass streams through, so the client polls from now on.
                streaming = False
                continue
            except httpx.TransportError as error:
                deadline.check()
                if failures >= self._retries:
                    raise _away(self.url, error) from error
            if after_seq == seen:
                failures += 1
                if self._ended_before(job_id, after_seq):
                    return
            time.sleep(_wire.pause_s(failures, random.random(), None))  # noqa: S311 - jitter

    def events(self, job_id: str, *, after_seq: int = 0) -> Generator[JobEvent]:
        """Yield the events that a job has until now; `watch` goes on until its end.

        Args:
            job_id: The job's id.
            after_seq: The `seq` of the last event that is known already; 0 yields all.

        Yields:
            The events, in their order.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        while True:
            page = self._ask(_wire.events_call(job_id, after_seq), JobEventPage)
            yield from page.events
            if page.done or not page.events:
                return
            after_seq = page.events[-1].seq

    def cancel(self, job_id: str) -> Job:
        """Cancel a job, or give up the files of a job that FAILED. Cancelling it twice is harmless.

        Args:
            job_id: The job's id.

        Returns:
            The job, CANCELLING until its files are removed.

        Raises:
            JobError: `job.finished`: it has SUCCEEDED already.
        """
        return self._ask(_wire.cancel_call(job_id), Job)

    def retry(self, job_id: str) -> Job:
        """Send a job that FAILED back to the queue, with all its attempts; it goes on where it stopped.

        Args:
            job_id: The job's id.

        Returns:
            The job, QUEUED again.

        Raises:
            JobError: `job.finished`: it has SUCCEEDED; `job.cancelled`; `job.not_finished`: it has not failed, or its
                files are being removed at this moment.
        """
        return self._ask(_wire.retry_call(job_id), Job)

    @property
    def webhooks(self) -> Webhooks:
        """The endpoints that the service calls when jobs end.

        Returns:
            An object with a method for each call.
        """
        return Webhooks(self._send)

    def workers(self) -> tuple[WorkerNode, ...]:
        """The live workers of the service, by name.

        Returns:
            The workers with what each does now.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        return self._ask(Call("GET", "/v1/workers"), WorkerNodeList).workers

    def result(self, job_id: str) -> ConvertResult | PlanSummary:
        """The result of a job that SUCCEEDED.

        Args:
            job_id: The job's id.

        Returns:
            What the conversion did; the plan if the job only planned.

        Raises:
            ReshardError: The job's own error, `job.cancelled`, or `job.not_finished`.
        """
        job = self.get(job_id)
        if job.error is not None:
            raise from_problem(job.error.model_dump())
        model = PlanSummary if job.kind is JobKind.PLAN else ConvertResult
        try:
            return self._ask(Call("GET", f"/v1/jobs/{job.id}/result"), model)
        except ReshardError as error:
            # It failed between the two calls.
            if error.code == "job.failed" and isinstance(own := error.details.get("error"), dict):
                raise from_problem(cast("dict[str, Any]", own)) from None
            raise

    def _ended_before(self, job_id: str, after_seq: int) -> bool:
        page = self._ask(_wire.events_call(job_id, after_seq), JobEventPage)
        return page.done and not page.events

    def _stream(self, job_id: str, after_seq: int, deadline: _Deadline) -> Generator[JobEvent]:
        call = _wire.stream_call(job_id, after_seq)
        timeout = httpx.Timeout(self._timeout_s, read=deadline.limit(_SILENCE_S))
        with self._http.stream(call.method, call.path, headers=dict(call.headers), timeout=timeout) as response:
            if response.status_code >= 400:
                answer = _answer(response, response.read())
                if _wire.passing(answer):
                    raise httpx.ReadError(f"HTTP {response.status_code}")
                raise _wire.error_of(answer)
            if response.status_code == 204:
                return
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise _NotAStreamError
            for event in parse_events(deadline.checked(response.iter_lines())):
                yield _job_event(event)

    def _poll(self, job_id: str, after_seq: int, deadline: _Deadline) -> Generator[JobEvent]:
        while True:
            page = self._ask(_wire.events_call(job_id, after_seq), JobEventPage)
            for event in page.events:
                after_seq = event.seq
                yield event
            if page.done:
                return
            deadline.check()
            time.sleep(deadline.limit(_POLL_S))

    def _ask(self, call: Call, model: type[ModelT]) -> ModelT:
        return _wire.parse(self._send(call), model)

    def _send(self, call: Call) -> Answer:
        retries = 0 if call.once else self._retries
        for tries in range(retries + 1):
            answer = None
            try:
                response = self._http.request(
                    call.method,
                    call.path,
                    params=call.params,
                    headers=dict(call.headers),
                    json=call.body,
                    timeout=httpx.Timeout(self._timeout_s, read=self._timeout_s + call.wait_s),
                )
                answer = _answer(response, response.content)
                if not _wire.passing(answer) or tries == retries:
                    return answer
            except httpx.TransportError as error:
                if tries == retries:
                    raise _away(self.url, error) from error
            time.sleep(_wire.pause_s(tries, random.random(), answer))  # noqa: S311 - jitter
        raise AssertionError("the last try returns or raises")


class _Deadline:
    """The time limit of a wait for a job; None waits for ever."""

    def __init__(self, job_id: str, timeout_s: float | None) -> None:
        self._job_id = job_id
        self._timeout_s = timeout_s
        self._at = None if timeout_s is None else time.monotonic() + timeout_s

    def limit(self, wait_s: float) -> float:
        """`wait_s`, shortened so that the wait ends shortly after the deadline at the latest."""
        return wait_s if self._at is None else max(0.05, min(wait_s, self._at - time.monotonic()))

    def checked(self, lines: Iterator[str]) -> Iterator[str]:
        """Yield lines until the deadline passes; pings are lines, too."""
        for line in lines:
            yield line
            self.check()

    def check(self) -> None:
        """Raise `job.wait_timeout` after the deadline."""
        if self._at is not None and time.monotonic() >= self._at:
            raise JobError(
                "job.wait_timeout",
                f"job {self._job_id} has not ended after {self._timeout_s:g} s",
                fix=f"it goes on; re-attach: reshard jobs watch {self._job_id}",
                details={"job_id": self._job_id},
            )


class _NotAStreamError(Exception):
    """The answer to a stream request is not a stream."""


def _dump(model: BaseModel) -> object:
    return model.model_dump(mode="json")


def _answer(response: httpx.Response, body: bytes) -> Answer:
    return Answer(response.status_code, response.headers, body)


def _job_event(event: ServerEvent) -> JobEvent:
    try:
        return JobEvent.model_validate_json(event.data)
    except ValidationError as error:
        raise JobError("service.protocol", "the service sent an event of another kind") from error


def _away(url: str, error: httpx.TransportError) -> ReshardError:
    return JobError(
        "service.unavailable",
        f"{url} does not answer ({type(error).__name__})",
        fix=f"check RESHARD_URL: curl {url}/healthz",
    )
