"""The paths of the dashboard, which a browser opens with its cookie."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

LOGIN = "/login"
STATIC = "/static/"
"""Style sheets and scripts: anybody may have them, for the page of the login needs them."""
_PAGE = re.compile(r"/(?:workers|submit(?:/layout)?|docs|logout|jobs/[^/]+(?:/(?:cancel|retry|layout))?)?")


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
