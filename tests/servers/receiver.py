"""A receiver of webhooks in a process of its own. The path says how it answers, and a file has what came.

`python receiver.py LOG [CERTIFICATE KEY]` prints its port. Each request is a line of JSON in LOG: path, headers, body.

- `/ok`: 204. `/fail`: 500. `/gone`: 410. `/moved`: 302 to `/ok`. `/busy`: 429 with `Retry-After: 77`.
- `/flaky-N`: 500 for the first N requests, then 204.
- `/hang`: no answer. `/slow-once`: no answer to the first request, 204 to others. `/cut`: the connection is closed.
- `/drip`: an answer whose head never ends, a byte each half second.
- `/flood`: 200 with a body that does not end.
"""

from __future__ import annotations

import json
import socketserver
import ssl
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

_lock = threading.Lock()
_counts: dict[str, int] = {}


class Handler(BaseHTTPRequestHandler):
    """Answers as the path says."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        line = json.dumps({
            "path": self.path, "headers": {n.lower(): v for n, v in self.headers.items()}, "body": body.decode(),
            "at": time.time(),
        })  # fmt: skip
        with _lock, Path(sys.argv[1]).open("a") as log:
            log.write(line + "\n")
            log.flush()
            _counts[self.path] = _counts.get(self.path, 0) + 1
            count = _counts[self.path]
        self.close_connection = True
        name = self.path.strip("/")
        if name == "hang" or (name == "slow-once" and count == 1):
            time.sleep(120)
        elif name == "cut":
            pass
        elif name == "drip":
            self._drip(b"HTTP/1.1 200 OK\r\nx-long: ")
        elif name == "flood":
            self._drip(b"HTTP/1.1 200 OK\r\n\r\n", block=b"x" * 65536, pause_s=0)
        else:
            status = {"fail": 500, "gone": 410, "moved": 302, "busy": 429}.get(name, 204)
            if name.startswith("flaky-") and count <= int(name.removeprefix("flaky-")):
                status = 500
            self.send_response(status)
            if status == 302:
                self.send_header("location", "/ok")
            if status == 429:
                self.send_header("retry-after", "77")
            self.send_header("content-length", "0")
            self.end_headers()

    do_GET = do_POST  # noqa: N815 - the library's name

    def _drip(self, head: bytes, *, block: bytes = b"x", pause_s: float = 0.5) -> None:
        try:
            self.wfile.write(head)
            for _ in range(100_000):
                self.wfile.write(block)
                self.wfile.flush()
                time.sleep(pause_s)
        except OSError:
            return

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A thread for each connection."""

    allow_reuse_address = True
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass


def main() -> None:
    """Serve until killed."""
    server = Server(("127.0.0.1", 0), Handler)
    if len(sys.argv) > 2:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(sys.argv[2], sys.argv[3])
        server.socket = context.wrap_socket(server.socket, server_side=True)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
