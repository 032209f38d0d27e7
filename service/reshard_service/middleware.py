"""The middleware of every request: counted, traced, read within limits, and refused where it is not text.

All of it is plain ASGI, so that event streams are not buffered.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from reshard.errors import RequestError, printable
from reshard_jobs.logs import log_as
from reshard_jobs.tracing import begin_span
from reshard_service.api.problems import problem_response
from reshard_service.auth import path_of
from reshard_service.metrics import Metrics


class CountRequests:
    """Counts requests by route and status."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500
        began = time.perf_counter()
        seconds = 0.0

        async def counting_send(message: Message) -> None:
            nonlocal status, seconds
            if message["type"] == "http.response.start":
                status = message["status"]
                seconds = time.perf_counter() - began
            await send(message)

        try:
            await self._app(scope, receive, counting_send)
        finally:
            # The caller chooses the method, so only known methods become label values.
            method = scope["method"] if scope["method"] in {"GET", "POST", "PUT", "DELETE", "HEAD"} else "other"
            route = getattr(scope.get("route"), "path", "unmatched")
            self._metrics.count_request(method=method, route=route, status=status, seconds=seconds)


class ReadBody:
    """Reads the body of a request before its route runs; refuses one that is too large or comes too slowly."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, limit_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._limit_s = limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._limit_s):
                body = await self._read(receive)
        except TimeoutError:
            await _refuse(408, f"the request body did not arrive within {self._limit_s:g} s", scope, receive, send)
            return
        if body is None:
            await _refuse(413, f"the request body is larger than {self._max_bytes} bytes", scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return b"".join(chunks)
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self._max_bytes:
                return None
            if not message.get("more_body", False):
                return b"".join(chunks)


async def _refuse(status: int, text: str, scope: Scope, receive: Receive, send: Send) -> None:
    answer = problem_response(
        RequestError(
            "request.invalid",
            text,
            fix="send the request again, complete and with a smaller body",
        ),
        status=status,
    )
    answer.headers["Connection"] = "close"
    await answer(scope, receive, send)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive channel that returns the body that was read already, and then the messages after it."""
    pending = [body]

    async def replaying() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replaying


# Refuses NUL characters and lone surrogates in the path, the query and the body of a request.
#
# JSON can encode both. PostgreSQL stores neither, UTF-8 cannot encode lone surrogates, and SQLite would store NUL
# characters. One check before every route makes all databases behave alike.

_NO_TEXT = re.compile("[\0\ud800-\udfff]")


async def require_plain_text(request: Request) -> None:
    """Let the request pass if its path, query and JSON body contain no such characters.

    Raises:
        RequestError: `request.invalid`.
    """
    places = [("path", value) for value in request.path_params.values()]
    places += [("query", text) for pair in request.query_params.multi_items() for text in pair]
    body = await request.body()
    if body:
        # FastAPI keeps the parsed body with the request, so this is the same value. A form is not JSON.
        with suppress(ValueError, RecursionError):
            places += _texts(await request.json())
    for where, text in places:
        if isinstance(text, str):
            refuse_unstorable(where, text)


def refuse_unstorable(where: str, text: str) -> None:
    """Refuse a text that has such a character.

    Raises:
        RequestError: `request.invalid`.
    """
    if found := _NO_TEXT.search(text):
        what = "a NUL character" if found[0] == "\0" else "half of a surrogate pair"
        raise RequestError(
            "request.invalid",
            f"{where}: {what} in {printable(text, max_chars=64)!r}, which no job record can hold",
            fix="leave the character out",
        )


def _texts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every text of a JSON body, keys and values, with its path. It does not recurse."""
    left = [("body", value)]
    while left:
        where, here = left.pop()
        if isinstance(here, dict):
            for name, part in cast("dict[str, Any]", here).items():
                yield where, name
                left.append((f"{where}.{printable(name, max_chars=64)}", part))
        elif isinstance(here, list):
            left += [(f"{where}.{number}", part) for number, part in enumerate(cast("list[Any]", here))]
        else:
            yield where, here


# A protocol of uvicorn that closes connections whose client does not send the head of a request in time.
#
# uvicorn 0.54 waits for the head as long as the client likes (`protocols/http/h11_impl.py`), so a few hundred slow
# clients would hold all connections. The middleware limits the time of the body.


def impatient(head_s: float) -> type[asyncio.Protocol]:
    """A protocol that waits for the head of a request for so many seconds."""
    return type("ImpatientProtocol", (_ImpatientProtocol,), {"head_s": head_s})


class _ImpatientProtocol(H11Protocol):
    head_s: float
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Stop waiting when a head is complete, and begin again with the first byte of the next one."""
        super().data_received(data)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._forget()
        super().connection_lost(exc)

    @property
    def _waits_for_head(self) -> bool:
        # uvicorn declares the cycle without None, which it is until the first request.
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is None or cycle.response_complete

    def _expect_head(self) -> None:
        if not self._waits_for_head:
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.head_s, self._close)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self) -> None:
        self._deadline = None
        if self._waits_for_head:
            self.transport.close()


# The middleware that makes a span of each request, below that of the caller if it names one (W3C Trace Context).

_NOT_TRACED = frozenset({"/healthz", "/readyz", "/metrics"})
"""Asked every few seconds by machines, about no job."""
_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD"})


class TraceRequests:
    """Traces requests by route and status. Neither the URL nor its query is written down, for both are the caller's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or path_of(scope) in _NOT_TRACED:
            await self._app(scope, receive, send)
            return
        status = 500

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
        caller = Headers(scope=scope).getlist("traceparent")
        parent = caller[0] if len(caller) == 1 else None
        span = begin_span(method, {"http.request.method": method}, parent=parent, kind="server")
        with span, log_as(**span.log_fields):
            try:
                await self._app(scope, receive, noting_send)
            finally:
                route = getattr(scope.get("route"), "path", None)
                if route is not None:
                    span.rename(f"{method} {route}")
                    span.set({"http.route": route})
                span.set({"http.response.status_code": status})
                if status >= 500:
                    span.fail(str(status))
