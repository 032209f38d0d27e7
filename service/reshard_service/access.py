"""The check of a request's `Host` and token, before its body is read.

A page in a browser can send requests to a service on the user's own machine under a name of its own (DNS rebinding).
Such a request has the page's name in `Host`.
"""

from __future__ import annotations

import hmac
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from limits import parse
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from reshard.errors import RequestError, printable
from reshard_service.problems import problem_response
from reshard_service.settings import ServiceSettings

COOKIE = "reshard_session"
LOGIN = "/login"
PAGE = "/"
"""The dashboard: the only page that a browser opens without the token and is to be sent to the login."""
_PUBLIC = {"/healthz", "/readyz", "/openapi.json", LOGIN}
_SAFE_METHODS = {"GET", "HEAD"}
_WRONG_TOKENS = parse("30/minute")
"""Requests with a wrong token that one address may send. A right token passes whatever others at its address send."""


def session_of(token: str) -> str:
    """The value of a browser's cookie for a token. It does not tell the token."""
    return hmac.digest(token.encode(), b"reshard dashboard session", "sha256").hex()


def is_token(given: bytes, token: str) -> bool:
    """True if this is the service's token. Bytes are compared: compare_digest refuses text that is not ASCII."""
    return hmac.compare_digest(given, token.encode())


class WrongTokens:
    """Counts wrong tokens by the address that they come from."""

    def __init__(self) -> None:
        """Begin with no counts."""
        self._limiter = MovingWindowRateLimiter(MemoryStorage())

    def refusal(self, address: str) -> RequestError:
        """Count a wrong token; returns the error for it."""
        if self._limiter.hit(_WRONG_TOKENS, address):
            return _unauthorized()
        return RequestError(
            "request.too_many_tokens",
            "too many wrong tokens came from this address",
            fix="wait for a minute, then send the service's token",
        )


def _unauthorized() -> RequestError:
    return RequestError(
        "request.unauthorized",
        "the token is missing or not valid",
        fix="export RESHARD_TOKEN=<the service's token>; on the service's machine, its user needs none",
    )


class AccessControl:
    """Refuses requests for hosts that are not served, and requests without the token."""

    def __init__(self, app: ASGIApp, *, settings: ServiceSettings, wrong: WrongTokens) -> None:
        self._app = app
        self._hosts = {host.lower() for host in settings.allowed_hosts}
        self._token = settings.token
        self._session = session_of(settings.token)
        self._wrong = wrong

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http" and (refused := self._refusal(scope)) is not None:
            # The body is not read, so the connection cannot be used again.
            refused.headers["Connection"] = "close"
            await refused(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = _name_of(headers.get("host", ""))
        if self._hosts and host not in self._hosts:
            return problem_response(
                RequestError(
                    "request.wrong_host",
                    f"this service is not {printable(host)!r}",
                    fix="set RESHARD_ALLOWED_HOSTS of the service to the names under which it is called",
                )
            )
        if not self._token or scope["path"] in _PUBLIC:
            return None
        # Headers arrive as Latin-1.
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and is_token(given.strip(" ").encode("latin-1"), self._token):
            return None
        if given:
            return problem_response(self._wrong.refusal((scope.get("client") or ("",))[0]))
        # A cookie is sent by the browser and not by the user, so it opens nothing that changes anything.
        if scope["method"] in _SAFE_METHODS and hmac.compare_digest(_session_in(headers), self._session):
            return None
        if scope["path"] == PAGE and scope["method"] in _SAFE_METHODS and "text/html" in headers.get("accept", ""):
            return RedirectResponse(LOGIN, status_code=303)
        return problem_response(_unauthorized())


def _name_of(host: str) -> str:
    """The name or address in a `Host` header, without the port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _session_in(headers: Headers) -> str:
    cookies = SimpleCookie()
    try:
        cookies.load(headers.get("cookie", ""))
    except CookieError:
        return ""
    value = cookies[COOKIE].value if COOKIE in cookies else ""
    return value if value.isascii() else ""
