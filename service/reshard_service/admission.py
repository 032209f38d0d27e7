"""What is refused at submission: what can be known within seconds."""

from __future__ import annotations

import logging

from starlette.concurrency import run_in_threadpool

from reshard.errors import RequestError, ReshardError, SourceError
from reshard.models import ConvertRequest, SourceSpec
from reshard_jobs.roots import Roots, locate
from reshard_service.probing import Prober, ProbeTimeout

logger = logging.getLogger(__name__)

_TELLS_OF_THE_STORE = frozenset({"storage.denied", "storage.no_bucket"})


async def require_allowed(roots: Roots, *urls: str) -> None:
    """Do nothing if every URL has one reading and lies under a root.

    Raises:
        RequestError: `request.invalid` or `request.root_forbidden`.
    """

    def check() -> None:
        for url in urls:
            locate(url)
        roots.require(urls)

    # In a thread: resolving a local path's links may block on a network file system.
    await run_in_threadpool(check)


async def admit(request: ConvertRequest, *, roots: Roots, prober: Prober, limit_s: float) -> None:
    """Look at a submission's source; do nothing if the job may be tried.

    What takes too long, needs the workers' machine, or may pass is left to PLANNING.

    Raises:
        ReshardError: Why the job cannot succeed.
    """
    await require_allowed(roots, request.source.url, request.target)
    source: SourceSpec = request.source
    try:
        await prober.inspect(source, limit_s=limit_s)
    except ProbeTimeout:
        logger.info("a source could not be looked at within %g s; its job is accepted", limit_s)
    except ReshardError as error:
        engine_missing = error.code == "request.engine_missing"
        if isinstance(error, RequestError | SourceError) and not engine_missing:
            raise
        if error.code in _TELLS_OF_THE_STORE:
            raise
        logger.info("a submission's source could not be looked at (%s); its job is accepted", error.code)
