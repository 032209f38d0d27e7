"""Runs the engine's read-only calls for the API in processes: probes, each with a deadline.

A few probes run at a time, and those who wait get their turns by tenant. A probe that answered is kept for the next
request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

from pydantic import BaseModel

from reshard.errors import JobError, from_problem
from reshard.models.jobs import ConvertRequest, Inspection, PlanSummary
from reshard.models.reports import LayoutPair
from reshard.options import SourceSpec
from reshard_jobs.limits import Roots
from reshard_service.settings import ServiceSettings

logger = logging.getLogger(__name__)

LONGEST_ANSWER_BYTES = 1 << 30


class ProbeTimeout(Exception):  # noqa: N818 - names what happened
    """The probe did not answer in time, so nothing is known of the checkpoint."""


class PicturesAsked(BaseModel):
    """A look at the layouts of a conversion, and at the parts of one tensor."""

    request: ConvertRequest
    tensor: str | None


class Prober:
    """Runs the engine's read-only calls in other processes."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._turns = FairTurns(settings.probes)
        self._kept: list[Process] = []

    async def prepare(self) -> None:
        """Start a probe ahead: the first caller need not wait for the engine's imports."""
        if not self._kept:
            self._kept.append(await self._start())

    async def close(self) -> None:
        """End the probes that wait."""
        while self._kept:
            await end_process(self._kept.pop())

    async def inspect(self, source: SourceSpec, *, tenant: str, roots: Roots, limit_s: float) -> Inspection:
        """Describe the checkpoint. The probe opens nothing outside of the roots.

        Raises:
            ReshardError: Any error of the engine.
            ProbeTimeout: It took longer than `limit_s`.
        """
        return Inspection.model_validate(await self._ask("inspect", source, limit_s, tenant=tenant, roots=roots))

    async def plan(
        self, request: ConvertRequest, *, tenant: str, roots: Roots, limit_s: float, queue_s: float = math.inf
    ) -> PlanSummary:
        """Plan the conversion. Raises the same errors as `inspect`; `ProbeTimeout` if none is free for `queue_s`, too.

        A probe that is free is taken at once.
        """
        return PlanSummary.model_validate(
            await self._ask("plan", request, limit_s, queue_s, tenant=tenant, roots=roots)
        )

    async def pictures(
        self, request: ConvertRequest, tensor: str | None, *, tenant: str, roots: Roots, limit_s: float
    ) -> LayoutPair:
        """The layouts of a conversion's source and target. Raises the same errors as `inspect`."""
        asked = PicturesAsked(request=request, tensor=tensor)
        return LayoutPair.model_validate(await self._ask("pictures", asked, limit_s, tenant=tenant, roots=roots))

    async def _ask(
        self,
        op: Literal["inspect", "plan", "pictures"],
        body: BaseModel,
        limit_s: float,
        queue_s: float = math.inf,
        *,
        tenant: str,
        roots: Roots,
    ) -> Any:
        refused = ProbeTimeout(f"no process was free for {queue_s:g} s")
        try:
            # The wait for a free slot counts, too, so that a busy service does not keep its callers longer.
            async with asyncio.timeout(limit_s), self._turns.turn(tenant, queue_s, refused):
                output, status = await self._run(op, body, roots, limit_s)
        except TimeoutError as error:
            raise ProbeTimeout(f"it took longer than {limit_s:g} s") from error
        if status == -signal.SIGXCPU:
            raise ProbeTimeout
        try:
            answer = json.loads(output)
        except ValueError as error:
            logger.warning("a probe ended with status %d and no answer", status)
            raise JobError(
                "internal.error",
                "the process that read the checkpoint's metadata crashed",
                fix="run `reshard inspect` on it and report the output",
                details={"status": status},
            ) from error
        return result_of(answer)

    async def _run(self, op: str, body: BaseModel, roots: Roots, limit_s: float) -> tuple[bytes, int]:
        limits = {"memory_bytes": self._settings.probe_memory_bytes, "cpu_s": math.ceil(limit_s) + 1}
        places = {"roots": roots.urls, "write_roots": roots.writable}
        asked = {"op": op, **limits, **places, "body": body.model_dump(mode="json")}
        line = json.dumps(asked).encode() + b"\n"
        kept = bool(self._kept)
        output, status = await self._exchange(await self._ready(), line)
        if not output and kept and status not in (-signal.SIGXCPU, 0):
            # Something may have killed the probe while it waited. A request that kills a probe kills a new one, too.
            output, status = await self._exchange(await self._ready(), line)
        return output, status

    async def _exchange(self, probe: Process, line: bytes) -> tuple[bytes, int]:
        """Give a request to a probe; returns its answer, or nothing and the status with which it ended."""
        output = b""
        try:
            stdin, stdout = _pipes(probe)
            with suppress(ConnectionError):
                stdin.write(line)
                await stdin.drain()
            output = await stdout.readline()
            return output, 0 if output else await probe.wait()
        finally:
            if output.endswith(b"\n") and probe.returncode is None:
                self._kept.append(probe)
            else:
                await asyncio.shield(end_process(probe))

    async def _ready(self) -> Process:
        """A probe that waits for a request."""
        while self._kept:
            probe = self._kept.pop()
            # After its answer: the child that gave it has ended.
            if await _says_idle(probe) and probe.returncode is None:
                return probe
            await end_process(probe)
        probe = await self._start()
        await _says_idle(probe)
        return probe

    async def _start(self) -> Process:
        return await asyncio.create_subprocess_exec(
            *self._settings.probe_command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment(),
            start_new_session=True,
            limit=LONGEST_ANSWER_BYTES,
        )


