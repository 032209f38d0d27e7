"""Routes that read a checkpoint's metadata without a job: plans and inspections."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from reshard.choices import JobKind
from reshard.errors import JobError
from reshard.models.jobs import ConvertRequest, Inspection, Job, PlanSummary
from reshard.models.reports import LayoutPair
from reshard.options import SourceSpec
from reshard_jobs.tenants.principals import Principal
from reshard_service.api.context import Context, ServiceContext, Submitter
from reshard_service.api.jobs import accepted
from reshard_service.api.problems import OF_SOURCES, problems
from reshard_service.probes.pool import ProbeTimeout

router = APIRouter(prefix="/v1", tags=["checkpoints"])


@router.post(
    "/plans",
    response_model=PlanSummary,
    responses={202: {"model": Job, "description": "A planning-only job."}, **OF_SOURCES},
)
async def plan(body: ConvertRequest, context: Context, caller: Submitter, request: Request) -> Response:
    """Plan a conversion. Answers 202 with a planning-only job if planning takes longer than a request may."""
    body = context.settings.maxima.allowed_request(body)
    try:
        summary = await planned(context, caller, body)
    except ProbeTimeout:
        job = await run_in_threadpool(lambda: context.jobs_of(caller).create(body, kind=JobKind.PLAN))
        await run_in_threadpool(context.doorbell.ring)
        return accepted(job, request)
    return JSONResponse(summary.model_dump(mode="json"))


async def planned(context: ServiceContext, caller: Principal, body: ConvertRequest) -> PlanSummary:
    """Plan a conversion for a caller.

    Raises:
        ReshardError: The conversion would be refused.
        ProbeTimeout: Planning takes longer than a request may.
    """
    roots = context.settings.jobs.roots
    limits = await run_in_threadpool(context.tenants.limits, caller.tenant)
    request = await run_in_threadpool(limits.allowed_request, body, roots)
    return await context.prober.plan(request, roots=limits.roots(roots), limit_s=context.settings.admission_s)


@router.post("/inspections", response_model=Inspection, responses={**OF_SOURCES, **problems(504)})
async def inspect(body: SourceSpec, context: Context, caller: Submitter) -> Response:
    """Describe a checkpoint without reading tensor data."""
    found = await inspected(context, caller, body)
    return JSONResponse(found.model_dump(mode="json"))


async def inspected(
    context: ServiceContext, caller: Principal, body: SourceSpec, limit_s: float | None = None
) -> Inspection:
    """Describe a checkpoint for a caller, in `limit_s` seconds or as long as the settings say.

    Raises:
        ReshardError: It cannot be read, or it takes too long (`job.wait_timeout`).
    """
    roots = context.settings.jobs.roots
    limits = await run_in_threadpool(context.tenants.limits, caller.tenant)
    source = await run_in_threadpool(limits.allowed_source, body, roots)
    limit_s = context.settings.inspection_s if limit_s is None else limit_s
    try:
        return await context.prober.inspect(source, roots=limits.roots(roots), limit_s=limit_s)
    except ProbeTimeout as error:
        raise JobError(
            "job.wait_timeout",
            f"reading the checkpoint's metadata takes longer than {limit_s:g} s",
            fix="run `reshard inspect` on a machine near the checkpoint",
        ) from error


async def pictured(context: ServiceContext, caller: Principal, body: ConvertRequest, tensor: str | None) -> LayoutPair:
    """The layouts of a conversion's source and planned target for a caller.

    Raises:
        ReshardError: The conversion would be refused, or it takes too long (`job.wait_timeout`).
    """
    roots = context.settings.jobs.roots
    limits = await run_in_threadpool(context.tenants.limits, caller.tenant)
    request = await run_in_threadpool(limits.allowed_request, body, roots)
    limit_s = context.settings.inspection_s
    try:
        return await context.prober.pictures(request, tensor, roots=limits.roots(roots), limit_s=limit_s)
    except ProbeTimeout as error:
        raise JobError(
            "job.wait_timeout",
            f"reading the checkpoint's metadata takes longer than {limit_s:g} s",
            fix="run `reshard inspect SRC --svg FILE` on a machine near the checkpoint",
        ) from error
