"""The engines of virtual layouts: processes that serve the files of a target that nobody writes.

An engine of a layout stays while the layout is used; the next use begins one again. While layouts are used, a process
without a layout has imported the engine ahead of the next layout.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from reshard.errors import JobError, RequestError, SourceError
from reshard_engine.warm_process import engine_memory_bytes
from reshard_jobs.layouts import PlannedLayout, UsedLayout
from reshard_service.probes.prober import LONGEST_ANSWER_BYTES, end_process, environment, result_of, turn
from reshard_service.settings import ServiceSettings

logger = logging.getLogger(__name__)

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
                env={**environment(), "RESHARD_DEVICE": "cpu"},
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
            await end_process(await self._started)


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
        reader, writer = await process.call(self._asked(), LONGEST_ANSWER_BYTES)
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
        return result_of(json.loads(line))


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
            async with self._engine(layout) as engine, turn(engine.reads, queue_s, _busy()):
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
