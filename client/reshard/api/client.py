"""The client of a reshard service."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import httpx

from reshard.api import wire
from reshard.api.admin import AdminClient, Layouts, Webhooks
from reshard.api.exchange import Exchange, Flow, Listen, NextLine, Pause, Talk
from reshard.api.service_token import ServiceAuth
from reshard.api.wire import Answer, Call, ModelT
from reshard.choices import JobState, TargetFormat
from reshard.errors import RequestError
from reshard.models.jobs import (
    ConvertRequest,
    ConvertResult,
    Inspection,
    Job,
    JobEvent,
    JobList,
    PlanSummary,
    WorkerNode,
    WorkerNodeList,
)
from reshard.models.keywords import ConvertOptions
from reshard.models.resume import RunLaunch
from reshard.option import renamed_argument
from reshard.options import SourceSpec

T = TypeVar("T")


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
        self.url, auth = service_at(url, token)
        self._exchange = Exchange(self.url, retries)
        named = {"User-Agent": wire.USER_AGENT}
        self._http = httpx.Client(base_url=self.url, auth=auth, timeout=timeout_s, headers=named)

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
        return AdminClient(self._run, self._exchange)

    def inspect(
        self,
        source: str | SourceSpec | None = None,
        *,
        tag: str | None = None,
        profile: str | None = None,
        launch: RunLaunch | None = None,
        url: str | SourceSpec | None = None,
    ) -> Inspection:
        """Describe a checkpoint that the service can read, from its metadata.

        Args:
            source: The checkpoint, as the service sees it: an absolute path or a URL; or a `SourceSpec`.
            tag: Checkpoint tag; by default what `latest` names.
            profile: Name of a storage profile of the service.
            launch: A run that is about to resume from it: the answer's `resume` says what the run loads.
            url: The former name of `source`.

        Returns:
            The description.

        Raises:
            SourceError: The checkpoint is missing, damaged, hostile or of an unsupported kind.
            RequestError: `request.root_forbidden`, `request.unauthorized` and the like: the service refuses.
            JobError: `job.wait_timeout`: reading takes longer than the service allows; `service.unavailable`.
        """
        place = renamed_argument("source", source, "url", url)
        spec = place if isinstance(place, SourceSpec) else SourceSpec(url=place, tag=tag, profile=profile)
        body = {
            **spec.model_dump(mode="json"),
            **({} if launch is None else {"launch": launch.model_dump(mode="json")}),
        }
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
        return self.plan_request(wire.convert_request(source, target, to, options))

    def plan_request(self, request: ConvertRequest) -> PlanSummary:
        """`plan` for a request that is a wire model already.

        Args:
            request: The conversion.

        Returns:
            The plan.

        Raises:
            ReshardError: As `plan`.
        """
        return self._run(self._exchange.plan(request))

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
        request = wire.convert_request(source, target, to, options)
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
        return self._ask(wire.submit_call(request, settings, key, job_id), Job)

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
        return self._ask(wire.job_call(job_id), Job)

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
        return self._ask(wire.list_call(states, labels or {}, page_size, page_token), JobList)

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
        return self._run(self._exchange.wait(job_id, timeout_s))

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
        return self._told(self._exchange.watch(job_id, after_seq, timeout_s))

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
        return self._told(self._exchange.events(job_id, after_seq))

    def cancel(self, job_id: str) -> Job:
        """Cancel a job, or give up the files of a job that FAILED. Cancelling it twice is harmless.

        Args:
            job_id: The job's id.

        Returns:
            The job, CANCELLING until its files are removed.

        Raises:
            JobError: `job.finished`: it has SUCCEEDED already.
        """
        return self._ask(wire.cancel_call(job_id), Job)

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
        return self._ask(wire.retry_call(job_id), Job)

    @property
    def webhooks(self) -> Webhooks:
        """The endpoints that the service calls when jobs end.

        Returns:
            An object with a method for each call.
        """
        return Webhooks(self._run, self._exchange)

    @property
    def layouts(self) -> Layouts:
        """Targets that the service serves and that nobody writes.

        Returns:
            An object with a method for each call.
        """
        return Layouts(self._run, self._exchange)

    def workers(self) -> tuple[WorkerNode, ...]:
        """The live workers of the service, by name.

        Returns:
            The workers with what each does now.

        Raises:
            ReshardError: The service refuses, or cannot be reached for longer than the retries last.
        """
        return self._run(self._exchange.pick(Call("GET", "/v1/workers"), WorkerNodeList, lambda found: found.workers))

    def result(self, job_id: str) -> ConvertResult | PlanSummary:
        """The result of a job that SUCCEEDED.

        Args:
            job_id: The job's id.

        Returns:
            What the conversion did; the plan if the job only planned.

        Raises:
            ReshardError: The job's own error, `job.cancelled`, or `job.not_finished`.
        """
        return self._run(self._exchange.result(job_id))

    def _ask(self, call: Call, model: type[ModelT]) -> ModelT:
        return self._run(self._exchange.ask(call, model))

    def _run(self, flow: Flow[T]) -> T:
        talk = Talk(flow)
        for _ in self._steps(talk):
            raise AssertionError("an event of an exchange that has none")
        return talk.value

    def _told(self, flow: Flow[None]) -> Generator[JobEvent]:
        yield from self._steps(Talk(flow))

    def _steps(self, talk: Talk[Any]) -> Generator[JobEvent]:
        """Take the steps of an exchange; yields its events."""
        with ExitStack() as opened:
            lines: Iterator[str] = iter(())
            while (step := talk.step) is not None:
                result: object = None
                try:
                    if isinstance(step, JobEvent):
                        yield step
                    elif isinstance(step, NextLine):
                        result = next(lines, None)
                    elif isinstance(step, Pause):
                        opened.close()
                        time.sleep(step.seconds)
                    else:
                        opened.close()
                        response = opened.enter_context(self._http.stream(**sent(step, self._http.timeout)))
                        result = answer = Answer(response.status_code, response.headers, b"")
                        if isinstance(step, Listen) and answer.is_stream:
                            lines = response.iter_lines()
                        else:
                            result = replace(answer, body=response.read())
                except httpx.TransportError as error:
                    talk.fail(error)
                else:
                    talk.take(result)


def service_at(url: str | None, token: str | None) -> tuple[str, ServiceAuth]:
    """The URL of a service, and what sends its token, from the arguments of a client.

    Raises:
        RequestError: `request.invalid`: no URL is known.
    """
    base = url or os.environ.get("RESHARD_URL", "")
    if not base.startswith(("http://", "https://")):
        raise RequestError(
            "request.invalid",
            f"the service's URL is {base!r}" if base else "no service is configured",
            fix="export RESHARD_URL=http://host:8000 (start one with `reshard serve`)",
        )
    base = base.rstrip("/")
    return base, ServiceAuth(base, token if token is not None else os.environ.get("RESHARD_TOKEN") or None)


def sent(step: Call | Listen, timeout: httpx.Timeout) -> dict[str, Any]:
    """The arguments of httpx's `stream` for a call."""
    call = step if isinstance(step, Call) else step.call
    read_s = step.silence_s if isinstance(step, Listen) else (timeout.read or 0.0) + call.wait_s
    limits = httpx.Timeout(timeout.connect, read=read_s)
    return {
        "method": call.method,
        "url": call.path,
        "params": call.params,
        "headers": dict(call.headers),
        "json": call.body,
        "timeout": limits,
    }
