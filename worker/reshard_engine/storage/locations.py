"""Locations: a URL resolved to a store and a path in it."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from reshard.errors import RequestError, printable
from reshard_engine.storage.local import LocalStore
from reshard_engine.storage.profiles import profile_named
from reshard_engine.storage.protocol import ObjectInfo, Store, join
from reshard_engine.storage.urls import canonical_url, is_local, scheme_of

_NOT_STORAGE = ("http", "https", "data", "blockcache", "filecache", "simplecache", "cached", "reference", "zip", "tar")
"""fsspec file systems that cannot list directories, or that wrap another one."""
_SERVED: ContextVar[Mapping[str, Store]] = ContextVar("served", default=MappingProxyType({}))


@dataclass(frozen=True)
class Location:
    """A path in a store."""

    store: Store
    path: str
    url: str

    def child(self, *names: str) -> Location:
        """The location of a path below this one."""
        return Location(self.store, join(self.path, *names), join(self.url, *names))

    def files(self) -> dict[str, ObjectInfo]:
        """Every file below this location, by its path relative to the location."""
        return {i.path[len(self.path) + 1 :]: i for i in self.store.list_tree(self.path)}


@contextmanager
def serving(scheme: str, store: Store) -> Generator[None]:
    """Let a store of this process serve a scheme within the block, in this thread (context) only."""
    token = _SERVED.set({**_SERVED.get(), scheme: store})
    try:
        yield
    finally:
        _SERVED.reset(token)


def open_location(url: str, profile: str | None = None, *, beside: Location | None = None) -> Location:
    """The location that a URL names. No request is sent yet.

    Args:
        url: The URL.
        profile: Name of a storage profile.
        beside: Another location. If it is in the same service, the new location uses its store and connections.

    Raises:
        RequestError: `request.unknown_scheme` if no installed fsspec backend serves the scheme,
            `request.invalid` as in `storage.urls.canonical_url`.
    """
    name = canonical_url(url)
    if is_local(url):
        return Location(LocalStore(), name, name)
    scheme, path = scheme_of(url), name.partition("://")[2]
    if (served := _SERVED.get().get(scheme)) is not None:
        return Location(served, path, name)
    if scheme == "s3":
        from reshard_engine.storage.s3 import S3Store  # botocore costs 0.25 s to import: only where S3 is used

        found = profile_named(profile)
        if beside is not None and isinstance(beside.store, S3Store) and beside.store.profile == found:
            return Location(beside.store, path, name)
        return Location(S3Store(found), path, name)
    return Location(_generic(scheme), path, name)


def _generic(scheme: str) -> Store:
    import fsspec  # pyright: ignore[reportMissingTypeStubs]  # it has none

    from reshard_engine.storage.generic import FsspecStore

    if scheme == "hf":
        # The client of hf:// raises errors of whichever HTTP library it uses, and reads whole blocks.
        raise RequestError(
            "request.unknown_scheme",
            "hf:// cannot be read: download the repository from the Hugging Face hub first",
            fix="hf download ORG/NAME --local-dir NAME, then name that directory",
        )
    if scheme in _NOT_STORAGE:
        raise _unserved(scheme, "it cannot list directories")
    try:
        filesystem: Any = fsspec.filesystem(scheme)  # pyright: ignore[reportUnknownMemberType]
    except (ValueError, ImportError) as error:
        raise _unserved(scheme, str(error)) from None
    return FsspecStore(filesystem, scheme)


def _unserved(scheme: str, reason: str) -> RequestError:
    return RequestError(
        "request.unknown_scheme",
        f"no storage backend serves {printable(scheme)!r}: {printable(reason)}",
        fix="use a local path, s3://, or install the fsspec backend of that scheme",
    )
