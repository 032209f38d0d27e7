"""Prometheus metrics: jobs and workers, read from the job database, webhooks, and HTTP requests."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from reshard.errors import CODES
from reshard_jobs.database import Database
from reshard_jobs.queue.nodes import Nodes
from reshard_jobs.statistics import (
    ATTEMPTS,
    READ_BYTES,
    STORE_ERRORS,
    WRITE_BYTES,
    JobStatistics,
    Totals,
    activity,
    engine_peak_bytes,
    few_tenants,
)

# Prometheus metrics of what happens: unfinished jobs by state and tenant, and totals of attempts, errors and bytes.

ENDS = ("succeeded", "failed", "retried", "cancelled", "fenced", "handed over", "given back", "lost")
"""The ends of attempts. All are shown from the start: a rate over a counter that appears with its first event misses
it."""
_STORE_CODES = tuple(code for code in CODES if code.startswith("storage."))


class ActivityCollector(Collector):
    """Asks the job database at each scrape."""

    def __init__(self, database: Database, *, lease_s: float) -> None:
        self._database = database
        self._lease_s = lease_s
        self._totals = Totals(database)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Jobs and bytes by state and tenant, ends of attempts, errors of stores, and the memory of engines."""
        now = activity(self._database)
        for name, text, counts in (
            ("reshard_tenant_jobs", "Unfinished jobs by state and tenant.", now.jobs),
            ("reshard_tenant_job_bytes", "Bytes that unfinished jobs are to write.", now.bytes_total),
            ("reshard_tenant_job_bytes_done", "Bytes that unfinished jobs have written.", now.bytes_done),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["tenant", "state"])
            for (tenant, state), count in few_tenants(counts).items():
                gauge.add_metric([tenant, state], count)
            yield gauge
        totals = self._totals.read()
        yield _counter("reshard_attempts", "Attempts that ended.", "end", totals.get(ATTEMPTS, {}), ENDS)
        text = "Attempts, helpers and removals that ended with an error of a store."
        yield _counter("reshard_store_errors", text, "code", totals.get(STORE_ERRORS, {}), _STORE_CODES)
        for name, text in (
            (READ_BYTES, "Bytes that conversions read which succeeded."),
            (WRITE_BYTES, "Bytes that conversions wrote which succeeded."),
        ):
            counts = {(tenant, ""): count for tenant, count in totals.get(name, {"default": 0}).items()}
            named = {tenant: count for (tenant, _), count in few_tenants(counts).items()}
            yield _counter(f"reshard_tenant_{name}", text, "tenant", named)
        yield GaugeMetricFamily(
            "reshard_engine_peak_memory_bytes",
            "Most memory that the last engine process of a live worker took.",
            value=engine_peak_bytes(self._database, lease_s=self._lease_s),
        )


def _counter(
    name: str, text: str, label: str, counts: Mapping[str, int], known: tuple[str, ...] = ()
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in {**dict.fromkeys(known, 0), **counts}.items():
        family.add_metric([value], count)
    return family


# Prometheus metrics of the queue: the oldest waiting job, and the jobs that ended lately.


class QueueCollector(Collector):
    """Asks the job database at each scrape.

    Jobs are removed after some time, so sums over all of them would fall. What ended within the last hour is a gauge.
    """

    def __init__(self, statistics: JobStatistics) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The age of the queue, jobs that ended within the last hour by state, and those that were tried again."""
        yield GaugeMetricFamily(
            "reshard_queue_age_seconds", "Age of the oldest job that waits.", value=self._statistics.queue_age_s()
        )
        ended = GaugeMetricFamily(
            "reshard_jobs_ended_last_hour", "Jobs that ended within the last hour, by state.", labels=["state"]
        )
        for state, count in self._statistics.ended_lately().items():
            ended.add_metric([state.value], count)
        yield ended
        yield GaugeMetricFamily(
            "reshard_jobs_retried_last_hour",
            "Jobs that ended within the last hour and needed more than one attempt.",
            value=self._statistics.retried_lately(),
        )


# Prometheus metrics of webhooks: what waits to be sent, and what was given up.


class WebhookCollector(Collector):
    """Asks the job database at each scrape.

    Dead deliveries are removed after some time, so their number would fall. Those of the last hour are a gauge.
    """

    def __init__(self, statistics: JobStatistics) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The age of the oldest delivery that waits, and the deliveries that died within the last hour."""
        yield GaugeMetricFamily(
            "reshard_webhook_age_seconds",
            "Age of the oldest webhook delivery that waits to be sent or tried again.",
            value=self._statistics.delivery_age_s(),
        )
        yield GaugeMetricFamily(
            "reshard_webhooks_dead_last_hour",
            "Webhook deliveries that were given up within the last hour.",
            value=self._statistics.dead_lately(),
        )


# Metrics of jobs and workers, and all metrics of a service as one text.

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
