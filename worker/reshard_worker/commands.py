"""Makes the commands for engine processes from requests, by this worker's own settings."""

from __future__ import annotations

import secrets
from typing import Any, Literal

from reshard.models import ConvertRequest, VerifyLevel
from reshard.shared_work import SharedWork
from reshard_jobs.limits import SERVICE, TenantLimits
from reshard_worker.memory_limit import engine_memory_bytes
from reshard_worker.protocol import Command
from reshard_worker.settings import WorkerSettings


def engine_command(
    op: Literal["convert", "plan", "discard", "help"],
    request: ConvertRequest,
    settings: WorkerSettings,
    *,
    limits: TenantLimits = SERVICE,
    workers: int = 1,
    **values: Any,
) -> Command:
    """The command for the engine, with the normalised URLs that were checked against the roots.

    Args:
        op: The operation.
        request: The request of the job.
        settings: The worker's settings.
        limits: The limits of the job's tenant.
        workers: The number of workers that may run the job at once.
        values: Other fields of the command.

    Raises:
        RequestError: A URL is outside the roots of this worker or of the tenant, or the request asks for more than
            this worker's maxima. It checks both independently of the API.
    """
    judged = limits.allowed_request(request, settings.jobs.roots)
    maxima = settings.jobs.maxima(runs_jobs=True)
    # A job that was refused for its size is cleaned up nevertheless.
    judged = judged if op == "discard" else maxima.with_threads(maxima.allowed_request(judged))
    if settings.verify is VerifyLevel.FULL:
        judged = judged.model_copy(update={"verify": VerifyLevel.FULL})
    work = None
    if workers > 1:
        work = SharedWork(
            # The owner begins at the largest run; helpers spread over the others.
            number=0 if op == "convert" else 1 + secrets.randbelow(workers - 1),
            count=workers,
            lease_s=settings.jobs.lease_s,
            least_bytes=settings.share_bytes,
        )
    memory_bytes = engine_memory_bytes(judged, settings.engine_memory_bytes)
    roots = limits.roots(settings.jobs.roots)
    places = {"roots": roots.urls, "write_roots": roots.writable}
    return Command(op=op, request=judged, work=work, memory_bytes=memory_bytes, **places, **values)
