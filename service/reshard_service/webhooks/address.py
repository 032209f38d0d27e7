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


_LOOPBACK = (ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1"))
_METADATA = (ipaddress.ip_address("169.254.169.254"), ipaddress.ip_address("fd00:ec2::254"))
_LOCAL_NAME = re.compile(r"(?:.+\.)?localhost|(?:.+\.)?localdomain|localhost[46]|ip6-(?:localhost|loopback)")
_METADATA_NAME = re.compile(r"metadata|metadata\..*\.?internal|instance-data(?:\.ec2\.internal)?")
"""Names of Google's, Azure's and Amazon's servers of metadata within their networks."""
_OTHER_PORTS = frozenset((
    7, 9, 19, 20, 21, 22, 23, 25, 53, 69, 79, 110, 111, 119, 123, 135, 137, 139, 143, 161, 389, 445, 465, 513, 514, 515,
    587, 636, 873, 993, 995, 1433, 1521, 2049, 2181, 2375, 2376, 2379, 2380, 3306, 3389, 4369, 5060, 5061, 5432, 5672,
    5900, 6000, 6379, 6380, 6443, 6667, 9042, 9092, 9200, 9300, 10250, 11211, 26379, 27017, 27018, 27019,
))  # fmt: skip
"""Ports of other servers than those of the web: shells, mail, files, databases, brokers, the control of clusters."""


class ForbiddenAddressError(Exception):
    """No address of the name may be connected to."""


def may_be_called(address: Address, allowed: Sequence[Network], *, port: int = 443) -> bool:
    """True for public addresses at ports of the web, and for every port in the operator's networks."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if any(address in network for network in allowed):
        return True
    if port in _OTHER_PORTS or not address.is_global or address.is_multicast or address.is_reserved:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address not in _UNICAST:
        return False
    return not any(address in network for network in _REFUSED)


def accepted_url(url: str, *, http: bool, allowed: Sequence[Network]) -> str:
    """The normalised form of an endpoint's URL.

    Raises:
        RequestError: `request.invalid`: it is not a URL of an endpoint. `request.address_forbidden`: nothing is sent to
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
    known = _addresses_of(parsed.host)
    if known and not any(may_be_called(address, allowed) for address in known):
        raise _forbidden(f"{printable(host, max_chars=100)} is not a public address")
    in_own_network = any(address in network for address in known for network in allowed) if known else bool(allowed)
    if port in _OTHER_PORTS and not in_own_network:
        raise _forbidden(f"port {port} is not that of a web server")
    return str(parsed)


def _addresses_of(host: str) -> tuple[Address, ...]:
    """The address that a host is in whatever form, or those that its name always leads to; none for other names."""
    name = host.rstrip(".").lower()
    if _LOCAL_NAME.fullmatch(name):
        return _LOOPBACK
    if _METADATA_NAME.fullmatch(name):
        return _METADATA
    try:
        return (ipaddress.ip_address(name),)
    except ValueError:
        pass
    try:
        # Resolvers take 0x7f.1, 0177.0.0.1 and 2130706433 for addresses, too.
        return (ipaddress.IPv4Address(socket.inet_aton(name)),)
    except OSError:
        return ()


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
        judged = [address for address in addresses if may_be_called(address, self._allowed, port=port)]
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


def _forbidden(why: str) -> RequestError:
    return RequestError(
        "request.address_forbidden",
        why,
        fix="name a public endpoint, at port 443 or another one of a web server; the operator may allow networks in "
        "RESHARD_WEBHOOK_NETWORKS",
    )


def _no_endpoint(url: str) -> RequestError:
    return RequestError(
        "request.invalid",
        f"{printable(url, max_chars=100)!r} is not a URL that webhooks can be sent to",
        fix="use https://host/path without user, password and fragment, or http if RESHARD_WEBHOOK_HTTP allows it",
    )
