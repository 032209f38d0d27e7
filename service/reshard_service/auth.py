"""Who calls the service: the `Host`, tokens, cookies and OIDC, checked before the body of a request is read.

A page in a browser can send requests to a service on the user's own machine under a name of its own (DNS rebinding).
Such a request has the page's name in `Host`.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import re
import secrets
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, urlsplit

import httpx
import jwt
from limits import parse
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from sqlalchemy.exc import DBAPIError, TimeoutError as PoolTimeout
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from reshard.api.service_token import token_path
from reshard.choices import TokenScope
from reshard.errors import JobError, RequestError, printable
from reshard_jobs.tenants.principals import ANYBODY, OPERATOR, Principal
from reshard_jobs.tenants.tenants import Tenants
from reshard_jobs.tenants.tokens import Tokens, cookie_of, looks_like_token, session_of
from reshard_service.api.problems import problem_of_database, problem_response
from reshard_service.settings import NEW_TOKEN, ServiceSettings
from reshard_service.webhooks.address import Address, Network

# Callers with a token of an OIDC issuer: signature, issuer, audience and times are checked by PyJWT.
#
# The keys of the issuer are fetched when a token first needs them, kept, and fetched anew for an unknown key. They are
# fetched at most once in `_REFRESH_S`, so that tokens with made-up keys do not make this service call its issuer.

logger = logging.getLogger(__name__)

ALGORITHMS = ("RS256", "ES256", "EdDSA")
"""Never `none`, and no algorithm whose key is a shared secret: the issuer's public keys would be that secret."""
SCOPE_PREFIX = "reshard:"
_REQUIRED = ("exp", "iat", "iss", "aud", "sub")
_LEEWAY_S = 30
_TIMEOUT_S = 5.0
_REFRESH_S = 30.0
_KEYS_S = 600.0
_MOST_TOKEN_CHARS = 16_384


class IssuerKeys:
    """The public keys of an issuer.

    Args:
        issuer: The issuer's URL.
        jwks_url: Where its keys are; empty to ask the issuer.
    """

    def __init__(self, issuer: str, jwks_url: str) -> None:
        self._issuer = issuer
        self._jwks_url = jwks_url
        self._fetching = threading.Lock()
        self._keys: dict[str, jwt.PyJWK] = {}
        self._fetched_at = self._tried_at = -_KEYS_S

    def key(self, kid: str) -> jwt.PyJWK | None:
        """The key with an id; None if the issuer has none.

        Raises:
            JobError: `service.unavailable`: the issuer does not answer, and the key is not known.
        """
        if not self._is_current(kid):
            # One thread at a time waits for the issuer: otherwise tokens with made-up keys would take all threads. The
            # others go on with the keys that are known; without any, they can only wait.
            if self._fetching.acquire(blocking=not self._keys):
                try:
                    if not self._is_current(kid) and time.monotonic() - self._tried_at > _REFRESH_S:
                        self._refresh()
                finally:
                    self._fetching.release()
            elif kid not in self._keys:
                raise JobError("service.unavailable", "the key of this token is being asked for", fix="try again")
        found = self._keys.get(kid)
        if found is None and self._fetched_at < 0:
            raise JobError("service.unavailable", "the issuer of this token does not answer", fix="try again")
        return found

    def _is_current(self, kid: str) -> bool:
        return kid in self._keys and time.monotonic() - self._fetched_at <= _KEYS_S

    def _refresh(self) -> None:
        now = self._tried_at = time.monotonic()
        try:
            self._keys, self._fetched_at = self._fetch(), now
        except (httpx.HTTPError, jwt.PyJWTError, ValueError, KeyError, TypeError) as error:
            logger.warning("the keys of the OIDC issuer could not be read: %s", printable(error))

    def _fetch(self) -> dict[str, jwt.PyJWK]:
        url = self._jwks_url
        if not url:
            facts = self._json(f"{self._issuer.rstrip('/')}/.well-known/openid-configuration")
            if facts["issuer"] != self._issuer:
                raise ValueError("the issuer calls itself by another name")
            url = str(facts["jwks_uri"])
        found = jwt.PyJWKSet.from_dict(self._json(url))
        return {key.key_id: key for key in found.keys if key.key_id and key.algorithm_name in ALGORITHMS}

    def _json(self, url: str) -> dict[str, Any]:
        answer = httpx.get(url, timeout=_TIMEOUT_S, follow_redirects=False)
        answer.raise_for_status()
        return cast("dict[str, Any]", answer.json())


