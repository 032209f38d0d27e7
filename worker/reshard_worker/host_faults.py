"""Failures that may be the host's fault: wrong credentials, a wrong clock, a missing module, a full disk, no threads.

Another worker tries such a job. A worker on which several jobs in a row fail in such a way doubts its own host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from sqlalchemy.exc import DBAPIError

from reshard.errors import ReshardError
from reshard_jobs.database import PeriodicThread
from reshard_jobs.queue.leases import FULL
from reshard_jobs.queue.nodes import Nodes

logger = logging.getLogger(__name__)

HOST = "host"
"""The entry in the details of a problem that says that the worker's host may be at fault."""
_CODES = frozenset(
    {
        # Wrong or expired credentials, and a wrong clock: S3 refuses signatures of another time.
        "storage.denied",
        # The disk for temporary files, or that of a local target.
        "storage.no_space",
        "storage.no_room",
        # A module, a format of another package, or a profile that this host does not have.
        "request.engine_missing",
        "request.bad_format",
        "request.unknown_profile",
        # Too many threads, processes or open files on this host.
        "job.host_exhausted",
    }
)


def may_be_the_hosts(problem: ReshardError) -> bool:
    """True if the same job may succeed on another host."""
    return problem.code in _CODES or problem.details.get(HOST) is True


def speaks_for_the_host(problem: ReshardError) -> bool:
    """True if a job that failed with this error shows that its host is sound: it got as far as the checkpoint."""
    return problem.code.partition(".")[0] not in {"request", "storage", "job", "internal"}


class HostWatch:
    """The supervisor's view of its own host, kept in the job database so that others see it.

    Args:
        nodes: The workers of the job database.
        worker: The name of this worker.
        pause_s: Seconds of the first quarantine.
    """

    def __init__(self, nodes: Nodes, worker: str, *, pause_s: float) -> None:
        self._nodes = nodes
        self._worker = worker
        self._pause_s = pause_s
        self._doubted = False
        self.found_full = False
        """True if the last job that failed here found its store full: what fills it may be removed in quarantine."""

    @property
    def in_quarantine(self) -> bool:
        """True if this worker claims nothing now."""
        if not self._doubted:
            return False
        return self._nodes.quarantine_left_s(self._worker) > 0

    def good(self) -> None:
        """Take note that a job ended in a way that speaks for this host."""
        try:
            self._nodes.good(self._worker)
        except DBAPIError as error:
            logger.warning("the database does not answer: %s", error)
            return
        if self._doubted:
            logger.warning("this worker has run a job again: its quarantine is over")
        self._doubted = False

    def refused(self, job_id: str, problem: ReshardError, *, record: bool = False) -> None:
        """Take note that a job failed here with what may be this host's fault; perhaps begin a quarantine."""
        self.found_full = problem.code in FULL
        try:
            found = self._nodes.refused(self._worker, job_id, problem, pause_s=self._pause_s, record=record)
        except DBAPIError as error:
            logger.warning("the database does not answer: %s", error)
            return
        if found is None:
            return
        self._doubted = True
        logger.error(
            "quarantine: %d jobs in a row failed here as they do on a bad host, the last one with %s. "
            "This worker claims nothing for %g s and then tries one job. "
            "Check this host's credentials, clock, free disk space and installed modules.",
            found.jobs,
            problem,
            found.pause_s,
        )


class Presence:
    """A thread that says in the job database that a worker is alive.

    Args:
        nodes: The workers of the job database.
        worker: The name of this worker.
        interval_s: Seconds between two messages.
        alive: Tells if the worker would take a job; while it says no, nothing is said.
    """

    def __init__(
        self, nodes: Nodes, worker: str, *, interval_s: float, alive: Callable[[], bool] = lambda: True
    ) -> None:
        self._nodes = nodes
        self._worker = worker
        self._alive = alive
        self._thread = PeriodicThread(self._say, interval_s=interval_s, name="presence")

    def start(self) -> None:
        """Say it now, and then again and again."""
        self._thread.start()

    def stop(self) -> None:
        """Say that the worker has ended."""
        self._thread.stop()
        try:
            self._nodes.leave(self._worker)
        except DBAPIError as error:
            logger.warning("the end of this worker could not be recorded: %s", error)

    def _say(self) -> None:
        if not self._alive():
            return
        try:
            self._nodes.seen(self._worker)
        except DBAPIError as error:
            logger.warning("the database does not answer: %s", error)
