"""Traces that are off cost nothing, and those that are on stay within their bounds."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from house.measured import say
from house.repository import ROOT
from reshard.errors import secrets_of
from reshard_engine.spans import begin_span as begin_engine_span
from reshard_jobs.tracing import OFF, _Process, _Seldom, begin_span, current, wanted
from reshard_worker.protocol import SpanBegan, SpanEnded, parse_message
from reshard_worker.runner import RunnerSpans

CHECKPOINT = ROOT / "tests" / "data" / "zero3_tiny"
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("env", "on"),
    [
        ({}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, False),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "None"}, False),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "console"}, False),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "True"}, False),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "false"}, True),
    ],
)
def test_the_standard_variables_switch_traces_on(env: dict[str, str], on: bool) -> None:
    assert wanted(env) is on


def test_another_protocol_is_said_once_and_not_spoken(caplog: pytest.LogCaptureFixture) -> None:
    process = _Process()
    for _ in range(3):
        assert not process.start("x", {**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "http/protobuf" in caplog.text


def test_spans_that_are_off_do_nothing_and_cost_little() -> None:
    began = time.thread_time()
    for _ in range(1000):
        with begin_span("x", {"a": 1}, parent=None) as span:
            span.set({"b": 2})
            span.fail("x")
    service_s = time.thread_time() - began
    assert (span, span.traceparent, span.trace_id, span.log_fields, span.recording) == (OFF, None, "", {}, False)
    assert current() is OFF
    began = time.thread_time()
    for _ in range(1000):
        begin_engine_span("run", run="0.0")(units=1)
    engine_s = time.thread_time() - began
    say(f"1,000 spans that are off: {service_s * 1e3:.2f} ms in the service, {engine_s * 1e3:.2f} ms in the engine")
    assert service_s + engine_s < 0.5


CODE = """
import json, sys
{}
sys.stderr.write("\\n" + json.dumps([name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]))
"""


@pytest.mark.parametrize(
    "code",
    [
        "from reshard.cli.main import run; run(['--help'])",
        f"from reshard.cli.main import run; run(['convert', {str(CHECKPOINT)!r}, 'out', '--to', 'universal'])",
        # The engine's process never does, whatever the variables say.
        "import os; os.environ['OTEL_EXPORTER_OTLP_ENDPOINT'] = 'http://127.0.0.1:9'; import reshard_worker.runner",
        # Celery's Redis client does, for counters of its own, if the package is there.
        "import reshard_worker.embedded, reshard_jobs.tracing as t; assert not t.start_tracing('x')",
    ],
    ids=["help", "convert", "engine", "worker"],
)
def test_what_does_not_import_opentelemetry(code: str, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(code)], capture_output=True, text=True, cwd=tmp_path, env=env, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stderr.splitlines()[-1]) == []
    assert (tmp_path / "out" / "reshard.json").exists() or "convert" not in code


def test_a_collector_that_is_away_is_said_once_in_a_while() -> None:
    seldom = _Seldom()
    records = [logging.LogRecord("x", logging.ERROR, "", 0, "no", (), (ValueError, ValueError(), None)) for _ in "123"]
    assert [seldom.filter(record) for record in records] == [True, False, False]
    assert records[0].exc_info is None


def test_secrets_of_the_collector_are_secrets() -> None:
    env = {
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key=planted-key, authorization=Bearer%20planted-token",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://user:planted-password@collector/v1/traces",
    }
    assert secrets_of(env) == {"planted-key", "Bearer planted-token", "planted-password"}


def test_spans_of_an_engine_stay_within_their_phase() -> None:
    lines: list[bytes] = []
    spans = RunnerSpans(lines.append)
    spans.enter("planning", bytes_done=0)
    spans.enter("running", bytes_done=0)
    first, second = spans.begin("run", {"run": "0.0"}), spans.begin("run", {"run": "0.4"})
    first(units=4, bytes=9)
    # Its epoch was lost: it ends with its phase, and only once.
    spans.enter("verifying", bytes_done=9)
    second(units=4, bytes=9)
    spans.enter("done", bytes_done=9)
    spans.begin("late", {})
    spans.end_all("checkpoint.incomplete")
    told = [parse_message(line) for line in lines]
    began = {m.number: (m.name, m.parent) for m in told if isinstance(m, SpanBegan)}
    assert began == {1: ("plan", 0), 2: ("units", 0), 3: ("run", 2), 4: ("run", 2), 5: ("verify", 0), 6: ("late", 0)}
    ended = [(m.number, m.code, m.facts) for m in told if isinstance(m, SpanEnded)]
    assert ended == [
        (1, "", {}),
        (3, "", {"units": 4, "bytes": 9}),
        (4, "", {}),
        (2, "", {"bytes": 9}),
        (5, "", {}),
        (6, "checkpoint.incomplete", {}),
    ]