def result_of(answer: Any) -> Any:
    """The result in an answer of an engine's process; raises the error that it has instead."""
    if "problem" in answer:
        raise from_problem(answer["problem"])
    return answer["result"]


class FairTurns:
    """Slots that the tenants share: a free slot goes to the waiting tenant that uses the fewest."""

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._used = Counter[str]()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def turn(self, tenant: str, queue_s: float, refused: Exception) -> AsyncGenerator[None]:
        """A slot for the length of the block; raises `refused` if the tenant gets none within `queue_s` seconds."""
        mine = (tenant, asyncio.get_running_loop().create_future())
        self._waiting.append(mine)
        self._assign()
        try:
            try:
                async with asyncio.timeout(None if math.isinf(queue_s) else queue_s):
                    await mine[1]
            except TimeoutError as error:
                raise refused from error
            yield
        finally:
            if mine in self._waiting:
                self._waiting.remove(mine)
            else:
                self._free += 1
                self._used[tenant] -= 1
                self._assign()

    def _assign(self) -> None:
        while self._free and self._waiting:
            # Of equal tenants, the first that waits.
            tenant, slot = chosen = min(self._waiting, key=lambda one: self._used[one[0]])
            self._waiting.remove(chosen)
            self._free -= 1
            self._used[tenant] += 1
            if not slot.done():  # a caller that was cancelled gives its slot back as it ends
                slot.set_result(None)


@asynccontextmanager
async def turn(slots: asyncio.Semaphore, queue_s: float, refused: Exception) -> AsyncGenerator[None]:
    """One of the slots, if one is free within `queue_s` seconds; else raises `refused`."""
    try:
        async with asyncio.timeout(None if math.isinf(queue_s) else queue_s):
            await slots.acquire()
    except TimeoutError as error:
        raise refused from error
    try:
        yield
    finally:
        slots.release()


def environment() -> dict[str, str]:
    """The variables of a process that runs the engine."""
    # Limit malloc arenas and BLAS threads: both reserve address space, which is limited.
    return {**os.environ, "MALLOC_ARENA_MAX": "2", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def _pipes(probe: Process) -> tuple[asyncio.StreamWriter, asyncio.StreamReader]:
    assert probe.stdin is not None
    assert probe.stdout is not None
    return probe.stdin, probe.stdout


async def _says_idle(probe: Process) -> bool:
    """True when a probe says that it waits. One for which nobody waits any more is ended: it may never say it."""
    try:
        return await _pipes(probe)[1].readline() == b"\n"
    except asyncio.CancelledError:
        await asyncio.shield(end_process(probe))
        raise


async def end_process(probe: Process) -> None:
    """Kill a probe and the process of its request."""
    if probe.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(probe.pid, signal.SIGKILL)
    await probe.wait()
