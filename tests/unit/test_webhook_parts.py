"""Parts of webhooks that need no server: which addresses may be called, signatures, sealed secrets."""

from __future__ import annotations

import base64
import ipaddress
import json
import socket
import time
from typing import Any

import httpcore
import pytest
from cryptography.fernet import Fernet
from standardwebhooks import Webhook, WebhookVerificationError

from house.expected import raised
from reshard.errors import RequestError
from reshard_service.settings import ServiceSettings
from reshard_service.webhooks.address import ForbiddenAddressError, JudgedConnections, accepted_url, may_be_called
from reshard_service.webhooks.secrets import Sealer, UnknownKeyError, new_secret, signature

PUBLIC = ("8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8")
REFUSED = (
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "169.254.170.2",
    "100.100.100.200", "192.0.0.192", "168.63.129.16", "224.0.0.1", "240.0.0.1", "255.255.255.255", "198.18.0.1",
    "::", "::1", "fe80::1", "fd00:ec2::254", "fd20:ce::254", "ff02::1", "fec0::1",
    "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::",
    "2001:0:53aa:64c:0:5efe::", "::ffff:0:127.0.0.1",
)  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_may_be_called(address: str) -> None:
    assert may_be_called(ipaddress.ip_address(address), ())


@pytest.mark.parametrize("address", REFUSED)
def test_other_addresses_may_not_be_called(address: str) -> None:
    assert not may_be_called(ipaddress.ip_address(address), ())
    assert not may_be_called(ipaddress.ip_address(address), (ipaddress.ip_network("10.99.0.0/16"),))


def test_the_operator_allows_networks() -> None:
    allowed = (ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("fd00::/8"))
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "fd00:ec2::254"):
        assert may_be_called(ipaddress.ip_address(address), allowed)
    assert not may_be_called(ipaddress.ip_address("192.168.1.1"), allowed)


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example.org/x", "ftp://hooks.example.org", "//hooks.example.org", "hooks.example.org", "https://",
        "https://user:secret@hooks.example.org/", "https://hooks.example.org/#x", "https://hooks.example.org:0/",
        "https://hooks.example.org:99999/", "https://hooks example.org/", "file:///etc/passwd", "https://[::1/",
        "https://0177.0.0.1/",
    ],
)  # fmt: skip
def test_other_urls_are_refused(url: str) -> None:
    assert raised(RequestError, accepted_url, url, http=False, allowed=()).code == "request.invalid"


@pytest.mark.parametrize("address", REFUSED)
def test_addresses_in_urls_are_refused_at_once(address: str) -> None:
    host = f"[{address}]" if ":" in address else address
    error = raised(RequestError, accepted_url, f"https://{host}/hook", http=False, allowed=())
    assert error.code == "request.address_forbidden"


NEVER = (
    "localhost", "LOCALHOST.", "api.localhost", "localhost.localdomain", "ip6-localhost", "0x7f.1", "127.1",
    "2130706433", "0x7f000001", "0xA9FEA9FE", "2852039166", "metadata.google.internal", "metadata", "instance-data",
    "instance-data.ec2.internal", "0", "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:127.0.0.1]",
)  # fmt: skip
"""Hosts that lead to this machine or to a cloud's metadata, whatever a name server says."""


@pytest.mark.parametrize("host", NEVER)
def test_hosts_that_can_never_be_called_are_refused_at_once(host: str) -> None:
    error = raised(RequestError, accepted_url, f"https://{host}/hook", http=False, allowed=())
    assert error.code == "request.address_forbidden"
    assert "RESHARD_WEBHOOK_NETWORKS" in error.fix


@pytest.mark.parametrize("host", ["hooks.example.org", "8.8.8.8", "[2606:4700:4700::1111]", "134744072"])
@pytest.mark.parametrize("port", [22, 25, 6379, 5432, 2375, 10250])
def test_ports_of_other_servers_are_refused_at_once(host: str, port: int) -> None:
    with pytest.raises(RequestError, match=f"port {port} is not that of a web server") as caught:
        accepted_url(f"https://{host}:{port}/hook", http=False, allowed=())
    assert caught.value.code == "request.address_forbidden"
    assert accepted_url(f"https://{host}:8443/hook", http=False, allowed=())


def test_the_operators_networks_have_all_names_and_ports() -> None:
    loopback, private = ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("10.0.0.0/8")
    for host in ("localhost", "0x7f.1", "[::ffff:127.0.0.1]", "127.0.0.1:6379", "localhost:22"):
        assert accepted_url(f"https://{host}/", http=False, allowed=(loopback,))
        with pytest.raises(RequestError, match="address_forbidden"):
            accepted_url(f"https://{host}/", http=False, allowed=(private,))
    # Where a name leads is known when it is called.
    assert accepted_url("https://hooks.corp.example:6379/", http=False, allowed=(private,))
    assert accepted_url("https://[::1]/", http=False, allowed=(ipaddress.ip_network("::1"),))
    assert accepted_url("https://localhost/", http=False, allowed=(ipaddress.ip_network("::1"),))


