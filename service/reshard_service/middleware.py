"""The middleware of every request: one counts it, one reads its body within limits.

Both are plain ASGI, so that event streams are not buffered.
"""

from __future__ import annotations

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reshard.errors import RequestError
from reshard_service.metrics import Metrics
from reshard_service.problems import problem_response


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
