"""Storage that jobs may name: prefixes of URLs, compared in the engine's own spelling of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from reshard.errors import RequestError, printable
from reshard.models import ConvertRequest
from reshard_engine.storage.urls import canonical_url, is_within

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")


def place_of(url: str) -> str:
    """The one spelling of a place that a job may name: what is compared, and what is opened.

    Raises:
        RequestError: `request.invalid`: the URL has more than one reading.
    """
    scheme, mark, _ = url.partition("://")
    if mark and not _SCHEME.fullmatch(scheme):
        raise _ambiguous(url)
    if not mark and not url.startswith("/"):
        # A relative path would mean one thing to the API and another to a worker; so would a `~`.
        raise _ambiguous(url)
    return canonical_url(url)


def _ambiguous(url: str) -> RequestError:
    return RequestError(
        "request.invalid",
        f"{printable(url)!r} is relative or chained",
        fix="write a URL as scheme://bucket/key/parts, a local path as /absolute/path",
    )


@dataclass(frozen=True, slots=True)
class Roots:
    """URL prefixes; none means that everything is allowed (a single user on a loopback address)."""

    urls: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Roots:
        """Roots from comma-separated URL prefixes.

        Raises:
            RequestError: `request.invalid`: a root has more than one reading.
        """
        roots = cls(tuple(part.strip() for part in text.split(",") if part.strip()))
        for url in roots.urls:
            place_of(url)
        return roots

    def allowed(self, url: str) -> str:
        """The one spelling of a place at or below a root. Use nothing else: only this was judged.

        Raises:
            RequestError: `request.root_forbidden`, or `request.invalid` for a URL with several readings.
        """
        place = place_of(url)
        if self.urls and not any(is_within(place, place_of(root)) for root in self.urls):
            raise _forbidden(url)
        return place

    def allowed_request(self, request: ConvertRequest) -> ConvertRequest:
        """The request with its places in their one spelling, if it may be carried out.

        Raises:
            RequestError: As `allowed`.
        """
        source = request.source.model_copy(update={"url": self.allowed(request.source.url)})
        target = self.allowed(request.target)
        if target in {place_of(root) for root in self.urls}:
            # A conversion also writes beside its target: `latest_universal`, its journal.
            raise _forbidden(request.target)
        beside = None if request.model_files is None else self.allowed(request.model_files)
        base = None if request.base is None else self.allowed(request.base)
        return request.model_copy(update={"source": source, "target": target, "model_files": beside, "base": base})


def _forbidden(url: str) -> RequestError:
    return RequestError(
        "request.root_forbidden",
        f"{printable(url)!r} is outside the storage that this service may use",
        fix="use a URL under one of the service's roots, or ask its operator to add one to RESHARD_ROOTS",
    )
