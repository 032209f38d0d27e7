"""Storage that jobs may name: prefixes of URLs, compared component by component."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from reshard.errors import RequestError, printable

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")


@dataclass(frozen=True, slots=True)
class Location:
    """A URL cut into what is compared: scheme, then host or bucket, then path components."""

    scheme: str
    parts: tuple[str, ...]

    def within(self, root: Location) -> bool:
        """Whether this location is `root` or lies below it."""
        return self.scheme == root.scheme and self.parts[: len(root.parts)] == root.parts


def locate(url: str) -> Location:
    """The location that `url` names; local paths with their symbolic links resolved.

    Raises:
        RequestError: `request.invalid`: the URL has more than one reading.
    """
    match = _SCHEME.match(url)
    if match is None or match[1].lower() == "file":
        split = urlsplit(url) if match else None
        path = unquote(split.path) if split else url
        # A relative path would mean one thing to the API and another to a worker.
        if (split and split.netloc not in {"", "localhost"}) or not path.startswith("/") or "\0" in path:
            raise _ambiguous(url)
        return Location("file", tuple(part for part in os.path.realpath(path).split("/") if part))
    parts = url[match.end() :].rstrip("/").split("/")
    # Object keys are literal: `..` is a name to a store and a step up to a file system behind one.
    if any(part in {"", ".", ".."} for part in parts) or "::" in url or "\\" in url:
        raise _ambiguous(url)
    return Location(match[1].lower(), tuple(parts))


def _ambiguous(url: str) -> RequestError:
    return RequestError(
        "request.invalid",
        f"the URL {printable(url)!r} has empty, relative or chained parts",
        fix="write the URL as scheme://bucket/key/parts, a local path as /absolute/path",
    )


@dataclass(frozen=True, slots=True)
class Roots:
    """URL prefixes; none means that everything is allowed (a single user on a loopback address)."""

    urls: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Roots:
        """Roots from comma-separated URL prefixes."""
        roots = cls(tuple(part.strip() for part in text.split(",") if part.strip()))
        for url in roots.urls:
            locate(url)
        return roots

    def require(self, urls: Iterable[str]) -> None:
        """Do nothing if every URL lies under a root.

        Raises:
            RequestError: `request.root_forbidden`, or `request.invalid` for a URL with several readings.
        """
        if not self.urls:
            return
        allowed = [locate(root) for root in self.urls]
        for url in urls:
            if not any(locate(url).within(root) for root in allowed):
                raise RequestError(
                    "request.root_forbidden",
                    f"{printable(url)!r} is outside the storage that this service may use",
                    fix="use a URL under one of the service's roots, or ask its operator to add one to RESHARD_ROOTS",
                )
