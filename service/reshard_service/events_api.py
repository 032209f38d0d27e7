"""The event log of a job, as a stream and as pages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.concurrency import run_in_threadpool

from reshard.errors import RequestError
from reshard.models import JobEventPage
from reshard_jobs.tables import MAX_SEQ
from reshard_service.context import Context
from reshard_service.documented import EVENTS, problems
from reshard_service.event_feed import EventFeed, page_after

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
    request: Request,
    context: Context,
    after_seq: Annotated[int, Query(ge=0, le=MAX_SEQ)] = 0,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Send the events after `Last-Event-ID` or `after_seq` as a stream, or (`Accept: application/json`) as a page."""
    if last_event_id is not None:
        after_seq = max(after_seq, _sequence(last_event_id))
    page = await run_in_threadpool(page_after, context.store, job_id, after_seq)
    accept = request.headers.get("accept", "")
    if "application/json" in accept and "text/event-stream" not in accept:
        return JSONResponse(page.model_dump(mode="json"), headers={"Cache-Control": "no-cache"})
    if page.done and not page.events:
        # No event will follow. The status 204 tells an EventSource to stop reconnecting.
        return Response(status_code=204)
    return EventSourceResponse(
        _stream(context.feed, job_id, after_seq, page),
        ping=context.settings.ping_s,
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


async def _stream(feed: EventFeed, job_id: str, seq: int, page: JobEventPage) -> AsyncIterator[ServerSentEvent]:
    with feed.watch(job_id, page.events[-1].seq if page.events else seq) as watch:
        while True:
            for event in page.events:
                seq = event.seq
                yield ServerSentEvent(data=event.model_dump_json(), event=event.kind, id=str(event.seq))
            if page.done:
                return
            page = await watch.after(seq)


def _sequence(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 12 and int(text) <= MAX_SEQ:
        return int(text)
    raise RequestError(
        "request.invalid", "Last-Event-ID is not an event id of this service", fix="leave the header out"
    )