def test_a_public_address_is_not_dialled_at_the_port_of_another_server(
    monkeypatch: pytest.MonkeyPatch, dialled: list[str]
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", Names(["8.8.8.8"], ["8.8.8.8", "10.0.0.1"]))
    private = (ipaddress.ip_network("10.0.0.0/8"),)
    with pytest.raises(ForbiddenAddressError):
        JudgedConnections(private, limit_s=5).connect_tcp("hooks.example.org", 6379)
    with pytest.raises(DialledError):
        JudgedConnections(private, limit_s=5).connect_tcp("hooks.example.org", 6379)
    assert dialled == ["10.0.0.1"]


def test_urls_are_normalised() -> None:
    assert (
        accepted_url("https://Hooks.Example.org:443/a?b=1", http=False, allowed=()) == "https://hooks.example.org/a?b=1"
    )
    assert accepted_url("https://bücher.example/", http=False, allowed=()).startswith("https://xn--bcher-kva.example")


class Names:
    """A name server whose answers change."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def __call__(self, host: str, port: int, *_args: Any, **_more: Any) -> list[Any]:
        self.asked.append(host)
        found = self.answers.pop(0)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]


class DialledError(Exception):
    pass


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses to which connections would go."""
    found: list[str] = []

    def connect(_self: object, host: str, *_args: object) -> None:
        found.append(host)
        raise DialledError

    monkeypatch.setattr(httpcore.SyncBackend, "connect_tcp", connect)
    return found


def test_a_name_is_resolved_once_and_the_judged_address_is_dialled(
    monkeypatch: pytest.MonkeyPatch, dialled: list[str]
) -> None:
    # The second answer is what a rebinding name server gives to whoever asks again.
    names = Names(["8.8.8.8"], ["127.0.0.1"])
    monkeypatch.setattr(socket, "getaddrinfo", names)
    with pytest.raises(DialledError):
        JudgedConnections((), limit_s=5).connect_tcp("hooks.example.org", 443)
    assert (dialled, names.asked) == (["8.8.8.8"], ["hooks.example.org"])


@pytest.mark.parametrize("answer", [["127.0.0.1"], ["169.254.169.254", "::1"], ["::ffff:10.0.0.1"], ["fe80::1%eth0"]])
def test_a_name_of_a_private_address_is_not_dialled(
    answer: list[str], monkeypatch: pytest.MonkeyPatch, dialled: list[str]
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", Names(answer))
    with pytest.raises(ForbiddenAddressError):
        JudgedConnections((), limit_s=5).connect_tcp("hooks.example.org", 443)
    assert dialled == []


def test_of_several_addresses_a_public_one_is_dialled(monkeypatch: pytest.MonkeyPatch, dialled: list[str]) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", Names(["10.0.0.1", "1.1.1.1"]))
    with pytest.raises(DialledError):
        JudgedConnections((), limit_s=5).connect_tcp("hooks.example.org", 443)
    assert dialled == ["1.1.1.1"]


def test_another_library_verifies_the_signatures() -> None:
    secret, payload = new_secret(), json.dumps({"type": "job.succeeded", "text": "ä"}).encode()
    now = int(time.time())
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(now),
        "webhook-signature": " ".join(signature(key, "msg_1", now, payload) for key in (new_secret(), secret)),
    }
    assert Webhook(secret).verify(payload, headers)["type"] == "job.succeeded"
    for changed in ({"webhook-id": "msg_2"}, {"webhook-timestamp": str(now - 5)}):
        with pytest.raises(WebhookVerificationError):
            Webhook(secret).verify(payload, headers | changed)
    assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32


def test_secrets_are_sealed_by_the_operators_key() -> None:
    old, new = Fernet.generate_key().decode(), Fernet.generate_key().decode()
    secret = new_secret()
    sealed = Sealer([old]).seal(secret)
    assert secret not in sealed
    assert Sealer([new, old]).open(sealed) == secret
    for keys in ([new], []):
        with pytest.raises(UnknownKeyError):
            Sealer(keys).open(sealed)
    # What was written without a key is read after one was set.
    assert Sealer([new]).open(Sealer([]).seal(secret)) == secret


def test_a_wrong_key_is_refused_and_not_shown() -> None:
    error = raised(RequestError, ServiceSettings.from_env, {"RESHARD_WEBHOOK_KEYS": "my-secret-key"})
    assert "my-secret-key" not in f"{error} {error.fix}"
    assert "openssl" in error.fix
    key = base64.b64encode(bytes([251] * 32)).decode()
    made = key.replace("+", "-").replace("/", "_")
    assert ServiceSettings.from_env({"RESHARD_WEBHOOK_KEYS": f"{made}, {made}"}).webhook_keys == (made, made)
    with pytest.raises(RequestError, match="RESHARD_WEBHOOK_NETWORKS"):
        ServiceSettings.from_env({"RESHARD_WEBHOOK_NETWORKS": "10.0.0.1/8"})
