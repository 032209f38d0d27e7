"""Starts the processes in which the API lets the engine read: probes, and the engines of virtual layouts.

A few probes run at a time, each with a deadline. A probe that answered is kept for the next request. An engine of a
layout stays while the layout is used; the next use begins one again. While layouts are used, a process without a layout
has imported the engine ahead of the next layout.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import socket
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

from pydantic import BaseModel

from reshard.errors import JobError, RequestError, SourceError, from_problem
from reshard.models.jobs import ConvertRequest, Inspection, PlanSummary
from reshard.models.reports import LayoutPair
from reshard.options import SourceSpec
from reshard_engine.warm_process import engine_memory_bytes
from reshard_jobs.layouts import PlannedLayout, UsedLayout
from reshard_jobs.limits import Roots
from reshard_service.settings import ServiceSettings

logger = logging.getLogger(__name__)

_LONGEST_ANSWER_BYTES = 1 << 30


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
            await _end(self._kept.pop())

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
        return _result_of(answer)

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
                await asyncio.shield(_end(probe))

    async def _ready(self) -> Process:
        """A probe that waits for a request."""
        while self._kept:
            probe = self._kept.pop()
            # After its answer: the child that gave it has ended.
            if await _says_idle(probe) and probe.returncode is None:
                return probe
            await _end(probe)
        probe = await self._start()
        await _says_idle(probe)
        return probe

    async def _start(self) -> Process:
        return await asyncio.create_subprocess_exec(
            *self._settings.probe_command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_environment(),
            start_new_session=True,
            limit=_LONGEST_ANSWER_BYTES,
        )


def _result_of(answer: Any) -> Any:
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
async def _turn(slots: asyncio.Semaphore, queue_s: float, refused: Exception) -> AsyncGenerator[None]:
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


def _environment() -> dict[str, str]:
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
        await asyncio.shield(_end(probe))
        raise


async def _end(probe: Process) -> None:
    """Kill a probe and the process of its request."""
    if probe.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(probe.pid, signal.SIGKILL)
    await probe.wait()


# The engines of virtual layouts.

_READ_BYTES = 256 << 10
"""Bytes of a response that this process holds at once, besides those in the buffers of sockets."""
_DEATH_S = 2.0
"""So long an engine may take to end after it has closed its socket, for its exit status to be reported."""


class EngineDied(Exception):  # noqa: N818 - names what happened
    """The engine of a layout ended before it answered."""


class Bytes:
    """The bytes of a range of a file, on their way from an engine."""

    def __init__(self, reader: asyncio.StreamReader, length: int) -> None:
        self._reader = reader
        self.left = length

    async def read(self) -> bytes:
        """The next bytes; none at the end, or if the engine can make no more of them. Then some are `left`."""
        try:
            data = await self._reader.read(min(_READ_BYTES, self.left)) if self.left else b""
        except ConnectionError:
            data = b""
        self.left -= len(data)
        return data


class _LayoutProcess:
    """A process that serves one layout. Until it is asked for the layout, it serves any."""

    def __init__(self, settings: ServiceSettings) -> None:
        """Start the process. Its imports go on after this has returned."""
        self._control, theirs = socket.socketpair()
        self._control.setblocking(False)
        self._started = asyncio.create_task(self._start(settings, theirs))
        # `call` raises the error of the start. It is read here, too: asyncio reports errors that nobody has read.
        self._started.add_done_callback(lambda task: task.cancelled() or task.exception())

    @staticmethod
    async def _start(settings: ServiceSettings, control: socket.socket) -> Process:
        with control:
            return await asyncio.create_subprocess_exec(
                *settings.layout_command,
                stdin=control.fileno(),
                # A GPU would lift the limit on memory.
                env={**_environment(), "RESHARD_DEVICE": "cpu"},
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        """True while it starts, and while it runs."""
        if not self._started.done():
            return True
        failed = self._started.cancelled() or self._started.exception() is not None
        return not failed and self._started.result().returncode is None

    async def call(self, asked: dict[str, Any], limit: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a call over a connection of its own; returns the connection, from which the answer comes next.

        Raises:
            EngineDied: The process has ended.
            OSError: The machine refused to start it.
        """
        await asyncio.shield(self._started)
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise EngineDied from error
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=limit)
        writer.write(json.dumps(asked).encode() + b"\n")
        return reader, writer

    async def status(self) -> int | None:
        """The exit status of a process that has closed its socket; None if it still runs."""
        process = await asyncio.shield(self._started)
        with suppress(TimeoutError):
            return await asyncio.wait_for(process.wait(), _DEATH_S)
        return None

    async def end(self) -> None:
        """Kill the process."""
        self._control.close()
        self._started.cancel()
        with suppress(asyncio.CancelledError, OSError):
            await _end(await self._started)


