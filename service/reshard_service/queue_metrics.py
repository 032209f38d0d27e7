"""Prometheus metrics of the queue: the oldest waiting job, and the jobs that ended lately."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from reshard_jobs.statistics import JobStatistics


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
