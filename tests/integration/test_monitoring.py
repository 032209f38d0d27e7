"""Alerts and the dashboard ask for metrics and labels that a real `/metrics` has, and each alert has its runbook."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import update

from house.repository import ROOT
from house.waiting import PATIENCE_S, wait_until
from reshard.choices import JobState, TargetFormat
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec
from reshard_jobs.database import Database
from reshard_jobs.queue.store import JobStore
from reshard_jobs.statistics import LATELY_S, MOST_TENANTS, OTHERS, JobStatistics, Totals, few_tenants
from reshard_jobs.tables import JobRow, db_now
from reshard_service.metrics import ENDS
from reshard_worker.supervisor import Outcome
from servers.scripted import scripted
from servers.stack import Stack, client_of, end_tree

MONITORING = ROOT / "deploy" / "monitoring"
SCRAPED = {"up": {"job", "instance"}}
"""What Prometheus itself makes when it reads a target."""


def alerts() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
    ]


def expressions() -> Iterator[tuple[str, str]]:
    for rule in alerts():
        yield rule["alert"], rule["expr"]
    for panel in json.loads((MONITORING / "dashboard.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, set[str]]:
    """The labels of each sample of a real API that has been asked for a few things."""
    directory = tmp_path_factory.mktemp("api")
    stack = Stack(directory / "logs", f"sqlite:///{directory}/jobs.db")
    with stack.api() as url:
        body = {"source": {"url": scripted()}, "target": str(directory / "out"), "to": "universal"}
        assert httpx.post(f"{url}/v1/jobs", json=body, timeout=PATIENCE_S).status_code == 202
        assert httpx.get(f"{url}/v1/jobs/none", timeout=PATIENCE_S).status_code == 404
        text = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return {**found, **SCRAPED}


def selectors(expression: object) -> Iterator[promql.VectorSelector]:
    """All vector selectors of a parsed expression."""
    if isinstance(expression, promql.VectorSelector):
        yield expression
    elif isinstance(expression, promql.Call):
        for argument in expression.args:
            yield from selectors(argument)
    else:
        for name in ("expr", "lhs", "rhs", "vector_selector", "vs"):
            if (inner := getattr(expression, name, None)) is not None:
                yield from selectors(inner)


@pytest.mark.parametrize(("name", "expression"), list(expressions()))
def test_queries_ask_for_what_the_api_shows(name: str, expression: str, metrics: Mapping[str, set[str]]) -> None:
    found = list(selectors(promql.parse(expression)))
    assert found, f"{name}: no metric in {expression}"
    assert len(found) == len(re.findall(r"reshard_\w+|\bup\b", expression))
    for selector in found:
        assert selector.name in metrics, f"{name}: {selector.name}"
        labels = {matcher.name for matcher in selector.matchers.matchers}
        assert labels <= metrics[selector.name], f"{name}: {labels}"
    grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
    assert grouped <= {label for selector in found for label in metrics[selector.name]}


def test_each_alert_has_a_runbook_and_each_runbook_an_alert() -> None:
    pages = {rule["annotations"]["runbook"]: rule["alert"] for rule in alerts()}
    for page, alert in pages.items():
        assert (ROOT / page).read_text().startswith(f"# {alert}\n")
    assert {Path(page).name for page in pages} == {p.name for p in (ROOT / "docs" / "runbooks").glob("*.md")} - {
        "README.md"
    }


def job(database: Database, state: JobState, **values: Any) -> None:
    request = ConvertRequest(source=SourceSpec(url="/a"), target="/b", to=TargetFormat.UNIVERSAL)
    made = JobStore(database).create(request)
    with database.write() as session:
        session.execute(update(JobRow).where(JobRow.id == made.id).values(state=state.value, **values))


def test_statistics_of_jobs(database_url: str) -> None:
    database = Database(database_url)
    statistics = JobStatistics(database)
    assert statistics.queue_age_s() == 0
    assert statistics.ended_lately() == {JobState.SUCCEEDED: 0, JobState.FAILED: 0, JobState.CANCELLED: 0}
    job(database, JobState.QUEUED, created_at=db_now() - 100)
    job(database, JobState.QUEUED, created_at=db_now() - 900, not_before=db_now() - 50)
    job(database, JobState.QUEUED, created_at=db_now() - 900, not_before=db_now() + 50)
    job(database, JobState.RUNNING, created_at=db_now() - 900)
    assert 100 <= statistics.queue_age_s() < 160
    job(database, JobState.SUCCEEDED, finished_at=db_now() - 10, attempt=1)
    job(database, JobState.SUCCEEDED, finished_at=db_now() - 10, attempt=3, releases=2)
    job(database, JobState.FAILED, finished_at=db_now() - 10, attempt=3)
    job(database, JobState.FAILED, finished_at=db_now() - LATELY_S - 10, attempt=3)
    assert statistics.ended_lately() == {JobState.SUCCEEDED: 2, JobState.FAILED: 1, JobState.CANCELLED: 0}
    assert statistics.retried_lately() == 1
    database.close()


def samples(url: str, name: str, label: str) -> dict[str, float]:
    """The samples of a family by one label."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text)
    return {s.labels[label]: s.value for family in families for s in family.samples if s.name == name}


