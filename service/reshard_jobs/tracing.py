"""Traces of OpenTelemetry, from the request that makes a job to the runs of its conversion; off unless `OTEL_*` ask.

Only this module imports OpenTelemetry, and only when a process has called `start_tracing` and the environment names a
collector. Spans wait in a bounded queue for a thread that sends them. A collector that refuses or hangs costs spans;
it never costs a job or its time.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import threading
import time
from collections.abc import Mapping
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Literal

from reshard.extras import install_line

if TYPE_CHECKING:
    from types import TracebackType

    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as SdkSpan, Tracer

logger = logging.getLogger(__name__)

Kind = Literal["internal", "server", "consumer"]
Value = str | int | float

CLOSE_S = 2.0
"""Seconds that a process which ends waits for the collector to take its last spans."""
MAX_TRACEPARENT_CHARS = 55
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_QUIET_S = 60.0
"""Seconds between two complaints about a collector: a lost one would fill the log."""


def wanted(env: Mapping[str, str]) -> bool:
    """True if the standard variables of OpenTelemetry ask for traces."""
    if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = [name.strip().lower() for name in env.get("OTEL_TRACES_EXPORTER", "").split(",")]
    return exporters in ([""], ["otlp"]) and any(env.get(name, "").strip() for name in _ENDPOINTS)


class Span:
    """The time of a piece of work, or nothing if traces are off. As a context it is the parent of those begun within.

    An exception that leaves the context marks the span as failed, by the code of a typed error.
    """

    __slots__ = ("_span", "_token")

    def __init__(self, span: SdkSpan | None) -> None:
        self._span = span
        self._token: Token[Span] | None = None

    def __enter__(self) -> Span:
        if self._span is not None:
            self._token = _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._span is None:
            return
        if self._token is not None:
            _current.reset(self._token)
            self._token = None
        if isinstance(error, Exception):
            self.fail(getattr(error, "code", type(error).__name__))
        self.end()

    @property
    def recording(self) -> bool:
        """True if this span is kept: traces are on, and the sampler has chosen its trace."""
        return self._span is not None and self._span.is_recording()

    @property
    def trace_id(self) -> str:
        """The id of the trace; empty if traces are off."""
        return "" if self._span is None else f"{self._span.get_span_context().trace_id:032x}"

    @property
    def log_fields(self) -> dict[str, str]:
        """The field of a log line that belongs to this span (see `reshard_jobs.logs`)."""
        return {"trace_id": self.trace_id} if self._span is not None else {}

    @property
    def traceparent(self) -> str | None:
        """This span as a parent in another process (W3C Trace Context); None if traces are off."""
        if self._span is None:
            return None
        found = self._span.get_span_context()
        return f"00-{found.trace_id:032x}-{found.span_id:016x}-{int(found.trace_flags):02x}"

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Add facts. They are read by whoever reads the traces: no URL and no secret may be among them."""
        if self._span is not None:
            self._span.set_attributes(attributes)

    def rename(self, name: str) -> None:
        """Change the name, which may be known only at the end."""
        if self._span is not None:
            self._span.update_name(name)

    def fail(self, code: str = "") -> None:
        """Mark the work as failed, with the code of the error. Its message may name places, so it is left out."""
        if self._span is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, code or None))
            if code:
                self._span.set_attribute("error.type", code)

    def child(self, name: str, attributes: Mapping[str, Value], *, begin_ns: int | None = None) -> Span:
        """Begin a span below this one, now or at a time since the epoch."""
        tracer = _process.tracer
        if tracer is None or self._span is None:
            return OFF
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(self._span)
        return Span(tracer.start_span(name, context=context, attributes=dict(attributes), start_time=begin_ns))

    def end(self, at_ns: int | None = None) -> None:
        """End the span. One that has ended stays as it is."""
        if self._span is not None and self._span.is_recording():
            self._span.end(at_ns)


OFF = Span(None)
_current: ContextVar[Span] = ContextVar("span", default=OFF)


