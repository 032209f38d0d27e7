"""Prometheus metrics: jobs by state, straight from the job database, and HTTP requests."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from reshard_jobs.store import JobStore

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class JobCollector(Collector):
    """Counts jobs when it is scraped: no process of many can know the number by itself."""

    def __init__(self, store: JobStore) -> None:
        self._store = store

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One gauge per state."""
        gauge = GaugeMetricFamily("reshard_jobs", "Jobs by state.", labels=["state"])
        for state, count in self._store.count_by_state().items():
            gauge.add_metric([state.value], count)
        yield gauge


class Metrics:
    """The metrics of one application, in a registry of their own."""

    def __init__(self, store: JobStore) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(JobCollector(store))
        self._requests = Counter(
            "reshard_http_requests_total", "HTTP requests.", ["method", "route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "reshard_http_request_seconds", "Seconds until the response began.", ["route"], registry=self._registry
        )

    def count_request(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """Count one request; `route` is the template, so that ids do not become labels."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)
