"""Tokens of an OIDC issuer: a real issuer with real keys, and tokens as attackers make them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from house.waiting import PATIENCE_S
from reshard.errors import JobError, RequestError
from reshard_service import auth
from reshard_service.auth import IssuerKeys
from reshard_service.settings import ServiceSettings
from servers.answering import Handler, answering
from servers.stack import Stack

OPERATOR = "the token of the operator"
AUDIENCE = "reshard-of-the-test"


@dataclass
class Issuer:
    """A small issuer, as its clients see it."""

    url: str
    keys: dict[str, tuple[str, Any]] = field(default_factory=dict[str, tuple[str, Any]])
    """Private keys by their ids, each with its algorithm."""
    fetched: int = 0
    away: bool = False

    def add(self, kid: str, algorithm: str, key: Any) -> None:
        self.keys[kid] = (algorithm, key)

    def jwks(self) -> dict[str, Any]:
        return {"keys": [_public(kid, algorithm, key) for kid, (algorithm, key) in self.keys.items()]}

    def claims(self, **changed: Any) -> dict[str, Any]:
        now = int(time.time())
        claims = {"iss": self.url, "aud": AUDIENCE, "sub": "ann", "iat": now, "exp": now + 300, "tenant": "team-a"}
        claims |= {"scope": "openid reshard:read reshard:submit"}
        return {name: value for name, value in (claims | changed).items() if value is not None}

    def token(self, kid: str = "rsa", **changed: Any) -> str:
        algorithm, key = self.keys[kid]
        return jwt.encode(self.claims(**changed), key, algorithm=algorithm, headers={"kid": kid})


def _public(kid: str, algorithm: str, key: Any) -> dict[str, Any]:
    by_name: dict[str, Any] = {
        "RS256": jwt.algorithms.RSAAlgorithm,
        "ES256": jwt.algorithms.ECAlgorithm,
        "EdDSA": jwt.algorithms.OKPAlgorithm,
    }
    return {**json.loads(by_name[algorithm].to_jwk(key.public_key())), "kid": kid, "alg": algorithm, "use": "sig"}


@pytest.fixture(scope="module")
def issuer() -> Generator[Issuer]:
    class Pages(Handler):
        def do_GET(self) -> None:  # noqa: N802
            found.fetched += 1
            pages = {
                "/.well-known/openid-configuration": {"issuer": found.url, "jwks_uri": f"{found.url}/keys"},
                "/keys": found.jwks(),
            }
            self.answer(503 if found.away else 200, json.dumps(pages[self.path]).encode())

    with answering(Pages) as url:
        found = Issuer(url)
        found.add("rsa", "RS256", rsa.generate_private_key(public_exponent=65537, key_size=2048))
        found.add("ec", "ES256", ec.generate_private_key(ec.SECP256R1()))
        found.add("ed", "EdDSA", ed25519.Ed25519PrivateKey.generate())
        yield found


@pytest.fixture(scope="module")
def api(issuer: Issuer, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    directory = tmp_path_factory.mktemp("oidc")
    settings = {"RESHARD_TOKEN": OPERATOR, "RESHARD_OIDC_ISSUER": issuer.url, "RESHARD_OIDC_AUDIENCE": AUDIENCE}
    stack = Stack(directory / "logs", f"sqlite:///{directory}/jobs.db", extra=settings)
    with stack.api() as url:
        made = ask(url, "POST", "/v1/tenants", OPERATOR, json={"name": "team-a"})
        assert made.status_code == 201
        yield url


def ask(url: str, method: str, path: str, token: str, **more: Any) -> httpx.Response:
    return httpx.request(
        method, f"{url}{path}", headers={"Authorization": f"Bearer {token}"}, timeout=PATIENCE_S, **more
    )


@pytest.mark.parametrize("kid", ["rsa", "ec", "ed"])
def test_tokens_of_the_issuer_are_taken(api: str, issuer: Issuer, kid: str) -> None:
    assert ask(api, "GET", "/v1/jobs", issuer.token(kid)).status_code == 200
    assert ask(api, "GET", "/v1/jobs", issuer.token(kid, aud=["other", AUDIENCE])).status_code == 200
    assert ask(api, "GET", "/v1/jobs", issuer.token(kid, scope=["reshard:read"])).status_code == 200


def test_scopes_and_tenant_come_from_the_claims(api: str, issuer: Issuer, tmp_path: Path) -> None:
    body = {"source": {"url": f"{tmp_path}/scripted"}, "target": f"{tmp_path}/out", "to": "universal"}
    job = ask(api, "POST", "/v1/jobs", issuer.token(), json=body).json()["id"]
    assert ask(api, "GET", f"/v1/jobs/{job}", issuer.token()).status_code == 200
    assert ask(api, "GET", f"/v1/jobs/{job}", OPERATOR).status_code == 404
    assert ask(api, "POST", f"/v1/jobs/{job}/cancel", issuer.token()).json()["code"] == "request.forbidden"
    for scope in (None, "read", "admin reshard:nothing", 7, {"reshard:read": 1}):
        assert ask(api, "GET", "/v1/jobs", issuer.token(scope=scope)).status_code == 403
    admin = issuer.token(scope="reshard:admin")
    assert ask(api, "GET", "/v1/tenants", admin).status_code == 403
    entries = ask(api, "GET", "/v1/audit", admin).json()["entries"]
    assert {entry["actor"] for entry in entries} >= {"oidc:ann", "operator"}


def _unsigned(issuer: Issuer) -> str:
    return jwt.encode(issuer.claims(), None, algorithm="none", headers={"kid": "rsa"})


def _part(value: Any) -> str:
    return (
        base64.urlsafe_b64encode(value if isinstance(value, bytes) else json.dumps(value).encode()).decode().rstrip("=")
    )


def _signed_with_the_public_key(issuer: Issuer) -> str:
    """HS256, with what everybody knows as the secret."""
    public = issuer.keys["rsa"][1].public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    text = f"{_part({'alg': 'HS256', 'kid': 'rsa', 'typ': 'JWT'})}.{_part(issuer.claims())}"
    return f"{text}.{_part(hmac.digest(public, text.encode(), hashlib.sha256))}"


def _by_another_key(issuer: Issuer) -> str:
    other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return jwt.encode(issuer.claims(), other, algorithm="RS256", headers={"kid": "rsa"})


def _with_its_own_key(issuer: Issuer) -> str:
    """A key in the header, which some libraries once believed."""
    other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    headers = {"kid": "mine", "jwk": _public("mine", "RS256", other), "jku": "http://127.0.0.1:1/keys"}
    return jwt.encode(issuer.claims(), other, algorithm="RS256", headers=headers)


def _changed(issuer: Issuer) -> str:
    head, _, signature = issuer.token().split(".")
    return f"{head}.{_part(issuer.claims(tenant='default', scope='reshard:admin'))}.{signature}"


def _with_the_key_of_another(issuer: Issuer) -> str:
    return jwt.encode(issuer.claims(), issuer.keys["ec"][1], algorithm="ES256", headers={"kid": "rsa"})


def _without_kid(issuer: Issuer) -> str:
    return jwt.encode(issuer.claims(), issuer.keys["rsa"][1], algorithm="RS256")


NOW = int(time.time())
HOSTILE: dict[str, Callable[[Issuer], str]] = {
    "alg none": _unsigned,
    "HS256 with the public key": _signed_with_the_public_key,
    "another key": _by_another_key,
    "its own key in the header": _with_its_own_key,
    "changed claims": _changed,
    "kid of another key": _with_the_key_of_another,
    "no kid": _without_kid,
    "expired": lambda issuer: issuer.token(exp=int(time.time()) - 60),
    "not yet valid": lambda issuer: issuer.token(nbf=int(time.time()) + 120),
    "no expiry": lambda issuer: issuer.token(exp=None),
    "other audience": lambda issuer: issuer.token(aud="another-service"),
    "no audience": lambda issuer: issuer.token(aud=None),
    "other issuer": lambda issuer: issuer.token(iss="https://elsewhere.example"),
    "no subject": lambda issuer: issuer.token(sub=None),
    "unknown tenant": lambda issuer: issuer.token(tenant="team-b"),
    "no tenant": lambda issuer: issuer.token(tenant=None),
    "list of tenants": lambda issuer: issuer.token(tenant=["team-a"]),
    "no token at all": lambda _issuer: "a.b.c",
    "header that is not an object": lambda issuer: f"{_part([1])}.{_part(issuer.claims())}.x",
    "nested header": lambda issuer: f"{_part(b'[' * 4000)}.{_part(issuer.claims())}.x",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tokens_are_wrong_tokens(api: str, issuer: Issuer, name: str) -> None:
    answer = ask(api, "GET", "/healthz", OPERATOR)
    assert answer.status_code == 200
    answer = ask(api, "GET", "/v1/jobs", HOSTILE[name](issuer))
    assert (answer.status_code, answer.json()["code"]) == (401, "request.unauthorized"), answer.text


def test_made_up_keys_do_not_make_the_service_call_its_issuer(api: str, issuer: Issuer) -> None:
    assert ask(api, "GET", "/v1/jobs", issuer.token()).status_code == 200
    before = issuer.fetched
    other = ec.generate_private_key(ec.SECP256R1())
    for number in range(6):
        token = jwt.encode(issuer.claims(), other, algorithm="ES256", headers={"kid": f"made-up-{number}"})
        assert ask(api, "GET", "/v1/jobs", token).status_code == 401
    assert issuer.fetched - before <= 2


class SlowIssuerKeys(IssuerKeys):
    """Keys whose second fetch, and each after it, waits until the test lets it go."""

    def __init__(self) -> None:
        super().__init__("https://issuer.example", "")
        self.fetches = 0
        self.began, self.may_end = threading.Event(), threading.Event()

    def _fetch(self) -> dict[str, jwt.PyJWK]:
        self.fetches += 1
        names = ["first"]
        if self.fetches > 1:
            self.began.set()
            assert self.may_end.wait(60)
            names.append("second")
        key = ec.generate_private_key(ec.SECP256R1())
        return {name: jwt.PyJWK(_public(name, "ES256", key)) for name in names}


def test_callers_with_known_keys_do_not_wait_for_the_fetch_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(auth, "time", SimpleNamespace(monotonic=lambda: now))
    keys = SlowIssuerKeys()
    with ThreadPoolExecutor(3) as pool:
        assert keys.key("first") is not None
        now += 60  # a new key may be asked for again
        fetching = pool.submit(keys.key, "second")
        assert keys.began.wait(60)
        try:
            assert pool.submit(keys.key, "first").result(20) is not None
            with pytest.raises(JobError, match=r"service\.unavailable") as refused:
                pool.submit(keys.key, "made up").result(20)
            assert refused.value.retryable, "it may be the key that is on its way"
            now += 3600  # old keys are used until there are new ones
            assert pool.submit(keys.key, "first").result(20) is not None
        finally:
            keys.may_end.set()
        assert fetching.result(60) is not None
    assert keys.fetches == 2


def test_an_issuer_that_is_away_is_no_wrong_token(issuer: Issuer, tmp_path: Path) -> None:
    settings = {"RESHARD_TOKEN": OPERATOR, "RESHARD_OIDC_ISSUER": issuer.url, "RESHARD_OIDC_AUDIENCE": AUDIENCE}
    stack = Stack(tmp_path / "logs", f"sqlite:///{tmp_path}/jobs.db", extra=settings)
    issuer.away = True
    try:
        with stack.api() as url:
            answer = ask(url, "GET", "/v1/jobs", issuer.token())
            assert (answer.status_code, answer.json()["code"]) == (503, "service.unavailable")
            assert ask(url, "GET", "/v1/jobs", OPERATOR).status_code == 200
    finally:
        issuer.away = False


def test_the_settings_need_an_audience_and_https() -> None:
    with pytest.raises(RequestError, match="RESHARD_OIDC_AUDIENCE"):
        ServiceSettings.from_env({"RESHARD_OIDC_ISSUER": "https://issuer.example"})
    with pytest.raises(RequestError, match="RESHARD_OIDC_ISSUER"):
        ServiceSettings.from_env({"RESHARD_OIDC_ISSUER": "http://issuer.example", "RESHARD_OIDC_AUDIENCE": "x"})
