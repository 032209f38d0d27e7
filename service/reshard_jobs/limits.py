"""Limits of jobs and tenants: roots, numbers of jobs, memory and threads, and quotas."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from reshard.errors import RequestError, format_size, printable
from reshard.filesystems import refuse_for_service
from reshard.models.jobs import ConvertRequest
from reshard.options import DEFAULT_MEMORY_LIMIT_BYTES, SourceSpec
from reshard.wire_model import MOST_BYTES
from reshard_engine.storage.urls import canonical_url, is_local, is_within, refuse_upload
from reshard_jobs.tables import TenantRow

# Roots: the URL prefixes below which jobs may read and write, compared after normalisation.

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
            RequestError: As `allowed`; `request.unsatisfiable` for a repository of the hub as the target.
        """
        source = self._source_of(request)
        writable = write or self
        target = writable.allowed(request.target)
        refuse_upload(target)
        if target in {normalized_url(root) for root in writable.urls}:
            # A conversion also writes beside its target: `latest_universal`, its journal.
            raise _forbidden(request.target)
        return self._beside(request).model_copy(update={"source": source, "target": target})

    def allowed_reading(self, request: ConvertRequest) -> ConvertRequest:
        """The request with the normalised URLs of what it reads, if they are allowed; its target is only a name.

        Raises:
            RequestError: As `allowed`.
        """
        source = self._source_of(request)
        return self._beside(request).model_copy(update={"source": source})

    def _source_of(self, request: ConvertRequest) -> SourceSpec:
        return request.source.model_copy(update={"url": self.allowed(request.source.url)})

    def _beside(self, request: ConvertRequest) -> ConvertRequest:
        """The request with what it reads beside the source."""
        beside = None if request.model_files is None else self.allowed(request.model_files)
        options = request.options
        for name, found in options.by_format():
            if places := found.places():
                judged = found.model_copy(update={option: self.allowed(url) for option, url in places.items()})
                options = options.model_copy(update={name: judged})
        return request.model_copy(update={"model_files": beside, "options": options})


def _forbidden(url: str) -> RequestError:
    return RequestError(
        "request.root_forbidden",
        f"{printable(url)!r} is outside the storage that this service may use",
        fix="use a URL under one of the service's roots, or ask its operator to add one to RESHARD_ROOTS",
    )


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

    def allowed_layout(self, request: ConvertRequest, service: Roots) -> ConvertRequest:
        """The request of a target that is never written, with normalised URLs, if they and its profile are allowed.

        Raises:
            RequestError: As `allowed_source`.
        """
        judged = self._reading(service).allowed_reading(request)
        self._require_profile(judged.source.url, judged.source.profile)
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
        refuse_for_service(place, name)
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


# The most memory and the most threads that a request may ask for: the operator's, or what the machine has.

MOST_THREADS = 1024
"""The largest number of threads in a request, as `ConvertRequest` declares it."""
_THREADS_PER_CORE = 4
_LEAST_THREADS = 64
"""Threads that any machine may run: most of them wait for a store."""
_ENGINE_THREADS = 8
"""Threads that an engine runs on a machine with few cores, if its request names no number."""
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Maxima:
    """The largest numbers that a request may name."""

    memory_bytes: int = MOST_BYTES
    threads: int = MOST_THREADS
    ranks: int | None = None
    """Ranks of a target; None for any number. Planning takes time and memory for each of them."""

    def allowed_request(self, request: ConvertRequest) -> ConvertRequest:
        """The request, if it asks for no more. The default of a request is never refused, but lowered to the maximum.

        Raises:
            RequestError: `request.above_maximum`.
        """
        if request.memory_limit_bytes > self.memory_bytes:
            if request.memory_limit_bytes != DEFAULT_MEMORY_LIMIT_BYTES:
                raise RequestError(
                    "request.above_maximum",
                    f"memory_limit_bytes is {request.memory_limit_bytes}, and the maximum of this service is "
                    f"{self.memory_bytes} ({format_size(self.memory_bytes)})",
                    fix="name a smaller memory limit or none, or ask the operator to raise RESHARD_MAX_MEMORY_BYTES",
                    details={"field": "memory_limit_bytes", "maximum": self.memory_bytes},
                )
            request = request.model_copy(update={"memory_limit_bytes": self.memory_bytes})
        if request.threads is not None and request.threads > self.threads:
            raise RequestError(
                "request.above_maximum",
                f"threads is {request.threads}, and the maximum of this service is {self.threads}",
                fix="name fewer threads or no number, or ask the operator to raise RESHARD_MAX_THREADS",
                details={"field": "threads", "maximum": self.threads},
            )
        ranks = request.layout.world_size
        if self.ranks is not None and ranks > self.ranks:
            raise RequestError(
                "request.above_maximum",
                f"dp x tp x pp is {ranks:,} ranks, and the maximum of a layout of this service is {self.ranks:,}",
                fix="submit a conversion instead, or ask the operator to raise RESHARD_LAYOUT_RANKS",
                details={"field": "layout.dp", "maximum": self.ranks},
            )
        return request

    def with_threads(self, request: ConvertRequest) -> ConvertRequest:
        """The request with a number of threads, if it names none and an engine's own choice could be too large."""
        if request.threads is not None or self.threads >= max(_cores(), _ENGINE_THREADS):
            return request
        return request.model_copy(update={"threads": self.threads})


def maxima_of_this_machine() -> Maxima:
    """The maxima of an operator who set none: the memory of this machine, and at least 64 threads."""
    return Maxima(
        max(_memory_bytes(), DEFAULT_MEMORY_LIMIT_BYTES),
        min(max(_cores() * _THREADS_PER_CORE, _LEAST_THREADS), MOST_THREADS),
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_bytes() -> int:
    """The memory of this machine, or of the control group that this process runs in, if that has less."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *_memory_of_groups()])


def _memory_of_groups() -> Iterator[int]:
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in {"", "memory"}:
            continue
        mount, name = (_CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (_CGROUPS, "memory.max")
        # A container sees its own group as the root, whatever the path says.
        group = mount / path.strip("/")
        for directory in (group, *group.parents):
            try:
                text = (directory / name).read_text(encoding="ascii").strip()
            except OSError:
                text = ""
            if text.isdigit():
                yield int(text)
            if directory == mount:
                break
