"""Totals that outlive the jobs they count, for metrics: ends of attempts, errors of stores, bytes by tenant."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping

from sqlalchemy import Insert, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from reshard_jobs.database import Database
from reshard_jobs.tables import TotalRow

logger = logging.getLogger(__name__)

ATTEMPTS = "attempts"
"""Attempts that ended, by their end: the outcomes of the supervisor, and `lost` for a lease that expired."""
STORE_ERRORS = "store_errors"
"""Attempts, helpers and removals that ended with an error of a store, by the error's code."""
READ_BYTES = "read_bytes"
WRITE_BYTES = "write_bytes"
"""Bytes of conversions that succeeded, by tenant."""


def add_totals(session: Session, counts: Mapping[tuple[str, str], int]) -> None:
    """Add to totals, by name and label, in the caller's transaction."""
    make = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    # In one order: two transactions that add to the same totals then never wait for each other in turn.
    for (name, label), count in sorted(counts.items()):
        statement: Insert = make(TotalRow).values(name=name, label=label[:64], value=count)
        session.execute(
            statement.on_conflict_do_update(
                index_elements=["name", "label"], set_={"value": TotalRow.value + statement.excluded.value}
            )
        )


class Totals:
    """The totals of a job database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, counts: Mapping[tuple[str, str], int]) -> None:
        """Add to totals. A failure is logged: it must not change what happens to a job."""
        try:
            with self._database.write() as session:
                add_totals(session, counts)
        except DBAPIError as error:
            logger.warning("totals could not be added: %s", error)

    def read(self) -> dict[str, dict[str, int]]:
        """All totals, by name and label."""
        found: dict[str, dict[str, int]] = defaultdict(dict)
        with self._database.read() as session:
            for row in session.scalars(select(TotalRow)):
                found[row.name][row.label] = row.value
        return found
