"""The event log of a job, as a stream and as pages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy.exc import DBAPIError, TimeoutError as PoolTimeout
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.concurrency import run_in_threadpool

from reshard.errors import RequestError
from reshard.models.jobs import JobEventPage
from reshard_jobs.tables import MAX_SEQ
from reshard_jobs.tenants.principals import Principal
from reshard_service.api.context import Context, Reader, ServiceContext
from reshard_service.api.problems import EVENTS, problems

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.get(
    "/{job_id}/events",
    response_model=JobEventPage,
    responses={
        200: {"content": EVENTS},
        204: {"description": "The job has ended, and no event follows."},
        **problems(404),
    },
)
async def events(
    job_id: str,
    *,
    request: Request,
    context: Context,
    caller: Reader,
    after_seq: Annotated[int, Query(ge=0, le=MAX_SEQ)] = 0,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Send the events after `Last-Event-ID` or `after_seq` as a stream, or (`Accept: application/json`) as a page."""
    if last_event_id is not None:
        after_seq = max(after_seq, _sequence(last_event_id))
    key = await run_in_threadpool(context.jobs_of(caller).key_of, job_id)
    page = await run_in_threadpool(context.events.after, key, after_seq)
    accept = request.headers.get("accept", "")
    if "application/json" in accept and "text/event-stream" not in accept:
        return JSONResponse(page.model_dump(mode="json"), headers={"Cache-Control": "no-cache"})
    if page.done and not page.events:
        # No event will follow. The status 204 tells an EventSource to stop reconnecting.
        return Response(status_code=204)
    return EventSourceResponse(
        _stream(context, caller, key, after_seq, page),
        ping=context.settings.ping_s,
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


async def _stream(
    context: ServiceContext, caller: Principal, key: str, seq: int, page: JobEventPage
) -> AsyncIterator[ServerSentEvent]:
    recheck_s, checked_at = context.settings.recheck_s, time.monotonic()
    with context.feed.watch(key, page.events[-1].seq if page.events else seq) as watch:
        while True:
            for event in page.events:
                seq = event.seq
                yield ServerSentEvent(data=event.model_dump_json(), event=event.kind, id=str(event.seq))
            if page.done:
                return
            page = JobEventPage(events=(), done=False)
            with suppress(TimeoutError):
                # Also when no event comes.
                async with asyncio.timeout(max(0.0, checked_at + recheck_s - time.monotonic())):
                    page = await watch.after(seq)
            if time.monotonic() - checked_at >= recheck_s:
                checked_at = time.monotonic()
                # While the database is away no event comes; who may read is asked again later.
                with suppress(DBAPIError, PoolTimeout):
                    if not await context.identity.still_valid(caller):
                        return


def _sequence(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 12 and int(text) <= MAX_SEQ:
        return int(text)
    raise RequestError(
        "request.invalid", "Last-Event-ID is not an event id of this service", fix="leave the header out"
    )
