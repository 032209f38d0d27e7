"""Addresses of webhooks: which URLs are accepted, and connections that go only to addresses which were judged.

A name is resolved once, by us. The connection goes to the address that was judged, so that a name server cannot answer
differently in between. TLS still checks the certificate against the name.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Iterable, Sequence
from typing import Any

import httpcore
import httpx

from reshard.errors import RequestError, printable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9a-fA-F:.]+")
"""A name in ASCII, or an address."""
_UNICAST = ipaddress.ip_network("2000::/3")
# Public by their form, but of the host's cloud or network: metadata of Oracle, the wire server of Azure, IPv6 that is
# carried within IPv4.
_REFUSED: tuple[Network, ...] = tuple(
    map(ipaddress.ip_network, ("192.0.0.0/24", "168.63.129.16/32", "2002::/16", "2001::/32"))
)


class ForbiddenAddressError(Exception):
    """No address of the name may be connected to."""


def may_be_called(address: Address, allowed: Sequence[Network]) -> bool:
    """True for public addresses, and for those in the operator's networks."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if any(address in network for network in allowed):
        return True
    if not address.is_global or address.is_multicast or address.is_reserved:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address not in _UNICAST:
        return False
    return not any(address in network for network in _REFUSED)


def accepted_url(url: str, *, http: bool, allowed: Sequence[Network]) -> str:
    """The normalised form of an endpoint's URL.

    Raises:
        RequestError: `request.invalid`: it is no URL of an endpoint. `request.address_forbidden`: nothing is sent to
            its address.
    """
    try:
        parsed = httpx.URL(url)
        port = parsed.port
    except (httpx.InvalidURL, UnicodeError) as error:
        raise _no_endpoint(url) from error
    schemes = ("https", "http") if http else ("https",)
    host = parsed.raw_host.decode("ascii")
    if parsed.scheme not in schemes or parsed.userinfo or parsed.fragment or not _HOST.fullmatch(host):
        raise _no_endpoint(url)
    if port is not None and not 0 < port < 1 << 16:
        raise _no_endpoint(url)
    try:
        literal = ipaddress.ip_address(parsed.host)
    except ValueError:
        return str(parsed)
    if not may_be_called(literal, allowed):
        raise RequestError(
            "request.address_forbidden",
            f"{literal} is not a public address",
            fix="name a public endpoint; the operator may allow networks in RESHARD_WEBHOOK_NETWORKS",
        )
    return str(parsed)


class JudgedConnections(httpcore.NetworkBackend):
    """Connections to judged addresses, with one time limit for all that happens on them.

    Args:
        allowed: Networks of the operator's that may be called though they are not public.
        limit_s: Seconds from now until the last byte.
    """

    def __init__(self, allowed: Sequence[Network], *, limit_s: float) -> None:
        self._allowed = allowed
        self._deadline = time.monotonic() + limit_s
        self._backend = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Resolve the name, judge its addresses and connect to the first one that may be called."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError("the name cannot be resolved") from error
        # Link-local addresses come with a zone: fe80::1%eth0.
        addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
        judged = [address for address in addresses if may_be_called(address, self._allowed)]
        if not judged:
            raise ForbiddenAddressError
        stream = self._backend.connect_tcp(str(judged[0]), port, _left(self._deadline), local_address, socket_options)
        return _TimedStream(stream, self._deadline)


class _TimedStream(httpcore.NetworkStream):
    """A connection that ends at a deadline, however slowly the other side sends."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: float) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left(self._deadline))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left(self._deadline))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _TimedStream(self._stream.start_tls(ssl_context, server_hostname, _left(self._deadline)), self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise httpcore.ReadTimeout("the time is over")
    return left


def _no_endpoint(url: str) -> RequestError:
    return RequestError(
        "request.invalid",
        f"{printable(url, max_chars=100)!r} is no URL that webhooks can be sent to",
        fix="use https://host/path without user, password and fragment, or http if RESHARD_WEBHOOK_HTTP allows it",
    )
