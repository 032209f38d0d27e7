"""Leases of rows: one conditional UPDATE claims a row, and a fence guards every later write of its owner.

Jobs, discards, places of helpers and deliveries are claimed in this way. `lease_until` of such a row is a time by the
database's clock: while it lies ahead, an owner that is alive holds the row. The owner renews it. When it has passed,
whoever asks may take the row over. `owner` is a random text that each claim writes anew; an owner adds it to the
conditions of its writes, so that one that lost its row changes nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from sqlalchemy import ColumnElement, Select, and_, or_, update
from sqlalchemy.orm import Session

from reshard_jobs.database import Database
from reshard_jobs.tables import Base, DeliveryRow, JobRow, WorkerRow, db_now

Leased: TypeAlias = type[JobRow] | type[WorkerRow] | type[DeliveryRow]
"""The tables whose rows have leases."""
RELEASED: Mapping[str, Any] = {"owner": None, "lease_until": None}
"""The columns of a row that nobody holds."""
_CANDIDATES = 8
_RowT = TypeVar("_RowT", bound=Base)
_ClaimT = TypeVar("_ClaimT")


def new_owner() -> str:
    """Make the name of an owner, unlike any other."""
    return secrets.token_hex(16)


def lease_of(seconds: float) -> dict[str, Any]:
    """Return the columns of a lease that begins now, for a claim or to renew one."""
    return {"lease_until": db_now() + seconds}


def is_held(row: Leased) -> ColumnElement[bool]:
    """Return the condition that somebody holds a row and is alive."""
    return and_(row.lease_until.is_not(None), row.lease_until > db_now())


def is_free(row: Leased) -> ColumnElement[bool]:
    """Return the condition that nobody holds a row, or that its owner's lease has ended."""
    return or_(row.lease_until.is_(None), has_ended(row))


def has_ended(row: Leased, *, for_s: float = 0.0) -> ColumnElement[bool]:
    """Return the condition that the lease on a row has ended, `for_s` seconds ago or earlier."""
    return row.lease_until <= (db_now() - for_s if for_s else db_now())


def change_row(session: Session, row: type[_RowT], *conditions: ColumnElement[bool], **values: Any) -> _RowT | None:
    """Update the row that meets all conditions, in one statement; returns it as it is now, or None if there is none."""
    statement = (
        update(row)
        .where(*conditions)
        .values(**values)
        .returning(row)
        .execution_options(synchronize_session=False, populate_existing=True)
    )
    return session.scalars(statement).one_or_none()


def claim_first(
    database: Database, query: Select[str], claim: Callable[[str], _ClaimT | None], *, most: int = _CANDIDATES
) -> tuple[_ClaimT | None, bool]:
    """Claim the first row of a query that others do not claim at the same time.

    Args:
        database: The job database.
        query: The ids of the rows that can be claimed, the best first.
        claim: Claims one of them; None if it cannot be claimed any more.
        most: The number of rows that are tried.

    Returns:
        The claim, if there is one, and whether the query found any row.
    """
    with database.read() as session:
        candidates = session.scalars(query.limit(most)).all()
    return next((c for found in candidates if (c := claim(found)) is not None), None), bool(candidates)
