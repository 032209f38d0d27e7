"""Principals: who makes a request, for which tenant, with which rights; and the audit log of what they did."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from reshard.choices import TokenScope
from reshard.errors import RequestError
from reshard.models.access import AuditEntry, AuditPage
from reshard_jobs.database import Database
from reshard_jobs.records import time_of
from reshard_jobs.tables import DEFAULT_TENANT, AuditRow, db_now

ALL_SCOPES = frozenset(TokenScope)


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller of one request.

    Attributes:
        tenant: The tenant whose things the caller reaches.
        scopes: Its rights.
        actor: Its name in the audit log: the id of a token, the subject of an OIDC token, or a word.
        name: Its name for people.
        token_id: The id of its token in the job database; empty for any other caller.
        address: The network address that the request came from.
        expires_at: Seconds since the epoch at which an OIDC token expires.
    """

    tenant: str
    scopes: frozenset[TokenScope]
    actor: str
    name: str = ""
    token_id: str = ""
    address: str = ""
    expires_at: float | None = None

    @property
    def is_operator(self) -> bool:
        """True for an administrator of the operator's tenant, who manages all tenants."""
        return self.tenant == DEFAULT_TENANT and TokenScope.ADMIN in self.scopes

    def require(self, scope: TokenScope) -> None:
        """Refuse a caller without a right.

        Raises:
            RequestError: `request.forbidden`.
        """
        if scope not in self.scopes:
            raise RequestError(
                "request.forbidden",
                f"this token has no scope `{scope}`; its scopes: {', '.join(sorted(self.scopes)) or 'none'}",
                fix="use a token with that scope; an administrator makes it with: "
                f"reshard tokens create NAME --scope {scope.value}",
                details={"scope": scope.value},
            )

    def require_operator(self) -> None:
        """Refuse everybody but administrators of the operator's tenant.

        Raises:
            RequestError: `request.forbidden`.
        """
        self.require(TokenScope.ADMIN)
        self._require_default()

    def require_default(self, scope: TokenScope) -> None:
        """Refuse tenants other than the operator's.

        Raises:
            RequestError: `request.forbidden`.
        """
        self.require(scope)
        self._require_default()

    def _require_default(self) -> None:
        if self.tenant != DEFAULT_TENANT:
            raise RequestError(
                "request.forbidden",
                "only the operator of the service may do this",
                fix="ask the operator of the service",
            )


OPERATOR = Principal(DEFAULT_TENANT, ALL_SCOPES, "operator", "operator")
"""The caller with the service's own token."""
ANYBODY = Principal(DEFAULT_TENANT, ALL_SCOPES - {TokenScope.ADMIN}, "anonymous", "anonymous")
"""The caller without a token of a service that lets everybody in. What it may do must end with that setting."""


# The audit log: who did what, in the transaction of the change itself; and who was refused as an administrator.
#
# An entry names things by their ids. It has no URL, no label and no secret.

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
