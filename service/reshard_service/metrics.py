"""Prometheus metrics: jobs and workers, read from the job database, and HTTP requests."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from reshard_jobs.nodes import Nodes
from reshard_jobs.statistics import JobStatistics
from reshard_service.activity_metrics import ActivityCollector
from reshard_service.queue_metrics import QueueCollector
from reshard_service.webhook_metrics import WebhookCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class JobCollector(Collector):
    """Counts jobs and their workers in the database at each scrape, because no single process knows all."""

    def __init__(self, statistics: JobStatistics, nodes: Nodes) -> None:
        self._statistics = statistics
        self._nodes = nodes

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Jobs by state, workers by role, and the sums of what workers of shared conversions did."""
        gauge = GaugeMetricFamily("reshard_jobs", "Jobs by state.", labels=["state"])
        for state, count in self._statistics.count_by_state().items():
            gauge.add_metric([state.value], count)
        yield gauge
        workers = GaugeMetricFamily("reshard_job_workers", "Workers that run a job now, by role.", labels=["role"])
        for role, count in self._statistics.workers_at_work().items():
            workers.add_metric([role], count)
        yield workers
        live = GaugeMetricFamily("reshard_workers", "Live workers by what they do.", labels=["state"])
        found = Counts(node.state for node in self._nodes.live())
        for name in ("idle", "working", "quarantined"):
            live.add_metric([name], found[name])
        yield live
        left = self._statistics.count_leftovers()
        yield GaugeMetricFamily("reshard_jobs_with_leftovers", "Ended jobs with files to remove.", value=left)
        shares = self._statistics.total_shares()
        for name, text, count in (
            ("runs", "Runs of units that workers of shared conversions claimed.", shares.runs),
            ("takeovers", "Runs that were taken over from a worker that had died.", shares.takeovers),
            ("splits", "Runs of which a part was given to a worker that waited.", shares.splits),
            ("epochs_lost", "Times that a worker's conversion ended or began again without it.", shares.epochs_lost),
            ("units", "Units that workers of shared conversions ran.", shares.units),
            ("write_bytes", "Bytes that workers of shared conversions wrote.", shares.write_bytes),
        ):
            yield CounterMetricFamily(f"reshard_shared_{name}", text, value=count)


class Metrics:
    """The metrics of one application, in a registry of their own."""

    def __init__(self, nodes: Nodes, statistics: JobStatistics, happenings: ActivityCollector) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(JobCollector(statistics, nodes))
        self._registry.register(QueueCollector(statistics))
        self._registry.register(WebhookCollector(statistics))
        self._registry.register(happenings)
        self._requests = Counter(
            "reshard_http_requests_total", "HTTP requests.", ["method", "route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "reshard_http_request_seconds", "Seconds until the response began.", ["route"], registry=self._registry
        )

    def count_request(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """Count one request. `route` is the route's template, so that ids do not become labels."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)
