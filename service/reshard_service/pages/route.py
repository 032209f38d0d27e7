"""The route of every page: its errors are pages, too, its forms are ours, and its session is a cookie."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse, Response
from fastapi.routing import APIRoute
from sqlalchemy.exc import DBAPIError, TimeoutError as PoolTimeout

from reshard.errors import RequestError, ReshardError
from reshard_service.api.context import Context
from reshard_service.api.problems import of_database, of_validation
from reshard_service.auth import COOKIE, LOGIN, address_of, is_of_api, path_of, place_after_login
from reshard_service.pages.rendering import form_of, is_from_elsewhere, placed, render, require_own_form

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


# Login and logout: a browser sends a token of the service once, and gets a cookie for the dashboard.

router = APIRouter(include_in_schema=False)
logout_router = APIRouter(include_in_schema=False, route_class=PageRoute)


@router.get(LOGIN)
def login_page(request: Request) -> Response:
    """Ask for the token."""
    place = place_after_login(request.query_params.get("next", "/"))
    if request.headers.get("sec-fetch-site") == "cross-site":
        # A link of another site leads here, so the browser has kept the cookie back. It sends it if our own page asks.
        return render(request, "bounce.html", next=placed(request, place))
    return render(request, "login.html", problem="", next=place)


@router.post(LOGIN)
async def log_in(request: Request, context: Context) -> Response:
    """Give a browser with the right token its cookie."""
    form = await form_of(request)
    place = place_after_login(form.get("next"))
    if is_from_elsewhere(request):
        # Another page would log its visitor in as somebody whom it chose.
        raise RequestError(
            "request.forbidden", "the login came from a page of another site", fix="open the login of this service"
        )
    cookie = await context.identity.cookie_for(form.get("token"))
    if cookie is None:
        refused = context.wrong_tokens.refusal(address_of(request.scope))
        text = "The token is not valid." if refused.code == "request.unauthorized" else refused.message
        return render(request, "login.html", status=refused.to_problem()["status"], problem=text, next=place)
    answer = RedirectResponse(placed(request, place), status_code=303)
    answer.set_cookie(COOKIE, cookie, httponly=True, samesite="strict", secure=request.url.scheme == "https")
    return answer


@logout_router.post("/logout")
async def log_out(request: Request) -> Response:
    """Take the cookie from a browser. Whoever is not logged in is logged out already."""
    answer = RedirectResponse(placed(request, LOGIN), status_code=303)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=request.url.scheme == "https")
    return answer
