"""Locations: a URL resolved to a store and a path in it, for any file system that can be listed."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any

from reshard.errors import RequestError, SourceError, listed, printable
from reshard.extras import install_line
from reshard.filesystems import AttachedFilesystem, attached_to, is_of_process
from reshard_engine.storage.fsspec_store import FsspecStore
from reshard_engine.storage.local import LocalStore
from reshard_engine.storage.protocol import ObjectInfo, ServiceStore, Store, join
from reshard_engine.storage.urls import canonical_url, is_local, is_within, scheme_of

WRITABLE: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "s3": ("reshard_engine.storage.s3", "S3Store", "worker"),
        "az": ("reshard_engine.storage.azure", "AzureStore", "azure"),
        "gs": ("reshard_engine.storage.gcs", "GcsStore", "gcs"),
    }
)
"""Schemes of the stores that can be written: module and class of a `ServiceStore`, and the extra that installs it."""
_HUB = {"hf": ("reshard_engine.storage.hub", "HubStore", "hub")}
"""As `WRITABLE`, for the hub: it takes whole commits, so no sink writes into it."""
WRITABLE_URLS = ", ".join(["a local path", *(f"{scheme}://bucket/path" for scheme in WRITABLE)])
"""Kinds of places that a user may name instead of a URL that can only be read."""
_NO_DIRECTORIES = ("http", "https", "data", "generic", "reshard")
"""fsspec file systems that cannot list directories."""
_WRAPPING = ("blockcache", "filecache", "simplecache", "cached", "reference", "asyncwrapper")
"""fsspec file systems over another one, which may serve bytes of another version than the one that it lists."""
_IN_A_FILE = ("zip", "tar", "dir")
"""fsspec file systems whose arguments say where they are, so that no URL does."""
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
        profile: Name of a storage profile, or that of a file system of this process (`reshard.filesystems`), which
            counts for the URLs of its scheme.
        beside: Another location. If it is in the same service, the new location uses its store and connections.

    Raises:
        RequestError: `request.unknown_scheme` if nothing that is installed serves the scheme,
            `request.invalid` as in `storage.urls.canonical_url`, and for the file system of another process.
    """
    name = canonical_url(url)
    if is_local(url):
        return Location(LocalStore(), name, name)
    scheme, path = scheme_of(url), name.partition("://")[2]
    if is_of_process(profile):
        attached = attached_to(profile, name)
        inner = attached.path_of(name) if scheme_of(f"{attached.scheme}://") == scheme else None
        if inner is not None:
            return Location(_attached_store(attached, scheme, inner), inner, name)
        profile = None
    if (served := _SERVED.get().get(scheme)) is not None:
        return Location(served, path, name)
    if scheme in _HUB and "/" not in path:
        raise RequestError(
            "request.invalid",
            f"{printable(name)} names no repository",
            fix="write hf://ORG/NAME, hf://ORG/NAME@REVISION or hf://ORG/NAME/DIRECTORY",
        )
    if scheme in (*WRITABLE, *_HUB):
        kind = service_store(scheme)
        return Location(kind.of_profile(profile, None if beside is None else beside.store), path, name)
    return Location(_generic(scheme), path, name)


def service_store(scheme: str) -> type[ServiceStore]:
    """The class of stores that serves one of the schemes of `WRITABLE`, or the hub.

    Raises:
        RequestError: `request.unknown_scheme` if what it needs is not installed.
    """
    module, name, extra = {**WRITABLE, **_HUB}[scheme]
    try:
        # botocore costs 0.25 s to import, and others more: each is imported where its scheme is used.
        found: type[ServiceStore] = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise RequestError(
            "request.unknown_scheme",
            f"{scheme}:// needs {printable(str(error.name))}, which is not installed",
            fix=install_line(extra),
        ) from None
    return found


