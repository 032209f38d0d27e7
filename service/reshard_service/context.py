"""What the routes of one application share, and who may call them."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Header, Request

from reshard.errors import RequestError
from reshard_jobs.database import Database
from reshard_jobs.idempotency import IdempotencyKeys
from reshard_jobs.store import JobStore
from reshard_service.doorbell import Doorbell
from reshard_service.metrics import Metrics
from reshard_service.probing import Prober
from reshard_service.settings import ServiceSettings


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """The parts of one running API."""

    settings: ServiceSettings
    database: Database
    store: JobStore
    keys: IdempotencyKeys
    prober: Prober
    doorbell: Doorbell
    metrics: Metrics


def context_of(request: Request) -> ServiceContext:
    """The context of the application that serves this request."""
    return cast("ServiceContext", request.app.state.context)


async def require_token(request: Request, authorization: Annotated[str, Header()] = "") -> None:
    """Let the request pass if it carries the service's token, or if there is none.

    Raises:
        RequestError: `request.unauthorized`.
    """
    token = context_of(request).settings.token
    # Compared as bytes: compare_digest refuses text that is not ASCII. The header's bytes arrive as Latin-1.
    if token and not hmac.compare_digest(authorization.encode("latin-1"), f"Bearer {token}".encode()):
        raise RequestError(
            "request.unauthorized",
            "the token is missing or not valid",
            fix="export RESHARD_TOKEN=<the service's token>",
        )


Context = Annotated[ServiceContext, Depends(context_of)]
