"""Renders pages: templates, headers, and the tag by which a page that watches itself knows that nothing changed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any, cast

from fastapi import Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from reshard.choices import JobState, TokenScope
from reshard.errors import format_size, printable
from reshard_jobs.principals import Principal
from reshard_service.page_paths import path_of, root_of
from reshard_service.pages import words
from reshard_service.pages.forms import TOKEN_FIELD, form_token
from reshard_service.pages.static_files import static_url

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
        "counted": words.counted,
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
