"""Access to the API: tokens, hosts, cookies, slow and large clients, against a real server."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from starlette.types import Scope

from reshard.api.client import Client
from reshard.api.service_token import token_for, token_path
from reshard.errors import RequestError
from reshard_jobs.database import Database
from reshard_service.auth import address_of, believe_proxies
from reshard_service.settings import ServiceSettings
from servers.process import ServerProcess, running
from servers.stack import Stack

TOKEN = "a token with späce"
HEADER = {"Authorization": f"Bearer {TOKEN}".encode()}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("RESHARD_TOKEN", raising=False)


@contextmanager
def started(directory: Path, port: int = 0, **settings: str) -> Generator[tuple[ServerProcess, Path]]:
    """`reshard serve` as a user starts it; its process and log."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RESHARD_")}
    log = directory / f"serve-{time.monotonic_ns()}.log"
    argv = [sys.executable, "-m", "reshard.cli.main", "serve", "--port", str(port)]
    with running([*argv, "--data-dir", str(directory / "data")], env={**env, **settings}, log=log) as process:
        yield process, log


@contextmanager
def serving(directory: Path, port: int = 0, **settings: str) -> Generator[tuple[ServerProcess, str, Path]]:
    """`reshard serve` when it is ready; its process, URL and log."""
    with started(directory, port, **settings) as (process, log):
        process.wait_until(lambda: "startup complete" in log.read_text())
        found = re.search(r"RESHARD_URL=(http://\S+)", log.read_text())
        assert found is not None
        yield process, found[1], log


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def _modes(directory: Path) -> dict[str, int]:
    """The permissions of a directory and of the files in it."""
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (directory, *directory.iterdir())}


_PRIVATE = {"data": 0o700, "jobs.db": 0o600, "jobs.db-wal": 0o600, "jobs.db-shm": 0o600, "jobs.db-webhook-key": 0o600}


def test_only_the_user_of_the_service_reads_its_database(tmp_path: Path) -> None:
    with serving(tmp_path):
        assert _modes(tmp_path / "data") == _PRIVATE
    # As a release before left them. The write-ahead log is that of a process that was killed.
    with serving(tmp_path) as (process, _, _):
        process.kill()
    for name, mode in _PRIVATE.items():
        path = tmp_path / name if name == "data" else tmp_path / "data" / name
        path.chmod(mode | 0o055 & ~0o011 if path.is_file() else 0o755)
    with serving(tmp_path):
        assert _modes(tmp_path / "data") == _PRIVATE
    # A directory that has something else in it is not the service's own: only the files are.
    (tmp_path / "data").chmod(0o755)
    (tmp_path / "data" / "notes").write_text("")
    with serving(tmp_path):
        found = _modes(tmp_path / "data")
    assert (found["data"], found["jobs.db"]) == (0o755, 0o600)


@pytest.mark.parametrize("mode", [0o1777, 0o755, 0o770])
def test_a_database_in_a_shared_directory_is_private_and_the_directory_stays(tmp_path: Path, mode: int) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    (shared / "jobs.db").touch(0o644)
    for place in (shared, shared / "new"):
        database = Database(f"sqlite:///{place}/jobs.db")
        found = _modes(place)
        database.close()
        assert found.pop(place.name) == (mode if place == shared else 0o700)
        assert {name: found[name] for name in ("jobs.db", "jobs.db-wal", "jobs.db-shm")} == dict.fromkeys(
            ("jobs.db", "jobs.db-wal", "jobs.db-shm"), 0o600
        )


def test_a_service_without_settings_lets_only_its_user_in(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, url, log):
        refused = httpx.get(f"{url}/v1/jobs")
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        path = token_path(_port(url))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert str(path) in log.read_text()
        assert path.read_text().strip() not in log.read_text()
        with Client(url) as client:
            assert client.list().jobs == ()
        with Client(url, "") as nobody, pytest.raises(RequestError, match="unauthorized"):
            nobody.list()
    assert not path.exists()


def test_a_client_outlives_a_restart_of_the_service(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, url, _log):
        client = Client(url)
        first = token_for(url)
        client.list()
    with serving(tmp_path, _port(url)):
        assert token_for(url) not in ("", first)
        client.list()
    client.close()


