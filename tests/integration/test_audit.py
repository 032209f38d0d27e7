"""The audit log: changes in their own transaction, refused attempts of administrators, no secrets."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from house.requests import asked
from house.waiting import PATIENCE_S
from reshard.cli.main import run
from reshard_jobs.database import Database
from reshard_jobs.queue.reaper import Reaper, Retention
from reshard_jobs.queue.store import JobStore
from reshard_jobs.tenants.principals import OPERATOR, AuditLog
from servers.stack import Stack

TOKEN = "the token of the operator"


class Api:
    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.directory = directory

    def ask(self, method: str, path: str, body: Any = None, token: str = TOKEN) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.request(method, f"{self.url}{path}", json=body, headers=headers, timeout=PATIENCE_S)

    def entries(self, token: str = TOKEN, query: str = "") -> list[dict[str, Any]]:
        return self.ask("GET", f"/v1/audit{query}", token=token).json()["entries"]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Generator[Api]:
    directory = tmp_path_factory.mktemp("audit")
    stack = Stack(directory / "logs", f"sqlite:///{directory}/jobs.db", extra={"RESHARD_TOKEN": TOKEN})
    with stack.api() as url:
        yield Api(url, directory)


def test_changes_are_recorded_with_who_made_them(api: Api) -> None:
    api.ask("POST", "/v1/tenants", {"name": "a"})
    made = api.ask("POST", "/v1/tokens", {"name": "x", "scopes": ["submit", "cancel", "admin"], "tenant": "a"}).json()
    body = {"source": {"url": f"{api.directory}/scripted"}, "target": f"{api.directory}/out", "to": "universal"}
    job = api.ask("POST", "/v1/jobs", body, made["secret"]).json()["id"]
    api.ask("POST", f"/v1/jobs/{job}/cancel", token=made["secret"])
    api.ask("PUT", "/v1/tenants/a", {"weight": 2})
    token_id = made["token"]["id"]
    mine = [(e["action"], e["actor"], e["object"], e["outcome"]) for e in reversed(api.entries(made["secret"]))]
    assert mine == [
        ("tenant.create", "operator", "a", "ok"),
        ("token.create", "operator", token_id, "ok"),
        ("job.submit", token_id, job, "ok"),
        ("job.cancel", token_id, job, "ok"),
        ("tenant.set", "operator", "a", "ok"),
    ]
    assert {entry["address"] for entry in api.entries()} == {"127.0.0.1"}
    text = api.ask("GET", "/v1/audit").text
    assert made["secret"].rpartition("_")[2] not in text
    assert str(api.directory) not in text


def test_refused_attempts_of_administrators_are_recorded(api: Api) -> None:
    api.ask("POST", "/v1/tenants", {"name": "b"})
    made = api.ask("POST", "/v1/tokens", {"name": "x", "scopes": ["read", "admin"], "tenant": "b"}).json()
    reader = api.ask("POST", "/v1/tokens", {"name": "x", "scopes": ["read"], "tenant": "b"}).json()["secret"]
    admin = made["secret"]
    api.ask("DELETE", "/v1/tenants/default", token=admin)
    api.ask("POST", "/v1/tokens", {"name": "x", "scopes": ["read"], "tenant": "default"}, admin)
    api.ask("DELETE", "/v1/tokens/nothing", token=admin)
    api.ask("GET", "/v1/audit?tenant=default", token=admin)
    api.ask("GET", "/v1/tokens", token=reader)
    refused = [(e["action"], e["object"], e["outcome"]) for e in reversed(api.entries(admin)) if e["outcome"] != "ok"]
    assert refused == [
        ("tenant.remove", "default", "request.forbidden"),
        ("token.create", "", "request.forbidden"),
        ("token.remove", "nothing", "request.not_found"),
        ("audit.list", "", "request.forbidden"),
        ("token.list", "", "request.forbidden"),
    ]
    # A tenant reads its own log only; the operator reads all, page by page.
    assert {entry["tenant"] for entry in api.entries(admin)} == {"b"}
    first = api.ask("GET", "/v1/audit?limit=2").json()
    rest = api.entries(query=f"?before={first['next_before']}")
    assert [e["id"] for e in first["entries"] + rest] == [e["id"] for e in api.entries()]


def test_the_commands(api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RESHARD_URL", api.url)
    monkeypatch.setenv("RESHARD_TOKEN", TOKEN)

    def cli(*arguments: str) -> str:
        assert run(arguments) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    cli("tenants", "create", "team-c", "--max-running", "2", "--bytes-per-day", "1TiB", "--write-root", "/data/c")
    cli("tenants", "set", "team-c", "--max-running", "none", "--weight", "3", "--max-priority", "-5")
    (line,) = [line for line in cli("tenants", "list").splitlines() if line.startswith("team-c")]
    assert line.split() == ["team-c", "-", "-", "-", "1", "TiB", "3", "/data/c"]
    secret = cli("tokens", "create", "ci", "--tenant", "team-c", "--scope", "read", "--expires", "never").strip()
    assert api.ask("GET", "/v1/jobs", token=secret).status_code == 200
    (line,) = [line for line in cli("tokens", "list", "--tenant", "team-c").splitlines() if line.endswith("ci")]
    token_id = line.split()[0]
    assert f"{token_id} revoked" in cli("tokens", "revoke", token_id)
    assert api.ask("GET", "/v1/jobs", token=secret).status_code == 401
    assert "token.revoke" in cli("audit", "--tenant", "team-c")
    assert cli("tenants", "remove", "team-c") == "team-c removed\n"
    for wrong in (
        ("tokens", "create", "x", "--scope", "read", "--expires", "soon"),
        ("tenants", "create", "x", "--max-running", "many"),
        ("tenants", "set", "nobody", "--weight", "2"),
        ("tenants", "remove", "default"),
    ):
        assert run(wrong) != 0
        assert "fix:" in capsys.readouterr().err


def test_an_entry_is_in_the_transaction_of_its_change_and_goes_in_time(database_url: str) -> None:
    database = Database(database_url)
    store = JobStore(database, by=OPERATOR)
    body = {"source": {"url": "/in"}, "target": "/out", "to": "universal"}
    request = asked(**body)
    store.create(request, job_id="one")
    with pytest.raises(Exception, match="exists"):
        store.create(request, job_id="one")
    log = AuditLog(database)
    assert [entry.object for entry in log.page(None).entries] == ["one"]
    Reaper(database, lease_s=60, retention=Retention(keep_audit_s=1e-9)).sweep()
    assert log.page(None).entries == ()
    database.close()
