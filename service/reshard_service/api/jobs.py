"""Routes of jobs: submit, look up, list, cancel, result."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import suppress
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from reshard.choices import JobState
from reshard.errors import JobError, RequestError, ReshardError, SourceError
from reshard.models.jobs import ConvertRequest, ConvertResult, Job, JobList, PlanSummary, SubmitRequest
from reshard_jobs.limits import TenantLimits
from reshard_jobs.logs import log_as
from reshard_jobs.queue.idempotency import fingerprint
from reshard_jobs.queue.store import MAX_PAGE_SIZE, JobFilter, JobStore
from reshard_jobs.tenants.principals import Principal
from reshard_jobs.tracing import current
from reshard_service.api.context import Canceller, Context, Reader, ServiceContext, Submitter
from reshard_service.api.former_places import FormerPlacesRoute
from reshard_service.api.problems import problems
from reshard_service.auth import root_of
from reshard_service.probes.prober import Prober, ProbeTimeout
from reshard_service.settings import ServiceSettings

# Checks of a submission: refuses a job if its problem can be found within seconds.

logger = logging.getLogger(__name__)

_TELLS_OF_THE_STORE = frozenset({"storage.denied", "storage.no_bucket"})


async def admit(
    request: ConvertRequest, *, tenant: str, limits: TenantLimits, settings: ServiceSettings, prober: Prober
) -> int | None:
    """Plan a submission without running it; return the bytes that it writes, or None if it was not planned.

    Checks for which no process is free, that take too long, need the worker's machine, or failed for a transient
    reason are left to PLANNING.

    Raises:
        ReshardError: The job cannot succeed.
    """
    # This runs in a thread: resolving the links of a local path may block on a network file system.
    roots = settings.jobs.roots
    judged = await run_in_threadpool(limits.allowed_request, request, roots)
    queue_s, limit_s = settings.admission_queue_s, settings.admission_s
    try:
        plan = await prober.plan(judged, tenant=tenant, roots=limits.roots(roots), limit_s=limit_s, queue_s=queue_s)
        return plan.write_bytes
    except ProbeTimeout as error:
        logger.info("a submission is accepted unplanned: %s", error)
    except ReshardError as error:
        engine_missing = error.code == "request.engine_missing"
        if isinstance(error, RequestError | SourceError) and not engine_missing:
            raise
        if error.code in _TELLS_OF_THE_STORE:
            raise
        logger.info("a submission could not be planned (%s); its job is accepted", error.code)
    return None


router = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=FormerPlacesRoute)

MAX_WAIT_S = 60.0
RETRY_AFTER_S = "2"
_PREFER_WAIT = re.compile(r"(?:^|[,;\s])wait=(\d{1,4})(?:$|[,;\s])")


@router.post("", status_code=202, response_model=Job, responses=problems(403, 409), summary="Submit a job")
async def submit(
    body: SubmitRequest,
    *,
    context: Context,
    caller: Submitter,
    request: Request,
    idempotency_key: Annotated[str | None, Header()] = None,
    prefer: Annotated[str, Header()] = "",
) -> Response:
    """Accept a conversion. With an `Idempotency-Key`, the same request again finds the same job."""
    job = await create_job(context, caller, body, idempotency_key)
    if match := _PREFER_WAIT.search(prefer):
        job, _ = await _wait(context, context.jobs_of(caller), job.id, float(match[1]), None)
    return accepted(job, request)


@router.put(
    "/{job_id}",
    status_code=202,
    response_model=Job,
    responses={200: {"model": Job, "description": "The job has ended."}, **problems(403, 409)},
    summary="Submit a job under an id of your own",
)
async def put(
    job_id: str,
    body: SubmitRequest,
    *,
    context: Context,
    caller: Submitter,
    request: Request,
    prefer: Annotated[str, Header()] = "",
) -> Response:
    """Accept a conversion under an id that the caller chooses.

    The same request again finds the same job: 200 if it has ended, 202 if not. Another request with this id is 409.
    """
    job = await create_job(context, caller, body, None, job_id)
    if match := _PREFER_WAIT.search(prefer):
        job, _ = await _wait(context, context.jobs_of(caller), job.id, float(match[1]), None)
    return JSONResponse(job.model_dump(mode="json")) if job.done else accepted(job, request)


def accepted(job: Job, request: Request) -> Response:
    """The answer 202 with `Location` and `Retry-After`."""
    path = root_of(request.scope) + job.links["self"]
    headers = {"Location": path, "Operation-Location": path, "Retry-After": RETRY_AFTER_S}
    return JSONResponse(job.model_dump(mode="json"), 202, headers)


async def create_job(
    context: ServiceContext, caller: Principal, body: SubmitRequest, key: str | None, job_id: str | None = None
) -> Job:
    """Check a submission and record its job; with a key or an id, find the job of the same submission before.

    Raises:
        ReshardError: The submission is refused.
    """
    hold, store, keys = None, context.jobs_of(caller), context.keys_of(caller)
    if job_id is not None or key is not None:
        digest = fingerprint(body.digested())
        begin = partial(keys.begin_job, job_id) if job_id is not None else partial(keys.begin, key or "")
        found = await run_in_threadpool(begin, digest)
        if isinstance(found, str):
            return await run_in_threadpool(store.get, found)
        hold = found
    settings, traceparent = context.settings, current().traceparent
    try:
        request = settings.maxima.allowed_request(body.conversion())
        limits = await run_in_threadpool(context.tenants.limits, caller.tenant)
        limits.require_priority(body.priority)
        planned_bytes = await admit(
            request, tenant=caller.tenant, limits=limits, settings=settings, prober=context.prober
        )
        job = await run_in_threadpool(
            lambda: store.create(
                request,
                labels=body.labels,
                max_attempts=body.max_attempts,
                max_workers=body.max_workers,
                priority=body.priority,
                planned_bytes=planned_bytes,
                hold=hold,
                job_id=job_id,
                traceparent=traceparent,
            )
        )
    except ReshardError:
        if hold is not None:
            await run_in_threadpool(keys.abandon, hold)
        raise
    with log_as(job=job.id, tenant=caller.tenant):
        logger.info("job %s: accepted", job.id)
    await run_in_threadpool(context.doorbell.ring)
    return job


@router.get("", response_model=JobList)
def list_jobs(
    *,
    context: Context,
    caller: Reader,
    state: Annotated[list[JobState] | None, Query()] = None,
    label: Annotated[list[str] | None, Query()] = None,
    page_size: Annotated[int, Query(ge=1, le=MAX_PAGE_SIZE)] = 50,
    page_token: Annotated[str, Query(max_length=1024)] = "",
) -> Response:
    """List jobs, newest first, that have all labels (`label=name=value`) and one of the states (`state=`).

    Results are short: `left_out` has the lengths of their long lists, which the job itself has.
    """
    labels: dict[str, str] = {}
    for text in label or []:
        name, equals, value = text.partition("=")
        if not equals:
            raise RequestError("request.invalid", "a label filter has no `=`", fix="use label=name=value")
        labels[name] = value
    chosen = JobFilter(tuple(state or ()), labels)
    page = context.jobs_of(caller).list_json(chosen, page_size=page_size, page_token=page_token)
    return Response(page, media_type="application/json")


@router.get(
    "/{job_id}",
    response_model=Job,
    responses={304: {"description": "The job is as `If-None-Match` knows it."}, **problems(404)},
)
async def get_job(
    job_id: str,
    *,
    context: Context,
    caller: Reader,
    wait: Annotated[float, Query(ge=0, le=3600, allow_inf_nan=False)] = 0.0,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Get a job. With `wait`, answers when it ends, when it changes (with `If-None-Match`), or after `wait` seconds."""
    job, tag = await _wait(context, context.jobs_of(caller), job_id, wait, if_none_match)
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if not job.done:
        headers["Retry-After"] = RETRY_AFTER_S
    if tag == if_none_match:
        return Response(status_code=304, headers=headers)
    return JSONResponse(job.model_dump(mode="json"), headers=headers)


