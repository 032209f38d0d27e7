"""The reaper's thread beside a driver: sweeps while jobs run, and rings the doorbell if jobs wait."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sqlalchemy.exc import DBAPIError

from reshard.errors import ReshardError
from reshard_jobs.periodic import PeriodicThread
from reshard_jobs.reaper import Reaper

logger = logging.getLogger(__name__)


class ReaperThread:
    """Sweeps at once and then every `interval_s`, until stopped.

    Args:
        make_reaper: Makes the reaper to run; called again while it raises, because the database may be away.
        interval_s: Seconds between two sweeps.
        ring: Called if a job is available, even if its message was already sent; may raise `OSError`.
    """

    def __init__(
        self, make_reaper: Callable[[], Reaper], *, interval_s: float, ring: Callable[[], None] | None = None
    ) -> None:
        self._make_reaper = make_reaper
        self._reaper: Reaper | None = None
        self._ring = ring
        self._thread = PeriodicThread(self._sweep, interval_s=interval_s, name="reaper")

    def start(self) -> None:
        """Begin to sweep."""
        self._thread.start()

    def stop(self) -> None:
        """End after the sweep that runs now."""
        self._thread.stop()

    def _sweep(self) -> None:
        try:
            self._reaper = self._reaper or self._make_reaper()
            sweep = self._reaper.sweep()
        except (DBAPIError, ReshardError) as error:
            logger.warning("the reaper's sweep failed and will be repeated: %s", error)
            return
        if sweep.requeued or sweep.failed or sweep.cancelled:
            logger.info("reaper: requeued %s, failed %s, cancelled %s", sweep.requeued, sweep.failed, sweep.cancelled)
        if self._ring is None or not sweep.work_waits:
            return
        try:
            self._ring()
        except OSError as error:
            logger.warning("the doorbell could not be rung: %s", error)
