"""Values that a job database cannot hold or compare, at every place that a caller fills: refused, never a 5xx."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy.exc
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings, strategies as st

from reshard.models.jobs import ConvertRequest, SubmitRequest
from reshard_jobs.queue.store import JobFilter, JobStore
from reshard_jobs.settings import JobSettings
from reshard_service.app import create_app
from reshard_service.settings import ServiceSettings

NUL, LONE, HUGE = "a\x00b", "a\ud800b", 10**30
PROBE = """
import json, sys
print(flush=True)
request = json.loads(sys.stdin.readline())["body"]
if "target" in request:
    answer = {"result": dict(digest="d", source_format="f", source_url=request["source"]["url"], tag=None, tensors=0,
              target=request["target"], to="universal", files=[], units=0, read_bytes=0, write_bytes=0,
              peak_memory_bytes=0)}
else:
    answer = {"problem": dict(type="", title="", status=404, detail="no", code="source.not_found")}
print(json.dumps(answer), flush=True)
"""
"""Takes every conversion and finds no checkpoint. Plain Python starts in 20 ms, pydantic in half a second."""

# FastAPI's own, where models are built when they are first used.
pytestmark = pytest.mark.filterwarnings("ignore:The 'alias' attribute")


@pytest.fixture
def api(database_url: str) -> Generator[TestClient]:
    """The application in this process; its probes take every submission."""
    probe = (sys.executable, "-I", "-S", "-c", PROBE)
    settings = ServiceSettings(jobs=JobSettings(database_url=database_url), probe_command=probe, token="operator")
    headers = {"Authorization": "Bearer operator"}
    with TestClient(create_app(settings), headers=headers, raise_server_exceptions=False) as client:
        yield client


def post(api: TestClient, path: str, body: Any, **headers: str) -> httpx.Response:
    """A body that no client library would send: JSON with escapes for what is not text."""
    return api.post(path, content=json.dumps(body).encode(), headers={"Content-Type": "application/json", **headers})


def body(**more: Any) -> dict[str, Any]:
    return {"source": {"url": "/in"}, "target": "/out", "to": "universal", **more}


def refused(answer: httpx.Response, code: str = "request.invalid") -> None:
    problem = answer.json()
    assert 400 <= answer.status_code < 500, answer.text
    assert problem["code"] == code
    assert problem["fix"]
    assert not problem["retryable"]


def token_of(*fields: Any, chosen: JobFilter | None = None) -> str:
    text = json.dumps([(chosen or JobFilter()).digest("default"), *fields])
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def test_texts_that_no_database_holds(api: TestClient) -> None:
    job = post(api, "/v1/jobs", body(labels={"team": "x"})).json()
    for text in (NUL, LONE):
        for wrong in (
            body(labels={"team": text}),
            body(labels={text: "x"}),
            body(target=f"/out{text}"),
            body(source={"url": f"/in{text}"}),
            body(source={"url": "/in", "tag": text}),
            body(source={"url": "/in", "profile": text}),
            body(options={"deepspeed": {"rules": text}}),
            body(options={"peft": {"adapter": text}}),
            body(layout={"dp": 1}, options={"deepspeed": {"partition_method": text}}),
            body(**{text: 1}),
            {text: text},
            text,
        ):
            refused(post(api, "/v1/jobs", wrong))
            refused(post(api, "/v1/jobs", wrong, **{"Idempotency-Key": "k"}))
            refused(post(api, "/v1/plans", wrong))
        refused(post(api, "/v1/inspections", {"url": f"/in{text}"}))
    for path in ("/v1/jobs/a%00b", "/v1/jobs/a%00b/events", "/v1/jobs/a%00b/result", "/v1/jobs?label=a%00=b"):
        refused(api.get(path))
    refused(api.get("/v1/jobs?label=a=b%00"))
    refused(api.get("/v1/jobs?state=%00"))
    refused(api.get("/v1/jobs?page_token=%00"))
    refused(api.post("/v1/jobs/a%00b/cancel"))
    # What is odd and still text is held as it is.
    odd = "é\u202e\U0001f600\t\x01\x7f\ufffd\ufffe"
    found = post(api, "/v1/jobs", body(labels={"odd": odd})).json()
    assert api.get(f"/v1/jobs/{found['id']}").json()["labels"] == {"odd": odd}
    assert [entry["id"] for entry in api.get("/v1/jobs", params={"label": f"odd={odd}"}).json()["jobs"]] == [
        found["id"]
    ]
    assert api.get(f"/v1/jobs/{job['id']}").json()["labels"] == {"team": "x"}


def test_labels_are_as_long_as_every_database_holds(api: TestClient) -> None:
    longest = {"n" * 128: "v" * 512}
    found = post(api, "/v1/jobs", body(labels=longest)).json()
    assert api.get(f"/v1/jobs/{found['id']}").json()["labels"] == longest
    for labels in ({"n" * 129: "v"}, {"n": "v" * 513}, {str(number): "v" for number in range(33)}):
        refused(post(api, "/v1/jobs", body(labels=labels)))
    refused(post(api, "/v1/jobs", body(), **{"Idempotency-Key": "k" * 256}))
    for path in (f"/v1/jobs/{'x' * 10_000}", f"/v1/jobs/{'x' * 10_000}/events"):
        refused(api.get(path), "request.not_found")
    assert api.get("/v1/jobs", params={"label": f"{'n' * 5000}={'v' * 5000}"}).json()["jobs"] == []


def test_ids_of_callers_are_as_long_as_every_database_holds(api: TestClient) -> None:
    for name in ("n" * 40, "N.1_-" * 7 + "x"):
        answer = api.put(f"/v1/jobs/{name}", json=body(labels={"of": name}, target=f"/out/{name}"))
        assert (answer.status_code, answer.json()["id"]) == (202, name), answer.text
        events = api.get(f"/v1/jobs/{name}/events", headers={"Accept": "application/json"}).json()["events"]
        assert [event["job_id"] for event in events] == [name]
    for name in ("n" * 41, "a%00", "-a", "job_x", "%C3%A9"):
        refused(api.put(f"/v1/jobs/{name}", json=body()))


def test_numbers_that_no_database_compares(api: TestClient) -> None:
    job = post(api, "/v1/jobs", body()).json()
    events = f"/v1/jobs/{job['id']}/events"
    plain = {"Accept": "application/json"}
    assert api.get(f"{events}?after_seq={2**31 - 1}", headers=plain).json()["events"] == []
    assert api.get(events, headers={**plain, "Last-Event-ID": str(2**31 - 1)}).json()["events"] == []
    for number in (2**31, 2**53, 2**63, 2**64, HUGE, -1, "1e3", "nan", "1.5", "9" * 5000):
        refused(api.get(f"{events}?after_seq={number}", headers=plain))
        refused(api.get(events, headers={**plain, "Last-Event-ID": str(number)}))
    for wait in ("nan", "inf", "-1", "1e400", "-nan"):
        refused(api.get(f"/v1/jobs/{job['id']}?wait={wait}"))
    for size in (0, 201, HUGE, "nan"):
        refused(api.get(f"/v1/jobs?page_size={size}"))
    for name in ("memory_limit_bytes", "part_bytes", "max_shard_bytes", "max_attempts", "threads"):
        for number in (HUGE, 2**63, -1, float("nan"), float("inf")):
            refused(post(api, "/v1/jobs", body(**{name: number})))
    refused(
        api.post("/v1/jobs", content=b'{"threads": ' + b"9" * 5000 + b"}", headers={"Content-Type": "application/json"})
    )


def test_forged_page_tokens(api: TestClient) -> None:
    for _ in range(3):
        post(api, "/v1/jobs", body())
    page = api.get("/v1/jobs?page_size=1").json()
    assert len(api.get(f"/v1/jobs?page_size=1&page_token={page['next_page_token']}").json()["jobs"]) == 1
    good = "job_" + "a" * 24
    for created_at in (float("nan"), float("inf"), -1.0, 1e300, 10**400, 2**63, True, "1", None, [1.0]):
        refused(api.get("/v1/jobs", params={"page_token": token_of(created_at, good)}))
    for job_id in (NUL, LONE, "", "a" * 65, "-x", good[:-1] + "\n", 5):
        refused(api.get("/v1/jobs", params={"page_token": token_of(1.0, job_id)}))
    for token in ("é", "%", "=", "W10", "bnVsbA", "W1tbW1tb" * 100, "A" * 1025):
        refused(api.get("/v1/jobs", params={"page_token": token}))


def test_bodies_that_are_no_json(api: TestClient) -> None:
    kind = {"Content-Type": "application/json"}
    for content in (
        b"\xff",
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": "\x00"}',
        b"[" * 100_000,
        b"",
        b"null",
        b"\xfe\xff\x00{",
    ):
        answer = api.post("/v1/jobs", content=content, headers=kind)
        refused(answer)
        assert answer.status_code == 422
    for content in (body(labels={"a": LONE}), body(labels={"a": NUL})):
        wide = json.dumps(content, ensure_ascii=False).encode("utf-16", "surrogatepass")
        refused(api.post("/v1/jobs", content=wide, headers=kind))


ANY_TEXT = st.text(st.characters(codec=None), max_size=8) | st.sampled_from([NUL, LONE, "", "\x00", "nan", str(HUGE)])
ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([2**31, 2**63, HUGE]) | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted({*SubmitRequest.model_fields, *ConvertRequest.model_fields})


def routes(schema: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in sorted(schema["paths"].items()):
        for method, facts in sorted(methods.items()):
            yield method.upper(), path, facts


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_no_value_at_any_place_is_our_fault(api: TestClient) -> None:
    listed = list(routes(api.get("/openapi.json").json()))
    assert len(listed) > 8
    # An ended one: the event stream of another would not end.
    ended = post(api, "/v1/jobs", body()).json()["id"]
    assert api.post(f"/v1/jobs/{ended}/cancel").json()["state"] == "CANCELLED"

    @given(data=st.data())
    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def ask(data: st.DataObject) -> None:
        method, path, facts = data.draw(st.sampled_from(listed))
        query: dict[str, Any] = {}
        headers: dict[str, str] = {}
        for parameter in facts.get("parameters", ()):
            value = data.draw(ANY_TEXT)
            if parameter["in"] == "path":
                job_id = data.draw(st.sampled_from([_quoted(value) or "x", ended]))
                path = path.replace(f"{{{parameter['name']}}}", job_id)
            elif parameter["in"] == "query" and data.draw(st.booleans()):
                query[parameter["name"]] = "0" if parameter["name"] == "wait" else _quoted(value)
            elif parameter["in"] == "header" and data.draw(st.booleans()):
                headers[parameter["name"]] = "".join(c for c in value if c.isascii() and c.isprintable()).strip()
        content = b""
        if "requestBody" in facts:
            sent = body(**data.draw(st.dictionaries(st.sampled_from(FIELDS) | ANY_TEXT, ANY_VALUE, max_size=3)))
            content = json.dumps(data.draw(st.sampled_from([sent, sent["source"]]))).encode()
            headers["Content-Type"] = "application/json"
        headers.pop("prefer", None)
        url = f"{path}?{'&'.join(f'{name}={value}' for name, value in query.items())}"
        answer = api.request(method, url, content=content, headers=headers)
        assert answer.status_code < 500, (method, url, content, answer.text)
        if "%2F" not in path:  # a slash in an id makes the path one of another route, or of none
            documented_as(facts, answer)
        if method == "PUT" and answer.status_code == 202:
            # The event stream of a job that waits would not end.
            api.post(f"{path}/cancel")
        if answer.status_code >= 400 and method != "HEAD":  # whose answers have no body
            assert answer.json()["code"] in {
                "request.invalid",
                "request.not_found",
                "request.unknown_scheme",
                "request.above_maximum",
                "request.job_exists",
                "request.tenant_exists",
                "job.cancelled",
                "source.not_found",
            }, answer.text

    ask()


def documented_as(facts: dict[str, Any], answer: httpx.Response) -> None:
    """Fail if the schema does not name the answer's status, or not its content type."""
    asked = f"{answer.request.method} {answer.request.url.path[:80]}"
    assert str(answer.status_code) in facts["responses"], (asked, answer.status_code, answer.text)
    kinds = facts["responses"][str(answer.status_code)].get("content", {})
    kind = answer.headers.get("content-type", "").partition(";")[0]
    assert kind in kinds or not (kinds or answer.content), (asked, answer.status_code, kind)


