"""Calls of the API as data: the request to send and how to parse its answer. No I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from reshard.choices import JobState, TargetFormat
from reshard.declared import declared_options
from reshard.errors import JobError, RequestError, ReshardError, from_problem, printable
from reshard.installed_formats import nested
from reshard.models.jobs import ConvertRequest
from reshard.models.keywords import ConvertOptions
from reshard.options import SourceSpec
from reshard.wire_model import invalid

ModelT = TypeVar("ModelT", bound=BaseModel)


USER_AGENT = "reshard"
"""The name of a client."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request. It is safe to repeat, unless it is to be sent once: submissions carry an idempotency key."""

    method: str
    path: str
    params: tuple[tuple[str, str], ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: Any = None
    wait_s: float = 0.0
    """Seconds for which the service may hold the answer back on purpose (long poll)."""
    once: bool = False
    """True to send it once, whatever happens: the answer has a secret that only this try knows."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_stream(self) -> bool:
        """True if events follow."""
        return self.status == 200 and self.headers.get("content-type", "").startswith("text/event-stream")


def convert_request(
    source: str | SourceSpec,
    target: str,
    to: TargetFormat | str,
    options: ConvertOptions,
    *,
    flags: Mapping[str, str] | None = None,
) -> ConvertRequest:
    """The `ConvertRequest` made of the arguments of the SDK or of the flags of a command; see `invalid` for `flags`.

    Raises:
        RequestError: `request.invalid`.
    """
    try:
        return ConvertRequest.model_validate({"target": target, **request_fields(source, to, options)})
    except ValidationError as error:
        raise invalid(error, flags) from None


def request_fields(source: str | SourceSpec, to: TargetFormat | str, options: ConvertOptions) -> dict[str, Any]:
    """The fields that requests of conversions and of layouts share, from the arguments of the SDK; not validated.

    Raises:
        RequestError: `request.invalid` for an option under both of its names, and for a text that is not a size.
    """
    fields = _by_field(options)
    said = {name: fields.pop(name) for name in (*SourceSpec.model_fields,) if name in fields}
    spec = source if isinstance(source, SourceSpec) else {"url": source, **said}
    return {"source": spec, "to": to, **nested(fields)}


def _by_field(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by the names of their fields: the functions' `memory_limit="1GiB"` is the field `memory_limit_bytes`."""
    named = {o.name: o for o in declared_options().values() if o.name != o.field}
    fields = {name: value for name, value in options.items() if name not in named}
    for name, option in named.items():
        if name not in options:
            continue
        if option.field in fields:
            raise RequestError(
                "request.invalid", f"{name} and {option.field} are one option", fix=f"leave {option.field} out"
            )
        if (value := options[name]) is not None:
            fields[option.field] = option.value(value)
    return fields


def submit_call(request: ConvertRequest, settings: Mapping[str, Any], key: str, job_id: str | None = None) -> Call:
    """Submit a conversion with the job's own settings (see `SubmitRequest`), as the job `job_id` if one is given."""
    # A service of an earlier release knows fewer options: those that nobody gave are left out.
    options = request.options.model_dump(mode="json", exclude_defaults=True)
    request = request.sent()
    body = {**request.model_dump(mode="json"), "options": options, **settings}
    if job_id is not None:
        return Call("PUT", _job_path(job_id), body=body)
    return Call("POST", "/v1/jobs", headers={"Idempotency-Key": key}, body=body)


def job_call(job_id: str, *, wait_s: float = 0.0, tag: str | None = None) -> Call:
    """Get a job. With `wait_s` the service answers when the job ends or, with `tag` (its last ETag), changes."""
    params = (("wait", f"{wait_s:g}"),) if wait_s else ()
    headers = {"If-None-Match": tag} if tag else {}
    return Call("GET", _job_path(job_id), params, headers, wait_s=wait_s)


def list_call(states: tuple[JobState, ...], labels: Mapping[str, str], page_size: int, page_token: str) -> Call:
    """Get one page of jobs."""
    params = [("page_size", str(page_size))]
    params += [("state", state.value) for state in states]
    params += [("label", f"{name}={value}") for name, value in labels.items()]
    params += [("page_token", page_token)] if page_token else []
    return Call("GET", "/v1/jobs", tuple(params))


def cancel_call(job_id: str) -> Call:
    """Cancel a job."""
    return Call("POST", f"{_job_path(job_id)}/cancel")


def retry_call(job_id: str) -> Call:
    """Send a job that FAILED back to the queue."""
    return Call("POST", f"{_job_path(job_id)}/retry")


def result_call(job_id: str) -> Call:
    """Get the result of a job that SUCCEEDED."""
    return Call("GET", f"{_job_path(job_id)}/result")


def events_call(job_id: str, after_seq: int) -> Call:
    """Get the events after a sequence number, as a page."""
    params = (("after_seq", str(after_seq)),)
    return Call("GET", f"{_job_path(job_id)}/events", params, {"Accept": "application/json"})


def stream_call(job_id: str, after_seq: int) -> Call:
    """Get the events after a sequence number, as a stream."""
    headers = {"Accept": "text/event-stream", "Cache-Control": "no-cache"}
    if after_seq:
        headers["Last-Event-ID"] = str(after_seq)
    return Call("GET", f"{_job_path(job_id)}/events", (), headers)


def parse(answer: Answer, model: type[ModelT]) -> ModelT:
    """The answer's body, parsed as a wire model.

    Raises:
        ReshardError: The problem that the service sent, or `service.protocol`.
    """
    if answer.status >= 400:
        raise error_of(answer)
    try:
        # A service of a later release knows more fields.
        return model.model_validate_json(answer.body, extra="ignore")
    except ValidationError as error:
        raise JobError(
            "service.protocol",
            f"the service's answer is not a {model.__name__}",
            fix="is RESHARD_URL a reshard service, of this client's version?",
        ) from error


def error_of(answer: Answer) -> ReshardError:
    """The typed error that an answer with an error status carries."""
    try:
        problem: Any = json.loads(answer.body)
    except ValueError:
        problem = None
    if isinstance(problem, Mapping) and "code" in problem:
        return from_problem(cast("Mapping[str, Any]", problem))
    # The body is not a problem object of ours: a proxy answered.
    text = printable(answer.body[:200].decode("utf-8", "replace"))
    passing = answer.status in PASSING_STATUSES
    code = "service.unavailable" if passing else "service.protocol"
    return JobError(code, f"HTTP {answer.status}: {text}", fix="check RESHARD_URL, and any proxy on the way")


PASSING_STATUSES = frozenset({429, 502, 503, 504})
"""Statuses after which the same request may succeed."""


def passing(answer: Answer) -> bool:
    """True if the same request may succeed later."""
    if answer.status < 400:
        return False
    return error_of(answer).retryable


def pause_s(tries: int, jitter: float, answer: Answer | None) -> float:
    """Seconds before the next try: exponential with jitter (0 to 1), or the service's `Retry-After`, at most 10 s."""
    backoff = min(0.25 * 2**tries, 8.0) * (0.5 + 0.5 * jitter)
    asked = answer.headers.get("retry-after", "") if answer else ""
    return min(max(backoff, float(asked)), 10.0) if asked.isdigit() else backoff


def _job_path(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"
