"""Sources on a file system of fsspec that the caller made, with its own credentials: `UPath` and others.

Requests name places by URLs and credentials by storage profiles. A file system of this process gets a profile of its
own, which exists as long as the process: so requests, plans and the engine stay as they are, and the credentials of a
source are never those of the target.
"""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeGuard

from reshard.errors import RequestError, printable
from reshard.option import PathLike

_PROFILE = "fsspec:"
"""The prefix of these profiles. A profile that an operator configured under such a name is never looked up."""


class UniversalPath(Protocol):
    """A path that knows its file system: `upath.UPath`, `fsspec.core.OpenFile`, `DirFileSystem`.

    Source: universal_pathlib 0.3.10 `upath/core.py`; fsspec 2026.9.0 `core.py`, `implementations/dirfs.py`.
    """

    @property
    def fs(self) -> Any:
        """The file system."""
        ...

    @property
    def path(self) -> str:
        """The path in it, without a scheme."""
        ...


class Mapper(Protocol):
    """The result of `fs.get_mapper(path)`: a directory of a file system. Source: fsspec 2026.9.0 `mapping.py`."""

    @property
    def fs(self) -> Any:
        """The file system."""
        ...

    @property
    def root(self) -> str:
        """The directory."""
        ...


class Filesystem(Protocol):
    """A file system of fsspec, which stands for its root. Source: fsspec 2026.9.0 `spec.py`."""

    root_marker: str

    def info(self, path: str, **kwargs: Any) -> Any:
        """The details of one file."""
        ...

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> Any:
        """A range of one file."""
        ...


SourcePlace = PathLike | UniversalPath | Mapper | Filesystem
"""A source: a local path, a URL, a `UPath`, or a directory of a file system of fsspec."""


@dataclass(frozen=True, eq=False)
class AttachedFilesystem:
    """A file system of fsspec under the scheme, and the host, of the URLs that name its files."""

    filesystem: Any
    scheme: str
    host: str
    """A host, a class or nothing: what stands before the path where the path alone would not be a URL."""
    lead: str
    """A slash if the paths begin with one here, as those of the root do. Zip files take paths without."""

    @classmethod
    def of(cls, filesystem: Any, path: str, protocol: str) -> AttachedFilesystem:
        """The names of a file system's files.

        Args:
            filesystem: The file system.
            path: A path in it.
            protocol: The scheme, if the path has one of its own.
        """
        own = [filesystem.protocol] if isinstance(filesystem.protocol, str) else [*filesystem.protocol, "abstract"]
        # sshfs 2026.8.0 leaves the protocol of the base class. A scheme has no underscore (RFC 3986, 3.1).
        scheme = protocol or (type(filesystem).__name__.lower() if own[0] == "abstract" else str(own[0]))
        scheme = re.sub(r"[^a-z0-9+.-]", "-", scheme.lower())
        host = getattr(filesystem, "host", None) or getattr(filesystem, "storage_options", {}).get("host")
        if not (isinstance(host, str) and host):
            host = "" if path.strip("/") else type(filesystem).__name__
        return cls(filesystem, scheme, host, "/" if path[:1] in {"", "/"} else "")

    def same(self, other: AttachedFilesystem) -> bool:
        """True for the same file system under the same names."""
        names = (self.scheme, self.host, self.lead) == (other.scheme, other.host, other.lead)
        return self.filesystem is other.filesystem and names

    def url_of(self, path: str) -> str:
        """The URL of a path of the file system."""
        if "://" in path:  # as HTTPFileSystem has them
            return path
        return f"{self.scheme}://" + "/".join(part for part in (self.host, path.strip("/")) if part)

    def path_of(self, url: str) -> str | None:
        """The path that a URL of this scheme names; None for a URL of another host."""
        rest = url.partition("://")[2]
        host, _, inner = rest.partition("/") if self.host else ("", "", rest)
        if host != self.host:
            return None
        return self.lead + inner if inner else ""


_attached: dict[str, AttachedFilesystem] = {}
"""By profile. fsspec itself keeps the file systems that it has made for as long as the process runs."""
_lock = threading.Lock()


