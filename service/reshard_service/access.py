"""The check of a request's `Host` and token, before its body is read.

A page in a browser can send requests to a service on the user's own machine under a name of its own (DNS rebinding).
Such a request has the page's name in `Host`.
"""

from __future__ import annotations

from urllib.parse import quote, urlsplit

from limits import parse
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from sqlalchemy.exc import DBAPIError, TimeoutError as PoolTimeout
from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from reshard.errors import JobError, RequestError, printable
from reshard_service.identity import Identity, address_of, believe_proxies
from reshard_service.page_paths import LOGIN, STATIC, is_of_api, is_page, path_of, root_of
from reshard_service.problems import problem_of_database, problem_response
from reshard_service.settings import ServiceSettings

_PUBLIC = {"/healthz", "/readyz", "/openapi.json", LOGIN}
_SAFE_METHODS = {"GET", "HEAD"}
_WRONG_TOKENS = parse("30/minute")
"""Requests with a wrong token that one address may send. A right token passes whatever others at its address send."""


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
        fix="export RESHARD_TOKEN=... (the service's token); on the service's machine, its user needs none; "
        "in a browser: open /login",
    )


class AccessControl:
    """Refuses requests for hosts that are not served, and requests without a token; finds the caller of the others."""

    def __init__(self, app: ASGIApp, *, settings: ServiceSettings, identity: Identity, wrong: WrongTokens) -> None:
        self._app = app
        self._hosts = {host.lower() for host in settings.allowed_hosts}
        self._proxies = settings.trusted_proxies
        self._identity = identity
        self._wrong = wrong

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http":
            believe_proxies(scope, self._proxies)
            try:
                refused = await self._refusal(scope)
            except (DBAPIError, PoolTimeout) as error:
                refused = problem_of_database(error)
            except JobError as error:  # the issuer of its token is away
                refused = problem_response(error)
            if refused is not None:
                # The body is not read, so the connection cannot be used again.
                refused.headers["Connection"] = "close"
                await refused(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _refusal(self, scope: Scope) -> Response | None:
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
        if (path := path_of(scope)) in _PUBLIC or path.startswith(STATIC):
            return None
        principal = await self._identity.caller(scope)
        if principal is not None:
            scope.setdefault("state", {})["principal"] = principal
            return None
        if headers.get("authorization", "").partition(" ")[2]:
            return problem_response(self._wrong.refusal(address_of(scope)))
        shown = is_page(path) or (scope["method"] in _SAFE_METHODS and not is_of_api(path))
        if shown and "text/html" in headers.get("accept", ""):
            return RedirectResponse(_login_for(scope), status_code=303)
        return problem_response(_unauthorized())


def _login_for(scope: Scope) -> str:
    """The login that leads to the page that was asked for."""
    query = scope.get("query_string", b"").decode("latin-1")
    path, login = quote(path_of(scope)), f"{root_of(scope)}{LOGIN}"
    place = f"{path}?{query}" if query else path
    if place == "/" or scope["method"] not in _SAFE_METHODS:
        return login
    return f"{login}?next={quote(place, safe='/')}"


def _name_of(host: str) -> str:
    """The name or address in a `Host` header, without the port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