class _Engine:
    """The process of one layout, from its start on."""

    def __init__(
        self,
        settings: ServiceSettings,
        layout: UsedLayout,
        take_ahead: Callable[[], _LayoutProcess | None],
        *,
        compare: bool,
    ) -> None:
        self.layout = layout
        self.users = 0
        self.idle_since = 0.0
        self.timer: asyncio.TimerHandle | None = None
        """Ends it when it has been idle for long enough."""
        self.reads = asyncio.Semaphore(settings.layout_reads)
        self._settings = settings
        self._compare = compare
        self._take_ahead = take_ahead
        self._process: _LayoutProcess | None = None
        self.opened = asyncio.create_task(self._open())
        # Callers that wait for it get its error. It is read here, too: asyncio reports errors that nobody has read.
        self.opened.add_done_callback(lambda task: task.cancelled() or task.exception())

    @property
    def is_alive(self) -> bool:
        """True while it starts, and while its process runs."""
        return not self.opened.done() or (self._process is not None and self._process.is_alive)

    async def ask(self, path: str, offset: int, length: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Ask for a range of a file; returns the connection, from which the bytes come next.

        Raises:
            ReshardError: The engine cannot make the first of the bytes.
            EngineDied: It has ended.
        """
        assert self._process is not None
        reader, writer = await self._process.call({"path": path, "offset": offset, "length": length}, _READ_BYTES)
        try:
            await self._answer(reader)
        except BaseException:
            writer.close()
            raise
        return reader, writer

    async def status(self) -> int | None:
        """The exit status of a process that has closed its socket; None if it still runs or was not started."""
        return None if self._process is None else await self._process.status()

    async def end(self) -> None:
        """Kill the process."""
        self.opened.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self.opened
        if self._process is not None:
            await self._process.end()

    async def _open(self) -> PlannedLayout:
        """Start the process, and have it plan the layout.

        Raises:
            ReshardError: Any error of the engine; `source.changed` or `request.gone` if it is not the layout that was
                planned before; `job.wait_timeout`.
            EngineDied: The process ended.
        """
        limit_s, layout = self._settings.layout_plan_s, self.layout
        try:
            async with asyncio.timeout(limit_s):
                planned = await self._plan()
        except TimeoutError as error:
            raise JobError(
                "job.wait_timeout",
                f"planning the layout and comparing its source takes longer than {limit_s:g} s",
                fix="leave the comparison out: `compare: false`; or ask the operator to raise RESHARD_LAYOUT_PLAN_S",
            ) from error
        if layout.source_digest and planned.source_digest != layout.source_digest:
            raise SourceError(
                "source.changed",
                "the source is not the one with which the layout was planned",
                fix="make another layout of the source as it is now: POST /v1/layouts",
            )
        if layout.content_digest and planned.content_digest != layout.content_digest:
            raise RequestError(
                "request.gone",
                "another release of the service planned the layout, and this one lays its files out in another way",
                fix="make it again: POST /v1/layouts",
            )
        return planned

    async def _plan(self) -> PlannedLayout:
        if (ahead := self._take_ahead()) is not None:
            self._process = ahead
            try:
                return await self._plan_in(ahead)
            except (EngineDied, OSError):
                # Something may have killed it while it waited, or it could not be started then. A layout that kills
                # its process kills a new one, too.
                await ahead.end()
        self._process = _LayoutProcess(self._settings)
        return await self._plan_in(self._process)

    async def _plan_in(self, process: _LayoutProcess) -> PlannedLayout:
        reader, writer = await process.call(self._asked(), _LONGEST_ANSWER_BYTES)
        try:
            return PlannedLayout.model_validate(await self._answer(reader))
        finally:
            writer.close()

    def _asked(self) -> dict[str, Any]:
        request, roots = self.layout.request, self.layout.limits.roots(self._settings.jobs.roots)
        return {
            "request": request.model_dump(mode="json"),
            "compare": self._compare,
            "roots": roots.urls,
            "write_roots": roots.writable,
            "memory_bytes": engine_memory_bytes(request, self._settings.engine_memory_bytes),
        }

    async def _answer(self, reader: asyncio.StreamReader) -> Any:
        try:
            line = await reader.readline()
        except ConnectionError as error:
            raise EngineDied from error
        if not line.endswith(b"\n"):
            raise EngineDied
        return _result_of(json.loads(line))


class LayoutEngines:
    """The engine processes of virtual layouts: one for each layout that is used now or was a short while ago."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._engines: dict[str, _Engine] = {}
        self._ahead: _LayoutProcess | None = None
        """A process for the next layout, while layouts are used: its imports take longer than planning most layouts."""
        self._freed = asyncio.Event()
        self._ending: set[asyncio.Task[None]] = set()

    async def plan(self, layout: UsedLayout, *, compare: bool) -> PlannedLayout:
        """Plan a layout in a new process, which stays for its first use.

        Raises:
            ReshardError: Any error of the engine; `service.busy`; `job.wait_timeout`.
        """
        async with self._engine(layout, compare=compare) as engine:
            return engine.opened.result()

    @asynccontextmanager
    async def reading(self, layout: UsedLayout, path: str, offset: int, length: int) -> AsyncGenerator[Bytes]:
        """The bytes of a range of a file. A process that died before it made the first of them is begun again, once.

        Raises:
            ReshardError: Any error of the engine; `source.changed`; `service.busy`.
        """
        for last in (False, True):
            queue_s = self._settings.layout_queue_s
            async with self._engine(layout) as engine, _turn(engine.reads, queue_s, _busy()):
                try:
                    reader, writer = await engine.ask(path, offset, length)
                except EngineDied as error:
                    if last:
                        raise await self._crash(engine) from error
                    self._drop(engine)
                    continue
                try:
                    yield Bytes(reader, length)
                finally:
                    writer.close()
                return

    def end(self, layout_id: str) -> None:
        """End the process of a layout. Responses that read from it are cut."""
        if (engine := self._engines.get(layout_id)) is not None:
            self._drop(engine)

    async def close(self) -> None:
        """End all processes."""
        for engine in list(self._engines.values()):
            self._drop(engine)
        self._end_unneeded()
        await asyncio.gather(*self._ending)

    @asynccontextmanager
    async def _engine(self, layout: UsedLayout, *, compare: bool = False) -> AsyncGenerator[_Engine]:
        """The process of a layout, when it has planned it; it stays at least for the length of the block."""
        engine = await self._found_or_begun(layout, compare=compare)
        engine.users += 1
        try:
            try:
                await asyncio.shield(engine.opened)
            except EngineDied as error:
                raise await self._crash(engine) from error
            except asyncio.CancelledError:
                if engine.opened.cancelled():
                    # Somebody has removed the layout meanwhile.
                    raise _busy() from None
                raise
            except Exception:
                self._drop(engine)
                raise
            yield engine
        finally:
            engine.users -= 1
            if not engine.users:
                self._end_later(engine)
            self._tell_freed()

    async def _found_or_begun(self, layout: UsedLayout, *, compare: bool) -> _Engine:
        try:
            async with asyncio.timeout(self._settings.layout_queue_s):
                while True:
                    found = self._engines.get(layout.id)
                    if found is not None and found.is_alive:
                        return found
                    if found is not None:
                        self._drop(found)
                    if self._make_room(layout):
                        begun = _Engine(self._settings, layout, self._take_ahead, compare=compare)
                        begun.opened.add_done_callback(self._start_ahead)
                        self._engines[layout.id] = begun
                        return begun
                    await self._freed.wait()
        except TimeoutError as error:
            raise _busy() from error

    def _make_room(self, layout: UsedLayout) -> bool:
        """End idle processes until one more may begin; false if too many are in use."""
        of_tenant = [e for e in self._engines.values() if e.layout.tenant == layout.tenant]
        most = self._settings.layout_engines_of_tenant
        if not self._room_among(of_tenant, most if layout.max_running is None else min(most, layout.max_running)):
            return False
        return self._room_among(list(self._engines.values()), self._settings.layout_engines)

    def _room_among(self, engines: list[_Engine], most: int) -> bool:
        idle = sorted((e for e in engines if not e.users), key=lambda e: e.idle_since)
        surplus = len(engines) + 1 - most
        if surplus > len(idle):
            return False
        for engine in idle[: max(0, surplus)]:
            self._drop(engine)
        return True

    def _end_later(self, engine: _Engine) -> None:
        loop, idle_s = asyncio.get_running_loop(), self._settings.layout_idle_s
        engine.idle_since = loop.time()
        if engine.timer is not None:
            engine.timer.cancel()
        engine.timer = loop.call_later(idle_s, lambda: engine.users or self._drop(engine))

    async def _crash(self, engine: _Engine) -> JobError:
        """The error for an engine that died. Its status is read before the engine is ended, which kills it."""
        try:
            status = await engine.status()
        finally:
            self._drop(engine)
        how = (
            "ended" if status is None else f"ended with status {status}" if status >= 0 else f"died of signal {-status}"
        )
        refused = " (native code aborts if it is refused memory)" if status == -signal.SIGABRT else ""
        return JobError(
            "internal.error",
            f"the process that makes the files of the layout {how}{refused}",
            fix="run `reshard convert` on the source, and report its output; for more memory: RESHARD_ENGINE_MEMORY",
            details={"status": status},
        )

    def _take_ahead(self) -> _LayoutProcess | None:
        taken, self._ahead = self._ahead, None
        return taken

    def _start_ahead(self, opened: asyncio.Task[PlannedLayout]) -> None:
        if opened.cancelled() or opened.exception() is not None:
            return
        if self._ahead is not None and not self._ahead.is_alive:
            self._end(self._ahead)
            self._ahead = None
        # Layouts that are being planned need the cores. The last of them starts the process.
        planning = any(not engine.opened.done() for engine in self._engines.values())
        if self._engines and not planning and self._ahead is None:
            try:
                self._ahead = _LayoutProcess(self._settings)
            except OSError as error:
                logger.warning("no process was started ahead of the next layout: %s", error)

    def _end_unneeded(self) -> None:
        if not self._engines and (ahead := self._take_ahead()) is not None:
            self._end(ahead)

    def _drop(self, engine: _Engine) -> None:
        if self._engines.get(engine.layout.id) is engine:
            del self._engines[engine.layout.id]
        if engine.timer is not None:
            engine.timer.cancel()
        self._end(engine)
        self._tell_freed()
        # Soon, not now: the engine may make room for another layout, which takes the process that waits.
        asyncio.get_running_loop().call_soon(self._end_unneeded)

    def _end(self, process: _Engine | _LayoutProcess) -> None:
        task = asyncio.create_task(process.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _tell_freed(self) -> None:
        self._freed.set()
        self._freed = asyncio.Event()


def _busy() -> JobError:
    return JobError("service.busy", "all engine processes for layouts are in use")
