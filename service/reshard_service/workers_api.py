"""The route of the live workers."""

from __future__ import annotations

from fastapi import APIRouter

from reshard.models import WorkerNodeList
from reshard_jobs.tables import DEFAULT_TENANT
from reshard_service.callers import Reader
from reshard_service.context import Context

router = APIRouter(prefix="/v1/workers", tags=["workers"])


@router.get("", response_model=WorkerNodeList)
def list_workers(context: Context, caller: Reader) -> WorkerNodeList:
    """List the live workers by name: what each does, and whether it is in quarantine.

    Tenants other than the operator's see the workers that work for them.
    """
    tenant = None if caller.tenant == DEFAULT_TENANT else caller.tenant
    return WorkerNodeList(workers=tuple(context.nodes.live(tenant)))
