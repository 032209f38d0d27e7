"""Canonical URLs: the one spelling of a location in plans and job records, and for the comparison with roots.

All code that checks or opens a URL uses `canonical_url`, so that a permission check and the file system can never read
one text in two ways.
"""

from __future__ import annotations

import os
import re

from reshard.errors import RequestError, printable

LOCAL_SCHEMES = ("file", "local")
_ALIASES = {"s3a": "s3", "s3n": "s3"}
_HOSTS = ("", "localhost")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_LITERAL = frozenset({"s3", "mem"})
"""Schemes whose keys hold `%` as any other character: our own stores, and fsspec's and the AWS tools' S3. `%2e%2e` is a
name of six characters there, and leads nowhere."""
_PERCENT = re.compile("%[0-9A-Fa-f]{2}")


def scheme_of(url: str) -> str:
    """The scheme of a URL, in lower case and without aliases; `file` for plain paths."""
    scheme, mark, _ = url.partition("://")
    name = scheme.lower() if mark else "file"
    return "file" if name in LOCAL_SCHEMES else _ALIASES.get(name, name)


def is_local(url: str) -> bool:
    """True if the URL names a path of this machine."""
    return scheme_of(url) == "file"


def canonical_url(url: str) -> str:
    """The canonical spelling of a URL.

    A local path becomes absolute, without a scheme, and with every symbolic link resolved. Any other URL has its scheme
    in lower case and has no empty, `.` or `..` segment. No escape is decoded: in paths and in keys of S3 a `%` is a
    character, and where programs differ about it, it is refused.

    Raises:
        RequestError: `request.invalid` for a URL that two parsers could read in two ways.
    """
    if "\0" in url or not url.strip():
        raise RequestError(
            "request.invalid",
            f"{printable(url)!r} names no location",
            fix="give a path or a URL, such as s3://bucket/path",
        )
    if is_local(url):
        # The kernel resolves `a/link/../b` with the link first and the dots after it, so this function does the same.
        return os.path.realpath(_local_path(url))
    if _SCHEME.fullmatch(scheme_of(url)) is None:
        raise RequestError(
            "request.invalid", f"{printable(url)} has no valid scheme", fix="write s3://bucket/path, or a local path"
        )
    rest = url.partition("://")[2].rstrip("/")
    if not rest or any(part in ("", ".", "..") for part in rest.split("/")):
        raise RequestError("request.invalid", f"{printable(url)} is not a clean URL", fix="write s3://bucket/path")
    if any(mark in rest for mark in ("?", "#", "::", "\\")):
        # A parser that reads queries, fragments or fsspec's chains in another way would open another location.
        raise RequestError("request.invalid", f"{printable(url)} is not a plain URL", fix="write s3://bucket/path")
    bucket, _, key = rest.partition("/")
    if "%" in bucket or (scheme_of(url) not in _LITERAL and _PERCENT.search(key)):
        raise RequestError(
            "request.invalid",
            f"{printable(url)} has a % escape, which not all programs read in one way",
            fix="write the characters themselves, such as s3://bucket/path",
        )
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
    """True if a canonical URL is a canonical root or lies below it."""
    return url == root or url.startswith(root.rstrip("/") + "/")
