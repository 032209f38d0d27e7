"""Routes for operators: liveness, readiness, metrics."""

from __future__ import annotations

from fastapi import APIRouter, Response
from sqlalchemy.exc import DBAPIError

from reshard.errors import JobError
from reshard_service.context import Context
from reshard_service.metrics import CONTENT_TYPE

probes = APIRouter(tags=["operations"])
"""Routes without a token, because load balancers send none."""

router = APIRouter(tags=["operations"])


@probes.get("/healthz")
def healthz() -> dict[str, str]:
    """Answer 200 while this process runs."""
    return {"status": "ok"}


@probes.get("/readyz")
def readyz(context: Context) -> dict[str, str]:
    """Answer 200 if this process can work: the job database and the broker answer. Else answer 503."""
    try:
        context.store.ping()
        database = True
    except DBAPIError:
        database = False
    broker = context.doorbell.ping()
    found = {"database": "ok" if database else "away", "broker": "ok" if broker else "away"}
    if not (database and broker):
        raise JobError("service.unavailable", "the service is not ready", fix="try again", details=found)
    return {"status": "ok", **found}


@router.get("/metrics")
def metrics(context: Context) -> Response:
    """Prometheus metrics."""
    return Response(context.metrics.render(), media_type=CONTENT_TYPE)
