"""Limits of a tenant: the storage that its jobs may name, and how many of them there may be."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from sqlalchemy import select
from sqlalchemy.orm import Session

from reshard.errors import RequestError, printable
from reshard.models import ConvertRequest, SourceSpec
from reshard_engine.storage.urls import is_local, is_within
from reshard_jobs.identity_tables import TenantRow
from reshard_jobs.roots import Roots, normalized_url


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The storage and the priority that jobs of one tenant may name. None is the service's own setting.

    The API judges a submission by these limits, and so does each worker: the operator may have changed them since.
    """

    read_roots: tuple[str, ...] | None = None
    write_roots: tuple[str, ...] | None = None
    profiles: frozenset[str] | None = None
    max_priority: int | None = None

    def allowed_source(self, source: SourceSpec, service: Roots) -> SourceSpec:
        """The source with its normalised URL.

        Raises:
            RequestError: `request.root_forbidden`, `request.unknown_profile`, or `request.invalid`.
        """
        place = self._reading(service).allowed(source.url)
        self._require_profile(place, source.profile)
        return source.model_copy(update={"url": place})

    def allowed_request(self, request: ConvertRequest, service: Roots) -> ConvertRequest:
        """The request with normalised URLs, if all of them and its profiles are allowed.

        Raises:
            RequestError: As `allowed_source`.
        """
        judged = self._reading(service).allowed_request(request, write=self._writing(service))
        self._require_profile(judged.source.url, judged.source.profile)
        self._require_profile(judged.target, judged.target_profile)
        return judged

    def roots(self, service: Roots) -> Roots:
        """The places at all that an engine may open for the tenant, and those that it may write."""
        opened = service
        if self.read_roots is not None and self.write_roots is not None:
            opened = _below(service, (*self.read_roots, *self.write_roots))
        return replace(opened, writable=self._writing(service).urls)

    def _reading(self, service: Roots) -> Roots:
        return service if self.read_roots is None else _below(service, self.read_roots)

    def _writing(self, service: Roots) -> Roots:
        return service if self.write_roots is None else _below(service, self.write_roots)

    def _require_profile(self, place: str, name: str | None) -> None:
        if self.profiles is None or (name is None and is_local(place)):
            return
        if name is None:
            raise RequestError(
                "request.unknown_profile",
                f"{printable(place)!r} names no storage profile",
                fix="name one of the tenant's profiles: --profile for the source, --target-profile for the target",
            )
        if name not in self.profiles:
            # Word for word the error for a name that nobody has configured.
            raise RequestError(
                "request.unknown_profile",
                f"no storage profile is called {printable(name)!r}",
                fix="add it to the TOML file that RESHARD_PROFILES names, or leave the profile out",
            )

    def require_priority(self, priority: int) -> None:
        """Refuse a priority that is too high.

        Raises:
            RequestError: `request.above_maximum`.
        """
        if self.max_priority is not None and priority > self.max_priority:
            raise RequestError(
                "request.above_maximum",
                f"priority is {priority}, and the maximum of this tenant is {self.max_priority}",
                fix="name a lower priority or none, or ask the operator to raise the tenant's maximum",
                details={"field": "priority", "maximum": self.max_priority},
            )


SERVICE = TenantLimits()
"""The limits of a tenant without settings of its own."""
NOTHING = TenantLimits((), (), frozenset())
"""The limits of a tenant that does not exist any more."""


def limits_of(session: Session, tenant: str) -> TenantLimits:
    """The limits of a tenant as they are now."""
    row = session.scalars(select(TenantRow).where(TenantRow.name == tenant)).one_or_none()
    if row is None:
        return NOTHING
    profiles = _names(row.profiles)
    return TenantLimits(
        _names(row.read_roots),
        _names(row.write_roots),
        None if profiles is None else frozenset(profiles),
        row.max_priority,
    )


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(str(name) for name in json.loads(text))


def _below(service: Roots, own: tuple[str, ...]) -> Roots:
    """The places below one of the tenant's roots and below one of the service's."""
    places = [normalized_url(url) for url in own]
    if not service.urls:
        return Roots(tuple(places), nothing=not places)
    outer = [normalized_url(url) for url in service.urls]
    both = [place for place in places if any(is_within(place, root) for root in outer)]
    both += [root for root in outer if any(is_within(root, place) for place in places)]
    return Roots(tuple(dict.fromkeys(both)), nothing=not both)
