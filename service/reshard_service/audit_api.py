"""The route of the audit log, and the entries of administrators' attempts that were refused."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter, Query, Request
from sqlalchemy.exc import DBAPIError, TimeoutError as PoolTimeout

from reshard.errors import ReshardError
from reshard.identity_models import AuditPage, TenantName
from reshard_jobs.audit import MAX_ENTRIES
from reshard_jobs.principals import Principal
from reshard_service.callers import Administrator
from reshard_service.context import Context, context_of
from reshard_service.documented import problems
from reshard_service.page_paths import path_of

router = APIRouter(prefix="/v1/audit", tags=["identity"])
logger = logging.getLogger(__name__)

_WATCHED = {"/v1/tokens": "token", "/v1/tenants": "tenant", "/v1/audit": "audit"}
_VERBS = {"POST": "create", "PUT": "set", "DELETE": "remove", "GET": "list"}


@router.get("", response_model=AuditPage, responses=problems(403))
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
    """Record a refused attempt to do what administrators do; other refusals are no news."""
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
