"""The login of the dashboard: a browser sends the service's token once and gets a cookie that can only read."""

from __future__ import annotations

from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from reshard_service.access import LOGIN
from reshard_service.context import Context
from reshard_service.dashboard import PAGE_HEADERS, page
from reshard_service.identity import COOKIE

router = APIRouter(include_in_schema=False)
_FORM = (
    '<form method="post" action="/login"><label>Token of the service '
    '<input name="token" type="password" autocomplete="current-password" required autofocus></label> '
    "<button>Log in</button></form>"
    "<p>It is the value of RESHARD_TOKEN. Without that variable, reshard serve names the file with the token.</p>"
)
_HEADERS = {
    **PAGE_HEADERS,
    "Content-Security-Policy": PAGE_HEADERS["Content-Security-Policy"].replace(
        "form-action 'none'", "form-action 'self'"
    ),
}


@router.get(LOGIN)
def form() -> HTMLResponse:
    """Ask for the token."""
    return HTMLResponse(page("Log in", _FORM), headers=_HEADERS)


@router.post(LOGIN)
async def log_in(request: Request, context: Context) -> Response:
    """Give a browser with the right token its cookie."""
    fields = parse_qs((await request.body()).decode("utf-8", "replace"), max_num_fields=8)
    given = fields.get("token", [""])[0].strip()
    cookie = await context.identity.cookie_for(given)
    if cookie is not None:
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(
            COOKIE,
            cookie,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer
    refused = context.wrong_tokens.refusal(request.client.host if request.client else "")
    text = "The token is not valid." if refused.code == "request.unauthorized" else refused.message
    status = refused.to_problem()["status"]
    return HTMLResponse(page("Log in", f"<p>{text}</p>{_FORM}"), status_code=status, headers=_HEADERS)
