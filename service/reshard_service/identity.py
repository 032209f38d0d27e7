"""Finds the caller of a request: the one place that turns tokens and cookies into principals."""

from __future__ import annotations

import hmac
import ipaddress
import time
from collections.abc import Sequence
from dataclasses import replace
from http.cookies import CookieError, SimpleCookie

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import Scope

from reshard_jobs.principals import ANYBODY, OPERATOR, Principal
from reshard_jobs.tokens import Tokens, cookie_of, looks_like_token, session_of
from reshard_service.oidc import OidcTokens
from reshard_service.page_paths import is_page, path_of
from reshard_service.settings import ServiceSettings
from reshard_service.webhook_address import Address, Network

COOKIE = "reshard_session"
_SAFE_METHODS = {"GET", "HEAD"}


class Identity:
    """Knows the callers of one service.

    Args:
        settings: The settings: the service's own token, and if it serves everybody.
        tokens: The tokens of the job database.
        oidc: The tokens of an OIDC issuer; None without one.
    """

    def __init__(self, settings: ServiceSettings, tokens: Tokens, oidc: OidcTokens | None = None) -> None:
        self._oidc = oidc
        # With a token, nobody is let in without one.
        self._open = not settings.token and (settings.anonymous or oidc is None)
        self._token = settings.token
        self._session = session_of(settings.token)
        self._tokens = tokens

    async def caller(self, scope: Scope) -> Principal | None:
        """The caller of a request, from its headers; None if they tell none."""
        headers = Headers(scope=scope)
        # Headers arrive as Latin-1.
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if given:
            text = given.strip(" ").encode("latin-1").decode("utf-8", "replace")
            found = await self.bearer(text) if scheme.lower() == "bearer" else None
        else:
            # A cookie is sent by the browser and not by the user. It reads, and it sends forms of our own pages, which
            # prove where they come from (`pages.forms`). Nothing else of the API can be changed with it.
            counts = scope["method"] in _SAFE_METHODS or is_page(path_of(scope))
            found = await self._browser(headers) if counts else None
        if found is None and self._open and not (looks_like_token(given.strip(" ")) or (given and self._oidc)):
            found = ANYBODY
        return None if found is None else replace(found, address=address_of(scope))

    async def bearer(self, given: str) -> Principal | None:
        """The caller with a token."""
        # compare_digest refuses text that is not ASCII.
        if self._token and hmac.compare_digest(given.encode(), self._token.encode()):
            return OPERATOR
        if looks_like_token(given):
            return await run_in_threadpool(self._tokens.find, given)
        return await run_in_threadpool(self._oidc.find, given) if self._oidc is not None else None

    async def _browser(self, headers: Headers) -> Principal | None:
        cookie = _session_in(headers)
        if self._token and hmac.compare_digest(cookie, self._session):
            return OPERATOR
        return await run_in_threadpool(self._tokens.find_session, cookie) if cookie else None

    async def cookie_for(self, given: str) -> str | None:
        """The cookie that a browser gets for a token; None if it gets none.

        A token of an OIDC issuer is not kept, so no cookie can stand for it.
        """
        found = await self.bearer(given)
        if found is None or found.expires_at is not None:
            return session_of("") if self._open and not given else None
        return cookie_of(given) if looks_like_token(given) else session_of(given)

    async def still_valid(self, principal: Principal) -> bool:
        """True if the token of a caller is neither revoked nor expired since its request began."""
        if principal.expires_at is not None:
            return time.time() < principal.expires_at
        return not principal.token_id or await run_in_threadpool(self._tokens.is_alive, principal.token_id)


def address_of(scope: Scope) -> str:
    """The address that a request comes from, as far as trusted proxies tell it (`believe_proxies`)."""
    return (scope.get("client") or ("",))[0]


def believe_proxies(scope: Scope, trusted: Sequence[Network]) -> None:
    """Give a request from a trusted proxy the client and the scheme that the proxy names.

    Each proxy appends the address that called it to `X-Forwarded-For`, so the list is read from its end: the client is
    the first address that is no trusted proxy. What stands before it is the client's own claim. A hop that is no
    address ends the walk, too; the client is then the last trusted proxy.
    """
    client = _address_in(address_of(scope))
    if client is None or not _is_in(client, trusted):
        return
    headers = Headers(scope=scope)
    for hop in reversed(",".join(headers.getlist("x-forwarded-for")).split(",")):
        found = _address_in(hop)
        if found is None:
            break
        client = found
        if not _is_in(client, trusted):
            break
    scope["client"] = (str(client), 0)
    # A list is the work of several proxies: the last one's word is the one that is known to be a trusted proxy's.
    scheme = ",".join(headers.getlist("x-forwarded-proto")).rpartition(",")[2].strip().lower()
    if scheme in ("http", "https"):
        scope["scheme"] = scheme


def _address_in(hop: str) -> Address | None:
    """The address in `192.0.2.1`, `192.0.2.1:80`, `2001:db8::1` or `[2001:db8::1]:80`; None if it is no address."""
    text = hop.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    return found.ipv4_mapped or found if isinstance(found, ipaddress.IPv6Address) else found


def _is_in(address: Address, networks: Sequence[Network]) -> bool:
    return any(address in network for network in networks)


def _session_in(headers: Headers) -> str:
    cookies = SimpleCookie()
    try:
        cookies.load(headers.get("cookie", ""))
    except CookieError:
        return ""
    value = cookies[COOKIE].value if COOKIE in cookies else ""
    return value if value.isascii() else ""
