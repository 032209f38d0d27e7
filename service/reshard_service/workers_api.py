"""The route of the live workers."""

from __future__ import annotations

from fastapi import APIRouter

from reshard.models import WorkerNodeList
from reshard_service.context import Context

router = APIRouter(prefix="/v1/workers", tags=["workers"])


@router.get("", response_model=WorkerNodeList)
def list_workers(context: Context) -> WorkerNodeList:
    """List the live workers by name: what each does, and whether it is in quarantine."""
    return WorkerNodeList(workers=tuple(context.nodes.live()))