async def _wait(
    context: ServiceContext, store: JobStore, job_id: str, wait_s: float, known_tag: str | None
) -> tuple[Job, str]:
    job, seq = await run_in_threadpool(store.look, job_id)
    tag = _tag_of(seq)
    if job.done or wait_s <= 0 or (known_tag is not None and tag != known_tag):
        return job, tag
    key = await run_in_threadpool(store.key_of, job_id)
    with suppress(TimeoutError), context.feed.watch(key, seq) as watch:
        async with asyncio.timeout(min(wait_s, MAX_WAIT_S)):
            page = await watch.after(seq)
            while known_tag is None and not page.done:
                seq = page.events[-1].seq if page.events else seq
                page = await watch.after(seq)
    job, seq = await run_in_threadpool(store.look, job_id)
    return job, _tag_of(seq)


def _tag_of(seq: int) -> str:
    return f'"{seq}"'


@router.post(
    "/{job_id}/cancel", status_code=202, response_model=Job, responses=problems(404, 409), summary="Cancel a job"
)
async def cancel(job_id: str, context: Context, caller: Canceller, request: Request) -> Response:
    """Cancel a job, or give up the files of one that FAILED. Repeating is harmless. Answers 409 if it has SUCCEEDED."""
    return accepted(await cancel_job(context, caller, job_id), request)


