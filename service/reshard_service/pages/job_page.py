"""The page of one job, and the forms that cancel and retry it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from reshard.models import Job, JobEvent
from reshard_jobs.overview import JobOverview
from reshard_service.callers import Canceller, Reader, Submitter
from reshard_service.context import Context, ServiceContext
from reshard_service.jobs_api import cancel_job, retry_job
from reshard_service.pages.job_facts import actions_of, happenings_of, options_of, phases_of
from reshard_service.pages.rendering import placed, render, rights
from reshard_service.pages.route import PageRoute
from reshard_service.pages.throughput import chart_of

router = APIRouter(prefix="/jobs", include_in_schema=False, route_class=PageRoute)

_MOST_FILES = 200
_MOST_EVENTS = 100


@router.get("/{job_id}")
async def job_page(job_id: str, request: Request, context: Context, caller: Reader) -> Response:
    """Show one job."""
    job, seq, events, wrote_source, submitted_by = await run_in_threadpool(_look, context, caller, job_id)
    told = happenings_of(job, events)
    return render(
        request,
        "job.html",
        job=job,
        seq=seq,
        phases=phases_of(job, events),
        options=options_of(job),
        actions=actions_of(job, rights(caller)),
        chart=chart_of(events),
        events=told[::-1][:_MOST_EVENTS],
        left_out=max(0, len(told) - _MOST_EVENTS),
        most_files=_MOST_FILES,
        wrote_source=wrote_source,
        submitted_by=submitted_by,
        seconds=_seconds(job),
    )


def _seconds(job: Job) -> float | None:
    """Seconds from a job's first start to its end; None if it did not start, or has not ended."""
    if job.started_at is None or job.finished_at is None:
        return None
    return (job.finished_at - job.started_at).total_seconds()


def _look(context: ServiceContext, caller: Reader, job_id: str) -> tuple[Job, int, list[JobEvent], str | None, str]:
    store = context.jobs_of(caller)
    job, seq = store.look(job_id)
    events = context.events.sampled(store.key_of(job_id))
    source = job.request.source
    submitted_by = JobOverview(context.database, caller.tenant).submitted_by(job)
    return job, seq, events, store.writer_of(source.url, source.tag), submitted_by


@router.post("/{job_id}/cancel")
async def cancel(job_id: str, request: Request, context: Context, caller: Canceller) -> Response:
    """Cancel a job, or give up the files of one that failed."""
    job = await cancel_job(context, caller, job_id)
    return RedirectResponse(placed(request, f"/jobs/{job.id}"), status_code=303)


@router.post("/{job_id}/retry")
async def retry(job_id: str, request: Request, context: Context, caller: Submitter) -> Response:
    """Send a job that FAILED back to the queue."""
    job = await retry_job(context, caller, job_id)
    return RedirectResponse(placed(request, f"/jobs/{job.id}"), status_code=303)
