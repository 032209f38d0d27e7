"""Tokens: hashed at rest, scoped, expiring and revocable; the service's own token goes on working."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from house.waiting import PATIENCE_S
from servers.stack import Stack

OPERATOR = "the token of the operator"
SCOPES = ("submit", "read", "cancel", "admin")
SECRET = re.compile(r"reshard_[a-z2-7]{16}_[a-z2-7]{52}")


class Api:
    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.directory = directory

    def ask(self, method: str, path: str, token: str = OPERATOR, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}", **more.pop("headers", {})}
        return httpx.request(method, f"{self.url}{path}", headers=headers, timeout=PATIENCE_S, **more)

    def token(self, *scopes: str, **more: Any) -> tuple[str, str]:
        answer = self.ask("POST", "/v1/tokens", json={"name": "test", "scopes": scopes, **more})
        assert answer.status_code == 201, answer.text
        assert answer.headers["cache-control"] == "no-store"
        return answer.json()["token"]["id"], answer.json()["secret"]

    def body(self) -> dict[str, Any]:
        return {"source": {"url": f"{self.directory}/scripted"}, "target": f"{self.directory}/out", "to": "universal"}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Generator[Api]:
    directory = tmp_path_factory.mktemp("tokens")
    stack = Stack(directory / "logs", f"sqlite:///{directory}/jobs.db", extra={"RESHARD_TOKEN": OPERATOR})
    with stack.api() as url:
        yield Api(url, directory)


def test_a_token_is_shown_once_and_stored_as_a_hash(api: Api) -> None:
    token_id, secret = api.token("read")
    assert SECRET.fullmatch(secret)
    assert api.ask("GET", "/v1/jobs", secret).status_code == 200
    listed = api.ask("GET", "/v1/tokens").text
    assert token_id in listed
    random_part = secret.rpartition("_")[2]
    assert random_part not in listed
    with sqlite3.connect(api.directory / "jobs.db") as connection:
        dump = "\n".join(connection.iterdump())
    assert token_id in dump
    assert random_part not in dump
    assert random_part not in (api.directory / "logs" / "api.log").read_text()


def test_each_operation_needs_its_scope_and_no_other(api: Api) -> None:
    schema = json.loads(httpx.get(f"{api.url}/openapi.json").text)
    without = {scope: api.token(*(set(SCOPES) - {scope}))[1] for scope in SCOPES}
    alone = {scope: api.token(scope)[1] for scope in SCOPES}
    asked = 0
    for path, operations in schema["paths"].items():
        for verb, operation in operations.items():
            if "security" not in operation:
                continue
            (scope,) = operation["security"][0]["HTTPBearer"]
            place = re.sub(r"\{\w+\}", "nothing", path)
            refused = api.ask(verb.upper(), place, without[scope], json=api.body())
            assert refused.status_code == 403, (verb, path)
            # An answer to HEAD has no body.
            if verb != "head":
                assert refused.json()["code"] == "request.forbidden", (verb, path)
                assert refused.json()["details"] == {"scope": scope}
            let_in = api.ask(verb.upper(), place, alone[scope], json=api.body())
            assert let_in.status_code not in (401, 403), (verb, path, let_in.text)
            asked += 1
    assert asked > 15


def test_a_revoked_and_an_expired_token_are_wrong_tokens(api: Api) -> None:
    token_id, secret = api.token("read")
    _, short = api.token("read", expires_in_s=1)
    wrong = api.ask("GET", "/v1/jobs", f"reshard_{'a' * 16}_{'b' * 52}")
    assert wrong.status_code == 401
    revoked = api.ask("DELETE", f"/v1/tokens/{token_id}")
    assert revoked.json()["revoked_at"]
    assert api.ask("DELETE", f"/v1/tokens/{token_id}").json() == revoked.json()
    time.sleep(1.1)
    for token in (secret, short):
        answer = api.ask("GET", "/v1/jobs", token)
        assert (answer.status_code, answer.content) == (401, wrong.content)


def test_the_last_use_is_recorded_at_most_once_a_minute(api: Api) -> None:
    token_id, secret = api.token("read")

    def last_used() -> str | None:
        tokens = api.ask("GET", "/v1/tokens").json()["tokens"]
        return next(token["last_used_at"] for token in tokens if token["id"] == token_id)

    assert last_used() is None
    api.ask("GET", "/v1/jobs", secret)
    first = last_used()
    assert first is not None
    api.ask("GET", "/v1/jobs", secret)
    assert last_used() == first


def test_a_token_is_not_asked_for_more_than_a_name_and_scopes(api: Api) -> None:
    for body in (
        {"name": "x"},
        {"name": "x", "scopes": []},
        {"name": "x", "scopes": ["root"]},
        {"name": "", "scopes": ["read"]},
        {"name": "x", "scopes": ["read"], "expires_in_s": 0},
        {"name": "x", "scopes": ["read"], "tenant": "Not/A/Name"},
    ):
        answer = api.ask("POST", "/v1/tokens", json=body)
        assert (answer.status_code, answer.json()["code"]) == (422, "request.invalid"), body
    unknown = api.ask("POST", "/v1/tokens", json={"name": "x", "scopes": ["read"], "tenant": "nobody"})
    assert (unknown.status_code, unknown.json()["code"]) == (404, "request.not_found")


def test_a_browser_logs_in_with_a_token_and_only_reads(api: Api) -> None:
    token_id, secret = api.token("read", "submit")
    with httpx.Client(base_url=api.url) as browser:
        assert browser.post("/login", data={"token": secret}).status_code == 303
        cookie = browser.cookies["reshard_session"]
        assert secret.rpartition("_")[2] not in cookie
        assert browser.get("/").status_code == 200
        assert browser.post("/v1/jobs", json=api.body()).status_code == 401
        api.ask("DELETE", f"/v1/tokens/{token_id}")
        assert browser.get("/v1/jobs").status_code == 401


def test_a_stream_ends_after_its_token_was_revoked(api: Api) -> None:
    token_id, secret = api.token("read")
    job = api.ask("POST", "/v1/jobs", json=api.body()).json()["id"]
    with httpx.stream(
        "GET", f"{api.url}/v1/jobs/{job}/events", headers={"Authorization": f"Bearer {secret}"}, timeout=20
    ) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("id")
        api.ask("DELETE", f"/v1/tokens/{token_id}")
        rest = "\n".join(lines)  # it ends although nothing happens to the job
    assert "PLANNING" not in rest
    assert api.ask("GET", f"/v1/jobs/{job}").json()["state"] == "QUEUED"