def _attached_store(attached: AttachedFilesystem, scheme: str, path: str) -> Store:
    protocols = attached.filesystem.protocol
    named = (protocols,) if isinstance(protocols, str) else tuple(protocols)
    kind = printable(type(attached.filesystem).__name__)
    caches = any(c.__name__ == "CachingFileSystem" for c in type(attached.filesystem).__mro__)
    if caches or not {*named}.isdisjoint(_WRAPPING):
        raise RequestError(
            "request.invalid",
            f"{kind} wraps another file system, and may serve bytes of another version than the one that it lists",
            fix="give the file system that it wraps, such as `fs.fs.get_mapper('bucket/path')`",
        )
    if not {*named}.isdisjoint(_NO_DIRECTORIES):
        raise RequestError(
            "request.invalid",
            f"{kind} cannot list directories",
            fix="copy the files of the checkpoint to a directory, `fs.get(files, 'DIR/')`, and name that",
        )
    if not path and scheme in (*WRITABLE, *_HUB):
        raise RequestError(
            "request.invalid",
            f"{kind} alone names no bucket",
            fix="name the directory as well: `fs.get_mapper('bucket/path')`",
        )
    return FsspecStore(attached.filesystem, scheme, lead=attached.lead)


def _generic(scheme: str) -> Store:
    import fsspec  # pyright: ignore[reportMissingTypeStubs]  # it has none

    if scheme in (*_NO_DIRECTORIES, *_WRAPPING, *_IN_A_FILE):
        raise _unserved(scheme, "it cannot list directories")
    try:
        kind: Any = fsspec.get_filesystem_class(scheme)  # pyright: ignore[reportUnknownMemberType]
    except (ValueError, ImportError) as error:
        raise _unserved(scheme, str(error)) from None
    if missing := _unset_arguments(kind):
        # Such as the host and the password of FTP: a URL must not contain them (`canonical_url`).
        raise RequestError(
            "request.unknown_scheme",
            f"{scheme}:// cannot be read: fsspec's {kind.__name__} needs {listed(missing)}, which reshard cannot pass",
            fix=f"copy the checkpoint to a local directory or a bucket, and name that: {WRITABLE_URLS}",
        )
    try:
        filesystem: Any = fsspec.filesystem(scheme)  # pyright: ignore[reportUnknownMemberType]
    except (OSError, ValueError, ImportError, TypeError, AttributeError, LookupError, RuntimeError) as error:
        # A constructor of another package that lacks its configuration fails in whichever way its code does first.
        raise _unserved(scheme, str(error)) from None
    return FsspecStore(filesystem, scheme)


def _unset_arguments(kind: Any) -> list[str]:
    """The arguments without which a file system cannot be made."""
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.POSITIONAL_ONLY, Parameter.KEYWORD_ONLY)
    # The signature of the class is that of fsspec's metaclass, which takes anything.
    own = [*signature(kind.__init__).parameters.values()][1:]
    return [a.name for a in own if a.kind in named and a.default is Parameter.empty]


def _unserved(scheme: str, reason: str) -> RequestError:
    return RequestError(
        "request.unknown_scheme",
        f"no storage backend serves {printable(scheme)!r}: {printable(reason)}",
        fix=f"name {WRITABLE_URLS}, or install the fsspec backend of that scheme",
    )


# Refusal of links in a checkpoint's directory that would carry the content of other files into the output.


def refuse_link_elsewhere(location: Location, path: str, *, also: Sequence[str] = ()) -> None:
    """Refuse a file of a location if it is a link to a file elsewhere, whose content must not reach the output.

    Args:
        location: The directory.
        path: Path of the file in its store.
        also: Further directories that may hold the file.

    Raises:
        SourceError: `name.invalid`.
    """
    if location.store.scheme != "file":
        return
    if not any(is_within(canonical_url(path), place) for place in (location.url, *also)):
        raise SourceError(
            "name.invalid", f"{printable(path)} is a link to a file elsewhere", fix="copy the file itself there"
        )


def refuse_hub_link_elsewhere(location: Location, path: str) -> None:
    """Like `refuse_link_elsewhere`, but accepts links into the huggingface_hub cache that holds the location.

    That cache consists of such links: `snapshots/REVISION` holds links to `blobs` beside `snapshots`.

    Raises:
        SourceError: `name.invalid`.
    """
    snapshots = os.path.dirname(location.url)
    cached = os.path.basename(snapshots) == "snapshots"
    blobs = [os.path.join(os.path.dirname(snapshots), "blobs")] if cached else []
    refuse_link_elsewhere(location, path, also=blobs)
