"""A collector of traces for tests: a real OTLP/HTTP receiver, which decodes what it gets. It can hang, too."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from house.waiting import PATIENCE_S
from servers.answering import Handler, answering


@dataclass(frozen=True)
class Received:
    """A span as it arrived."""

    name: str
    trace: str
    id: str
    parent: str
    begin_ns: int
    end_ns: int
    service: str
    kind: int
    facts: dict[str, Any]
    failed: bool
    error: str

    @property
    def job(self) -> str:
        return str(self.facts.get("reshard.job", ""))


@dataclass
class Collector:
    """What arrived, and how the receiver behaves."""

    endpoint: str = ""
    spans: list[Received] = field(default_factory=list[Received])
    bodies: list[bytes] = field(default_factory=list[bytes])
    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    hangs: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def env(self, **more: str) -> dict[str, str]:
        """The variables that switch traces on."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100", **more}

    def wait_until(self, ready: Callable[[], bool], *, timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not ready():
            assert time.monotonic() < deadline, [(s.name, s.job) for s in self.spans]
            time.sleep(0.05)

    def named(self, name: str, job: str = "") -> list[Received]:
        found = [s for s in list(self.spans) if s.name == name and job in {"", s.job}]
        return sorted(found, key=lambda s: s.begin_ns)

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            service = _facts(resource.resource.attributes).get("service.name", "")
            for scope in resource.scope_spans:
                for s in scope.spans:
                    self.spans.append(
                        Received(
                            name=s.name,
                            trace=s.trace_id.hex(),
                            id=s.span_id.hex(),
                            parent=s.parent_span_id.hex(),
                            begin_ns=s.start_time_unix_nano,
                            end_ns=s.end_time_unix_nano,
                            service=service,
                            kind=s.kind,
                            facts=_facts(s.attributes),
                            failed=s.status.code == 2,
                            error=s.status.message,
                        )
                    )


def _facts(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


@contextmanager
def collector() -> Generator[Collector]:
    """A receiver on a port of its own."""
    found = Collector()

    class Taking(Handler):
        def do_POST(self) -> None:  # noqa: N802
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if found.hangs.is_set():
                found.released.wait(60)
                return
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            found.headers.append({k.lower(): v for k, v in self.headers.items()})
            found.bodies.append(body)
            found.take(body)
            self.answer(200)

    with answering(Taking) as found.endpoint:
        try:
            yield found
        finally:
            found.released.set()
