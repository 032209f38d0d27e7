"""The pages of the tenant's jobs, of the live workers, and of the API's reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from reshard.choices import JobState
from reshard.errors import RequestError
from reshard_jobs.queue.overview import Column, JobLines, JobOverview, Wanted
from reshard_jobs.queue.store import JobFilter
from reshard_service.api.context import Context, Reader
from reshard_service.api.operators import list_workers
from reshard_service.pages.rendering import render
from reshard_service.pages.route import PageRoute
from reshard_service.pages.words import state_name

router = APIRouter(include_in_schema=False, route_class=PageRoute)

_MOST_PAGES = 1_000_000
_ACTIVE = tuple(state for state in JobState if not state.terminal)
_SHOWN: dict[str, tuple[JobState, ...]] = {"": (), "active": _ACTIVE, **{s.value.lower(): (s,) for s in JobState}}
"""The choices of the filter by state."""
_NAMES = {"": "Any", "active": "Not ended", **{s.value.lower(): state_name(s) for s in JobState}}
_NEWEST = f"-{Column.CREATED}"


@router.get("/")
async def jobs_page(
    *,
    request: Request,
    context: Context,
    caller: Reader,
    search: Annotated[str, Query(max_length=1024)] = "",
    state: Annotated[str, Query(max_length=32)] = "",
    label: Annotated[str, Query(max_length=1024)] = "",
    sort: Annotated[str, Query(max_length=32)] = "",
    page: Annotated[int, Query(ge=1, le=_MOST_PAGES)] = 1,
) -> Response:
    """Show one page of jobs, newest first if nothing else is asked for."""
    by, descending = _order(sort)
    labels = _labels(label)
    wanted = Wanted(JobFilter(_states(state), labels or {}), search.strip(), by, descending, page)
    found = JobLines((), 0, {}, 1)
    if labels is not None:
        found = await run_in_threadpool(JobOverview(context.database, caller.tenant).page, wanted)
    given = {"search": search.strip(), "state": state.lower(), "label": label}
    filters = {name: value for name, value in given.items() if value}
    ordered = {**filters, **({"sort": sort} if sort else {})}
    return render(
        request,
        "jobs.html",
        status=422 if labels is None else 200,
        unreadable=labels is None,
        found=found,
        choices=_choices(found),
        filters=filters,
        search=given["search"],
        chosen=given["state"],
        label=label,
        sort=sort or _NEWEST,
        heads=_heads(filters, by, descending=descending),
        first=(page - 1) * wanted.page_size + 1,
        page=page,
        pages={name: urlencode({**ordered, "page": page + step}) for name, step in (("before", -1), ("after", 1))},
        newest=urlencode(ordered),
        live=any(not job.done for job in found.jobs) or page == 1,
    )


def _order(sort: str) -> tuple[Column, bool]:
    """The column and whether it is descending: `-created` is the newest first."""
    try:
        return Column((sort or _NEWEST).removeprefix("-")), (sort or _NEWEST).startswith("-")
    except ValueError:
        raise RequestError("request.invalid", "jobs have no such column", fix="choose one of the list") from None


def _heads(filters: Mapping[str, str], by: Column, *, descending: bool) -> dict[str, tuple[str, str]]:
    """The direction in which each column is sorted, as `aria-sort` says it, and the query that sorts by it."""
    found: dict[str, tuple[str, str]] = {}
    for column in Column:
        now = ("descending" if descending else "ascending") if column is by else ""
        # The first click shows the newest, and the longest.
        turn = now == "ascending" or (not now and column in (Column.CREATED, Column.DURATION))
        found[column.value] = now, urlencode({**filters, "sort": f"{'-' if turn else ''}{column}"})
    return found


def _choices(found: JobLines) -> dict[str, str]:
    """The choices of the filter by state, each with its number of jobs."""
    counts = {name: sum(found.by_state.get(s, 0) for s in states or JobState) for name, states in _SHOWN.items()}
    return {name: f"{_NAMES[name]} ({count:,})" for name, count in counts.items()}


def _states(text: str) -> tuple[JobState, ...]:
    if (found := _SHOWN.get(text.lower())) is not None:
        return found
    raise RequestError("request.invalid", "there is no such state of jobs", fix="choose one of the list")


def _labels(text: str) -> dict[str, str] | None:
    """The label that a text asks for; None if it cannot be read."""
    name, equals, value = text.partition("=")
    if not equals:
        return None if text.strip() else {}
    return {name.strip(): value.strip()}


# The page of the live workers.


@router.get("/workers")
def workers_page(request: Request, context: Context, caller: Reader) -> Response:
    """Show what each worker does. Tenants other than the operator's see the workers that work for them."""
    found = list_workers(context, caller)
    # An operator sees the workers of all tenants, but no job of another one.
    mine = {node.name for node in context.nodes.live(caller.tenant)}
    return render(request, "workers.html", workers=found.workers, mine=mine)


# The page of the API's reference: Swagger UI over `/openapi.json`, with its assets from a package of ours.


@router.get("/docs")
def reference_page(request: Request) -> Response:
    """Show the API. It holds nothing of any tenant, so every caller may see it."""
    return render(request, "reference.html")