def test_every_problem_is_documented(api: TestClient) -> None:
    schema = api.get("/openapi.json").json()
    # FastAPI's own form of errors is never sent.
    assert "HTTPValidationError" not in schema["components"]["schemas"]
    for _, path, facts in routes(schema):
        for status, answer in facts["responses"].items():
            assert answer["description"], (path, status)
            assert int(status) < 400 or "application/problem+json" in answer["content"], (path, status)
    assert schema["paths"]["/v1/jobs/{job_id}/events"]["get"]["responses"]["200"]["content"].keys() == {
        "application/json",
        "text/event-stream",
    }


def _quoted(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode("utf-8", "surrogatepass"))


def test_an_error_that_names_files_which_are_no_text(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"tag\xff")).mkdir()
    (tmp_path / os.fsdecode(b"tag\xff") / "mp_rank_00_model_states.pt").write_bytes(b"")
    (tmp_path / "latest").write_text("gone")
    service = ServiceSettings(jobs=JobSettings(database_url=f"sqlite:///{tmp_path}/jobs.db"), inspection_s=60)
    with TestClient(create_app(service), raise_server_exceptions=False) as api:
        refused(post(api, "/v1/inspections", {"url": str(tmp_path)}), "checkpoint.bad_latest")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (sqlalchemy.exc.OperationalError("", {}, Exception("gone")), "service.unavailable"),
        (sqlalchemy.exc.InterfaceError("", {}, Exception("closed")), "service.unavailable"),
        (sqlalchemy.exc.InternalError("", {}, Exception(), connection_invalidated=True), "service.unavailable"),
        (sqlalchemy.exc.TimeoutError("every connection of the pool is in use"), "service.unavailable"),
        (sqlalchemy.exc.DataError("", {}, Exception("out of range")), "request.invalid"),
        (sqlalchemy.exc.ProgrammingError("", {}, Exception("no such column")), "internal.error"),
        (sqlalchemy.exc.IntegrityError("", {}, Exception("not unique")), "internal.error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_only_a_database_that_is_away_is_worth_another_try(
    sqlite_url: str, error: Exception, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    app = create_app(ServiceSettings(jobs=JobSettings(database_url=sqlite_url)))
    monkeypatch.setattr(JobStore, "get", fail)
    with TestClient(app, raise_server_exceptions=False) as api:
        problem = api.get("/v1/jobs/job_x/result").json()
    assert (problem["code"], problem["retryable"]) == (code, code == "service.unavailable")
    assert str(error) not in json.dumps(problem)
