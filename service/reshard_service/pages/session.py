"""Login and logout: a browser sends a token of the service once, and gets a cookie for the dashboard."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from reshard.errors import RequestError
from reshard_service.context import Context
from reshard_service.identity import COOKIE, address_of
from reshard_service.page_paths import LOGIN, place_after_login
from reshard_service.pages.forms import form_of, is_from_elsewhere
from reshard_service.pages.rendering import placed, render
from reshard_service.pages.route import PageRoute

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