def test_a_token_file_that_others_can_read_or_replace_is_not_used(tmp_path: Path) -> None:
    path = token_path(8123)
    path.parent.mkdir(parents=True)
    path.write_text("secret\n")
    for mode, found in ((0o600, "secret"), (0o640, ""), (0o604, ""), (0o620, "")):
        path.chmod(mode)
        assert token_for("http://127.0.0.1:8123") == found, oct(mode)
    path.chmod(0o600)
    for url in ("http://10.0.0.1:8123", "http://127.0.0.1.example.com:8123", "http://example.com:8123", "http://[::1"):
        assert token_for(url) == "", url
    for url in ("http://localhost:8123/", "http://[::1]:8123", "http://127.9.9.9:8123"):
        assert token_for(url) == "secret", url
    target = tmp_path / "elsewhere"
    path.rename(target)
    path.symlink_to(target)
    assert token_for("http://127.0.0.1:8123") == ""
    path.unlink()
    os.mkfifo(path, 0o600)
    assert token_for("http://127.0.0.1:8123") == ""


def test_a_home_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with started(tmp_path, XDG_STATE_HOME=str(tmp_path / "file")) as (process, log):
        assert process.popen.wait(30) != 0
    assert "the service's token cannot be written" in log.read_text()
    assert "export RESHARD_TOKEN=" in log.read_text()


def test_a_page_of_another_name_is_not_served(tmp_path: Path) -> None:
    """DNS rebinding: the browser sends the name of the page that asks."""
    with serving(tmp_path, RESHARD_ANONYMOUS="true") as (_, url, _log):
        port = _port(url)
        body = {"source": {"url": str(tmp_path)}, "target": str(tmp_path / "out"), "to": "universal"}
        for host in (f"evil.example:{port}", "evil.example", f"127.0.0.1.evil.example:{port}", "", "[", "a@b:c:d"):
            answer = httpx.post(f"{url}/v1/jobs", json=body, headers={"Host": host, "Origin": f"http://{host}"})
            assert answer.status_code in (400, 421), host
            if answer.status_code == 421:
                assert answer.json()["code"] == "request.wrong_host"
        for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"LOCALHOST:{port}", f"[::1]:{port}", "localhost"):
            assert httpx.get(f"{url}/v1/jobs", headers={"Host": host}).status_code == 200, host
    with serving(tmp_path, RESHARD_ANONYMOUS="true", RESHARD_ALLOWED_HOSTS="reshard.internal, 127.0.0.1") as found:
        assert httpx.get(f"{found[1]}/v1/jobs", headers={"Host": "reshard.internal:8000"}).status_code == 200
        assert httpx.get(f"{found[1]}/v1/jobs", headers={"Host": "localhost"}).status_code == 421


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """An API with a token."""
    directory = tmp_path_factory.mktemp("closed")
    extra = {"RESHARD_TOKEN": TOKEN, "RESHARD_ROOTS": str(directory), "RESHARD_ANONYMOUS": "", "RESHARD_BODY_S": "1"}
    with Stack(directory / "logs", f"sqlite:///{directory}/jobs.db", extra=extra).api() as url:
        yield url


@pytest.mark.parametrize(
    ("scheme", "status"),
    [("Bearer", 200), ("bearer", 200), ("BEARER", 200), ("Basic", 401), ("Bearerx", 401), ("", 401)],
)
def test_the_scheme_is_read_in_any_case(closed: str, scheme: str, status: int) -> None:
    answer = httpx.get(f"{closed}/v1/jobs", headers={"Authorization": f"{scheme} {TOKEN}".strip().encode()})
    assert answer.status_code == status


def test_a_body_without_a_token_is_not_read(closed: str) -> None:
    port = _port(closed)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        head = f"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 1000000\r\n\r\n"
        connection.sendall(head.encode())  # the body never comes
        assert connection.recv(64).startswith(b"HTTP/1.1 401")
    server = next(c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port)
    before = psutil.Process(server).memory_info().rss
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(200)]
        for client in clients:
            client.sendall(head.encode() + bytes(1 << 16))
        time.sleep(1)
        assert psutil.Process(server).memory_info().rss - before < 50 << 20


