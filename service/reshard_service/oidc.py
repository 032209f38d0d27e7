"""Callers with a token of an OIDC issuer: signature, issuer, audience and times are checked by PyJWT.

The keys of the issuer are fetched when a token first needs them, kept, and fetched anew for an unknown key. They are
fetched at most once in `_REFRESH_S`, so that tokens with made-up keys do not make this service call its issuer.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, cast

import httpx
import jwt

from reshard.choices import TokenScope
from reshard.errors import JobError, printable
from reshard_jobs.principals import Principal
from reshard_jobs.tenants import Tenants
from reshard_service.settings import ServiceSettings

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
