"""The client's pure half: what is sent, how answers are read; and its loops against a small faulty server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from http.server import BaseHTTPRequestHandler
from inspect import signature
from typing import Any

import pytest
from pydantic import ValidationError

from reshard.api import wire
from reshard.api.client import Client
from reshard.api.exchange import EventLines, ServerEvent
from reshard.api.wire import Answer
from reshard.choices import JobState
from reshard.errors import JobError, RequestError, SourceError
from reshard.functions import push
from reshard.models.access import NewTenant, NewToken, RotateRequest
from reshard.models.jobs import ConvertRequest, Job, JobList, SubmitRequest
from reshard.models.keywords import ConvertOptions
from reshard.option import renamed_argument
from reshard.options import DeepSpeedOptions, PeftOptions, WeightsOptions
from reshard.wire_model import RequestModel
from servers.answering import Handler, answering

FIELDS: Any = {"memory_limit_bytes": 2 << 30, "max_shard_bytes": 5 * 10**9, "part_bytes": 1 << 20}
PROBLEM = {"code": "source.not_found", "detail": "nothing there", "fix": "look again", "details": {"url": "x"}}


def answer(status: int, body: object, **headers: str) -> Answer:
    return Answer(status, headers, body if isinstance(body, bytes) else json.dumps(body).encode())


def test_server_events() -> None:
    lines = [": ping", "id: 1", "event: state", "data: {}", "", "data:a", "data: b", "", "", "id: 9", "data: cut off"]
    reader = EventLines()
    assert [found for line in lines if (found := reader.feed(line))] == [
        ServerEvent("1", "state", "{}"),
        ServerEvent("1", "message", "a\nb"),
    ]


def test_problems_become_typed_errors() -> None:
    with pytest.raises(SourceError) as caught:
        wire.parse(answer(422, PROBLEM), Job)
    assert (caught.value.code, caught.value.fix, caught.value.details) == (
        "source.not_found",
        "look again",
        {"url": "x"},
    )
    with pytest.raises(JobError, match=r"service\.protocol"):
        wire.parse(answer(200, {"id": "x"}), Job)
    with pytest.raises(JobError, match=r"service\.unavailable"):
        wire.parse(answer(502, b"<html>bad gateway\x1b[31m</html>"), Job)
    with pytest.raises(JobError, match=r"service\.protocol"):
        wire.parse(answer(418, ["teapot"]), Job)
    with pytest.raises(JobError, match=r"service\.protocol"):
        wire.parse(answer(422, {"code": "from.the.future", "detail": "new"}), Job)


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, {}, False),
        (503, b"", True),
        (429, b"", True),
        (500, b"", False),
        (422, PROBLEM, False),
        (409, {"code": "request.idempotency_conflict", "detail": ""}, True),
        (409, {"code": "request.target_exists", "detail": ""}, False),
        (503, {"code": "service.unavailable", "detail": ""}, True),
        (503, {"code": "service.wrong_host", "detail": ""}, False),
    ],
)
def test_what_is_tried_again(status: int, body: object, *, expected: bool) -> None:
    assert wire.passing(answer(status, body)) is expected


def test_pauses_grow_and_obey_the_service() -> None:
    pauses = [wire.pause_s(tries, 1.0, None) for tries in range(8)]
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert wire.pause_s(0, 0.0, None) == 0.125
    assert wire.pause_s(0, 1.0, answer(503, b"", **{"retry-after": "3"})) == 3.0
    assert wire.pause_s(0, 1.0, answer(503, b"", **{"retry-after": "999"})) == 10.0
    assert wire.pause_s(0, 1.0, answer(503, b"", **{"retry-after": "Wed, 21 Oct"})) == 0.25


def test_arguments_under_their_former_names() -> None:
    """`Client.inspect(url=...)` and `push(directory, url=...)`, where `url` is elsewhere the service."""
    assert renamed_argument("source", "s3://a", "url", None) == "s3://a"
    with pytest.warns(DeprecationWarning, match="'url' is now 'source'"):
        assert renamed_argument("source", None, "url", "s3://a") == "s3://a"
    for value, given in ((None, None), ("s3://a", "s3://b")):
        with pytest.raises(TypeError, match="source"):
            renamed_argument("source", value, "url", given)
    for call, name in ((Client.inspect, "source"), (push, "target")):
        assert [*signature(call).parameters][1] == name
        assert "url" in signature(call).parameters


def test_calls() -> None:
    request = wire.convert_request("s3://a", "s3://b", "universal", {"tag": "t", "threads": 2})
    call = wire.submit_call(request, {"labels": {"x": "y"}, "max_attempts": 4}, "key")
    assert call.headers == {"Idempotency-Key": "key"}
    assert call.body["source"] == {"url": "s3://a", "tag": "t", "profile": None}
    assert (call.body["labels"], call.body["max_attempts"], call.body["threads"]) == ({"x": "y"}, 4, 2)
    assert wire.job_call("a/../b").path == "/v1/jobs/a%2F..%2Fb"
    listing = wire.list_call((JobState.QUEUED, JobState.FAILED), {"a": "b=c"}, 10, "token")
    assert listing.params == (
        ("page_size", "10"),
        ("state", "QUEUED"),
        ("state", "FAILED"),
        ("label", "a=b=c"),
        ("page_token", "token"),
    )
    assert wire.stream_call("j", 0).headers.get("Last-Event-ID") is None
    assert wire.stream_call("j", 7).headers["Last-Event-ID"] == "7"
    with pytest.raises(RequestError, match=r"request\.invalid: dtype is none of 'fp32'"):
        wire.convert_request("s3://a", "s3://b", "torch", {"dtype": "fp3"})
    # The clients take the names and texts of the functions, and the names of fields as in the releases before.
    sizes: ConvertOptions = {"memory_limit": "2GiB", "max_shard_size": "5GB", "part_size": 1 << 20}
    request = wire.convert_request("s3://a", "s3://b", "torch", sizes)
    assert (request.memory_limit_bytes, request.part_bytes) == (2 << 30, 1 << 20)
    assert request.options.of(WeightsOptions).max_shard_bytes == 5 * 10**9
    assert wire.convert_request("s3://a", "s3://b", "torch", FIELDS) == request
    with pytest.raises(RequestError, match="max_shard_size and max_shard_bytes are one option"):
        wire.convert_request("s3://a", "s3://b", "torch", FIELDS | sizes)
    with pytest.raises(RequestError, match=r"request\.invalid"):
        wire.convert_request("s3://a", "s3://b", "torch", {"memory_limit": "much"})
    # A service may have formats that are not installed here.
    assert wire.convert_request("s3://a", "s3://b", "cake", {}).to == "cake"


def test_a_client_needs_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESHARD_URL", raising=False)
    for url in (None, "localhost:8000"):
        with pytest.raises(RequestError, match=r"request\.invalid"):
            Client(url)
    monkeypatch.setenv("RESHARD_URL", "http://localhost:8000/")
    assert Client().url == "http://localhost:8000"


def test_the_client_is_light() -> None:
    heavy = ["celery", "fastapi", "fsspec", "numpy", "sqlalchemy", "starlette", "torch", "typer"]
    script = f"import sys, reshard; reshard.Client; print([m for m in {heavy!r} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=180)
    assert shown.stdout.strip() == "[]"


def test_public_names_exist() -> None:
    import reshard

    assert dir(reshard) == sorted(set(reshard.__all__))
    for name in reshard.__all__:
        assert getattr(reshard, name) is not None
    with pytest.raises(AttributeError):
        _ = reshard.nothing  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType, reportUnknownMemberType]


Reply = Callable[[BaseHTTPRequestHandler], None]


class Faulty:
    """An HTTP server that gives prepared replies, the last one again and again."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        faulty = self

        class Replying(Handler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                faulty.seen.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
                reply = faulty.replies.pop(0) if len(faulty.replies) > 1 else faulty.replies[0]
                reply(self)

            do_GET = do_POST = _serve  # noqa: N815

        self.handler = Replying
        self.url = ""


@pytest.fixture
def faulty() -> Generator[Faulty]:
    found = Faulty()
    with answering(found.handler) as found.url:
        yield found


def send(status: int, body: bytes, kind: str = "application/json", *, cut: bool = False, **headers: str) -> Reply:
    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body) + (100 if cut else 0)))
        handler.end_headers()
        handler.wfile.write(body)
        handler.close_connection = cut

    return reply


