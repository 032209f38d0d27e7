"""A reverse proxy before an object store that forwards bytes verbatim and logs every request.

The `Host` header stays what the client signed, so that SigV4 signatures hold. One thread, asyncio.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from servers.stores import ObjectServer


@dataclass(frozen=True)
class LoggedRequest:
    """One request and the status of its answer (0: none was seen)."""

    method: str
    target: str
    status: int

    @property
    def path(self) -> str:
        """The path of the URL."""
        return urlsplit(self.target).path

    @property
    def query(self) -> dict[str, str]:
        """The parameters of the URL."""
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True))


class LoggingProxy:
    """The proxy's log and its knobs."""

    def __init__(self) -> None:
        self.requests: list[LoggedRequest] = []
        self.endpoint = ""
        self.pause_s: Callable[[str, str], float] | None = None
        """Seconds to hold a request back, from its method and target: slows a store down."""
        self.held: Callable[[str, str], bool] | None = None
        """Tells from its method and target if a request must wait for now; it is asked again and again."""
        self.waiting = 0
        """The number of requests that wait now."""

    def hold_parts(self, store: ObjectServer, after: int = 0) -> None:
        """Hold every upload of a part back, but for so many that may pass first."""
        passed = 0

        def held(method: str, target: str) -> bool:
            nonlocal passed
            if store.part_of(method, target) is None:
                return False
            passed += 1
            return passed > after

        self.held = held

    def parts_uploaded(self, store: ObjectServer) -> list[tuple[str, str, str]]:
        """(path, upload id, part number) of every part that the store accepted, in order."""
        found = (store.part_of(r.method, r.target) for r in self.requests if r.status in {200, 201})
        return [part for part in found if part is not None]


@contextmanager
def logging_proxy(upstream: str) -> Generator[LoggingProxy]:
    """A proxy before `upstream` (`http://host:port`) for the length of the block."""
    proxy = LoggingProxy()
    target = urlsplit(upstream)
    assert target.hostname is not None
    assert target.port is not None
    host, port = target.hostname, target.port
    loop = asyncio.new_event_loop()
    started = threading.Event()
    stop = asyncio.Event()
    connections: set[asyncio.Task[None]] = set()

    async def serve() -> None:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await _Connection(proxy, reader, writer).forward(host, port)

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # The loop itself refers to tasks weakly, and one that is cancelled before it begins closes nothing.
            task = loop.create_task(handle(reader, writer))
            connections.add(task)
            task.add_done_callback(lambda _: writer.close())
            task.add_done_callback(connections.discard)

        server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=1 << 20)
        proxy.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await stop.wait()
        server.close()

    async def end_connections() -> None:
        """Wait for their ends: what is left open is reported in whichever test runs when it is collected."""
        await asyncio.sleep(0.01)  # a connection that was accepted last has its task in the next turn of the loop
        while rest := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
            await asyncio.sleep(0.01)  # closed transports let go of their sockets in the next turn of the loop

    def run() -> None:
        loop.run_until_complete(serve())
        loop.run_until_complete(end_connections())
        loop.close()

    thread = threading.Thread(target=run, name="s3-proxy", daemon=True)
    thread.start()
    started.wait(10)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


class _Connection:
    """One client connection: requests one after the other, each forwarded and answered."""

    def __init__(self, proxy: LoggingProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._reader = reader
        self._writer = writer

    async def forward(self, host: str, port: int) -> None:
        server_reader, server_writer = await asyncio.open_connection(host, port, limit=1 << 20)
        try:
            while True:
                try:
                    head = await self._reader.readuntil(b"\r\n\r\n")
                except asyncio.IncompleteReadError:
                    return
                method, target = head.split(b" ", 2)[:2]
                status = await self._exchange(head, method.decode(), target.decode(), server_reader, server_writer)
                self._proxy.requests.append(LoggedRequest(method.decode(), target.decode(), status))
        finally:
            server_writer.close()

    async def _exchange(
        self,
        head: bytes,
        method: str,
        target: str,
        server_reader: asyncio.StreamReader,
        server_writer: asyncio.StreamWriter,
    ) -> int:
        if self._proxy.pause_s is not None:
            await asyncio.sleep(self._proxy.pause_s(method, target))
        self._proxy.waiting += 1
        while (held := self._proxy.held) is not None and held(method, target):  # noqa: ASYNC110 - a function is asked
            await asyncio.sleep(0.02)
        self._proxy.waiting -= 1
        server_writer.write(head)
        waits = _header(head, b"expect").lower() == b"100-continue"
        if waits:
            interim = await server_reader.readuntil(b"\r\n\r\n")
            self._writer.write(interim)
            await self._writer.drain()
            if _status(interim) != 100:
                return await self._answer(interim, method, server_reader, written=True)
        await _copy_body(head, self._reader, server_writer)
        answer = await server_reader.readuntil(b"\r\n\r\n")
        while _status(answer) == 100:
            answer = await server_reader.readuntil(b"\r\n\r\n")
        return await self._answer(answer, method, server_reader, written=False)

    async def _answer(self, head: bytes, method: str, reader: asyncio.StreamReader, *, written: bool) -> int:
        status = _status(head)
        if not written:
            self._writer.write(head)
        if method != "HEAD" and status not in {204, 304}:
            await _copy_body(head, reader, self._writer)
        await self._writer.drain()
        return status


async def _copy_body(head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    if _header(head, b"transfer-encoding").lower() == b"chunked":
        while True:
            size_line = await reader.readuntil(b"\r\n")
            size = int(size_line.split(b";")[0], 16)
            writer.write(size_line + await reader.readexactly(size + 2))
            await writer.drain()
            if size == 0:
                return
    remaining = int(_header(head, b"content-length") or 0)
    while remaining:
        chunk = await reader.read(min(remaining, 1 << 18))
        if not chunk:
            raise asyncio.IncompleteReadError(b"", remaining)
        remaining -= len(chunk)
        writer.write(chunk)
        await writer.drain()


def _header(head: bytes, name: bytes) -> bytes:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.lower() == name:
            return value.strip()
    return b""


def _status(head: bytes) -> int:
    return int(head.split(b" ", 2)[1])
