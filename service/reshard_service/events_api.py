"""The event log of a job, as a stream and as pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.concurrency import run_in_threadpool

from reshard.errors import RequestError
from reshard.models import JobEvent, JobEventPage
from reshard_jobs.tables import MAX_SEQ
from reshard_service.context import Context, ServiceContext

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.get("/{job_id}/events", response_model=JobEventPage)
async def events(
    job_id: str,
    request: Request,
    context: Context,
    after_seq: Annotated[int, Query(ge=0, le=MAX_SEQ)] = 0,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Send the events after `Last-Event-ID` or `after_seq` as a stream, or (`Accept: application/json`) as a page."""
    if last_event_id is not None:
        after_seq = max(after_seq, _sequence(last_event_id))
    page = await run_in_threadpool(_page, context, job_id, after_seq)
    accept = request.headers.get("accept", "")
    if "application/json" in accept and "text/event-stream" not in accept:
        return JSONResponse(page.model_dump(mode="json"), headers={"Cache-Control": "no-cache"})
    if page.done and not page.events:
        # No event will follow. The status 204 tells an EventSource to stop reconnecting.
        return Response(status_code=204)
    return EventSourceResponse(
        _stream(context, job_id, page),
        ping=context.settings.ping_s,
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


async def _stream(context: ServiceContext, job_id: str, page: JobEventPage) -> AsyncIterator[ServerSentEvent]:
    after_seq = 0
    while True:
        for event in page.events:
            after_seq = event.seq
            yield ServerSentEvent(data=event.model_dump_json(), event=event.kind, id=str(event.seq))
        if page.done:
            return
        if not page.events:
            await asyncio.sleep(context.settings.poll_s)
        page = await run_in_threadpool(_page, context, job_id, after_seq)


def _page(context: ServiceContext, job_id: str, after_seq: int) -> JobEventPage:
    found = context.store.events(job_id, after_seq=after_seq)
    if found:
        return JobEventPage(events=tuple(found), done=_ends(found[-1]))
    job, last_seq = context.store.look(job_id)
    # An event may have been added between the two reads: the page is the last one only if the log is not longer.
    return JobEventPage(events=(), done=job.done and last_seq <= after_seq)


def _ends(event: JobEvent) -> bool:
    return event.kind == "state" and event.state.terminal


def _sequence(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 12 and int(text) <= MAX_SEQ:
        return int(text)
    raise RequestError(
        "request.invalid", "Last-Event-ID is not an event id of this service", fix="leave the header out"
    )