def located(place: SourcePlace) -> tuple[str, str | None]:
    """The URL of a source, and the profile of its file system; None for a path or a URL as text.

    The file system of this machine (`LocalFileSystem`) needs no profile.

    Raises:
        RequestError: `request.invalid` for an object that is not a place.
    """
    if isinstance(place, str | os.PathLike):
        return os.fspath(place), None
    filesystem, path = _filesystem_and_path(place)
    path = str(filesystem._strip_protocol(path))  # noqa: SLF001 - all methods of fsspec's file systems begin with it
    named = "" if _is_filesystem(place) else getattr(place, "protocol", "")
    attached = AttachedFilesystem.of(filesystem, path, named if isinstance(named, str) else "")
    if any(kind.__name__ == "LocalFileSystem" for kind in type(filesystem).__mro__):
        return path, None
    if attached.scheme in {"file", "local"}:  # paths of this machine, but from another root
        attached = replace(attached, scheme=f"{attached.scheme}-system")
    with _lock:
        name = next((n for n, known in _attached.items() if known.same(attached)), f"{_PROFILE}{len(_attached) + 1}")
        _attached.setdefault(name, attached)
    return attached.url_of(path), name


def text_of(place: SourcePlace, what: str) -> str:
    """A path or a URL as text, for a place that no file system of the caller may name.

    Args:
        place: The place.
        what: The argument, for the error.

    Raises:
        RequestError: `request.invalid`.
    """
    url, profile = located(place)
    if profile is None:
        return url
    raise RequestError(
        "request.invalid",
        f"{what} is {printable(url)} on a file system of fsspec, which is only read",
        fix=f'write the URL as text, such as `{what}="s3://bucket/path"`; a storage profile has credentials of its own '
        "(docs/object-stores.md)",
    )


def refuse_for_service(url: str, profile: str | None) -> None:
    """Refuse the profile of a file system where another process would have to read from it.

    Raises:
        RequestError: `request.invalid`.
    """
    if is_of_process(profile):
        raise _of_another_process(url)


def is_of_process(profile: str | None) -> TypeGuard[str]:
    """True for the profile of a file system of one process."""
    return profile is not None and profile.startswith(_PROFILE)


def attached_to(profile: str, url: str) -> AttachedFilesystem:
    """The file system of a profile.

    Args:
        profile: The profile.
        url: The place that is wanted of it, for the error.

    Raises:
        RequestError: `request.invalid` in another process than the one that attached the file system.
    """
    if (attached := _attached.get(profile)) is None:
        raise _of_another_process(url)
    return attached


def _of_another_process(url: str) -> RequestError:
    return RequestError(
        "request.invalid",
        f"the source {printable(url)} is on a file system of fsspec, an object of the process that made the "
        "request: another process has neither the object nor its credentials",
        fix='name the source by its URL as text, such as `source="s3://bucket/path"`, and credentials by a storage '
        "profile of the service; or convert in the process that has the file system",
    )


def _filesystem_and_path(place: Any) -> tuple[Any, str]:
    if _is_filesystem(getattr(place, "fs", None)):
        path = getattr(place, "path", None) if hasattr(place, "path") else getattr(place, "root", None)
        if isinstance(path, str):
            # A directory of a directory of a file system (`DirFileSystem` in a mapper) is one of the innermost.
            return _innermost(place.fs, path)
    if _is_filesystem(place):
        return place, place.root_marker
    raise RequestError(
        "request.invalid",
        f"the source is of the type {printable(type(place).__name__)}",
        fix="give a path, a URL as text, a UPath, or `fs.get_mapper('bucket/path')` of a file system of fsspec",
    )


def _innermost(filesystem: Any, path: str) -> tuple[Any, str]:
    inner, above = getattr(filesystem, "fs", None), getattr(filesystem, "path", None)
    if filesystem.protocol == "dir" and _is_filesystem(inner) and isinstance(above, str):
        joined = f"{above.rstrip('/')}/{path.strip('/')}" if above and path.strip("/") else above or path
        return _innermost(inner, joined)
    return filesystem, path


def _is_filesystem(value: object) -> bool:
    return all(hasattr(value, name) for name in ("protocol", "root_marker", "info", "cat_file", "_strip_protocol"))