def current() -> Span:
    """The span within which this code runs; one that does nothing if there is none."""
    return _current.get()


def begin_span(
    name: str,
    attributes: Mapping[str, Value],
    *,
    parent: str | None,
    kind: Kind = "internal",
    begin_ns: int | None = None,
) -> Span:
    """Begin a span below one of another process; without a valid `parent`, it is the first one of a trace."""
    tracer = _process.tracer
    if tracer is None:
        return OFF
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = Context()
    if parent is not None and _TRACEPARENT.fullmatch(parent):
        context = TraceContextTextMapPropagator().extract({"traceparent": parent}, context)
    kinds = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "consumer": SpanKind.CONSUMER}
    return Span(
        tracer.start_span(name, context=context, kind=kinds[kind], attributes=dict(attributes), start_time=begin_ns)
    )


class _Process:
    """Sends the spans of this process, if an exporter is configured."""

    def __init__(self) -> None:
        self.tracer: Tracer | None = None
        self._provider: TracerProvider | None = None
        self._complained = False

    def start(self, service: str, env: Mapping[str, str]) -> bool:
        if self.tracer is not None:
            return True
        if not wanted(env):
            return False
        protocol = next((env[name].strip().lower() for name in _PROTOCOLS if env.get(name)), "http/protobuf")
        if protocol != "http/protobuf":
            self._complain("no traces are sent: OTLP over %r is not supported, only over http/protobuf", protocol)
            return False
        try:
            self._provider = _provider_for(service, env)
        except ImportError as error:
            self._complain("no traces are sent: %s", f"{error.name} is not installed; {install_line('otel')}")
            return False
        except ValueError as error:
            self._complain("no traces are sent: a variable OTEL_* is wrong: %s", error)
            return False
        self.tracer = self._provider.get_tracer("reshard")
        atexit.register(self.close)
        return True

    def _complain(self, message: str, fact: object) -> None:
        if not self._complained:
            logger.warning(message, fact)
        self._complained = True

    def close(self) -> None:
        provider, self._provider, self.tracer = self._provider, None, None
        if provider is None:
            return
        atexit.unregister(self.close)
        # The SDK would wait for a collector that hangs as long as its own timeouts say.
        ending = threading.Thread(target=provider.shutdown, name="traces-end", daemon=True)
        ending.start()
        ending.join(CLOSE_S)


_process = _Process()


def start_tracing(service: str) -> bool:
    """Begin to send the spans of this process if `OTEL_*` ask for it; call it after forks. False if traces are off.

    A package that is missing, or a variable that is wrong, is said once, and the process goes on without traces.

    Args:
        service: The name of the service, unless `OTEL_SERVICE_NAME` is set.
    """
    return _process.start(service, os.environ)


def stop_tracing() -> None:
    """Give the collector the spans that wait, in `CLOSE_S` seconds at most; those begun later are lost."""
    _process.close()


def _provider_for(service: str, env: Mapping[str, str]) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider, export

    named = env.get("OTEL_SERVICE_NAME") or "service.name=" in env.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({} if named else {"service.name": service})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    # The SDK reads the other variables: the size of the queue, the endpoint, headers, the sampler.
    provider.add_span_processor(export.BatchSpanProcessor(OTLPSpanExporter()))
    complaints = _Seldom()
    for handler_of in ("exporter.otlp.proto.http.trace_exporter", "sdk._shared_internal"):
        logging.getLogger(f"opentelemetry.{handler_of}").addFilter(complaints)
    return provider


class _Seldom(logging.Filter):
    """Lets one line pass in `_QUIET_S` seconds, without a traceback, which shows nothing of ours."""

    def __init__(self) -> None:
        super().__init__()
        self._said_at = -_QUIET_S

    def filter(self, record: logging.LogRecord) -> bool:
        """True if the record is to be logged."""
        now = time.monotonic()
        if now - self._said_at < _QUIET_S:
            return False
        self._said_at = now
        record.exc_info = record.exc_text = None
        return True