@pytest.mark.timeout(120)
def test_what_workers_did_is_counted(stack: Stack, tmp_path: Path) -> None:
    with stack.api() as url, client_of(url) as client:
        assert set(samples(url, "reshard_attempts_total", "end")) == set(ENDS) >= set(Outcome) - {"helped", "discarded"}
        assert set(samples(url, "reshard_attempts_total", "end").values()) == {0.0}
        with stack.worker() as worker:
            good = client.submit(scripted(units=2), str(tmp_path / "good"), to="universal")
            assert client.wait(good.id, timeout_s=PATIENCE_S).state is JobState.SUCCEEDED
            away = scripted(units=2, fail="storage.unavailable", times=1)
            again = client.submit(away, str(tmp_path / "again"), to="universal")
            assert client.wait(again.id, timeout_s=PATIENCE_S).state is JobState.SUCCEEDED
            wrong = client.submit(scripted(fail="source.not_found"), str(tmp_path / "bad"), to="universal")
            assert client.wait(wrong.id, timeout_s=PATIENCE_S).state is JobState.FAILED
            peak = re.search(
                r"^reshard_engine_peak_memory_bytes (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE
            )
            assert peak is not None
            assert 10 << 20 < float(peak[1]) < 2 << 30
            long = client.submit(scripted(units=4000, unit_s=0.1), str(tmp_path / "long"), to="universal")
            wait_until(lambda: sum(samples(url, "reshard_tenant_job_bytes_done", "state").values()) > 0)
            assert samples(url, "reshard_tenant_jobs", "tenant") == {"default": 1.0}
            assert samples(url, "reshard_tenant_job_bytes", "state") == {"RUNNING": 4_000_000.0}
            end_tree(worker)
        with stack.worker():
            # Its lease expires, and another worker takes it.
            wait_until(lambda: samples(url, "reshard_attempts_total", "end")["lost"] == 1)
            wait_until(lambda: client.get(long.id).state is JobState.RUNNING)  # a queued job is cancelled without one
            client.cancel(long.id)
            assert client.wait(long.id, timeout_s=PATIENCE_S).state is JobState.CANCELLED
            wait_until(lambda: samples(url, "reshard_attempts_total", "end")["cancelled"] == 1)
        ends = {end: count for end, count in samples(url, "reshard_attempts_total", "end").items() if count}
        assert ends == {"succeeded": 2, "retried": 1, "failed": 1, "lost": 1, "cancelled": 1}
        errors = {code: n for code, n in samples(url, "reshard_store_errors_total", "code").items() if n}
        assert errors == {"storage.unavailable": 1}
        assert samples(url, "reshard_tenant_write_bytes_total", "tenant") == {"default": 4000.0}


def test_many_tenants_are_few_labels() -> None:
    counts = {(f"tenant{n}", "QUEUED"): n + 1 for n in range(MOST_TENANTS + 10)}
    few = few_tenants(counts)
    assert len(few) == MOST_TENANTS + 1
    assert few[OTHERS, "QUEUED"] == sum(range(1, 11))
    assert sum(few.values()) == sum(counts.values())


def test_totals_add_up_from_many_threads(database_url: str) -> None:
    databases = [Database(database_url) for _ in range(4)]
    threads = [
        threading.Thread(target=lambda d=d: [Totals(d).add({("a", "x"): 1, ("b", "y"): 2}) for _ in range(20)])
        for d in databases
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Totals(databases[0]).read() == {"a": {"x": 80}, "b": {"y": 160}}
    for database in databases:
        database.close()