class OidcTokens:
    """The callers with tokens of the issuer that the settings name.

    Args:
        settings: The settings of the service.
        tenants: The tenants of the job database. A token of another tenant is refused.
    """

    def __init__(self, settings: ServiceSettings, tenants: Tenants) -> None:
        self._issuer = settings.oidc_issuer
        self._audience = settings.oidc_audience
        self._tenant_claim = settings.oidc_tenant_claim
        self._scope_claim = settings.oidc_scope_claim
        self._keys = IssuerKeys(settings.oidc_issuer, settings.oidc_jwks_url)
        self._tenants = tenants

    def find(self, text: str) -> Principal | None:
        """The caller with a token; None if the token is not valid for this service. It may wait for the issuer.

        Raises:
            JobError: `service.unavailable`: the issuer's keys are not known, and it does not answer.
        """
        if not looks_like_jwt(text):
            return None
        try:
            header = jwt.get_unverified_header(text)
            kid = header.get("kid")
            if header.get("alg") not in ALGORITHMS or not isinstance(kid, str):
                return None
            key = self._keys.key(kid)
            if key is None or key.algorithm_name != header["alg"]:
                return None
            claims = jwt.decode(
                text,
                key.key,
                algorithms=[key.algorithm_name],
                audience=self._audience,
                issuer=self._issuer,
                leeway=_LEEWAY_S,
                options={"require": list(_REQUIRED)},
            )
        except (jwt.PyJWTError, ValueError, RecursionError):
            return None
        return self._principal(claims)

    def _principal(self, claims: dict[str, Any]) -> Principal | None:
        tenant, subject = claims.get(self._tenant_claim), claims["sub"]
        if not isinstance(tenant, str) or "\0" in tenant or not self._tenants.exists(tenant):
            return None
        return Principal(
            tenant,
            _scopes(claims.get(self._scope_claim)),
            f"oidc:{printable(subject, max_chars=150)}",
            printable(subject),
            expires_at=float(claims["exp"]) + _LEEWAY_S,
        )


def looks_like_jwt(text: str) -> bool:
    """True if a text has the form of a signed JWT."""
    return text.count(".") == 2 and text.isascii() and len(text) <= _MOST_TOKEN_CHARS


def _scopes(claim: object) -> frozenset[TokenScope]:
    """The scopes in a claim: names with the prefix `reshard:`, separated by blanks or in a list."""
    names = claim.split() if isinstance(claim, str) else cast("list[object]", claim) if isinstance(claim, list) else []
    known = {f"{SCOPE_PREFIX}{scope}": scope for scope in TokenScope}
    return frozenset(known[name] for name in names if isinstance(name, str) and name in known)


# The paths of the dashboard, which a browser opens with its cookie.

LOGIN = "/login"
STATIC = "/static/"
"""Style sheets and scripts: anybody may have them, for the page of the login needs them."""
_PAGE = re.compile(r"/(?:workers|submit(?:/layout)?|docs|logout|jobs/[^/]+(?:/(?:cancel|retry|layout))?)?")


def root_of(scope: Scope) -> str:
    """The path below which a proxy shows the service, as the server says it (`RESHARD_ROOT_PATH`); empty for none."""
    return cast("dict[str, Any]", scope).get("root_path", "")


def path_of(scope: Scope) -> str:
    """The path of a request below the root, as the routes have it; the proxy may have taken the root off, or not."""
    path, root = cast("str", scope["path"]), root_of(scope)
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def is_of_api(path: str) -> bool:
    """True for a path below which nothing is a page: programs ask there, and get JSON."""
    return path.startswith("/v1/") or path in ("/v1", "/metrics", "/healthz", "/readyz", "/openapi.json")


def is_page(path: str) -> bool:
    """True for a page of the dashboard, or one of its forms. Paths of the API are none."""
    return _PAGE.fullmatch(path) is not None


def place_after_login(text: str) -> str:
    """The page to which a login leads: the one that was asked for, if it is one of ours."""
    # Browsers read a backslash as a slash, and `//host` as another host.
    if text.startswith("/") and not text.startswith("//") and "\\" not in text and text.isprintable():
        parts = urlsplit(text)
        if is_page(parts.path) and parts.path != "/logout":
            return text
    return "/"


# Finds the caller of a request: the one place that turns tokens and cookies into principals.

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
            # prove where they come from (`pages.rendering`). Nothing else of the API can be changed with it.
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
    the first address that is not a trusted proxy. What stands before it is the client's own claim. A hop that is not an
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
    """The address in `192.0.2.1`, `192.0.2.1:80`, `2001:db8::1` or `[2001:db8::1]:80`; None if it is not an address."""
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


_PUBLIC = {"/healthz", "/readyz", "/openapi.json", LOGIN}
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


# The token that `reshard serve` makes for itself on a loopback address, where every user of the machine can knock.


@contextmanager
def local_token(port: int) -> Generator[tuple[str, Path]]:
    """Write a new token to the file where this user's clients look for it; the file goes when the block ends.

    Raises:
        RequestError: `request.invalid`: the file cannot be written.
    """
    token, path = secrets.token_urlsafe(32), token_path(port)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        # A new file of this user replaces whatever has the name: a file of somebody else, or one that others can read.
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(token + "\n")
        os.replace(name, path)
    except OSError as error:
        raise RequestError(
            "request.invalid",
            f"the service's token cannot be written to {printable(str(path))}: {error.strerror}",
            fix=f"export {NEW_TOKEN}; or set XDG_STATE_HOME to a directory of your own",
        ) from None
    try:
        yield token, path
    finally:
        with suppress(OSError):
            if path.read_text(encoding="ascii").strip() == token:  # a later start on this port has another one
                path.unlink()
