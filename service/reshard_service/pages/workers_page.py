"""The page of the live workers."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from reshard_service.callers import Reader
from reshard_service.context import Context
from reshard_service.pages.rendering import render
from reshard_service.pages.route import PageRoute
from reshard_service.workers_api import list_workers

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@router.get("/workers")
def workers_page(request: Request, context: Context, caller: Reader) -> Response:
    """Show what each worker does. Tenants other than the operator's see the workers that work for them."""
    found = list_workers(context, caller)
    # An operator sees the workers of all tenants, but no job of another one.
    mine = {node.name for node in context.nodes.live(caller.tenant)}
    return render(request, "workers.html", workers=found.workers, mine=mine)
