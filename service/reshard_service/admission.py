"""Checks of a submission: refuses a job if its problem can be found within seconds."""

from __future__ import annotations

import logging

from starlette.concurrency import run_in_threadpool

from reshard.errors import RequestError, ReshardError, SourceError
from reshard.models import ConvertRequest
from reshard_jobs.roots import Roots
from reshard_service.inspection_pool import Prober, ProbeTimeout

logger = logging.getLogger(__name__)

_TELLS_OF_THE_STORE = frozenset({"storage.denied", "storage.no_bucket"})


async def admit(request: ConvertRequest, *, roots: Roots, prober: Prober, limit_s: float) -> None:
    """Plan a submission without running it; return if the job may be accepted.

    Checks that take too long, need the worker's machine, or failed for a transient reason are left to PLANNING.

    Raises:
        ReshardError: The job cannot succeed.
    """
    # This runs in a thread: resolving the links of a local path may block on a network file system.
    judged = await run_in_threadpool(roots.allowed_request, request)
    try:
        await prober.plan(judged, limit_s=limit_s)
    except ProbeTimeout:
        logger.info("a submission could not be planned within %g s; its job is accepted", limit_s)
    except ReshardError as error:
        engine_missing = error.code == "request.engine_missing"
        if isinstance(error, RequestError | SourceError) and not engine_missing:
            raise
        if error.code in _TELLS_OF_THE_STORE:
            raise
        logger.info("a submission could not be planned (%s); its job is accepted", error.code)