def test_wrong_tokens_are_counted_and_the_right_one_passes(closed: str) -> None:
    found = [httpx.get(f"{closed}/v1/jobs", headers={"Authorization": "Bearer wrong"}) for _ in range(40)]
    assert {a.status_code for a in found} == {401, 429}
    assert found[-1].json()["code"] == "request.too_many_tokens"
    assert httpx.get(f"{closed}/v1/jobs", headers=HEADER).status_code == 200
    assert httpx.get(f"{closed}/v1/jobs").status_code == 401


def test_an_address_that_a_stranger_claims_does_not_lift_the_limit(tmp_path: Path) -> None:
    with serving(tmp_path, RESHARD_TOKEN=TOKEN) as (_, url, _log), httpx.Client(base_url=url) as client:
        found = [client.get("/v1/jobs", headers=_claim(f"198.51.100.{n}")).status_code for n in range(40)]
        assert set(found) == {401, 429}, found
        login = client.post("/login", data={"token": "wrong"}, headers={"X-Forwarded-For": "203.0.113.1"})
        assert login.status_code == 429
    trusting = {"RESHARD_TOKEN": TOKEN, "RESHARD_TRUSTED_PROXIES": "127.0.0.1, 192.0.2.0/24"}
    with serving(tmp_path, **trusting) as (_, url, _log), httpx.Client(base_url=url) as client:
        found = [client.get("/v1/jobs", headers=_claim(f"198.51.100.{n}")).status_code for n in range(40)]
        assert set(found) == {401}, "each address has a count of its own"
        forged = [client.get("/v1/jobs", headers=_claim(f"9.9.9.{n}, 203.0.113.7, 192.0.2.9")) for n in range(40)]
        assert {answer.status_code for answer in forged} == {401, 429}, "only what trusted proxies added counts"
        headers = {**HEADER, "X-Forwarded-For": b"9.9.9.9, 203.0.113.8"}
        assert client.post("/v1/tokens", json={"name": "one", "scopes": ["read"]}, headers=headers).is_success
        audit = client.get("/v1/audit", headers=HEADER).text
        assert "203.0.113.8" in audit
        assert "9.9.9.9" not in audit


def _claim(client: str) -> dict[str, str]:
    return {"Authorization": "Bearer wrong", "X-Forwarded-For": client}


@pytest.mark.parametrize("given", ["proxy.example", "10.0.0.1/8", "*", "1.2.3.4:80"])
def test_trusted_proxies_are_addresses(given: str) -> None:
    with pytest.raises(RequestError, match=r"request\.invalid: RESHARD_TRUSTED_PROXIES is") as refused:
        ServiceSettings.from_env({"RESHARD_TRUSTED_PROXIES": given})
    assert refused.value.fix == "set RESHARD_TRUSTED_PROXIES to addresses and networks such as 10.0.0.7,fd00::/8"


@pytest.mark.parametrize(
    ("peer", "hops", "client"),
    [
        ("127.0.0.1", "", "127.0.0.1"),
        ("127.0.0.1", "203.0.113.7", "203.0.113.7"),
        ("::ffff:127.0.0.1", "203.0.113.7", "203.0.113.7"),
        ("127.0.0.1", "1.1.1.1, 203.0.113.7, 10.0.0.2", "203.0.113.7"),
        ("127.0.0.1", "10.0.0.3, 10.0.0.2", "10.0.0.3"),
        ("127.0.0.1", "1.1.1.1, unknown, 10.0.0.2", "10.0.0.2"),
        ("127.0.0.1", "1.1.1.1, [2001:db8::7]:443", "2001:db8::7"),
        ("127.0.0.1", "203.0.113.7:443", "203.0.113.7"),
        ("203.0.113.9", "1.1.1.1", "203.0.113.9"),
    ],
)
def test_forwarded_addresses_are_read_from_the_nearest_hop(peer: str, hops: str, client: str) -> None:
    proxies = ServiceSettings.from_env({"RESHARD_TRUSTED_PROXIES": "127.0.0.1,10.0.0.0/8"}).trusted_proxies
    headers = [(b"x-forwarded-for", hops.encode()), (b"x-forwarded-proto", b"https")] if hops else []
    scope: Scope = {"type": "http", "client": (peer, 1), "scheme": "http", "headers": headers}
    believe_proxies(scope, proxies)
    assert address_of(scope) == client
    assert scope["scheme"] == ("https" if client != peer and hops else "http")


