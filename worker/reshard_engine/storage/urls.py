"""Canonical URLs: the one spelling of a location, and its comparison with the roots of this process.

All code that checks or opens a URL uses `canonical_url`, so that a permission check and the file system can never read
one text in two ways.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from reshard.errors import SEE_HELP, RequestError, printable

LOCAL_SCHEMES = ("file", "local")
_ALIASES = {"s3a": "s3", "s3n": "s3", "abfs": "az", "abfss": "az", "gcs": "gs"}
_HOSTS = ("", "localhost")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_LITERAL = frozenset({"s3", "az", "gs", "mem"})
"""Schemes whose keys hold `%` as any other character: our own stores, and fsspec's and the vendors' tools. `%2e%2e` is
a name of six characters there, and leads nowhere."""
_OTHER_REPOSITORIES = ("datasets", "spaces", "kernels", "buckets")
_HUB_REF = re.compile(r"^([^/]+/[^/@]+@)(refs/(?:convert/[\w.-]+|pr/\d+))(?=/|$)")
_HUB_MAIN = re.compile(r"^([^/]+/[^/@]+)@main(?=/|$)")
_HUB_NAMES = re.compile(r"[^/@%]+(?:$|/[^/@%]+(?:@(?:[^/@%]|%2F)+)?(?=/|$))")
"""The owner, the name of a repository and its revision, as they stand before the path."""
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
        raise RequestError("request.invalid", f"{printable(url)!r} names no location", fix=SEE_HELP)
    if is_local(url):
        # The kernel resolves `a/link/../b` with the link first and the dots after it, so this function does the same.
        return os.path.realpath(_local_path(url))
    if _SCHEME.fullmatch(scheme_of(url)) is None:
        raise RequestError(
            "request.invalid", f"{printable(url)} has no valid scheme", fix="write s3://bucket/path, or a local path"
        )
    rest = url.partition("://")[2].rstrip("/")
    if scheme_of(url) == "hf":
        rest = _of_hub(url, rest)
    if not has_plain_segments(rest):
        raise RequestError("request.invalid", f"{printable(url)} is not a clean URL", fix="write s3://bucket/path")
    if any(mark in rest for mark in ("?", "#", "::", "\\")):
        # A parser that reads queries, fragments or fsspec's chains in another way would open another location.
        raise RequestError("request.invalid", f"{printable(url)} is not a plain URL", fix="write s3://bucket/path")
    bucket, _, key = (_HUB_NAMES.sub("hub", rest, count=1) if scheme_of(url) == "hf" else rest).partition("/")
    user, at, host = bucket.rpartition("@")
    if at:
        # `container@account` of Azure, and `user:password@host` elsewhere: the latter would reach records and logs.
        place = rest.removeprefix(user + at) if ":" in user else rest.replace(at + host, "", 1)
        raise RequestError(
            "request.invalid",
            f"{scheme_of(url)}://{printable(place)}: the URL names an account or a user, which only the environment or "
            "a storage profile specifies",
            fix=f"write {scheme_of(url)}://{printable(place)}",
        )
    if "%" in bucket or (scheme_of(url) not in _LITERAL and _PERCENT.search(key)):
        raise RequestError(
            "request.invalid",
            f"{printable(url)} has a % escape, which not all programs read in one way",
            fix="write the characters themselves, such as s3://bucket/path",
        )
    return f"{scheme_of(url)}://{rest}"


def has_plain_segments(path: str) -> bool:
    """True if no segment of a relative path is empty, `.` or `..`.

    HTTP clients and gateways resolve such segments on the way (RFC 3986, 5.2.4), so a key that has them may name
    another object, in another container. Azure reads a backslash as a slash, so it separates segments here too.
    """
    return all(part not in ("", ".", "..") for part in path.replace("\\", "/").split("/"))


def _of_hub(url: str, rest: str) -> str:
    """The one spelling of a place in a model repository of the hub: `ORG/NAME[@REVISION][/PATH]`.

    A `/` of a revision is `%2F`, as `HfFileSystem` writes it, and `@main` is left out.
    Source: huggingface_hub 2.4.0 `utils/_hf_uris.py` (types of repositories, `refs/pr/N` and `refs/convert/NAME`).
    """
    kind, _, inner = rest.partition("/")
    if kind in _OTHER_REPOSITORIES:
        raise RequestError(
            "request.invalid",
            f"{printable(url)}: checkpoints are read from model repositories, not from {kind}",
            fix=f"download it, and name that directory: hf download ORG/NAME --repo-type {kind.removesuffix('s')} "
            "--local-dir NAME",
        )
    rest = inner if kind == "models" else rest
    rest = _HUB_REF.sub(lambda found: found[1] + found[2].replace("/", "%2F"), rest)
    rest = _HUB_MAIN.sub(r"\1", rest)
    if _HUB_NAMES.match(rest) is None:
        raise RequestError(
            "request.invalid",
            f"{printable(url)} names no repository of the hub",
            fix="write hf://ORG/NAME@REVISION/PATH, with %2F for each / of the revision; @REVISION and /PATH may be "
            "left out",
        )
    return rest


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


def refuse_upload(url: str) -> None:
    """Refuse a repository of the hub as the target of a job, or of several processes.

    Raises:
        RequestError: `request.unsatisfiable`.
    """
    if scheme_of(url) == "hf":
        raise RequestError(
            "request.unsatisfiable",
            f"{printable(url)}: one process uploads to the hub, with the token of its user; jobs of a service and "
            "conversions on many workers do not",
            fix="convert to a directory or a bucket, and upload that from a machine that has your token",
        )


def is_within(url: str, root: str) -> bool:
    """True if a canonical URL is a canonical root or lies below it."""
    return url == root or url.startswith(root.rstrip("/") + "/")


# The roots of this process: an engine of a service reads and writes nothing outside of them, whatever links say.
#
# The service compares the URLs of a request with its roots. What the engine finds by itself, such as the directory of a
# tag, a file behind a link, the directory above the source or the save directory of a target, is compared here.

_ROOTS: list[str] = []
"""Canonical URLs; empty if everything may be read. A process of an engine or a probe sets them once."""
_WRITE_ROOTS: list[str] = []
"""As `_ROOTS`, for the places that may be written."""


def confine(roots: Iterable[str], write_roots: Iterable[str] = ()) -> None:
    """Let this process read and write below these roots only; none of them lifts the limit."""
    _ROOTS[:] = [canonical_url(root) for root in roots]
    _WRITE_ROOTS[:] = [canonical_url(root) for root in write_roots]


def refuse_writing_outside(url: str, why: str) -> None:
    """Refuse a place beside or above a target if nothing may be written there.

    Args:
        url: The place.
        why: Why something is written there, for people.

    Raises:
        RequestError: `request.root_forbidden`.
    """
    if _WRITE_ROOTS and not any(is_within(canonical_url(url), root) for root in _WRITE_ROOTS):
        raise RequestError(
            "request.root_forbidden",
            f"{why}: {printable(url)} is outside the storage that this service may write",
            fix="name a target that is a directory deeper below one of the service's roots",
        )


def is_allowed(url: str) -> bool:
    """True if a URL is at or below a root, with its links resolved."""
    return not _ROOTS or _is_inside(canonical_url(url))


def refuse_outside(path: str) -> None:
    """Refuse a local path that leads out of the roots.

    Raises:
        RequestError: `request.root_forbidden`.
    """
    if _ROOTS and not _is_inside(os.path.realpath(path)):
        raise _forbidden(path)


def refuse_opened_outside(descriptor: int, path: str) -> None:
    """Refuse an open file that lies outside of the roots, which a link to it cannot change any more.

    Raises:
        RequestError: `request.root_forbidden`.
    """
    if not _ROOTS:
        return
    try:
        place = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        place = os.path.realpath(path)
    if not _is_inside(place):
        raise _forbidden(path)


def _is_inside(place: str) -> bool:
    return any(is_within(place, root) for root in _ROOTS)


def _forbidden(path: str) -> RequestError:
    return RequestError(
        "request.root_forbidden",
        f"{printable(path)} is a link to a place outside the storage that this service may use",
        fix="copy what it leads to below one of the service's roots, or ask its operator to add one to RESHARD_ROOTS",
    )
