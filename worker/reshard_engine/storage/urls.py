"""The one spelling of a place: what plans and job records name, and what roots are compared with.

Everything that judges a URL and everything that opens one goes through `canonical_url`, so that a
permission check and the file system can never read one text in two ways.
"""

from __future__ import annotations

import os
import re

from reshard.errors import RequestError, printable

LOCAL_SCHEMES = ("file", "local")
_ALIASES = {"s3a": "s3", "s3n": "s3"}
_HOSTS = ("", "localhost")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


def scheme_of(url: str) -> str:
    """The scheme of a URL, in lower case and without aliases; `file` for plain paths."""
    scheme, mark, _ = url.partition("://")
    name = scheme.lower() if mark else "file"
    return "file" if name in LOCAL_SCHEMES else _ALIASES.get(name, name)


def is_local(url: str) -> bool:
    """Whether the URL names a path of this machine."""
    return scheme_of(url) == "file"


def canonical_url(url: str) -> str:
    """The URL in its one spelling.

    Local paths become absolute with every symbolic link resolved, without a scheme; other URLs keep a
    lower-case scheme and clean segments.

    Raises:
        RequestError: `request.invalid` for what two parsers could read in two ways.
    """
    if "\0" in url or not url.strip():
        raise RequestError("request.invalid", f"{printable(url)!r} names no place")
    if is_local(url):
        # `a/link/../b` is what the kernel opens, not what the text says: links first, dots after.
        return os.path.realpath(_local_path(url))
    if _SCHEME.fullmatch(scheme_of(url)) is None:
        raise RequestError("request.invalid", f"{printable(url)} has no scheme that could be one")
    rest = url.partition("://")[2].rstrip("/")
    if not rest or any(part in ("", ".", "..") for part in rest.split("/")):
        raise RequestError("request.invalid", f"{printable(url)} is not a clean URL", fix="write s3://bucket/path")
    if any(mark in rest for mark in ("?", "#", "::", "\\")):
        # Queries, fragments and fsspec's chains: whoever reads them otherwise would open another place.
        raise RequestError("request.invalid", f"{printable(url)} is not a plain URL", fix="write s3://bucket/path")
    return f"{scheme_of(url)}://{rest}"


def _local_path(url: str) -> str:
    _, mark, rest = url.partition("://")
    if not mark:
        return os.path.expanduser(url)
    host, slash, path = rest.partition("/")
    if host.lower() not in _HOSTS or not slash or any(c in rest for c in "?#%"):
        raise RequestError(
            "request.invalid",
            f"{printable(url)} is not a plain file URL",
            fix="write the path alone, such as /data/run1",
        )
    return "/" + path


def is_within(url: str, root: str) -> bool:
    """Whether a canonical URL is a canonical root or lies below it."""
    return url == root or url.startswith(root.rstrip("/") + "/")
