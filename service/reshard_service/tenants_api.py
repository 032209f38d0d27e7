"""Routes of tenants, for the operator only."""

from __future__ import annotations

from fastapi import APIRouter

from reshard.identity_models import NewTenant, Tenant, TenantList, TenantSettings
from reshard_service.callers import Administrator
from reshard_service.context import Context
from reshard_service.documented import problems

router = APIRouter(prefix="/v1/tenants", tags=["identity"])


@router.post("", status_code=201, response_model=Tenant, responses=problems(403, 409))
def create_tenant(body: NewTenant, context: Context, caller: Administrator) -> Tenant:
    """Make a tenant."""
    caller.require_operator()
    return context.tenants.create(body, by=caller)


@router.get("", response_model=TenantList, responses=problems(403))
def list_tenants(context: Context, caller: Administrator) -> TenantList:
    """List all tenants, by name."""
    caller.require_operator()
    return TenantList(tenants=tuple(context.tenants.list()))


@router.put("/{name}", response_model=Tenant, responses=problems(403, 404))
def set_tenant(name: str, body: TenantSettings, context: Context, caller: Administrator) -> Tenant:
    """Replace all settings of a tenant. Workers judge jobs that wait by the new settings."""
    caller.require_operator()
    return context.tenants.set(name, body, by=caller)


@router.delete("/{name}", response_model=Tenant, responses=problems(403, 404, 409))
def remove_tenant(name: str, context: Context, caller: Administrator) -> Tenant:
    """Remove a tenant with its tokens and the records of its jobs. Answers 409 while it has jobs or files of them."""
    caller.require_operator()
    return context.tenants.remove(name, by=caller)
