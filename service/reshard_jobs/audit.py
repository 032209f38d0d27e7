"""The audit log: who did what, in the transaction of the change itself; and who was refused as an administrator.

An entry names things by their ids. It has no URL, no label and no secret.
"""

from __future__ import annotations

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from reshard.identity_models import AuditEntry, AuditPage
from reshard_jobs.database import Database
from reshard_jobs.identity_tables import AuditRow
from reshard_jobs.principals import Principal
from reshard_jobs.records import time_of
from reshard_jobs.tables import db_now

MAX_ENTRIES = 500


def record(
    session: Session,
    by: Principal | None,
    action: str,
    thing: str,
    *,
    tenant: str | None = None,
    outcome: str = "ok",
) -> None:
    """Add an entry to the log; None is this program itself, whose changes are no one's.

    Args:
        session: The transaction of the change.
        by: The caller.
        action: What it did, such as `token.create`.
        thing: The id or the name of what it did it to.
        tenant: The tenant that the thing belongs to, if it is not the caller's.
        outcome: `ok`, or the code of the error.
    """
    if by is None:
        return
    values = {"tenant": tenant or by.tenant, "actor": by.actor[:200], "address": by.address[:64]}
    values |= {"action": action[:64], "object": thing[:200], "outcome": outcome[:64]}
    session.execute(insert(AuditRow).values(at=db_now(), **values))


class AuditLog:
    """The audit log of a job database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def refused(self, by: Principal, action: str, thing: str, code: str) -> None:
        """Record an attempt that was refused, and so has no transaction of its own."""
        with self._database.write() as session:
            record(session, by, action, thing, outcome=code)

    def page(self, tenant: str | None, *, before: int | None = None, limit: int = 100) -> AuditPage:
        """A page of entries, newest first: those of a tenant, or all; those before an entry, or the newest."""
        query = select(AuditRow).order_by(AuditRow.id.desc()).limit(min(limit, MAX_ENTRIES) + 1)
        if tenant is not None:
            query = query.where(AuditRow.tenant == tenant)
        if before is not None:
            query = query.where(AuditRow.id < before)
        with self._database.read() as session:
            rows = session.scalars(query).all()
        shown = rows[: min(limit, MAX_ENTRIES)]
        entries = tuple(_entry_of(row) for row in shown)
        return AuditPage(entries=entries, next_before=shown[-1].id if len(rows) > len(shown) else None)


def _entry_of(row: AuditRow) -> AuditEntry:
    return AuditEntry(
        id=row.id,
        at=time_of(row.at),
        tenant=row.tenant,
        actor=row.actor,
        address=row.address,
        action=row.action,
        object=row.object,
        outcome=row.outcome,
    )
