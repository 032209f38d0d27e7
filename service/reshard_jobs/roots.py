"""Roots: the URL prefixes below which jobs may read and write, compared after normalisation."""

from __future__ import annotations

import re
from dataclasses import dataclass

from reshard.errors import RequestError, printable
from reshard.models import ConvertRequest
from reshard_engine.storage.urls import canonical_url, is_within

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")


def normalized_url(url: str) -> str:
    """The normalised form of a URL or path. The same form is compared with the roots and opened.

    Raises:
        RequestError: `request.invalid`: the URL is ambiguous.
    """
    scheme, mark, _ = url.partition("://")
    if mark and not _SCHEME.fullmatch(scheme):
        raise _ambiguous(url)
    if not mark and not url.startswith("/"):
        # A relative path, or a `~`, would name one place for the API and another one for a worker.
        raise _ambiguous(url)
    return canonical_url(url)


def _ambiguous(url: str) -> RequestError:
    return RequestError(
        "request.invalid",
        f"{printable(url)!r} is a relative path or a chained URL",
        fix="write a URL as scheme://bucket/key/parts, a local path as /absolute/path",
    )


@dataclass(frozen=True, slots=True)
class Roots:
    """The allowed URL prefixes; without any, everything is allowed (a single user on a loopback address)."""

    urls: tuple[str, ...] = ()
    nothing: bool = False
    """True if nothing is allowed at all: a tenant's roots and those of the service have nothing in common."""
    writable: tuple[str, ...] = ()
    """The prefixes among them below which an engine may write; none lifts the limit."""

    @classmethod
    def parse(cls, text: str) -> Roots:
        """Parse comma-separated URL prefixes.

        Raises:
            RequestError: `request.invalid`: a root is ambiguous.
        """
        roots = cls(tuple(part.strip() for part in text.split(",") if part.strip()))
        for url in roots.urls:
            normalized_url(url)
        return roots

    def allowed(self, url: str) -> str:
        """The normalised form of a URL at or below a root. Open only this form: only this one was checked.

        Raises:
            RequestError: `request.root_forbidden`, or `request.invalid` for an ambiguous URL.
        """
        place = normalized_url(url)
        if self.nothing:
            raise _forbidden(url)
        if self.urls and not any(is_within(place, normalized_url(root)) for root in self.urls):
            raise _forbidden(url)
        return place

    def allowed_request(self, request: ConvertRequest, *, write: Roots | None = None) -> ConvertRequest:
        """The request with normalised URLs, if all of them are allowed. `write`: the roots of targets, if others.

        Raises:
            RequestError: As `allowed`.
        """
        source = request.source.model_copy(update={"url": self.allowed(request.source.url)})
        writable = write or self
        target = writable.allowed(request.target)
        if target in {normalized_url(root) for root in writable.urls}:
            # A conversion also writes beside its target: `latest_universal`, its journal.
            raise _forbidden(request.target)
        beside = None if request.model_files is None else self.allowed(request.model_files)
        options = request.options
        for name, found in options.by_format():
            if places := found.places():
                judged = found.model_copy(update={option: self.allowed(url) for option, url in places.items()})
                options = options.model_copy(update={name: judged})
        return request.model_copy(
            update={"source": source, "target": target, "model_files": beside, "options": options}
        )


def _forbidden(url: str) -> RequestError:
    return RequestError(
        "request.root_forbidden",
        f"{printable(url)!r} is outside the storage that this service may use",
        fix="use a URL under one of the service's roots, or ask its operator to add one to RESHARD_ROOTS",
    )
