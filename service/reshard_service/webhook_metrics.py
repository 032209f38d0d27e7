"""Prometheus metrics of webhooks: what waits to be sent, and what was given up."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from reshard_jobs.statistics import JobStatistics


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
