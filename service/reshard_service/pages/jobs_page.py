"""The page of all jobs of the caller's tenant: filters, pages, progress, and why jobs failed."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from reshard.errors import RequestError
from reshard.models import JobState
from reshard_jobs.pages import JobFilter
from reshard_service.callers import Reader
from reshard_service.context import Context
from reshard_service.pages.rendering import render
from reshard_service.pages.route import PageRoute

router = APIRouter(include_in_schema=False, route_class=PageRoute)

PAGE_SIZE = 25
_ACTIVE = tuple(state for state in JobState if not state.terminal)
_SHOWN: dict[str, tuple[JobState, ...]] = {"": (), "active": _ACTIVE, **{s.value.lower(): (s,) for s in JobState}}
"""The choices of the filter by state."""


@router.get("/")
async def jobs_page(
    *,
    request: Request,
    context: Context,
    caller: Reader,
    state: Annotated[str, Query(max_length=32)] = "",
    label: Annotated[str, Query(max_length=1024)] = "",
    page_token: Annotated[str, Query(max_length=1024)] = "",
) -> Response:
    """Show one page of jobs, newest first."""
    chosen = JobFilter(_states(state), _labels(label))
    store = context.jobs_of(caller)
    found = await run_in_threadpool(lambda: store.list(chosen, page_size=PAGE_SIZE, page_token=page_token))
    filters = {name: value for name, value in (("state", state.lower()), ("label", label)) if value}
    older = urlencode({**filters, "page_token": found.next_page_token}) if found.next_page_token else ""
    return render(
        request,
        "jobs.html",
        jobs=found.jobs,
        choices=list(_SHOWN),
        state=state.lower(),
        label=label,
        older=older,
        newest=urlencode(filters) if page_token else None,
        live=any(not job.done for job in found.jobs) or not page_token,
    )


def _states(text: str) -> tuple[JobState, ...]:
    if (found := _SHOWN.get(text.lower())) is not None:
        return found
    raise RequestError("request.invalid", "there is no such state of jobs", fix="choose one of the list")


def _labels(text: str) -> dict[str, str]:
    if not text.strip():
        return {}
    name, equals, value = text.partition("=")
    if not equals:
        raise RequestError("request.invalid", "a label filter has no `=`", fix="write name=value")
    return {name.strip(): value.strip()}
