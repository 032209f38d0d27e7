"""The roots of this process: an engine of a service reads and writes nothing outside of them, whatever links say.

The service compares the URLs of a request with its roots. What the engine finds by itself, such as the directory of a
tag, a file behind a link, the directory above the source or the save directory of a target, is compared here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from reshard.errors import RequestError, printable
from reshard_engine.storage.urls import canonical_url, is_within

_ROOTS: list[str] = []
"""Canonical URLs; empty if everything may be read. A process of an engine or a probe sets them once."""
_WRITE_ROOTS: list[str] = []
"""As `_ROOTS`, for the places that may be written."""


def confine(roots: Iterable[str], write_roots: Iterable[str] = ()) -> None:
    """Let this process read and write below these roots only; none of them lifts the limit."""
    _ROOTS[:] = [canonical_url(root) for root in roots]
    _WRITE_ROOTS[:] = [canonical_url(root) for root in write_roots]


def refuse_writing_outside(url: str) -> None:
    """Refuse the save directory of a target if nothing may be written there.

    Raises:
        RequestError: `request.root_forbidden`.
    """
    if _WRITE_ROOTS and not any(is_within(canonical_url(url), root) for root in _WRITE_ROOTS):
        raise RequestError(
            "request.root_forbidden",
            f"the target ends with the source's tag, so its save directory is {printable(url)}, "
            "which is outside the storage that this service may write",
            fix="name a target whose save directory is below one of the service's roots",
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
