"""A reverse proxy before an S3 server that makes each call wait, and that limits the bandwidth of its client.

Each connection has a thread, which mostly sleeps: bytes are copied in large chunks outside the interpreter's lock. The
`Host` header stays what the client signed. `Expect` is not a part of a signature (botocore/auth.py 1.4x,
`SIGNED_HEADERS_BLACKLIST`), so the proxy answers it itself: a call waits once.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, suppress
from urllib.parse import parse_qs, urlsplit

_CHUNK_BYTES = 256 << 10
_HEAD_BYTES = 64 << 10


class SlowStore:
    """The proxy of one worker."""

    def __init__(self, upstream: str, *, delay_s: float, bytes_per_s: float, shared: bool = True) -> None:
        """Listen; calls go to `upstream` (`http://host:port`). All connections share the bandwidth, or each has it."""
        place = urlsplit(upstream)
        self._upstream = (str(place.hostname), int(place.port or 80))
        self._delay_s = delay_s
        both = _Link(bytes_per_s), _Link(bytes_per_s)
        self._new_links = (lambda: both) if shared else lambda: (_Link(bytes_per_s), _Link(bytes_per_s))
        self.calls: Counter[str] = Counter()
        self.sent_bytes = self.received_bytes = 0
        self.log: list[tuple[float, str, str]] = []
        """When each call came, its kind and its target."""
        self._server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.endpoint = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client, socket.create_connection(self._upstream) as server:
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            mine, theirs, links = _Reader(client), _Reader(server), self._new_links()
            while (head := mine.head()) is not None:
                self._exchange(head, mine, theirs, links)

    def _exchange(self, head: bytes, mine: _Reader, theirs: _Reader, links: tuple[_Link, _Link]) -> None:
        lines = head.split(b"\r\n")
        kept = [line for line in lines if not line.lower().startswith(b"expect:")]
        if len(kept) < len(lines):
            mine.end.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        method, target = (word.decode() for word in lines[0].split(b" ", 2)[:2])
        self.calls[kind_of(method, target)] += 1
        self.log.append((time.monotonic(), kind_of(method, target), target))
        time.sleep(self._delay_s)
        theirs.end.sendall(b"\r\n".join(kept))
        self.sent_bytes += mine.copy_body(head, theirs.end, links[0])
        answer = theirs.head()
        while answer is not None and answer.split(b" ", 2)[1] == b"100":
            answer = theirs.head()
        if answer is None:
            raise ConnectionResetError
        mine.end.sendall(answer)
        if method != "HEAD" and answer.split(b" ", 2)[1] not in (b"204", b"304"):
            self.received_bytes += theirs.copy_body(answer, mine.end, links[1])


class _Link:
    """One direction of a network link, of a connection or of all connections of a worker."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def pass_bytes(self, count: int) -> None:
        """Wait until the link has carried so many bytes more."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + count / self._bytes_per_s
            until = self._free_at
        time.sleep(max(0.0, until - time.monotonic()))


class _Reader:
    """One end of a connection, with the bytes that came behind a head."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._rest = bytearray()
        self._memory = memoryview(bytearray(_CHUNK_BYTES))

    def head(self) -> bytes | None:
        """The next head with its empty line; None if the connection has ended."""
        while (at := self._rest.find(b"\r\n\r\n")) < 0:
            more = self.end.recv(_HEAD_BYTES)
            if not more:
                return None
            self._rest += more
        head = bytes(self._rest[: at + 4])
        del self._rest[: at + 4]
        return head

    def copy_body(self, head: bytes, to: socket.socket, link: _Link) -> int:
        """Send the body that follows a head on; returns its size."""
        if b"chunked" in _header(head, b"transfer-encoding"):
            return self._copy_chunks(to)
        left = total = int(_header(head, b"content-length") or 0)
        if left and self._rest:
            first = bytes(self._rest[:left])
            del self._rest[:left]
            link.pass_bytes(len(first))
            to.sendall(first)
            left -= len(first)
        while left:
            count = self.end.recv_into(self._memory, min(left, _CHUNK_BYTES))
            if not count:
                raise ConnectionResetError
            link.pass_bytes(count)
            to.sendall(self._memory[:count])
            left -= count
        return total

    def _copy_chunks(self, to: socket.socket) -> int:
        total = 0
        while True:
            while (at := self._rest.find(b"\r\n")) < 0:
                self._fill()
            size = int(bytes(self._rest[:at]).split(b";")[0], 16)
            whole = at + 2 + size + 2
            while len(self._rest) < whole:
                self._fill()
            to.sendall(self._rest[:whole])
            del self._rest[:whole]
            total += size
            if not size:
                return total

    def _fill(self) -> None:
        more = self.end.recv(_CHUNK_BYTES)
        if not more:
            raise ConnectionResetError
        self._rest += more


def _header(head: bytes, name: bytes) -> bytes:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip().lower()
    return b""


def kind_of(method: str, target: str) -> str:
    """The operation of S3 that a request is, and if it is one of the protocol's own texts."""
    url = urlsplit(target)
    query = parse_qs(url.query, keep_blank_values=True)
    if method == "GET" and url.path.count("/") < 2 + url.path.endswith("/"):
        return "ListUploads" if "uploads" in query else "List"
    if "uploadId" in query:
        names = {"GET": "ListParts", "PUT": "UploadPart", "POST": "Complete", "DELETE": "Abort"}
        return names.get(method, method)
    if "uploads" in query:
        return "CreateUpload"
    if "delete" in query:
        return "Delete"
    names = {"GET": "Get", "PUT": "Put", "HEAD": "Head", "DELETE": "Delete"}
    return names.get(method, method) + (" text" if ".reshard-" in url.path else "")


@contextmanager
def slow_stores(
    upstream: str, count: int, *, delay_s: float, bytes_per_s: float, shared: bool = True
) -> Generator[list[SlowStore]]:
    """One proxy for each of `count` workers."""
    stores = [SlowStore(upstream, delay_s=delay_s, bytes_per_s=bytes_per_s, shared=shared) for _ in range(count)]
    try:
        yield stores
    finally:
        for store in stores:
            store.close()
