"""Starts probes, a few at a time, each with a deadline."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
from typing import Any, Literal

from pydantic import BaseModel

from reshard.errors import JobError, from_problem
from reshard.models import ConvertRequest, Inspection, PlanSummary, SourceSpec
from reshard_service.settings import ServiceSettings

logger = logging.getLogger(__name__)


class ProbeTimeout(Exception):  # noqa: N818 - names what happened
    """The probe did not answer in time; nothing is known of the checkpoint."""


class Prober:
    """Runs the engine's read-only calls outside of this process."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.probes)

    async def inspect(self, source: SourceSpec, *, limit_s: float) -> Inspection:
        """What the checkpoint is.

        Raises:
            ReshardError: What the engine found.
            ProbeTimeout: It took longer than `limit_s`.
        """
        return Inspection.model_validate(await self._ask("inspect", source, limit_s))

    async def plan(self, request: ConvertRequest, *, limit_s: float) -> PlanSummary:
        """What the conversion would do. Raises as `inspect` does."""
        return PlanSummary.model_validate(await self._ask("plan", request, limit_s))

    async def _ask(self, op: Literal["inspect", "plan"], body: BaseModel, limit_s: float) -> Any:
        try:
            # The wait for a free slot counts: a busy service must not keep its callers longer.
            async with asyncio.timeout(limit_s), self._slots:
                output, status = await self._run(op, body.model_dump_json().encode(), limit_s)
        except TimeoutError as error:
            raise ProbeTimeout from error
        if status == -signal.SIGXCPU:
            raise ProbeTimeout
        try:
            answer = json.loads(output)
        except ValueError as error:
            logger.warning("a probe ended with status %d and no answer", status)
            raise JobError(
                "internal.error",
                "looking at the checkpoint crashed",
                fix="run `reshard inspect` on it and report what it says",
                details={"status": status},
            ) from error
        if "problem" in answer:
            raise from_problem(answer["problem"])
        return answer["result"]

    async def _run(self, op: str, body: bytes, limit_s: float) -> tuple[bytes, int]:
        # Fewer malloc arenas and BLAS threads: both reserve address space, which is limited.
        environment = {**os.environ, "MALLOC_ARENA_MAX": "2", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        process = await asyncio.create_subprocess_exec(
            *self._settings.probe_command,
            op,
            str(self._settings.probe_memory_bytes),
            str(math.ceil(limit_s) + 1),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        try:
            output, _ = await process.communicate(body)
            return output, await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await asyncio.shield(process.wait())
