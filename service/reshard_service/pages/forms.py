"""The forms of the dashboard: their fields, and the proof that they come from our own pages.

A browser sends its cookie with whatever request a page makes. Three things keep other pages from using it: the cookie
is `SameSite=Strict`; a form must say that it comes from this service (`Sec-Fetch-Site` or `Origin`, which no page can
set); and it must carry a token that only our pages know.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from fastapi import Request

from reshard.errors import RequestError
from reshard_service.identity import COOKIE
from reshard_service.plain_text import refuse_unstorable

TOKEN_FIELD = "form_token"  # noqa: S105 - the name of a field
_MOST_FIELDS = 200


@dataclass(frozen=True, slots=True)
class Form:
    """The fields of a form, each by its last value."""

    fields: Mapping[str, str]

    def get(self, name: str) -> str:
        """The value of a field without the spaces around it; empty if it is not there."""
        return self.fields.get(name, "").strip()


def form_token(request: Request) -> str:
    """The token that forms of this browser's pages carry. It follows from the cookie, so no server has to keep it."""
    key = request.cookies.get(COOKIE, "").encode("utf-8", "replace")
    return hmac.digest(key, b"reshard dashboard form", "sha256").hex()


def is_from_elsewhere(request: Request) -> bool | None:
    """True if a page of another site or origin makes this request, False if one of ours does, None if nothing says."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site != "same-origin"
    origin = request.headers.get("origin")
    if origin is None:
        return None
    try:
        return urlsplit(origin).netloc.lower() != request.headers.get("host", "").lower()
    except ValueError:
        return True


async def form_of(request: Request) -> Form:
    """The fields of a form's body.

    Raises:
        RequestError: `request.invalid`: it is not readable, or has text that no job record can hold.
    """
    try:
        text = (await request.body()).decode()
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    except ValueError as error:
        raise RequestError("request.invalid", "the form cannot be read", fix="open the page again") from error
    for name, value in pairs:
        refuse_unstorable("body", name)
        refuse_unstorable("body", value)
    return Form(dict(pairs))


async def require_own_form(request: Request) -> None:
    """Let a form pass that one of our own pages sent.

    Raises:
        RequestError: `request.forbidden`.
    """
    form = await form_of(request)
    given = form.get(TOKEN_FIELD).encode()
    if is_from_elsewhere(request) is not False or not hmac.compare_digest(given, form_token(request).encode()):
        raise RequestError(
            "request.forbidden",
            "this form was not sent by a page of this service, or by one from before the last login",
            fix="open the page again and repeat what you did",
        )
