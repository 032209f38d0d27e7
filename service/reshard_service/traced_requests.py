"""The middleware that makes a span of each request, below that of the caller if it names one (W3C Trace Context)."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reshard_jobs.logs import log_as
from reshard_jobs.tracing import begin_span
from reshard_service.page_paths import path_of

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
