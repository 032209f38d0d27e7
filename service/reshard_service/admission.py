"""What is refused at submission: what can be known within seconds."""

from __future__ import annotations

import logging

from starlette.concurrency import run_in_threadpool

from reshard.errors import RequestError, ReshardError, SourceError
from reshard.models import ConvertRequest
from reshard_jobs.roots import Roots
from reshard_service.probing import Prober, ProbeTimeout

logger = logging.getLogger(__name__)

_TELLS_OF_THE_STORE = frozenset({"storage.denied", "storage.no_bucket"})


async def admit(request: ConvertRequest, *, roots: Roots, prober: Prober, limit_s: float) -> None:
    """Plan a submission without carrying it out; do nothing if the job may be tried.

    What takes too long, needs the workers' machine, or may pass is left to PLANNING.

    Raises:
        ReshardError: Why the job cannot succeed.
    """
    # In a thread: resolving a local path's links may block on a network file system.
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
