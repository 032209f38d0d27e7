"""The token of a service on this machine: `reshard serve` writes it to a file that only its user can read.

The client sends such a token to loopback addresses only, and only if the file belongs to its own user.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from collections.abc import Generator
from pathlib import Path
from urllib.parse import urlsplit

import httpx

MAX_TOKEN_BYTES = 4096
_DEFAULT_PORTS = {"http": 80, "https": 443}


def token_path(port: int) -> Path:
    """The file with the token of this user's service on a port of this host.

    The name has the host's name, because hosts of a cluster may share one home directory.
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return base / "reshard" / "tokens" / f"{socket.gethostname()}-{port}"


def is_loopback(host: str) -> bool:
    """True if only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def token_for(url: str) -> str:
    """The token of this user's service at a URL; empty if the URL is not a loopback address, or if no file has one."""
    try:
        parts = urlsplit(url)
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)
    except ValueError:
        return ""
    return _own_text(token_path(port)) if is_loopback(parts.hostname or "") else ""


def _own_text(path: Path) -> str:
    """The text of a file that belongs to this user alone; empty if it does not."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        private = facts.st_uid == os.geteuid() and not facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        if not private or not stat.S_ISREG(facts.st_mode):
            return ""
        return file.read(MAX_TOKEN_BYTES).decode("ascii", "replace").strip()


class ServiceAuth(httpx.Auth):
    """Sends the service's token: a given one, or the one in its file, which each start of the service replaces."""

    def __init__(self, url: str, token: str | None) -> None:
        """`token` is None to look for the file, and empty to send none."""
        self._url = url
        self._fixed = token is not None
        self._token = token_for(url) if token is None else token

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Send the token; if it is refused, and the service was started again since, send the new one."""
        self._put(request)
        answer = yield request
        if answer.status_code == 401 and not self._fixed and (token := token_for(self._url)) not in ("", self._token):
            self._token = token
            self._put(request)
            yield request

    def _put(self, request: httpx.Request) -> None:
        if self._token:
            # The header is bytes because a token need not be ASCII.
            raw = [(name, value) for name, value in request.headers.raw if name.lower() != b"authorization"]
            request.headers = httpx.Headers([*raw, (b"Authorization", f"Bearer {self._token}".encode())])
