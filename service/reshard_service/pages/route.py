"""The route of every page: its errors are pages, too, and its forms are ours."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from sqlalchemy.exc import DBAPIError, TimeoutError as PoolTimeout

from reshard.errors import ReshardError
from reshard_service.page_paths import is_of_api, path_of
from reshard_service.pages.forms import require_own_form
from reshard_service.pages.rendering import render
from reshard_service.problems import of_database, of_validation

_SAFE_METHODS = {"GET", "HEAD"}


class PageRoute(APIRoute):
    """A route that answers with a page."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the handler of the route."""
        handle = super().get_route_handler()

        async def page(request: Request) -> Response:
            try:
                if request.method not in _SAFE_METHODS:
                    await require_own_form(request)
                return await handle(request)
            except ReshardError as error:
                return error_page(request, error)
            except RequestValidationError as error:
                return error_page(request, of_validation(error))
            except (DBAPIError, PoolTimeout) as error:
                return error_page(request, of_database(error))

        return page


def page_for_browser(request: Request, error: ReshardError) -> Response | None:
    """The page of an error if a person asked for a page; None for programs, and for whoever looks at the API itself."""
    wants = request.method in _SAFE_METHODS and "text/html" in request.headers.get("accept", "")
    return error_page(request, error) if wants and not is_of_api(path_of(request.scope)) else None


def error_page(request: Request, error: ReshardError) -> Response:
    """The page of a typed error: what is wrong, and what to do."""
    problem = error.to_problem()
    return render(request, "error.html", status=problem["status"], problem=problem)
