"""Routes for operators: liveness, readiness, metrics."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from sqlalchemy.exc import DBAPIError, TimeoutError as PoolTimeout

from reshard.choices import TokenScope
from reshard.errors import JobError
from reshard_service.callers import Reader
from reshard_service.context import Context
from reshard_service.documented import problems
from reshard_service.metrics import CONTENT_TYPE

probes = APIRouter(tags=["operations"])
"""Routes without a token, because load balancers send none."""

router = APIRouter(tags=["operations"])


@probes.get("/healthz")
def healthz() -> dict[str, str]:
    """Answer 200 while this process runs."""
    return {"status": "ok"}


@probes.get("/readyz", responses=problems(503))
def readyz(context: Context) -> dict[str, str]:
    """Answer 200 if this process can serve requests: the job database answers. Else answer 503.

    `status` is `degraded` while the broker is away. Jobs are accepted then, because they are in the job database. They
    begin when the broker is back.
    """
    broker = "ok" if context.doorbell.ping() else "away"
    try:
        context.statistics.ping()
    except (DBAPIError, PoolTimeout):
        away = {"database": "away", "broker": broker}
        raise JobError("service.unavailable", "the service is not ready", fix="try again", details=away) from None
    return {"status": "ok" if broker == "ok" else "degraded", "database": "ok", "broker": broker}


@router.get("/metrics", response_class=PlainTextResponse, responses=problems(403))
def metrics(context: Context, caller: Reader) -> Response:
    """Prometheus metrics of all tenants, for the operator's tenant only."""
    caller.require_default(TokenScope.READ)
    return Response(context.metrics.render(), media_type=CONTENT_TYPE)
