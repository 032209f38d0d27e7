"""Routes for operators and administrators: health, metrics, live workers, tokens, tenants, and the audit log."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from sqlalchemy.exc import DBAPIError, TimeoutError as PoolTimeout

from reshard.choices import TokenScope
from reshard.errors import JobError, ReshardError
from reshard.models.access import (
    AuditPage,
    CreatedToken,
    NewTenant,
    NewToken,
    Tenant,
    TenantList,
    TenantName,
    TenantSettings,
    Token,
    TokenList,
)
from reshard.models.jobs import WorkerNodeList
from reshard_jobs.tables import DEFAULT_TENANT
from reshard_jobs.tenants.principals import MAX_ENTRIES, Principal
from reshard_service.api.context import Administrator, Context, Reader, context_of
from reshard_service.api.problems import problems
from reshard_service.auth import path_of
from reshard_service.metrics import CONTENT_TYPE

probes = APIRouter(tags=["operations"])
"""Routes without a token, because load balancers send none."""

health_router = APIRouter(tags=["operations"])


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


@health_router.get("/metrics", response_class=PlainTextResponse, responses=problems(403))
def metrics(context: Context, caller: Reader) -> Response:
    """Prometheus metrics of all tenants, for the operator's tenant only."""
    caller.require_default(TokenScope.READ)
    return Response(context.metrics.render(), media_type=CONTENT_TYPE)


# The route of the live workers.

workers_router = APIRouter(prefix="/v1/workers", tags=["workers"])


@workers_router.get("", response_model=WorkerNodeList)
def list_workers(context: Context, caller: Reader) -> WorkerNodeList:
    """List the live workers by name: what each does, and whether it is in quarantine.

    Tenants other than the operator's see the workers that work for them.
    """
    tenant = None if caller.tenant == DEFAULT_TENANT else caller.tenant
    return WorkerNodeList(workers=tuple(context.nodes.live(tenant)))


# The route of the audit log, and the entries of administrators' attempts that were refused.

audit_router = APIRouter(prefix="/v1/audit", tags=["identity"])
logger = logging.getLogger(__name__)

_WATCHED = {"/v1/tokens": "token", "/v1/tenants": "tenant", "/v1/audit": "audit"}
_VERBS = {"POST": "create", "PUT": "set", "DELETE": "remove", "GET": "list"}


@audit_router.get("", response_model=AuditPage, responses=problems(403))
def read_audit_log(
    context: Context,
    caller: Administrator,
    tenant: Annotated[TenantName | None, Query()] = None,
    before: Annotated[int | None, Query(ge=1, le=(1 << 62))] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_ENTRIES)] = 100,
) -> AuditPage:
    """Read the audit log, newest first: that of the caller's tenant. The operator reads that of all, or of one."""
    if tenant is not None and tenant != caller.tenant:
        caller.require_operator()
    chosen = tenant if tenant is not None or caller.is_operator else caller.tenant
    return context.audit.page(chosen, before=before, limit=limit)


def note_refusal(request: Request, error: ReshardError) -> None:
    """Record a refused attempt to do what administrators do; other refusals are not news."""
    caller = getattr(request.state, "principal", None)
    prefix, _, thing = path_of(request.scope)[1:].partition("/")[2].partition("/")
    kind = _WATCHED.get(f"/v1/{prefix}")
    if kind is None or not isinstance(caller, Principal):
        return
    action = f"{kind}.{_VERBS.get(request.method, 'other')}"
    try:
        context_of(request).audit.refused(caller, action, thing, error.code)
    except (DBAPIError, PoolTimeout):
        logger.warning("the refusal of %s by %s could not be recorded", action, caller.actor)


# Routes of tenants, for the operator only.

tenants_router = APIRouter(prefix="/v1/tenants", tags=["identity"])


@tenants_router.post("", status_code=201, response_model=Tenant, responses=problems(403, 409))
def create_tenant(body: NewTenant, context: Context, caller: Administrator) -> Tenant:
    """Make a tenant."""
    caller.require_operator()
    return context.tenants.create(body, by=caller)


@tenants_router.get("", response_model=TenantList, responses=problems(403))
def list_tenants(context: Context, caller: Administrator) -> TenantList:
    """List all tenants, by name."""
    caller.require_operator()
    return TenantList(tenants=tuple(context.tenants.list()))


@tenants_router.put("/{name}", response_model=Tenant, responses=problems(403, 404))
def set_tenant(name: str, body: TenantSettings, context: Context, caller: Administrator) -> Tenant:
    """Replace all settings of a tenant. Workers judge jobs that wait by the new settings."""
    caller.require_operator()
    return context.tenants.set(name, body, by=caller)


@tenants_router.delete("/{name}", response_model=Tenant, responses=problems(403, 404, 409))
def remove_tenant(name: str, context: Context, caller: Administrator) -> Tenant:
    """Remove a tenant with its tokens and the records of its jobs. Answers 409 while it has jobs or files of them."""
    caller.require_operator()
    return context.tenants.remove(name, by=caller)


# Routes of tokens: create, list, revoke.

tokens_router = APIRouter(prefix="/v1/tokens", tags=["identity"])


@tokens_router.post("", status_code=201, response_model=CreatedToken, responses=problems(403, 404))
def create_token(body: NewToken, context: Context, caller: Administrator) -> Response:
    """Make a token. Its secret is in this answer only. Only the operator may name another tenant."""
    _may_manage(caller, body.tenant)
    token, secret = context.tokens.create(body, by=caller)
    made = CreatedToken(token=token, secret=secret)
    return JSONResponse(made.model_dump(mode="json"), status_code=201, headers={"Cache-Control": "no-store"})


@tokens_router.get("", response_model=TokenList, responses=problems(403))
def list_tokens(
    context: Context, caller: Administrator, tenant: Annotated[TenantName | None, Query()] = None
) -> TokenList:
    """List the tokens of the caller's tenant, newest first. Only the operator may name another tenant."""
    _may_manage(caller, tenant)
    return TokenList(tokens=tuple(context.tokens.list(tenant or caller.tenant)))


@tokens_router.delete("/{token_id}", response_model=Token, responses=problems(403, 404))
def revoke_token(token_id: str, context: Context, caller: Administrator) -> Token:
    """Revoke a token. Repeating is harmless."""
    return context.tokens.revoke(token_id, by=caller)


def _may_manage(caller: Principal, tenant: str | None) -> None:
    # The answer is the same for a tenant that exists and for one that does not.
    if tenant is not None and tenant != caller.tenant:
        caller.require_operator()