async def cancel_job(context: ServiceContext, caller: Principal, job_id: str) -> Job:
    """Cancel a job for a caller, and wake a worker if it has to clean up. Raises the errors of `JobStore.cancel`."""
    job = await run_in_threadpool(context.jobs_of(caller).cancel, job_id)
    if job.state is JobState.CANCELLING or job.leftovers_until is not None:
        # The owner polls for cancels. If there is no owner, a worker must be woken to clean up.
        await run_in_threadpool(context.doorbell.ring)
    return job


@router.post(
    "/{job_id}/retry", status_code=202, response_model=Job, responses=problems(404, 409), summary="Retry a failed job"
)
async def retry(job_id: str, context: Context, caller: Submitter, request: Request) -> Response:
    """Send a job that FAILED back to the queue; it goes on where it stopped. Repeating is harmless."""
    return accepted(await retry_job(context, caller, job_id), request)


async def retry_job(context: ServiceContext, caller: Principal, job_id: str) -> Job:
    """Send a job back to the queue for a caller, and wake a worker. Raises the errors of `JobStore.retry`."""
    job = await run_in_threadpool(context.jobs_of(caller).retry, job_id)
    if job.state is JobState.QUEUED:
        await run_in_threadpool(context.doorbell.ring)
    return job


@router.get(
    "/{job_id}/result",
    response_model=ConvertResult | PlanSummary,
    responses=problems(404, 409),
    summary="Get a job's result",
)
def result(job_id: str, context: Context, caller: Reader) -> ConvertResult | PlanSummary:
    """Get the result of a job. Answers 409 while it runs and if it has none: `details.error` says why it failed."""
    return outcome_of(context.jobs_of(caller).get(job_id))


def outcome_of(job: Job) -> ConvertResult | PlanSummary:
    """The result of a job.

    Raises:
        JobError: `job.failed` with the job's own error, `job.cancelled`, or `job.not_finished`.
    """
    if (found := job.result or job.plan) is not None:
        return found
    details = {"job_id": job.id, "state": job.state.value}
    if job.state is JobState.FAILED and job.error is not None:
        # A status of the job's own error, such as 503, would say that the API had failed.
        raise JobError(
            "job.failed",
            f"job {job.id} failed: {job.error.code}: {job.error.detail}",
            fix=f"reshard jobs show {job.id}",
            details={**details, "error": job.error.model_dump()},
        )
    if job.state is JobState.CANCELLED:
        raise JobError("job.cancelled", f"job {job.id} was cancelled", fix="submit it again", details=details)
    raise JobError(
        "job.not_finished", f"job {job.id} is {job.state}", fix=f"reshard jobs watch {job.id}", details=details
    )
