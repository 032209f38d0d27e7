"""URLs to stores: one function that names storage, with the store behind it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from reshard.errors import RequestError, printable
from reshard_engine.storage.local import LocalStore
from reshard_engine.storage.profiles import profile_named
from reshard_engine.storage.protocol import Store, join

_LOCAL_SCHEMES = ("file", "local")


@dataclass(frozen=True)
class Location:
    """A path in a store."""

    store: Store
    path: str
    url: str

    def child(self, *names: str) -> Location:
        """The location of a path below this one."""
        return Location(self.store, join(self.path, *names), join(self.url, *names))


def scheme_of(url: str) -> str:
    """The scheme of a URL; `file` for plain paths."""
    scheme, mark, _ = url.partition("://")
    return scheme.lower() if mark else "file"


def normalized(url: str) -> str:
    """The URL in the one spelling that plans and manifests use: absolute, without a trailing slash."""
    if scheme_of(url) in _LOCAL_SCHEMES:
        return os.path.abspath(url.partition("://")[2] if "://" in url else os.path.expanduser(url))
    scheme, _, rest = url.partition("://")
    return f"{scheme.lower()}://{rest.rstrip('/')}"


def open_location(url: str, profile: str | None = None) -> Location:
    """The location that a URL names; nothing is contacted yet.

    Raises:
        RequestError: `request.unknown_scheme` if no installed fsspec backend serves the scheme,
            `request.invalid` for a URL without a bucket or with empty or dotted path segments.
    """
    scheme = scheme_of(url)
    name = normalized(url)
    if scheme in _LOCAL_SCHEMES:
        return Location(LocalStore(), name, name)
    path = name.partition("://")[2]
    if not path or any(part in ("", ".", "..") for part in path.split("/")):
        raise RequestError("request.invalid", f"{printable(url)} is not a clean URL", fix="write s3://bucket/path")
    if scheme in ("s3", "s3a"):
        from reshard_engine.storage.s3 import S3Store  # costs 0.4 s to import: only where S3 is used

        return Location(S3Store(profile_named(profile)), path, name)
    return Location(_generic(scheme), path, name)


def _generic(scheme: str) -> Store:
    import fsspec  # pyright: ignore[reportMissingTypeStubs]  # it has none

    from reshard_engine.storage.generic import FsspecStore

    try:
        filesystem: Any = fsspec.filesystem(scheme)  # pyright: ignore[reportUnknownMemberType]
    except (ValueError, ImportError) as error:
        raise RequestError(
            "request.unknown_scheme",
            f"no storage backend serves {printable(scheme)!r}: {printable(str(error))}",
            fix="use a local path, s3://, or install the fsspec backend of that scheme",
        ) from error
    return FsspecStore(filesystem, scheme)
