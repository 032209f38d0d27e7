"""A reverse proxy before an S3 server that answers one request wrongly, as networks and servers do."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlsplit

from servers.answering import answering

_HOP = {"connection", "keep-alive", "transfer-encoding", "expect"}


class Wrong(StrEnum):
    """What may happen to a request."""

    RESET_BEFORE = "reset before the request arrives"
    RESET_AFTER = "reset after the effect"
    UNAVAILABLE = "503 before the effect"
    LOST = "500 after the effect"
    SHORT_BODY = "half of the body, then the end"
    RESET_BODY = "half of the body, then a reset"
    OTHER_ETAG = "another ETag"
    ERROR_IN_200 = "status 200, and an error as the body"


_INTERNAL_ERROR = b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>InternalError</Code><Message>x</Message></Error>'


@dataclass
class FaultyProxy:
    """The proxy's knobs and its log."""

    endpoint: str = ""
    wrong: Wrong | None = None
    applies: Callable[[str, str], bool] = lambda _method, _target: True
    """Which requests, by method and target."""
    times: int = 1
    """How many of them go wrong."""
    hit: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(method, target) of the requests that went wrong."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def break_next(self, wrong: Wrong, applies: Callable[[str, str], bool], *, times: int = 1) -> None:
        """Answer the next `times` requests that apply wrongly."""
        with self._lock:
            self.wrong, self.applies, self.times = wrong, applies, times
            self.hit.clear()

    def take(self, method: str, target: str) -> Wrong | None:
        """What happens to this request."""
        with self._lock:
            if self.wrong is None or len(self.hit) >= self.times or not self.applies(method, target):
                return None
            self.hit.append((method, target))
            return self.wrong


@contextmanager
def faulty_proxy(upstream: str) -> Generator[FaultyProxy]:
    """A proxy before `upstream` (`http://host:port`) for the length of the block."""
    proxy = FaultyProxy()
    place = urlsplit(upstream).netloc

    class Handler(_Handler):
        server_place = place
        faults = proxy

    with answering(Handler) as proxy.endpoint:
        yield proxy


class _Handler(BaseHTTPRequestHandler):
    """Each request on an upstream connection of its own."""

    protocol_version = "HTTP/1.1"
    server_place = ""
    faults: FaultyProxy

    def log_message(self, format: str, *args: object) -> None:
        """The log is `FaultyProxy.hit`."""

    def handle(self) -> None:
        with suppress(ConnectionError):
            super().handle()

    def _exchange(self) -> None:
        wrong = self.faults.take(self.command, self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if wrong is Wrong.RESET_BEFORE:
            self._reset()
            return
        if wrong is Wrong.UNAVAILABLE:
            self._answer(503, [], _INTERNAL_ERROR.replace(b"InternalError", b"SlowDown"))
            return
        status, headers, answer = self._forward(body)
        if wrong is Wrong.RESET_AFTER:
            self._reset()
        elif wrong is Wrong.LOST:
            self._answer(500, [], _INTERNAL_ERROR)
        elif wrong is Wrong.ERROR_IN_200:
            self._answer(200, [("Content-Type", "application/xml")], _INTERNAL_ERROR)
        elif wrong in {Wrong.SHORT_BODY, Wrong.RESET_BODY} and self.command != "HEAD":
            self._answer(status, headers, answer, sent=len(answer) // 2)
            self._reset() if wrong is Wrong.RESET_BODY else self._end()
        elif wrong is Wrong.OTHER_ETAG:
            self._answer(status, [(n, '"0"' if n.lower() == "etag" else v) for n, v in headers], answer)
        else:
            self._answer(status, headers, answer)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _exchange  # noqa: N815 - names of the base class

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.server_place, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in _HOP:
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, *, sent: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in {*_HOP, "content-length"}:
                self.send_header(name, value)
        length = (
            next((v for n, v in headers if n.lower() == "content-length"), None) if self.command == "HEAD" else None
        )
        self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])
        self.wfile.flush()

    def _end(self) -> None:
        self.close_connection = True

    def _reset(self) -> None:
        """Close with RST instead of FIN."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True