def test_slow_heads_and_bodies_are_cut(closed: str) -> None:
    port = _port(closed)
    assert httpx.get(f"{closed}/healthz").status_code == 200  # an idle connection is not one that is slow
    with socket.create_connection(("127.0.0.1", port), timeout=60) as body:
        head = f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nAuthorization: Bearer {TOKEN}\r\n\r\n{{"
        body.sendall(head.encode())
        began = time.monotonic()
        assert body.recv(64).startswith(b"HTTP/1.1 408")
        assert time.monotonic() - began > 0.9


def test_slow_heads_are_cut_by_serve(tmp_path: Path) -> None:
    with serving(tmp_path, RESHARD_HEAD_S="1") as (_, url, _log), ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", _port(url)), timeout=60)) for _ in range(50)
        ]
        for client in clients[:25]:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: local")
        for number in range(3):
            time.sleep(0.25)
            clients[0].sendall(f"host\r\nX-{number}: y".encode())  # a trickle does not help
        for client in clients:
            assert client.recv(64) == b""
        assert httpx.get(f"{url}/healthz").status_code == 200


def test_a_browser_logs_in_and_its_cookie_only_reads(closed: str) -> None:
    with httpx.Client(base_url=closed, headers={"Accept": "text/html"}) as browser:
        asked = browser.get("/")
        assert (asked.status_code, asked.headers["location"]) == (303, "/login")
        assert 'type="password"' in browser.get("/login").text
        assert browser.post("/login", data={"token": "wrong"}).status_code in (401, 429)
        answer = browser.post("/login", data={"token": TOKEN})
        assert answer.status_code == 303
        cookie = answer.headers["set-cookie"].lower()
        assert all(word in cookie for word in ("httponly", "samesite=strict", "path=/"))
        assert TOKEN not in cookie
        assert "<h1>Jobs</h1>" in browser.get("/").text
        assert browser.get("/v1/jobs").status_code == 200
        body = {"source": {"url": "/x"}, "target": "/y", "to": "universal"}
        assert browser.post("/v1/jobs", json=body).status_code == 401
        assert browser.post("/v1/jobs/abc/cancel").status_code == 401
        for value in ("", "x", "é", '"\\351"'):
            forged = httpx.get(f"{closed}/v1/jobs", headers={"Cookie": f"reshard_session={value}".encode()})
            assert forged.status_code == 401, value


def test_the_schema_says_that_a_token_is_needed(closed: str) -> None:
    schema = json.loads(httpx.get(f"{closed}/openapi.json").text)
    assert schema["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
    assert schema["paths"]["/v1/jobs"]["post"]["security"] == [{"HTTPBearer": ["submit"]}]
    assert "security" not in schema["paths"]["/healthz"]["get"]


@pytest.mark.parametrize("missing", ["RESHARD_TOKEN", "RESHARD_ROOTS"])
def test_the_factory_alone_is_as_careful_as_serve(tmp_path: Path, missing: str) -> None:
    given = {"RESHARD_TOKEN": "a-secret-of-this-test", "RESHARD_ROOTS": str(tmp_path), "RESHARD_ANONYMOUS": ""}
    env = {**Stack(tmp_path, f"sqlite:///{tmp_path}/jobs.db").env(), **given}
    env.pop(missing)
    argv = [sys.executable, "-m", "uvicorn", "reshard_service.app:create_app", "--factory", "--port", "0"]
    log = tmp_path / "uvicorn.log"
    with running(argv, env=env, log=log) as process:
        assert process.popen.wait(30) != 0
    assert f"{missing} is not set" in log.read_text()
