"""The page of the API's reference: Swagger UI over `/openapi.json`, with its assets from a package of ours."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from reshard_service.pages.rendering import render
from reshard_service.pages.route import PageRoute

router = APIRouter(include_in_schema=False, route_class=PageRoute)


@router.get("/docs")
def reference_page(request: Request) -> Response:
    """Show the API. It holds nothing of any tenant, so every caller may see it."""
    return render(request, "reference.html")
