"""The objects that the routes of one application share: the caller of a request, and the feed of events."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer, SecurityScopes
from sqlalchemy.exc import DBAPIError, TimeoutError as PoolTimeout
from starlette.concurrency import run_in_threadpool

from reshard.choices import TokenScope
from reshard.models.jobs import JobEvent, JobEventPage
from reshard_jobs.database import Database
from reshard_jobs.layouts import Layouts
from reshard_jobs.queue.idempotency import IdempotencyKeys
from reshard_jobs.queue.nodes import Nodes
from reshard_jobs.queue.states import EventLog
from reshard_jobs.queue.store import JobStore
from reshard_jobs.statistics import JobStatistics
from reshard_jobs.tenants.principals import AuditLog, Principal
from reshard_jobs.tenants.tenants import Tenants
from reshard_jobs.tenants.tokens import Tokens
from reshard_service.auth import Identity, WrongTokens
from reshard_service.doorbell import Doorbell
from reshard_service.metrics import Metrics
from reshard_service.probes.layout_engines import LayoutEngines
from reshard_service.probes.prober import Prober
from reshard_service.settings import ServiceSettings
from reshard_service.webhooks.secrets import Sealer

# The newest events of all watched jobs: one poll of the job database for all watchers of this process.

logger = logging.getLogger(__name__)

_KEPT_EVENTS = 200
"""Events of a job that are kept for its watchers. One that is slower reads the database itself."""


@dataclass(slots=True)
class _Watched:
    seq: int
    """The sequence number of the newest event that was read."""
    watchers: int = 0
    gone: bool = False
    recent: deque[JobEvent] = field(default_factory=lambda: deque[JobEvent](maxlen=_KEPT_EVENTS))
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, events: list[JobEvent], *, gone: bool = False) -> None:
        self.gone = gone
        self.recent.extend(events)
        self.seq = events[-1].seq if events else self.seq
        self.changed.set()
        self.changed = asyncio.Event()


class Watch:
    """One watcher of one job."""

    def __init__(self, log: EventLog, key: str, job: _Watched) -> None:
        self._log = log
        self._key = key
        self._job = job

    async def after(self, seq: int) -> JobEventPage:
        """Wait for events after a sequence number; at most a page of them."""
        job = self._job
        while job.seq <= seq and not job.gone:
            await job.changed.wait()
        if job.gone:
            return JobEventPage(events=(), done=True)
        newer = tuple(event for event in job.recent if event.seq > seq)
        if newer and newer[0].seq == seq + 1:
            return JobEventPage(events=newer, done=newer[-1].ends_job)
        return await run_in_threadpool(self._log.after, self._key, seq)


class EventFeed:
    """Polls the job database while somebody watches a job.

    Args:
        log: The event logs of the jobs, which are named by their keys.
        poll_s: Seconds between two polls.
    """

    def __init__(self, log: EventLog, *, poll_s: float) -> None:
        self._log = log
        self._poll_s = poll_s
        self._jobs: dict[str, _Watched] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def watch(self, key: str, seq: int) -> Generator[Watch]:
        """Watch a job, of which the caller knows the events up to a sequence number."""
        job = self._jobs.setdefault(key, _Watched(seq))
        if job.seq < seq:
            # What is kept must have no holes.
            job.recent.clear()
            job.seq = seq
        job.watchers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            yield Watch(self._log, key, job)
        finally:
            job.watchers -= 1
            if not job.watchers:
                self._jobs.pop(key, None)

    async def close(self) -> None:
        """Stop polling."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while self._jobs:
            await asyncio.sleep(self._poll_s)
            known = {key: job.seq for key, job in self._jobs.items()}
            try:
                news = await run_in_threadpool(self._log.news, known)
            except (DBAPIError, PoolTimeout) as error:
                logger.warning("the events of watched jobs could not be read: %s", error)
                continue
            except Exception:
                # All watchers of this process depend on this task: it must not end while they wait.
                logger.exception("the events of watched jobs could not be read")
                continue
            for key, events in news.items():
                job = self._jobs.get(key)
                # A watcher that came meanwhile may know more.
                if job is not None and (events is None or job.seq == known[key]):
                    job.tell(events or [], gone=events is None)


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """The parts of one running API."""

    settings: ServiceSettings
    database: Database
    nodes: Nodes
    statistics: JobStatistics
    events: EventLog
    tokens: Tokens
    tenants: Tenants
    audit: AuditLog
    identity: Identity
    prober: Prober
    engines: LayoutEngines
    doorbell: Doorbell
    feed: EventFeed
    metrics: Metrics
    wrong_tokens: WrongTokens
    sealer: Sealer

    def jobs_of(self, principal: Principal) -> JobStore:
        """The jobs of a caller's tenant."""
        return JobStore(self.database, principal.tenant, by=principal)

    def layouts_of(self, principal: Principal) -> Layouts:
        """The virtual layouts of a caller's tenant."""
        return Layouts(self.database, principal.tenant, keep_s=self.settings.keep_layouts_s, by=principal)

    def keys_of(self, principal: Principal) -> IdempotencyKeys:
        """The idempotency keys of a caller's tenant."""
        return IdempotencyKeys(self.database, principal.tenant)


def context_of(request: Request) -> ServiceContext:
    """The context of the application that serves this request."""
    return cast("ServiceContext", request.app.state.context)


Context = Annotated[ServiceContext, Depends(context_of)]


# The caller of a request as a parameter of its route, with the scope that the route needs.
#
# `AccessControl` has found the caller before. A route without such a parameter would serve callers without any scope;
# `tests/unit/test_service_parts.py` finds it.

_BEARER = HTTPBearer(
    auto_error=False,
    description="A token of the service. Each operation names the scope that the token needs.",
)


def caller_of(request: Request, needed: SecurityScopes, _: Annotated[object, Security(_BEARER)]) -> Principal:
    """The caller, if its token has the scopes that the route names.

    Raises:
        RequestError: `request.forbidden`.
    """
    principal = cast("Principal", request.state.principal)
    for scope in needed.scopes:
        principal.require(TokenScope(scope))
    return principal


Submitter = Annotated[Principal, Security(caller_of, scopes=[TokenScope.SUBMIT.value])]
Reader = Annotated[Principal, Security(caller_of, scopes=[TokenScope.READ.value])]
Canceller = Annotated[Principal, Security(caller_of, scopes=[TokenScope.CANCEL.value])]
Administrator = Annotated[Principal, Security(caller_of, scopes=[TokenScope.ADMIN.value])]
