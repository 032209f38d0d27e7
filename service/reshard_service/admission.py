"""Checks of a submission: refuses a job if its problem can be found within seconds."""

from __future__ import annotations

import logging

from starlette.concurrency import run_in_threadpool

from reshard.errors import RequestError, ReshardError, SourceError
from reshard.models import ConvertRequest
from reshard_jobs.limits import TenantLimits
from reshard_jobs.roots import Roots
from reshard_service.inspection_pool import Prober, ProbeTimeout

logger = logging.getLogger(__name__)

_TELLS_OF_THE_STORE = frozenset({"storage.denied", "storage.no_bucket"})


async def admit(request: ConvertRequest, *, limits: TenantLimits, roots: Roots, prober: Prober, limit_s: float) -> int:
    """Plan a submission without running it; return the bytes that it writes, or 0 if that is not known.

    Checks that take too long, need the worker's machine, or failed for a transient reason are left to PLANNING.

    Raises:
        ReshardError: The job cannot succeed.
    """
    # This runs in a thread: resolving the links of a local path may block on a network file system.
    judged = await run_in_threadpool(limits.allowed_request, request, roots)
    try:
        return (await prober.plan(judged, roots=limits.roots(roots), limit_s=limit_s)).write_bytes
    except ProbeTimeout:
        logger.info("a submission could not be planned within %g s; its job is accepted", limit_s)
    except ReshardError as error:
        engine_missing = error.code == "request.engine_missing"
        if isinstance(error, RequestError | SourceError) and not engine_missing:
            raise
        if error.code in _TELLS_OF_THE_STORE:
            raise
        logger.info("a submission could not be planned (%s); its job is accepted", error.code)
    return 0
