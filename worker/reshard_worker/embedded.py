"""The embedded executor of `reshard serve`: polls the job table and needs no broker.

Run as `python -m reshard_worker.embedded`; settings come from `RESHARD_*` variables.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from sqlalchemy.exc import DBAPIError

from reshard.errors import ReshardError
from reshard_engine.warm_process import die_with_parent
from reshard_jobs.database import Database, PeriodicThread
from reshard_jobs.logs import configure_logs
from reshard_jobs.queue.discards import Discards
from reshard_jobs.queue.leases import Leases
from reshard_jobs.queue.nodes import Nodes
from reshard_jobs.queue.reaper import Reaper, Retention
from reshard_jobs.tracing import stop_tracing
from reshard_worker.child import Runners
from reshard_worker.host_faults import HostWatch, Presence
from reshard_worker.settings import WorkerSettings, worker_name
from reshard_worker.supervisor import Supervisor, Tally

# The reaper's thread beside a driver: sweeps while jobs run, and rings the doorbell if jobs wait.

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


POLL_S = 0.25


def serve_jobs(settings: WorkerSettings) -> None:
    """Run jobs one after the other until SystemExit is raised in this thread."""
    database = Database(settings.jobs.database_url)
    jobs, name = settings.jobs, worker_name("embedded")
    leases = Leases(database, lease_s=jobs.lease_s, keep_failed_s=jobs.keep_failed_s)
    reaper = Reaper(database, lease_s=jobs.lease_s, interval_s=jobs.reaper_s, retention=Retention.of(jobs))
    reaping = ReaperThread(lambda: reaper, interval_s=jobs.reaper_s)
    runners = Runners(settings.runner_command, warm=settings.warm_engine)
    nodes = Nodes(database, lease_s=jobs.lease_s)
    presence = Presence(nodes, name, interval_s=jobs.heartbeat_s)
    supervisor = Supervisor(
        leases,
        settings,
        name=name,
        runners=runners,
        discards=Discards(database, lease_s=jobs.lease_s),
        host=HostWatch(nodes, name, pause_s=settings.quarantine_s),
        tally=Tally(database, nodes, name),
    )
    reaping.start()
    presence.start()
    runners.prepare()
    try:
        while True:
            try:
                idle = supervisor.run_next() is None
            except DBAPIError as error:
                logger.warning("the database does not answer: %s", error)
                idle = True
            if idle:
                time.sleep(POLL_S)
    finally:
        runners.close()
        presence.stop()
        reaping.stop()
        database.close()
        stop_tracing()


def main() -> int:
    """Serve until SIGTERM or SIGINT, or until the parent dies."""
    configure_logs()
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    die_with_parent(signal.SIGTERM)
    try:
        serve_jobs(WorkerSettings.from_env())
    except ReshardError as error:
        sys.stderr.write(f"{error.code}: {error.message}\nfix: {error.fix}\n")
        return int(error.exit_code)
    return 0


def _stop(number: int, _frame: FrameType | None) -> None:
    # The supervisor requeues its job before it ends. A second signal must not interrupt that.
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
