"""Checks of a submission: refuses a job if its problem can be found within seconds."""

from __future__ import annotations

import logging

from starlette.concurrency import run_in_threadpool

from reshard.errors import RequestError, ReshardError, SourceError
from reshard.models import ConvertRequest
from reshard_jobs.limits import TenantLimits
from reshard_service.inspection_pool import Prober, ProbeTimeout
from reshard_service.settings import ServiceSettings

logger = logging.getLogger(__name__)

_TELLS_OF_THE_STORE = frozenset({"storage.denied", "storage.no_bucket"})


async def admit(
    request: ConvertRequest, *, limits: TenantLimits, settings: ServiceSettings, prober: Prober
) -> int | None:
    """Plan a submission without running it; return the bytes that it writes, or None if it was not planned.

    Checks for which no process is free, that take too long, need the worker's machine, or failed for a transient
    reason are left to PLANNING.

    Raises:
        ReshardError: The job cannot succeed.
    """
    # This runs in a thread: resolving the links of a local path may block on a network file system.
    roots = settings.jobs.roots
    judged = await run_in_threadpool(limits.allowed_request, request, roots)
    queue_s, limit_s = settings.admission_queue_s, settings.admission_s
    try:
        plan = await prober.plan(judged, roots=limits.roots(roots), limit_s=limit_s, queue_s=queue_s)
        return plan.write_bytes
    except ProbeTimeout as error:
        logger.info("a submission is accepted unplanned: %s", error)
    except ReshardError as error:
        engine_missing = error.code == "request.engine_missing"
        if isinstance(error, RequestError | SourceError) and not engine_missing:
            raise
        if error.code in _TELLS_OF_THE_STORE:
            raise
        logger.info("a submission could not be planned (%s); its job is accepted", error.code)
    return None