def drop(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.close()
    handler.close_connection = True


def event(seq: int, state: str) -> dict[str, Any]:
    return {"seq": seq, "job_id": "j", "at": "2026-01-01T00:00:00Z", "kind": "state", "state": state}


def sse(*events: dict[str, Any]) -> bytes:
    return "".join(f"id: {e['seq']}\r\nevent: state\r\ndata: {json.dumps(e)}\r\n\r\n" for e in events).encode()


def test_passing_failures_are_tried_again_with_the_same_key(faulty: Faulty) -> None:
    accepted = json.dumps(
        {
            "id": "j",
            "state": "QUEUED",
            "done": False,
            "attempt": 0,
            "max_attempts": 3,
            "request": {"source": {"url": "/a"}, "target": "/b", "to": "universal"},
            "created_at": "2026-01-01T00:00:00Z",
        }
    ).encode()
    conflict = json.dumps({"code": "request.idempotency_conflict", "detail": ""}).encode()
    faulty.replies = [send(503, b""), drop, send(409, conflict), send(202, accepted)]
    with Client(faulty.url, "t") as client:
        assert client.submit("/a", "/b", to="universal").id == "j"
    keys = {headers["idempotency-key"] for _, _, headers in faulty.seen}
    assert len(faulty.seen) >= 4
    assert len(keys) == 1
    assert {headers["authorization"] for _, _, headers in faulty.seen} == {"Bearer t"}


def test_a_refusal_is_not_tried_again(faulty: Faulty) -> None:
    faulty.replies = [send(422, json.dumps(PROBLEM).encode())]
    with Client(faulty.url) as client, pytest.raises(SourceError):
        client.inspect("/a")
    assert len(faulty.seen) == 1


def test_a_service_that_is_away(faulty: Faulty) -> None:
    faulty.replies = [drop]
    with Client(faulty.url, retries=2) as client:
        with pytest.raises(JobError, match=r"service\.unavailable"):
            client.list()
        with pytest.raises(JobError, match=r"service\.unavailable"):
            list(client.watch("j"))


def test_watch_goes_on_after_broken_streams(faulty: Faulty) -> None:
    stream = "text/event-stream"
    faulty.replies = [
        send(200, sse(event(1, "QUEUED"), event(2, "PLANNING")) + b"id: 3\r\ndata: {half", stream, cut=True),
        send(503, b""),
        send(200, sse(event(3, "RUNNING")), stream),
        send(200, sse(event(4, "SUCCEEDED")), stream),
    ]
    faulty.replies.insert(2, send(200, b'{"events": [], "done": false}'))
    with Client(faulty.url) as client:
        assert [found.seq for found in client.watch("j")] == [1, 2, 3, 4]
    streams = [headers for _, _, headers in faulty.seen if headers["accept"] == stream]
    assert [headers.get("last-event-id") for headers in streams] == [None, "2", "2", "3"]


def test_watch_polls_where_streams_do_not_pass(faulty: Faulty) -> None:
    faulty.replies = [
        send(200, b"<html>", "text/html"),
        send(200, json.dumps({"events": [event(1, "QUEUED")], "done": False}).encode()),
        send(200, json.dumps({"events": [event(2, "FAILED")], "done": True}).encode()),
    ]
    with Client(faulty.url) as client:
        assert [found.state for found in client.watch("j")] == [JobState.QUEUED, JobState.FAILED]
    assert [path for _, path, _ in faulty.seen][1:] == [
        "/v1/jobs/j/events?after_seq=0",
        "/v1/jobs/j/events?after_seq=1",
    ]


def test_pages(faulty: Faulty) -> None:
    faulty.replies = [send(200, JobList(jobs=(), next_page_token="t").model_dump_json().encode())]
    with Client(faulty.url) as client:
        assert client.list(page_size=3).next_page_token == "t"
    assert faulty.seen[0][1] == "/v1/jobs?page_size=3"


# Requests hold numbers where the API's document says so: `true` and `"5"` are none.


MODELS: tuple[type[RequestModel], ...] = (
    ConvertRequest, DeepSpeedOptions, NewTenant, NewToken, PeftOptions, RotateRequest, SubmitRequest, WeightsOptions,
)  # fmt: skip


def numbers() -> Iterator[tuple[type[RequestModel], str]]:
    for model in MODELS:
        for name, field in model.model_json_schema()["properties"].items():
            kinds = {field.get("type"), *(option.get("type") for option in field.get("anyOf", ()))} - {None, "null"}
            if kinds and kinds <= {"integer", "number"}:
                yield model, name


def test_there_are_numbers() -> None:
    assert {model for model, _ in numbers()} == set(MODELS)


@pytest.mark.parametrize("wrong", [True, False, "5"])
@pytest.mark.parametrize(("model", "name"), list(numbers()))
def test_what_is_no_number_is_refused(model: type[RequestModel], name: str, wrong: object) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate({name: wrong})
    (own,) = [error for error in caught.value.errors() if error["loc"] == (name,)]
    assert "not a number" in own["msg"]
