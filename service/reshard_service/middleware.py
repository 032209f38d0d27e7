"""What wraps every request: its count, and the limit of its body."""

from __future__ import annotations

import json
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reshard.errors import RequestError
from reshard_service.metrics import Metrics


class RequestEnvelope:
    """Counts requests and refuses large bodies. Plain ASGI, so that event streams are not buffered."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, max_body_bytes: int) -> None:
        self._app = app
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes

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
            body = await self._read_body(receive)
            if body is None:
                await self._refuse(counting_send)
            else:
                await self._app(scope, _replay(body, receive), counting_send)
        finally:
            # A stranger chooses the method: only known ones become label values.
            method = scope["method"] if scope["method"] in {"GET", "POST", "PUT", "DELETE", "HEAD"} else "other"
            route = getattr(scope.get("route"), "path", "unmatched")
            self._metrics.count_request(method=method, route=route, status=status, seconds=seconds)

    async def _read_body(self, receive: Receive) -> bytes | None:
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return b"".join(chunks)
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self._max_body_bytes:
                return None
            if not message.get("more_body", False):
                return b"".join(chunks)

    async def _refuse(self, send: Send) -> None:
        problem = RequestError(
            "request.invalid", f"the request body is larger than {self._max_body_bytes} bytes"
        ).to_problem()
        body = json.dumps({**problem, "status": 413}).encode()
        headers = [(b"content-type", b"application/problem+json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _replay(body: bytes, receive: Receive) -> Receive:
    """A channel that gives a body that was read already, then whatever comes after it."""
    pending = [body]

    async def replaying() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replaying
