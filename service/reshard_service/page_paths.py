"""The paths of the dashboard, which a browser opens with its cookie."""

from __future__ import annotations

import re
from typing import Any, cast
from urllib.parse import urlsplit

from starlette.types import Scope

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
