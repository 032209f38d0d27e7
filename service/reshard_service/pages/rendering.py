"""Renders pages: templates, headers, static files, and the tag of a page that watches itself."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined, nodes

from reshard.choices import JobState, TokenScope
from reshard.draw.layout import STYLE
from reshard.errors import RequestError, counted, format_size, printable
from reshard_jobs.tenants.principals import Principal
from reshard_service.auth import COOKIE, STATIC, path_of, root_of
from reshard_service.middleware import refuse_unstorable
from reshard_service.pages import words

# Style sheets and scripts of the dashboard: a closed list of files, each under an address that has its digest.

router = APIRouter(include_in_schema=False)
_OURS = Path(__file__).parent / "static"
_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
_A_YEAR = "public, max-age=31536000, immutable"


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file."""

    content: bytes
    media_type: str
    digest: str


@cache
def _files() -> dict[str, StaticFile]:
    found: dict[str, bytes] = {path.name: path.read_bytes() for path in sorted(_OURS.iterdir())}
    found["layout.css"] = STYLE.encode()
    # Swagger UI as this package carries it; nothing of the package is imported.
    theirs = find_spec("fastapi_offline")
    assert theirs is not None
    assert theirs.origin is not None
    for name in ("swagger-ui-bundle.js", "swagger-ui.css"):
        found[name] = (Path(theirs.origin).parent / "static" / name).read_bytes()
    return {
        name: StaticFile(content, _TYPES[Path(name).suffix], hashlib.sha256(content).hexdigest()[:16])
        for name, content in found.items()
        if Path(name).suffix in _TYPES
    }


def static_url(name: str) -> str:
    """The address of a file. It changes with the file, so that browsers may keep it for good."""
    return f"{STATIC}{name}?v={_files()[name].digest}"


@router.get(STATIC + "{name}")
def static_file(name: str, request: Request) -> Response:
    """Serve one of the files."""
    file = _files().get(name)
    if file is None:
        raise RequestError(
            "request.not_found",
            f"there is no file {printable(name, max_chars=64)!r}",
            fix="load the page again: its files have the names of this release",
        )
    kept = request.query_params.get("v") == file.digest
    headers = {"Cache-Control": _A_YEAR if kept else "no-cache", "X-Content-Type-Options": "nosniff"}
    return Response(file.content, media_type=file.media_type, headers=headers)


# The forms of the dashboard: their fields, and the proof that they come from our own pages.
#
# A browser sends its cookie with whatever request a page makes. Three things keep other pages from using it: the cookie
# is `SameSite=Strict`; a form must say that it comes from this service (`Sec-Fetch-Site` or `Origin`, which no page can
# set); and it must carry a token that only our pages know.

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


_HERE = Path(__file__).parent
PAGE_HEADERS = {
    # Even if a name from a checkpoint were not escaped, this policy would not let it run or load anything.
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    # `no-referrer` would also take the `Origin` from our own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Pages stay on no disk, and the button "back" shows none after the logout.
    "Cache-Control": "no-store",
}
_LONGEST = 4_096
_VERSION = version("reshard")


def render(request: Request, template: str, *, status: int = 200, **values: Any) -> Response:
    """A page. With `If-None-Match` of the very same page, the answer 304.

    Args:
        request: The request.
        template: The name of the template.
        status: The status of the answer.
        values: What the template shows. All of it is escaped.
    """
    text = html(request, template, **values)
    tag = f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'
    headers = {**PAGE_HEADERS, "ETag": tag}
    if status == 200 and request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return HTMLResponse(text, status_code=status, headers=headers)


def placed(request: Request, path: str) -> str:
    """The address of a page for a browser: its path below the service's root."""
    return f"{root_of(request.scope)}{path}"


def html(request: Request, template: str, **values: Any) -> str:
    """The text of a page."""
    caller = cast("Principal | None", getattr(request.state, "principal", None))
    given = {
        "caller": caller,
        "may": rights(caller),
        "path": path_of(request.scope),
        "root": root_of(request.scope),
        "version": _VERSION,
        "form_token": form_token(request),
        "token_field": TOKEN_FIELD,
    }
    return _environment.get_template(template).render(**{**given, **values})


def rights(caller: Principal | None) -> Mapping[str, bool]:
    """The scopes that a caller has, by name; a page shows no button that would be refused."""
    return {scope.value: caller is not None and scope in caller.scopes for scope in TokenScope}


def plain(text: object) -> str:
    """A text from a checkpoint or a request, with characters that a terminal or an eye would misread made visible."""
    return printable(str(text), max_chars=_LONGEST)


def duration(seconds: float | None) -> str:
    """Seconds in words: `0.4 s`, `12 s`, `3 min 5 s`, `2 h 10 min`."""
    if seconds is None:
        return ""
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours} h {rest} min" if rest else f"{hours} h"


def moment(at: datetime | None) -> str:
    """A time for a machine: the script of the page shows it in the reader's time zone."""
    return "" if at is None else at.isoformat(timespec="seconds")


def moment_in_words(at: datetime | None) -> str:
    """A time for a reader whose browser runs no scripts."""
    return "" if at is None else f"{at:%Y-%m-%d %H:%M} UTC"


_TONES = {
    JobState.SUCCEEDED: "good",
    JobState.FAILED: "bad",
    JobState.CANCELLED: "off",
    JobState.CANCELLING: "off",
    JobState.QUEUED: "off",
}
"""Waiting is neutral; the colour of warnings is for warnings."""


def tone(state: JobState) -> str:
    """The class of a state, which gives it its colour. The state is written beside it, too."""
    return _TONES.get(state, "busy")


_environment = Environment(
    loader=FileSystemLoader(_HERE / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.filters.update(
    {"plain": plain, "size": format_size, "duration": duration, "moment": moment, "in_words": moment_in_words}
)
_environment.filters["tone"] = tone
cast("dict[str, Any]", _environment.filters).update(
    {
        "counted": counted,
        "format_name": words.format_name,
        "is_command": words.is_command,
        "product": prod,
        "state_name": words.state_name,
        "target_name": words.target_name,
        "target_of": words.target_of,
        "target_part": words.target_part,
        "worded": words.worded,
    }
)
cast("dict[str, Any]", _environment.globals)["static_url"] = static_url


def names_shown(template: str) -> frozenset[str]:
    """The fields of a form: the names with which its template calls its macros."""
    text = (_HERE / "templates" / template).read_text(encoding="utf-8")
    calls = (call for call in _environment.parse(text).find_all(nodes.Call) if call.args)
    return frozenset(call.args[0].value for call in calls if isinstance(call.args[0], nodes.Const))
