"""The objects that the routes of one application share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request

from reshard_jobs.database import Database
from reshard_jobs.idempotency import IdempotencyKeys
from reshard_jobs.nodes import Nodes
from reshard_jobs.store import JobStore
from reshard_service.access import WrongTokens
from reshard_service.doorbell import Doorbell
from reshard_service.event_feed import EventFeed
from reshard_service.inspection_pool import Prober
from reshard_service.metrics import Metrics
from reshard_service.settings import ServiceSettings


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """The parts of one running API."""

    settings: ServiceSettings
    database: Database
    store: JobStore
    nodes: Nodes
    keys: IdempotencyKeys
    prober: Prober
    doorbell: Doorbell
    feed: EventFeed
    metrics: Metrics
    wrong_tokens: WrongTokens


def context_of(request: Request) -> ServiceContext:
    """The context of the application that serves this request."""
    return cast("ServiceContext", request.app.state.context)


Context = Annotated[ServiceContext, Depends(context_of)]
