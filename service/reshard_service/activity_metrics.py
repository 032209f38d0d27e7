"""Prometheus metrics of what happens: unfinished jobs by state and tenant, and totals of attempts, errors and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from reshard.errors import CODES
from reshard_jobs.activity import activity, engine_peak_bytes, few_tenants
from reshard_jobs.database import Database
from reshard_jobs.totals import ATTEMPTS, READ_BYTES, STORE_ERRORS, WRITE_BYTES, Totals

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
