"""The objects that the routes of one application share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request

from reshard_jobs.audit import AuditLog
from reshard_jobs.database import Database
from reshard_jobs.event_log import EventLog
from reshard_jobs.idempotency import IdempotencyKeys
from reshard_jobs.nodes import Nodes
from reshard_jobs.principals import Principal
from reshard_jobs.statistics import JobStatistics
from reshard_jobs.store import JobStore
from reshard_jobs.tenants import Tenants
from reshard_jobs.tokens import Tokens
from reshard_service.access import WrongTokens
from reshard_service.doorbell import Doorbell
from reshard_service.event_feed import EventFeed
from reshard_service.identity import Identity
from reshard_service.inspection_pool import Prober
from reshard_service.metrics import Metrics
from reshard_service.settings import ServiceSettings
from reshard_service.webhook_secrets import Sealer


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
    doorbell: Doorbell
    feed: EventFeed
    metrics: Metrics
    wrong_tokens: WrongTokens
    sealer: Sealer

    def jobs_of(self, principal: Principal) -> JobStore:
        """The jobs of a caller's tenant."""
        return JobStore(self.database, principal.tenant, by=principal)

    def keys_of(self, principal: Principal) -> IdempotencyKeys:
        """The idempotency keys of a caller's tenant."""
        return IdempotencyKeys(self.database, principal.tenant)


def context_of(request: Request) -> ServiceContext:
    """The context of the application that serves this request."""
    return cast("ServiceContext", request.app.state.context)


Context = Annotated[ServiceContext, Depends(context_of)]
