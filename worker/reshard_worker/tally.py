"""The numbers that a worker adds to the job database for metrics: ends of attempts, errors of stores, bytes, memory."""

from __future__ import annotations

import logging

from sqlalchemy.exc import DBAPIError

from reshard.errors import ReshardError
from reshard.models import ConvertResult
from reshard_jobs.database import Database
from reshard_jobs.nodes import Nodes
from reshard_jobs.totals import ATTEMPTS, READ_BYTES, STORE_ERRORS, WRITE_BYTES, Totals

logger = logging.getLogger(__name__)


class Tally:
    """The numbers of one worker. Nothing here can fail a job: numbers that cannot be written are lost.

    Args:
        database: The job database.
        nodes: The workers of the job database.
        worker: The name of this worker.
    """

    def __init__(self, database: Database, nodes: Nodes, worker: str) -> None:
        self._totals = Totals(database)
        self._nodes = nodes
        self._worker = worker
        self._store_errors: dict[str, int] = {}

    def problem(self, problem: ReshardError | None) -> None:
        """Take note of the error with which an engine ended."""
        if problem is not None and problem.code.startswith("storage."):
            self._store_errors[problem.code] = self._store_errors.get(problem.code, 0) + 1

    def ended(self, how: str, tenant: str = "", converted: ConvertResult | None = None) -> None:
        """Add an attempt that ended, and the errors that were noted since the last one."""
        counts = {(ATTEMPTS, how): 1} if how else {}
        counts |= {(STORE_ERRORS, code): count for code, count in self._store_errors.items()}
        if converted is not None:
            counts |= {(READ_BYTES, tenant): converted.read_bytes, (WRITE_BYTES, tenant): converted.write_bytes}
        self._store_errors = {}
        if counts:
            self._totals.add(counts)

    def engine(self, peak_bytes: int) -> None:
        """Record the most memory that the last engine took."""
        if not peak_bytes:
            return
        try:
            self._nodes.engine_ended(self._worker, peak_bytes)
        except DBAPIError as error:
            logger.warning("the memory of the engine could not be recorded: %s", error)
